//! Reads of a busy stream, put together: to wake up for a message of a kilobyte costs several
//! times what is done with it.

use std::io::{self, Read};
use std::net::TcpStream as Unwatched;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::READ_BYTES;

/// A stream with more than this between two beats is read as it comes: beyond it the
/// kernel's buffers might fill up, and hold the sender back.
const PACED_BYTES_MAX: usize = 64 << 10;
/// So many reads in a row, each sooner than a beat after the one before, make a stream busy.
const READS_IN_A_ROW: u32 = 3;

/// Times at which busy streams are read. What has the same ones wakes up once for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Between two of them; zero for none, so that all streams are read as they come.
    pub every: Duration,
    /// One of them.
    pub since: Instant,
}

impl Pace {
    /// The first of them that is later than `now`.
    #[must_use]
    pub fn after(&self, now: Instant) -> Instant {
        let passed = now.saturating_duration_since(self.since);
        let Some(part) = passed.as_nanos().checked_rem(self.every.as_nanos()) else {
            return now;
        };
        // Less than `every`, of which nobody takes more than 584 years.
        now + self.every.saturating_sub(Duration::from_nanos(part as u64))
    }
}

enum Stream {
    /// The reactor says when there is something to read.
    Watched(TcpStream),
    /// Nobody is woken by what comes.
    Paused { stream: Unwatched, until: Instant },
    /// Neither could be had of the system.
    Broken,
}

/// A stream whose reads are put together while it is busy.
pub(super) struct Paced {
    stream: Stream,
    pace: Option<Pace>,
    /// When something was read last.
    read_at: Option<Instant>,
    /// Reads, each sooner than a beat after the one before.
    in_a_row: u32,
    /// Read since the last rest.
    bytes: usize,
    /// The last read brought all that was asked for: there may be more.
    was_full: bool,
    /// Where an unwatched stream is read to first.
    scratch: Vec<u8>,
}

impl Paced {
    pub(super) fn new(stream: TcpStream) -> Self {
        let (stream, scratch) = (Stream::Watched(stream), Vec::new());
        let (read_at, in_a_row, bytes, was_full) = (None, 0, 0, false);
        Self { stream, pace: None, read_at, in_a_row, bytes, was_full, scratch }
    }

    /// From now on.
    pub(super) fn set_pace(&mut self, pace: Pace) {
        self.pace = (!pace.every.is_zero()).then_some(pace);
    }

