//! Limits the memory of unread replies (not streamed, over 256 KiB) that the router holds for one
//! HTTP/2 connection.
//!
//! A reply that is not streamed is collected before any of it is sent, and stays in memory until
//! the client has read it. An HTTP/2 client may ask for hundreds at a time and read none. So the
//! long replies of a connection share a limit: after its first 256 KiB, an engine's reply is read
//! further only when there is room for all of it.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use prometheus::IntCounterVec;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind};
use splitrail_config::model::Limits;

/// Size in bytes up to which a reply needs no room, so that small replies never wait.
const FREE_BYTES: usize = 256 << 10;

/// Bytes per permit of the semaphore.
const PLACE_BYTES: usize = 1 << 10;

/// The limits of a room.
#[derive(Clone, Copy, Debug)]
pub struct RoomBounds {
    all_places: u32,
    /// Time within which a client must read `pace_bytes` while other replies wait for room.
    patience: Duration,
    pace_bytes: u64,
}

impl From<&Limits> for RoomBounds {
    fn from(limits: &Limits) -> Self {
        // Room is freed by the resets of stalled replies. They began to wait for their client a
        // little later than other replies began to wait for room.
        let patience = limits.write_stall + limits.write_stall / 4;
        let pace_bytes = patience.as_secs_f64() * limits.reply_min_bytes_per_s as f64;
        let all_places = places(limits.unread_replies_max_bytes);
        Self { all_places, patience, pace_bytes: (pace_bytes as u64).max(1) }
    }
}

/// Room for the long replies that the client of one connection has not read yet.
#[derive(Debug)]
pub struct UnreadRoom {
    places: Arc<Semaphore>,
    bounds: RoomBounds,
    /// Counts the bytes that the connection's client has read.
    taken_bytes: Arc<AtomicU64>,
}

impl UnreadRoom {
    /// The room of a connection. `taken_bytes` counts the bytes that its client has read.
    pub fn new(bounds: RoomBounds, taken_bytes: Arc<AtomicU64>) -> Self {
        let places = Arc::new(Semaphore::new(bounds.all_places as usize));
        Self { places, bounds, taken_bytes }
    }

    /// Waits for room for this many bytes, or for the whole room if that is less or the size is
    /// unknown. `None` if the client reads its earlier replies too slowly.
    async fn enter(&self, bytes: Option<usize>) -> Option<OwnedSemaphorePermit> {
        let RoomBounds { all_places, patience, pace_bytes } = self.bounds;
        let wanted = bytes.map_or(all_places, places).min(all_places);
        let mut entering = std::pin::pin!(Arc::clone(&self.places).acquire_many_owned(wanted));
        loop {
            let before = self.taken_bytes.load(Relaxed);
            match tokio::time::timeout(patience, &mut entering).await {
                // The semaphore is never closed.
                Ok(entered) => return entered.ok(),
                Err(_) => {
                    let taken = self.taken_bytes.load(Relaxed).wrapping_sub(before);
                    if taken < pace_bytes {
                        return None;
                    }
                }
            }
        }
    }
}

fn places(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PLACE_BYTES)).unwrap_or(u32::MAX >> 3).min(u32::MAX >> 3)
}

/// The room that one request's reply occupies until the client has read it.
pub struct UnreadReply {
    /// Counts requests that are shed.
    shed: IntCounterVec,
    room: Option<Arc<UnreadRoom>>,
    /// Whether the reply is made of several engine replies, all of which must arrive before it is
    /// sent.
    is_joint: bool,
    place: OnceCell<OwnedSemaphorePermit>,
    waits: Mutex<WaitTotals>,
}

/// The time for which engines' replies have waited for room.
#[derive(Debug, Default)]
struct WaitTotals {
    /// Number of replies that wait, and since when one or more do.
    waiting: u32,
    since: Option<Instant>,
    /// The time before.
    waited: Duration,
}

/// A reply that waits for room, until it is dropped.
struct RoomWait<'a>(&'a UnreadReply);

impl<'a> RoomWait<'a> {
    fn begin(unread: &'a UnreadReply) -> Self {
        let mut waits = unread.waits();
        waits.waiting += 1;
        waits.since.get_or_insert_with(Instant::now);
        drop(waits);
        Self(unread)
    }
}

impl Drop for RoomWait<'_> {
    fn drop(&mut self) {
        let mut waits = self.0.waits();
        waits.waiting -= 1;
        if waits.waiting == 0 {
            let since = waits.since.take();
            waits.waited += since.map(|since| since.elapsed()).unwrap_or_default();
        }
    }
}

impl UnreadReply {
    /// A reply that occupies no room yet, on a connection with this room. It may be made of several
    /// engine replies.
    pub fn new(shed: &IntCounterVec, room: Option<Arc<UnreadRoom>>, is_joint: bool) -> Self {
        let (place, waits) = Default::default();
        Self { shed: shed.clone(), room, is_joint, place, waits }
    }

