//! Buffers, for each worker, what was received from the broker and not yet passed to the worker's
//! session. The size is bounded for each worker and for all workers of a model.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_proto::v1;
use tokio::sync::{Notify, watch};

use super::waiting::WaitingChanges;

/// Maximum memory of one worker's waiting changes in bytes: somewhat more than a shim publishes
/// between two snapshots.
const SLOT_MAX_BYTES: usize = 16 << 20;
/// Maximum memory in bytes of the waiting changes of all workers of a model.
const ALL_MAX_BYTES: usize = 256 << 20;
/// From this size on, the consumer waits, so that further messages stay with the broker.
const FULL_BYTES: usize = ALL_MAX_BYTES / 2;
/// Maximum time for which the consumer waits for room.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// How long a slot is kept after the last heartbeat.
const FORGET: Duration = Duration::from_secs(60);
/// Number of slots beyond the number of shims that may attach, for workers that are gone and not
/// yet forgotten.
const BESIDE: usize = 64;

/// The slots of one model's workers.
pub(super) struct Slots {
    max: usize,
    by_token: Mutex<BTreeMap<String, Arc<Slot>>>,
    held: Arc<HeldBytes>,
}

/// Total memory of the messages that wait in all slots.
#[derive(Default)]
struct HeldBytes {
    bytes: AtomicUsize,
    freed: Notify,
}

/// The slot of one worker.
pub(super) struct Slot {
    /// The worker's name in the form used in subjects.
    pub(super) token: String,
    /// Proves to the registry that a new relay of this worker may replace an earlier one. Only this
    /// router knows it.
    pub(super) secret: [u8; 32],
    queue: Mutex<Queue>,
    /// Notified when the queue gets a message.
    pub(super) news: Notify,
    pub(super) latest: watch::Sender<LatestReports>,
    /// Whether a relay runs for this worker.
    is_relayed: AtomicBool,
    /// Earliest time at which the next relay may start.
    not_before: Mutex<Instant>,
    held: Arc<HeldBytes>,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<WaitingChanges>,
    bytes: usize,
}

/// Marks a slot as relayed until this is dropped, be it by a panic.
pub(super) struct RelayMark {
    slot: Arc<Slot>,
    /// Pause before the next relay.
    pub(super) pause: Duration,
}

impl RelayMark {
    pub(super) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }
}

impl Drop for RelayMark {
    fn drop(&mut self) {
        *lock(&self.slot.not_before) = Instant::now() + self.pause;
        self.slot.is_relayed.store(false, Relaxed);
    }
}

/// The last reports of a worker.
#[derive(Clone, Debug)]
pub(super) struct LatestReports {
    pub(super) at: Instant,
    pub(super) instance_id: String,
    pub(super) mirror_id: String,
    /// The number of the last change that the shim has published to the broker's stream; `None`
    /// while the shim does not know it.
    pub(super) sequence: Option<u64>,
    /// The last load report, and how many this process has sent.
    pub(super) load: Option<(u64, v1::Load)>,
    pub(super) hello: Option<v1::Hello>,
    pub(super) terms: Option<v1::Welcome>,
    pub(super) bye: Option<v1::Bye>,
}

impl LatestReports {
    fn nothing() -> Self {
        Self {
            at: Instant::now(),
            instance_id: String::new(),
            mirror_id: String::new(),
            sequence: None,
            load: None,
            hello: None,
            terms: None,
            bye: None,
        }
    }
}

impl Slots {
    pub(super) fn new(workers_max: usize) -> Self {
        let by_token = Mutex::default();
        Self { max: workers_max + BESIDE, by_token, held: Arc::default() }
    }

    /// The slot of a worker, which is created if needed; `None` if a new slot would exceed the
    /// maximum.
    pub(super) fn slot(&self, token: &str) -> Option<Arc<Slot>> {
        let mut slots = lock(&self.by_token);
        if let Some(slot) = slots.get(token) {
            return Some(Arc::clone(slot));
        }
        if slots.len() >= self.max {
            return None;
        }
        let slot = Arc::new(Slot {
            token: token.to_owned(),
            secret: rand::random(),
            queue: Mutex::default(),
            news: Notify::new(),
            latest: watch::Sender::new(LatestReports::nothing()),
            is_relayed: AtomicBool::new(false),
            not_before: Mutex::new(Instant::now()),
            held: Arc::clone(&self.held),
        });
        slots.insert(token.to_owned(), Arc::clone(&slot));
        Some(slot)
    }

    pub(super) fn all(&self) -> Vec<Arc<Slot>> {
        lock(&self.by_token).values().cloned().collect()
    }

    /// Drops the slots of workers that have sent no heartbeat for `FORGET` and have no running
    /// relay.
    pub(super) fn forget(&self, now: Instant) {
        let is_old = |slot: &Slot| {
            now.saturating_duration_since(slot.latest.borrow().at) >= FORGET
                && !slot.is_relayed.load(Relaxed)
        };
        lock(&self.by_token).retain(|_, slot| !is_old(slot));
    }

    /// Waits, for at most `ROOM_PATIENCE`, until the waiting messages take less than `FULL_BYTES`.
    pub(super) async fn room(&self) {
        let free = async {
            loop {
                let mut freed = std::pin::pin!(self.held.freed.notified());
                freed.as_mut().enable();
                if self.held.bytes.load(Relaxed) < FULL_BYTES {
                    return;
                }
                freed.await;
            }
        };
        let _in_time = tokio::time::timeout(ROOM_PATIENCE, free).await;
    }
}