    pub(super) async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.watch()?;
        match &mut self.stream {
            Stream::Watched(stream) => stream.write_all(bytes).await,
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Reads what is there, at the next beat if the stream is busy, and waits if that is
    /// nothing; 0 at its end. `is_between` says that everything so far was whole messages:
    /// the rest of one is not kept waiting. Cancelling loses nothing.
    pub(super) async fn read(
        &mut self,
        buffer: &mut BytesMut,
        is_between: bool,
    ) -> io::Result<usize> {
        if is_between && !self.was_full {
            self.rest(Instant::now())?;
        } else if let Stream::Paused { until, .. } = &mut self.stream {
            *until = Instant::now();
        }
        if let Stream::Paused { until, .. } = self.stream {
            sleep_until(until).await;
            if let Some(count) = self.read_now(buffer)? {
                return Ok(count);
            }
            self.in_a_row = 0;
            self.watch()?;
        }
        let Stream::Watched(stream) = &mut self.stream else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let count = stream.read_buf(buffer).await?;
        self.has_read(count, Instant::now());
        Ok(count)
    }

    /// Reads what is there without waiting; `None` if that is nothing.
    pub(super) fn read_now(&mut self, buffer: &mut BytesMut) -> io::Result<Option<usize>> {
        let read = match &mut self.stream {
            Stream::Watched(stream) => stream.try_read_buf(buffer),
            Stream::Paused { stream, .. } => {
                self.scratch.resize(READ_BYTES, 0);
                let read = stream.read(&mut self.scratch);
                if let Ok(count) = read {
                    buffer.extend_from_slice(&self.scratch[..count]);
                }
                read
            }
            Stream::Broken => return Err(io::ErrorKind::NotConnected.into()),
        };
        match read {
            Ok(count) => {
                self.has_read(count, Instant::now());
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn has_read(&mut self, count: usize, now: Instant) {
        self.bytes += count;
        self.was_full = count >= READ_BYTES;
        let Some(pace) = self.pace else { return };
        let is_soon = self.read_at.is_some_and(|last| now - last < pace.every);
        self.in_a_row = if is_soon { self.in_a_row.saturating_add(1) } else { 0 };
        self.read_at = Some(now);
    }

    /// What was read is dealt with: a busy stream has a rest until the next beat.
    fn rest(&mut self, now: Instant) -> io::Result<()> {
        let Some(pace) = self.pace.filter(|_| self.bytes > 0) else { return Ok(()) };
        if std::mem::take(&mut self.bytes) > PACED_BYTES_MAX {
            self.in_a_row = 0;
            return self.watch();
        }
        match &mut self.stream {
            Stream::Paused { until, .. } => *until = pace.after(now),
            Stream::Watched(_) if self.in_a_row >= READS_IN_A_ROW => {
                if let Stream::Watched(stream) = std::mem::replace(&mut self.stream, Stream::Broken)
                {
                    let (stream, until) = (stream.into_std()?, pace.after(now));
                    self.stream = Stream::Paused { stream, until };
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whoever waits is woken by what comes, and by what has come already.
    fn watch(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.stream, Stream::Broken) {
            Stream::Paused { stream, .. } => {
                self.scratch = Vec::new();
                self.stream = Stream::Watched(TcpStream::from_std(stream)?);
            }
            as_it_is => self.stream = as_it_is,
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// Beats that a test does not live to see.
    const HOUR: Duration = Duration::from_secs(3600);

    async fn pair(every: Duration) -> (Paced, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (ours, theirs) = tokio::join!(connecting, listener.accept());
        let mut paced = Paced::new(ours.unwrap());
        paced.set_pace(Pace { every, since: Instant::now() });
        (paced, theirs.unwrap().0)
    }

    /// Reads so many bytes, message by message, each sent once the one before is read.
    async fn messages(paced: &mut Paced, peer: &mut TcpStream, count: u32) {
        for _ in 0..count {
            peer.write_all(b"message").await.unwrap();
            assert_eq!(paced.read(&mut BytesMut::new(), true).await.unwrap(), 7);
        }
    }

    #[test]
    fn beats_are_the_same_for_all_who_ask_between_two_of_them() {
        let (since, every) = (Instant::now(), Duration::from_millis(25));
        let pace = Pace { every, since };
        let at = |ms| since + Duration::from_millis(ms);
        for (now, next) in [(0, 25), (1, 25), (24, 25), (25, 50), (60, 75)] {
            assert_eq!(pace.after(at(now)), at(next));
        }
        let none = Pace { every: Duration::ZERO, since };
        assert_eq!(none.after(at(7)), at(7));
    }

    #[tokio::test]
    async fn a_stream_is_read_as_it_comes_until_it_is_busy_and_the_rest_of_a_message_always() {
        let (mut paced, mut peer) = pair(HOUR).await;
        messages(&mut paced, &mut peer, 1 + READS_IN_A_ROW).await;
        peer.write_all(b"part").await.unwrap();
        let mut buffer = BytesMut::new();
        let waiting = paced.read(&mut buffer, true);
        let soon = tokio::time::timeout(Duration::from_millis(50), waiting);
        assert!(soon.await.is_err(), "it has a rest");
        // What waits is not lost, and comes at once when it is asked for.
        assert_eq!(paced.read_now(&mut buffer).unwrap(), Some(4));
        assert_eq!(paced.read_now(&mut buffer).unwrap(), None);
        let rest = async { peer.write_all(b" and rest").await.unwrap() };
        let (read, ()) = tokio::join!(paced.read(&mut buffer, false), rest);
        assert_eq!((read.unwrap(), &buffer[..]), (9, &b"part and rest"[..]));
        drop(peer);
        assert_eq!(paced.read(&mut buffer, false).await.unwrap(), 0, "its end is no pause");
    }

    #[tokio::test]
    async fn what_comes_within_a_beat_is_read_at_its_end_and_silence_ends_the_pauses() {
        let (mut paced, mut peer) = pair(Duration::from_millis(200)).await;
        let mut buffer = BytesMut::new();
        // A busy machine may make a pause between any two: then it begins anew.
        while !matches!(paced.stream, Stream::Paused { .. }) {
            messages(&mut paced, &mut peer, 1).await;
            paced.rest(Instant::now()).unwrap();
        }
        for _ in 0..3 {
            peer.write_all(b"message").await.unwrap();
        }
        while buffer.len() < 21 {
            assert!(paced.read(&mut buffer, true).await.unwrap() > 0);
        }
        // Longer than a beat: nobody looks again and again while nothing comes.
        let waiting = paced.read(&mut buffer, true);
        let _silence = tokio::time::timeout(Duration::from_secs(1), waiting).await;
        assert!(matches!(paced.stream, Stream::Watched(_)));
        messages(&mut paced, &mut peer, 1).await;
    }

    #[tokio::test]
    async fn a_stream_with_much_to_say_is_not_held_back() {
        const ALL: usize = 64 * PACED_BYTES_MAX;
        let (mut paced, mut peer) = pair(HOUR).await;
        messages(&mut paced, &mut peer, 1 + READS_IN_A_ROW).await;
        paced.rest(Instant::now()).unwrap();
        assert!(matches!(paced.stream, Stream::Paused { .. }));
        let (mut all, mut buffer) = (0, BytesMut::new());
        let writing = async { peer.write_all(&vec![1; ALL]).await.unwrap() };
        let reading = async {
            while all == 0 {
                // The first of it has come: from here on nobody waits.
                all += paced.read_now(&mut buffer).unwrap().unwrap_or_default();
                tokio::task::yield_now().await;
            }
            while all < ALL {
                buffer.clear();
                buffer.reserve(READ_BYTES);
                // As if a message ended wherever a read that was full does.
                let is_between = paced.was_full;
                all += paced.read(&mut buffer, is_between).await.unwrap();
            }
        };
        let patience = Duration::from_secs(30);
        tokio::time::timeout(patience, async { tokio::join!(writing, reading) }).await.unwrap();
        paced.rest(Instant::now()).unwrap();
        assert!(matches!(paced.stream, Stream::Watched(_)), "after much there is no rest");
    }
}