    /// Whether the reply is made of several engine replies.
    pub fn is_joint(&self) -> bool {
        self.is_joint
    }

    /// Waits until a reply of which `bytes` have arrived may be read further. `whole` is its total
    /// size, if known.
    ///
    /// # Errors
    /// If the client does not read its other replies.
    pub async fn room_for(&self, bytes: usize, whole: Option<usize>) -> Result<(), Error> {
        let Some(room) = self.room.as_ref().filter(|_| bytes > FREE_BYTES) else { return Ok(()) };
        let whole = whole.filter(|_| !self.is_joint);
        let enter = async || {
            let mut entering = pin!(room.enter(whole));
            let entered = match futures_util::poll!(&mut entering) {
                Poll::Ready(entered) => entered,
                Poll::Pending => {
                    let _wait = RoomWait::begin(self);
                    entering.await
                }
            };
            entered.ok_or_else(|| self.refuse())
        };
        self.place.get_or_try_init(enter).await.map(drop)
    }

    /// For how long engines' replies have waited for room so far: not the time of the engines. It
    /// is the client's, who reads its other replies slowly.
    ///
    /// # Errors
    /// A reply waits now. For one that has taken too long, this is the error to report.
    pub fn waited(&self) -> Result<Duration, Error> {
        let WaitTotals { waiting, waited, .. } = *self.waits();
        if waiting > 0 { Err(self.refuse()) } else { Ok(waited) }
    }

    /// A panic while the lock was held cannot leave the times half-changed.
    fn waits(&self) -> MutexGuard<'_, WaitTotals> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that is refused because its client does not read other replies.
    fn refuse(&self) -> Error {
        self.shed.with_label_values(&["none", "unread_replies"]).inc();
        let message = "unread replies of this connection have reached \
                       limits.unread_replies_size_max; read them first";
        Error::new(ErrorKind::OverShare, message)
    }

    /// Ties the room to the reply's bytes: it becomes free when the last of them is dropped.
    pub fn bind(self: Arc<Self>, answer: Bytes) -> Bytes {
        match self.place.get() {
            Some(_) => Bytes::from_owner(Bound { answer, _unread: self }),
            None => answer,
        }
    }
}

/// A reply with the room that it occupies.
struct Bound {
    answer: Bytes,
    _unread: Arc<UnreadReply>,
}

impl AsRef<[u8]> for Bound {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus::Opts;

    use super::*;

    const MIB: usize = 1 << 20;

    fn room() -> (UnreadRoom, Arc<AtomicU64>) {
        let taken_bytes = Arc::new(AtomicU64::new(0));
        let limits = Limits {
            unread_replies_max_bytes: 4 * MIB,
            write_stall: Duration::from_secs(10),
            reply_min_bytes_per_s: 10,
            ..Limits::default()
        };
        (UnreadRoom::new((&limits).into(), Arc::clone(&taken_bytes)), taken_bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn replies_wait_for_room_as_long_as_the_client_reads() {
        let (room, taken_bytes) = room();
        let first = room.enter(Some(3 * MIB)).await;
        assert!(first.is_some());
        let second = room.enter(Some(2 * MIB));
        let reading = async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                taken_bytes.fetch_add(200, Relaxed);
            }
            drop(first);
        };
        assert!(tokio::join!(second, reading).0.is_some());
        assert!(room.enter(Some(100 * MIB)).await.is_some(), "the longest takes all there is");
    }

    #[tokio::test(start_paused = true)]
    async fn replies_do_not_wait_for_a_client_that_does_not_read() {
        let (room, taken_bytes) = room();
        let _unread = room.enter(None).await;
        let waiting = (0..10).map(|_| room.enter(Some(MIB)));
        let dribbling = async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                taken_bytes.fetch_add(1, Relaxed);
            }
        };
        let (entered, ()) = tokio::join!(futures_util::future::join_all(waiting), dribbling);
        assert!(entered.iter().all(Option::is_none));
    }
    #[tokio::test(start_paused = true)]
    async fn the_time_that_replies_wait_for_room_is_added_up() {
        const S: Duration = Duration::from_secs(1);
        let (room, _) = room();
        let room = Arc::new(room);
        let shed = IntCounterVec::new(Opts::new("shed", "shed"), &["model", "reason"]).unwrap();
        let unread = UnreadReply::new(&shed, Some(Arc::clone(&room)), false);
        let first = room.enter(None).await;
        let mut entering = pin!(unread.room_for(MIB, Some(MIB)));
        assert!(futures_util::poll!(&mut entering).is_pending());
        tokio::time::advance(3 * S).await;
        assert_eq!(unread.waited().unwrap_err().kind(), ErrorKind::OverShare, "it waits");
        drop(first);
        entering.await.unwrap();
        assert_eq!(unread.waited().unwrap(), 3 * S);
        tokio::time::advance(5 * S).await;
        assert_eq!(unread.waited().unwrap(), 3 * S, "the engine is waited for");
    }
}
