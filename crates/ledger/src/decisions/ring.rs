//! The most recent decision records.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

use super::handle::DecisionHandle;
use super::record::{Decision, DecisionStart};

/// A bounded ring of decision records.
#[derive(Debug)]
pub struct Decisions {
    ring: ArcSwap<Ring>,
}

/// The places of the records. A request that starts a record takes the next number and the place
/// with this number. No other request uses this place unless all others were taken in the
/// meantime: requests do not wait for each other here.
#[derive(Debug)]
struct Ring {
    next: AtomicU64,
    places: Box<[Mutex<Option<NumberedRecord>>]>,
}

/// A record with its number: higher is newer.
type NumberedRecord = (u64, DecisionHandle);

impl Ring {
    fn new(kept: usize) -> Self {
        let places = std::iter::repeat_with(Mutex::default).take(kept.max(1));
        Self { next: AtomicU64::new(0), places: places.collect() }
    }

    fn put(&self, handle: DecisionHandle) {
        let number = self.next.fetch_add(1, Relaxed);
        let place = &self.places[(number % self.places.len() as u64) as usize];
        // The record that makes room is freed after the place is unlocked.
        let _oldest = lock(place).replace((number, handle));
    }

    /// The newest first.
    fn newest(&self) -> Vec<DecisionHandle> {
        let kept = self.places.iter().filter_map(|place| lock(place).clone());
        let mut kept: Vec<NumberedRecord> = kept.collect();
        kept.sort_unstable_by_key(|(number, _)| Reverse(*number));
        kept.into_iter().map(|(_, handle)| handle).collect()
    }

    /// At most `limit` records, the newest first, without a look at the others.
    fn recent(&self, limit: usize) -> impl Iterator<Item = DecisionHandle> {
        let next = self.next.load(Relaxed);
        let numbers = (0..next).rev().take(limit.min(self.places.len()));
        numbers.filter_map(|number| {
            let place = &self.places[(number % self.places.len() as u64) as usize];
            // The place may not be filled yet, or may be taken by a newer record already.
            lock(place).clone().filter(|(kept, _)| *kept == number).map(|(_, handle)| handle)
        })
    }
}

fn lock(place: &Mutex<Option<NumberedRecord>>) -> MutexGuard<'_, Option<NumberedRecord>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Decisions {
    /// A ring of `kept` records.
    pub fn new(kept: usize) -> Self {
        Self { ring: ArcSwap::from_pointee(Ring::new(kept)) }
    }

    /// Changes the number of records that are kept to `kept`.
    pub fn keep(&self, kept: usize) {
        let before = self.ring.load();
        if before.places.len() == kept.max(1) {
            return;
        }
        let ring = Ring::new(kept);
        let newest = before.newest();
        newest.into_iter().take(kept).rev().for_each(|handle| ring.put(handle));
        self.ring.store(Arc::new(ring));
    }

    /// Starts a record; the oldest makes room.
    pub fn start(&self, start: DecisionStart) -> DecisionHandle {
        let handle = DecisionHandle::new(start);
        self.ring.load().put(handle.clone());
        handle
    }

    /// The newest records first, of one request if an id is given.
    pub fn newest(&self, request_id: Option<&str>, limit: usize) -> Vec<Decision> {
        let wanted = |handle: &DecisionHandle| {
            request_id.is_none_or(|id| handle.with(|decision| decision.request_id == id))
        };
        let found = self.ring.load().newest().into_iter().filter(wanted).take(limit);
        found.map(|handle| handle.with(Decision::clone)).collect()
    }

    /// Reads at most `limit` records where they are, the newest first.
    pub fn read_recent(&self, limit: usize, mut read: impl FnMut(&Decision)) {
        self.ring.load().recent(limit).for_each(|handle| handle.with(&mut read));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(decisions: &Decisions, id: &str) {
        decisions.start(DecisionStart { request_id: id.into(), ..DecisionStart::default() });
    }

    #[test]
    fn the_ring_forgets_the_oldest() {
        let decisions = Decisions::new(2);
        ["a", "b", "c"].into_iter().for_each(|id| start(&decisions, id));
        let ids: Vec<_> = decisions.newest(None, 9).into_iter().map(|d| d.request_id).collect();
        assert_eq!(ids, ["c", "b"]);
        assert!(decisions.newest(Some("a"), 9).is_empty());
        assert_eq!(decisions.newest(Some("b"), 9).len(), 1);
    }

    #[test]
    fn the_recent_records_are_read_newest_first() {
        let decisions = Decisions::new(3);
        let ids = |limit| {
            let mut ids = Vec::new();
            decisions.read_recent(limit, |decision| ids.push(decision.request_id().to_owned()));
            ids
        };
        assert!(ids(9).is_empty());
        ["a", "b", "c", "d"].into_iter().for_each(|id| start(&decisions, id));
        assert_eq!(ids(9), ["d", "c", "b"]);
        assert_eq!(ids(2), ["d", "c"]);
    }

    #[test]
    fn a_ring_of_another_size_keeps_the_newest() {
        let decisions = Decisions::new(3);
        let ids = || decisions.newest(None, 9).into_iter().map(|d| String::from(d.request_id));
        ["a", "b", "c", "d"].into_iter().for_each(|id| start(&decisions, id));
        decisions.keep(2);
        assert!(ids().eq(["d", "c"]));
        decisions.keep(4);
        ["e", "f", "g"].into_iter().for_each(|id| start(&decisions, id));
        assert!(ids().eq(["g", "f", "e", "d"]));
    }
}
