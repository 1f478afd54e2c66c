//! Bounds the long answers that the router holds for one connection whose client has not read them.
//!
//! A reply that is not streamed is gathered before any of it is sent, and stays until the client has read it.
//! An HTTP/2 client may ask for hundreds at a time and read none. So the long answers of a connection share a bound:
//! an engine's answer is read only as far as the unread answers of its client leave room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use prometheus::IntCounterVec;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, Kind};
use splitrail_config::model::Limits;

/// Bytes of a reply that need no room: many small replies wait for nothing.
const FREE_BYTES: usize = 256 << 10;

/// What one place in a room stands for.
const PLACE_BYTES: usize = 1 << 10;

/// What a room is held to.
#[derive(Clone, Copy, Debug)]
pub struct RoomBounds {
    all_places: u32,
    /// How long a client may take less than `pace_bytes` while others wait for room.
    patience: Duration,
    pace_bytes: u64,
}

impl From<&Limits> for RoomBounds {
    fn from(limits: &Limits) -> Self {
        let patience = limits.write_stall;
        let pace_bytes = patience.as_secs_f64() * limits.reply_min_bytes_per_s as f64;
        let all_places = places(limits.unread_replies_max_bytes);
        Self { all_places, patience, pace_bytes: (pace_bytes as u64).max(1) }
    }
}

/// Room for the long answers that the client of one connection has not taken yet.
#[derive(Debug)]
pub struct UnreadRoom {
    places: Arc<Semaphore>,
    bounds: RoomBounds,
    /// Bytes that the connection's client has taken.
    taken_bytes: Arc<AtomicU64>,
}

impl UnreadRoom {
    /// The room of a connection whose client has taken so many bytes, as the counter says.
    pub fn new(bounds: RoomBounds, taken_bytes: Arc<AtomicU64>) -> Self {
        let places = Arc::new(Semaphore::new(bounds.all_places as usize));
        Self { places, bounds, taken_bytes }
    }

    /// Waits for room for so many bytes, or for all there is; `None` if the client takes too
    /// little of what is there before.
    async fn enter(&self, bytes: Option<usize>) -> Option<OwnedSemaphorePermit> {
        let RoomBounds { all_places, patience, pace_bytes } = self.bounds;
        let wanted = bytes.map_or(all_places, places).min(all_places);
        let mut entering = std::pin::pin!(Arc::clone(&self.places).acquire_many_owned(wanted));
        loop {
            let before = self.taken_bytes.load(Relaxed);
            match tokio::time::timeout(patience, &mut entering).await {
                // It is never closed.
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

/// What one request's answer takes of the room, until the client has taken it.
pub struct Unread {
    /// Counts requests that are refused for load.
    shed: IntCounterVec,
    room: Option<Arc<UnreadRoom>>,
    /// Whether several replies make up the answer: none goes out before all are there.
    is_joint: bool,
    place: OnceCell<OwnedSemaphorePermit>,
}

impl Unread {
    /// Nothing yet, of an answer that goes to a connection with this room; it may be made of
    /// several replies.
    pub fn new(shed: &IntCounterVec, room: Option<Arc<UnreadRoom>>, is_joint: bool) -> Self {
        Self { shed: shed.clone(), room, is_joint, place: OnceCell::new() }
    }

    /// Waits until a reply may go on, of which so many bytes have come; it will have `whole`,
    /// where that is known.
    ///
    /// # Errors
    /// If the client does not take its other answers.
    pub async fn room_for(&self, bytes: usize, whole: Option<usize>) -> Result<(), Error> {
        let Some(room) = self.room.as_ref().filter(|_| bytes > FREE_BYTES) else { return Ok(()) };
        let whole = whole.filter(|_| !self.is_joint);
        let enter = async || room.enter(whole).await.ok_or_else(|| self.refuse());
        self.place.get_or_try_init(enter).await.map(drop)
    }

    /// Counts a request that is refused because its client does not take other answers.
    fn refuse(&self) -> Error {
        self.shed.with_label_values(&["none", "unread_replies"]).inc();
        let message = "limits.unread_replies_max_bytes of answers wait on this connection, and \
                       are not read";
        Error::new(Kind::OverShare, message)
    }

    /// The answer's bytes: the room that they take is free again with the last of them.
    pub fn bind(self: Arc<Self>, answer: Bytes) -> Bytes {
        match self.place.get() {
            Some(_) => Bytes::from_owner(Bound { answer, _unread: self }),
            None => answer,
        }
    }
}

/// An answer with the room that it takes.
struct Bound {
    answer: Bytes,
    _unread: Arc<Unread>,
}

impl AsRef<[u8]> for Bound {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

#[cfg(test)]
mod tests {
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
    async fn answers_wait_for_room_as_long_as_the_client_reads() {
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
    async fn answers_do_not_wait_for_a_client_that_does_not_read() {
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
}
