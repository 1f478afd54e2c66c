//! The most recent decision records, and those of unusual requests of the last hours.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use serde::Deserialize;

use super::handle::DecisionHandle;
use super::notable::NotableDecisions;
use super::record::Decision;
use splitrail_api::name::Name;

/// The decision records that are kept: a bounded ring of the most recent ones, and a bounded number of
/// those of unusual requests.
#[derive(Debug)]
pub struct Decisions {
    ring: ArcSwap<Ring>,
    notable: NotableDecisions,
}

/// The records that are looked for. Members that are not set exclude nothing.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DecisionFilter {
    /// The id of the request.
    pub request_id: Option<String>,
    /// The worker of any of its legs.
    pub worker: Option<String>,
    /// The time of the first decision, in milliseconds since 1970: not before this one.
    pub from_unix_ms: Option<u64>,
    /// The time of the first decision, in milliseconds since 1970: not after this one.
    pub to_unix_ms: Option<u64>,
    /// Only requests that failed.
    pub failed: bool,
    /// The slowest requests first, not the newest.
    pub slowest: bool,
    /// Maximum number of records.
    pub limit: Option<usize>,
}

impl DecisionFilter {
    fn admits(&self, decision: &Decision) -> bool {
        let is = |name: &Option<Name>, wanted: &str| name.as_deref() == Some(wanted);
        let of_worker = |wanted: &String| {
            is(&decision.prefill_worker, wanted) || is(&decision.decode_worker, wanted)
        };
        let at = decision.decided_unix_ms;
        self.request_id.as_ref().is_none_or(|id| *decision.request_id == **id)
            && self.worker.as_ref().is_none_or(of_worker)
            && self.from_unix_ms.is_none_or(|from| from <= at)
            && self.to_unix_ms.is_none_or(|to| at <= to)
            && (!self.failed || decision.has_failed())
    }
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
        Self { ring: ArcSwap::from_pointee(Ring::new(kept)), notable: NotableDecisions::default() }
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
    pub fn start(&self, start: Decision) -> DecisionHandle {
        let handle = DecisionHandle::new(start);
        self.ring.load().put(handle.clone());
        handle
    }

    /// The request of a record has ended at this time, and the record has its times and its outcome: it
    /// is kept for hours if it is unusual.
    pub fn keep_if_notable(&self, handle: &DecisionHandle, ended_unix_ms: u64) {
        self.notable.offer(handle, ended_unix_ms);
    }

    /// The records that are looked for, the newest or the slowest first.
    pub fn find(&self, filter: &DecisionFilter) -> Vec<Decision> {
        let mut all = self.ring.load().newest();
        all.extend(self.notable.all());
        all.retain(|handle| handle.with(|decision| filter.admits(decision)));
        let mut found = HashSet::new();
        all.retain(|handle| found.insert(handle.address()));
        let read = |handle: &DecisionHandle| {
            handle.with(|decision| (decision.decided_unix_ms, decision.slow_ms()))
        };
        // The sort is stable: of the same millisecond, the newest stays the first.
        all.sort_by_cached_key(|handle| Reverse(read(handle).0));
        if filter.slowest {
            all.sort_by(|one, other| read(other).1.total_cmp(&read(one).1));
        }
        all.truncate(filter.limit.unwrap_or(usize::MAX));
        all.iter().map(|handle| handle.with(Decision::clone)).collect()
    }

    /// Reads at most `limit` records where they are, the newest first.
    pub fn read_recent(&self, limit: usize, mut read: impl FnMut(&Decision)) {
        self.ring.load().recent(limit).for_each(|handle| handle.with(&mut read));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::RequestTimes;

    fn start(decisions: &Decisions, id: &str) -> DecisionHandle {
        decisions.start(Decision { request_id: id.into(), ..Decision::default() })
    }

    fn start_all(decisions: &Decisions, ids: &[&str]) {
        for id in ids {
            start(decisions, id);
        }
    }

    fn found(decisions: &Decisions, filter: &DecisionFilter) -> Vec<String> {
        let found = decisions.find(filter);
        found.iter().map(|decision| decision.request_id.to_string()).collect()
    }

    #[test]
    fn a_slow_or_failed_request_is_found_after_the_ring_has_forgotten_it() {
        let decisions = Decisions::new(2);
        for (id, ms, outcome, worker, unix_ms) in [
            ("slow", 900.0, "ok", "d0", 1_000),
            ("broken", 3.0, "decode_lost", "d1", 2_000),
            ("x", 1.0, "ok", "d0", 3_000),
            ("y", 2.0, "ok", "d0", 4_000),
        ] {
            let handle = start(&decisions, id);
            let times =
                RequestTimes { ttft_ms: Some(ms), total_ms: ms, stages_ms: Default::default() };
            handle.request_took(times);
            {
                let mut decision = handle.lock();
                decision.outcome = Some(outcome);
                decision.decode_worker = Some(worker.into());
                decision.decided_unix_ms = unix_ms;
            }
            decisions.keep_if_notable(&handle, unix_ms);
        }
        let all = DecisionFilter::default;
        assert_eq!(found(&decisions, &DecisionFilter { failed: true, ..all() }), ["broken"]);
        let slowest = found(&decisions, &DecisionFilter { slowest: true, ..all() });
        assert_eq!(slowest[..2], ["slow", "broken"], "each once, with the slowest first");
        assert_eq!(slowest.iter().filter(|id| *id == "x").count(), 1);
        let of_d1 = DecisionFilter { worker: Some("d1".into()), ..all() };
        assert_eq!(found(&decisions, &of_d1), ["broken"]);
        let then = DecisionFilter { from_unix_ms: Some(900), to_unix_ms: Some(1_500), ..all() };
        assert_eq!(found(&decisions, &then), ["slow"]);
    }

    #[test]
    fn the_ring_forgets_the_oldest() {
        let decisions = Decisions::new(2);
        start_all(&decisions, &["a", "b", "c"]);
        assert_eq!(found(&decisions, &DecisionFilter::default()), ["c", "b"]);
        let of = |id: &str| DecisionFilter { request_id: Some(id.into()), ..Default::default() };
        assert!(found(&decisions, &of("a")).is_empty());
        assert_eq!(found(&decisions, &of("b")), ["b"]);
    }

    #[test]
    fn the_recent_records_are_read_newest_first() {
        let decisions = Decisions::new(3);
        let ids = |limit| {
            let mut ids = Vec::new();
            decisions.read_recent(limit, |decision| ids.push(decision.request_id.to_string()));
            ids
        };
        assert!(ids(9).is_empty());
        start_all(&decisions, &["a", "b", "c", "d"]);
        assert_eq!(ids(9), ["d", "c", "b"]);
        assert_eq!(ids(2), ["d", "c"]);
    }

    #[test]
    fn a_ring_of_another_size_keeps_the_newest() {
        let decisions = Decisions::new(3);
        let ids = || found(&decisions, &DecisionFilter::default());
        start_all(&decisions, &["a", "b", "c", "d"]);
        decisions.keep(2);
        assert_eq!(ids(), ["d", "c"]);
        decisions.keep(4);
        start_all(&decisions, &["e", "f", "g"]);
        assert_eq!(ids(), ["g", "f", "e", "d"]);
    }
}