impl Slot {
    /// Whether a relay may start now.
    pub(super) fn may_be_relayed(&self, now: Instant) -> bool {
        !self.is_relayed.load(Relaxed) && now >= *lock(&self.not_before)
    }

    /// Marks the slot as relayed. If the relay panics, the next one starts after `pause`.
    pub(super) fn relay(self: Arc<Self>, pause: Duration) -> RelayMark {
        self.is_relayed.store(true, Relaxed);
        RelayMark { slot: self, pause }
    }

    /// Adds a message. If there is no room, all waiting messages of this worker are dropped first;
    /// returns whether that happened.
    pub(super) fn push(&self, message: WaitingChanges) -> bool {
        let bytes = message.bytes();
        let mut queue = lock(&self.queue);
        let all = self.held.bytes.load(Relaxed);
        let is_full = queue.bytes + bytes > SLOT_MAX_BYTES || all + bytes > ALL_MAX_BYTES;
        if is_full {
            self.free(queue.bytes);
            *queue = Queue::default();
        }
        self.held.bytes.fetch_add(bytes, Relaxed);
        queue.bytes += bytes;
        queue.messages.push_back(message);
        drop(queue);
        self.news.notify_one();
        is_full
    }

    /// Takes the oldest message.
    pub(super) fn pop(&self) -> Option<WaitingChanges> {
        let mut queue = lock(&self.queue);
        let message = queue.messages.pop_front()?;
        queue.bytes -= message.bytes();
        self.free(message.bytes());
        Some(message)
    }

    /// Puts the last message taken back at the front.
    pub(super) fn put_back(&self, message: WaitingChanges) {
        let mut queue = lock(&self.queue);
        self.held.bytes.fetch_add(message.bytes(), Relaxed);
        queue.bytes += message.bytes();
        queue.messages.push_front(message);
    }

    /// Drops the messages of all other mirrors.
    pub(super) fn keep(&self, mirror_id: &str) {
        let mut queue = lock(&self.queue);
        let before = queue.bytes;
        queue.messages.retain(|message| message.mirror_id == mirror_id);
        queue.bytes = queue.messages.iter().map(WaitingChanges::bytes).sum();
        self.free(before - queue.bytes);
    }

    /// The number of the first waiting change of a mirror.
    pub(super) fn first(&self, mirror_id: &str) -> Option<u64> {
        let queue = lock(&self.queue);
        let mut of_it = queue.messages.iter().filter(|message| message.mirror_id == mirror_id);
        of_it.find_map(|message| message.first)
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.queue).messages.is_empty()
    }

    fn free(&self, bytes: usize) {
        self.held.bytes.fetch_sub(bytes, Relaxed);
        self.held.freed.notify_waiters();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let bytes = lock(&self.queue).bytes;
        self.free(bytes);
    }
}

/// Locks a mutex. Poisoning is ignored, because a panic cannot leave these values half-changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A message with a payload of `bytes` bytes.
    fn message(mirror_id: &str, sequence: u64, bytes: usize) -> WaitingChanges {
        let empty = WaitingChanges { mirror_id: mirror_id.to_owned(), ..WaitingChanges::default() };
        let payload = vec![0; bytes - empty.bytes()].into();
        WaitingChanges { first: Some(sequence), payload, ..empty }
    }

    #[test]
    fn waiting_bytes_are_bounded_and_counted() {
        let slots = Slots::new(1);
        let slot = slots.slot("w").unwrap();
        assert!(!slot.push(message("m", 1, SLOT_MAX_BYTES / 2)));
        assert!(!slot.push(message("m", 2, SLOT_MAX_BYTES / 2)));
        assert!(slot.push(message("m", 3, 1000)), "no room: the newest stays");
        assert_eq!(slot.first("m"), Some(3));
        assert_eq!(slots.held.bytes.load(Relaxed), 1000);
        slot.push(message("n", 1, 2000));
        slot.keep("n");
        assert_eq!((slot.first("m"), slot.first("n")), (None, Some(1)));
        let taken = slot.pop().unwrap();
        assert!(slot.is_empty() && slots.held.bytes.load(Relaxed) == 0);
        slot.put_back(taken);
        assert_eq!(slots.held.bytes.load(Relaxed), 2000);
        drop(slot);
        slots.forget(Instant::now() + FORGET);
        assert_eq!(slots.held.bytes.load(Relaxed), 0, "a forgotten slot frees its bytes");
    }

    #[tokio::test]
    async fn a_relay_that_panics_is_followed_by_another_one() {
        let slot = Slots::new(1).slot("w").unwrap();
        let pause = Duration::from_secs(3600);
        let mark = Arc::clone(&slot).relay(pause);
        assert!(!slot.may_be_relayed(Instant::now() + pause));
        let relay = async move {
            assert!(mark.slot().is_empty() && mark.pause.is_zero(), "a defect");
        };
        let mut relaying = tokio::task::JoinSet::new();
        relaying.spawn(relay);
        assert!(relaying.join_next().await.unwrap().is_err());
        let now = Instant::now();
        assert!(!slot.may_be_relayed(now) && slot.may_be_relayed(now + pause));
        let mut mark = Arc::clone(&slot).relay(pause);
        mark.pause = Duration::ZERO;
        drop(mark);
        assert!(slot.may_be_relayed(Instant::now()), "it ended by itself");
    }

    #[test]
    fn the_number_of_slots_is_bounded() {
        let slots = Slots::new(1);
        let taken = (0..100).filter(|name| slots.slot(&name.to_string()).is_some()).count();
        assert_eq!(taken, 1 + BESIDE);
    }
}
