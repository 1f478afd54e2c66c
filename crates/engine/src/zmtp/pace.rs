//! Combines the reads of a busy stream: waking up for a message of a kilobyte costs several times
//! the work on the message.

use std::io::{self, Read};
use std::net::TcpStream as Unwatched;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::READ_BYTES;

/// A stream with more bytes than this between two read times is read as it arrives: otherwise the
/// kernel's buffers might fill up and delay the sender.
const PACED_BYTES_MAX: usize = 64 << 10;
/// Number of consecutive reads, each less than one interval after the previous one, that make a
/// stream busy.
const READS_IN_A_ROW: u32 = 3;

/// The times at which busy streams are read. Streams with the same times share their wake-ups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The interval; zero means that all streams are read as data arrives.
    pub every: Duration,
    /// One of the read times.
    pub since: Instant,
}

impl Pace {
    /// The first read time after `now`.
    #[must_use]
    pub fn after(&self, now: Instant) -> Instant {
        let passed = now.saturating_duration_since(self.since);
        let Some(part) = passed.as_nanos().checked_rem(self.every.as_nanos()) else {
            return now;
        };
        // Less than `every`, which in nanoseconds fits 64 bits up to 584 years.
        now + self.every.saturating_sub(Duration::from_nanos(part as u64))
    }
}

enum Stream {
    /// The reactor reports when data arrives.
    Watched(TcpStream),
    /// The stream is not registered with the reactor, so arriving data wakes no task.
    Paused { stream: Unwatched, until: Instant },
    /// The system refused to convert the stream.
    Broken,
}

/// A stream whose reads are combined while it is busy.
pub(super) struct PacedStream {
    stream: Stream,
    pace: Option<Pace>,
    /// Time of the last read.
    read_at: Option<Instant>,
    /// Number of consecutive reads, each less than one interval after the previous one.
    in_a_row: u32,
    /// Number of bytes read since the last pause.
    bytes: usize,
    /// Whether the last read filled the buffer, so that there may be more data.
    was_full: bool,
    /// Buffer for reads of an unwatched stream.
    scratch: Vec<u8>,
}

impl PacedStream {
    pub(super) fn new(stream: TcpStream) -> Self {
        let (stream, scratch) = (Stream::Watched(stream), Vec::new());
        let (read_at, in_a_row, bytes, was_full) = (None, 0, 0, false);
        Self { stream, pace: None, read_at, in_a_row, bytes, was_full, scratch }
    }

    /// Sets the read times.
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

    /// Reads what has arrived, at the next read time if the stream is busy, and waits if there is
    /// nothing; 0 at the end. `is_between` means that only complete messages have been read so far:
    /// the rest of a message is read without delay. Cancel-safe.
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

    /// Reads what has arrived without waiting; `None` if there is nothing.
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

    /// The data that was read has been handled: a busy stream pauses until the next read time.
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

    /// Registers the stream with the reactor, which reports also data that has already arrived.
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

    /// An interval that no test lasts.
    const HOUR: Duration = Duration::from_secs(3600);

    async fn pair(every: Duration) -> (PacedStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (ours, theirs) = tokio::join!(connecting, listener.accept());
        let mut paced = PacedStream::new(ours.unwrap());
        paced.set_pace(Pace { every, since: Instant::now() });
        (paced, theirs.unwrap().0)
    }

    /// Sends and reads messages one by one until this many were read.
    async fn messages(paced: &mut PacedStream, peer: &mut TcpStream, count: u32) {
        for _ in 0..count {
            peer.write_all(b"message").await.unwrap();
            assert_eq!(paced.read(&mut BytesMut::new(), true).await.unwrap(), 7);
        }
    }

    #[test]
    fn streams_with_the_same_pace_share_their_read_times() {
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
    async fn a_stream_is_read_immediately_unless_it_is_busy_and_between_messages() {
        let (mut paced, mut peer) = pair(HOUR).await;
        messages(&mut paced, &mut peer, 1 + READS_IN_A_ROW).await;
        peer.write_all(b"part").await.unwrap();
        let mut buffer = BytesMut::new();
        let waiting = paced.read(&mut buffer, true);
        let soon = tokio::time::timeout(Duration::from_millis(50), waiting);
        assert!(soon.await.is_err(), "the stream is paused");
        // Waiting data is not lost, and is read immediately on request.
        assert_eq!(paced.read_now(&mut buffer).unwrap(), Some(4));
        assert_eq!(paced.read_now(&mut buffer).unwrap(), None);
        let rest = async { peer.write_all(b" and rest").await.unwrap() };
        let (read, ()) = tokio::join!(paced.read(&mut buffer, false), rest);
        assert_eq!((read.unwrap(), &buffer[..]), (9, &b"part and rest"[..]));
        drop(peer);
        assert_eq!(
            paced.read(&mut buffer, false).await.unwrap(),
            0,
            "the end is reported without a pause"
        );
    }

    #[tokio::test]
    async fn a_busy_stream_is_read_at_the_read_time_and_silence_ends_the_pauses() {
        let (mut paced, mut peer) = pair(Duration::from_millis(200)).await;
        let mut buffer = BytesMut::new();
        // A busy machine may insert a pause between two reads, after which counting starts again.
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
        // Longer than an interval: an idle stream causes no repeated reads.
        let waiting = paced.read(&mut buffer, true);
        let _silence = tokio::time::timeout(Duration::from_secs(1), waiting).await;
        assert!(matches!(paced.stream, Stream::Watched(_)));
        messages(&mut paced, &mut peer, 1).await;
    }

    #[tokio::test]
    async fn a_stream_with_many_bytes_is_not_delayed() {
        const ALL: usize = 64 * PACED_BYTES_MAX;
        let (mut paced, mut peer) = pair(HOUR).await;
        messages(&mut paced, &mut peer, 1 + READS_IN_A_ROW).await;
        paced.rest(Instant::now()).unwrap();
        assert!(matches!(paced.stream, Stream::Paused { .. }));
        let (mut all, mut buffer) = (0, BytesMut::new());
        let writing = async { peer.write_all(&vec![1; ALL]).await.unwrap() };
        let reading = async {
            while all == 0 {
                // The first data has arrived, so nothing waits from here on.
                all += paced.read_now(&mut buffer).unwrap().unwrap_or_default();
                tokio::task::yield_now().await;
            }
            while all < ALL {
                buffer.clear();
                buffer.reserve(READ_BYTES);
                // As if a message ended wherever a read filled the buffer.
                let is_between = paced.was_full;
                all += paced.read(&mut buffer, is_between).await.unwrap();
            }
        };
        let patience = Duration::from_secs(30);
        tokio::time::timeout(patience, async { tokio::join!(writing, reading) }).await.unwrap();
        paced.rest(Instant::now()).unwrap();
        assert!(matches!(paced.stream, Stream::Watched(_)), "after many bytes there is no pause");
    }
}
