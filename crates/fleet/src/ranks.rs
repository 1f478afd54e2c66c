//! The data-parallel ranks of one worker.
//!
//! Ranks share a process and an address, but no KV cache: a request on one rank cannot use the
//! blocks of another. If the engine lets a request name its rank (`X-data-parallel-rank`), each
//! rank is a candidate of its own. Otherwise the engine chooses the rank, and only blocks that all
//! ranks hold are certain to be found.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering::Relaxed};

use arc_swap::ArcSwap;
use splitrail_kv::WorkerKey;
use splitrail_policy::WorkerIndex;
use tokio::sync::watch;

use splitrail_workload::booking::BookedSums;

/// Maximum number of ranks of one worker. A higher reported number is reduced to this.
pub const RANKS_MAX: u16 = 256;

/// A worker's ranks.
#[derive(Debug)]
pub struct Ranks {
    /// The number of ranks; `None` while it has not been reported.
    known: watch::Sender<Option<u16>>,
    /// The same number for readers that take no lock; 0 while it is unknown.
    count: AtomicU16,
    configured: Option<u16>,
    /// Whether requests can be pinned to a rank: 0 is unknown, 1 is no, 2 is yes.
    pins: AtomicU8,
    pins_configured: Option<bool>,
    first: Arc<Rank>,
    /// All ranks after the first, in order.
    further: ArcSwap<Vec<Arc<Rank>>>,
}

/// One rank.
#[derive(Debug, Default)]
pub struct Rank {
    /// The work that the router has assigned to the rank, if requests are pinned to it.
    pub booked: Arc<BookedSums>,
    /// Whether the rank's KV events are being received.
    events_current: AtomicBool,
    /// Whether the index left out blocks of the rank because of its size limit.
    index_truncated: AtomicBool,
}

impl Ranks {
    /// Starts with the configured number of ranks, or with one.
    pub fn new(configured: Option<u16>, pins_configured: Option<bool>) -> Self {
        let ranks = Self {
            known: watch::Sender::new(Some(1)),
            count: AtomicU16::new(1),
            configured,
            pins: AtomicU8::new(0),
            pins_configured,
            first: Arc::default(),
            further: ArcSwap::default(),
        };
        ranks.set_takes_rank_header(None);
        ranks.set_count(1);
        ranks
    }

    /// Marks the number of ranks as unknown until it is reported, unless it is configured. Until
    /// then no rank counts as current.
    pub fn expect(&self) {
        if self.configured.is_none() {
            self.count.store(0, Relaxed);
            self.known.send_replace(None);
        }
    }

    /// The number of ranks; 1 while it is unknown.
    pub fn count(&self) -> u16 {
        self.count.load(Relaxed).max(1)
    }

    /// Whether the number of ranks is known.
    pub fn are_known(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// A receiver for the number of ranks and its changes.
    pub fn follow(&self) -> watch::Receiver<Option<u16>> {
        self.known.subscribe()
    }

    /// Records the reported number of ranks. A configured number takes precedence.
    pub fn set_count(&self, reported: u32) {
        let said = u16::try_from(reported).unwrap_or(u16::MAX);
        let count = self.configured.unwrap_or(said).clamp(1, RANKS_MAX);
        self.known.send_if_modified(|known| {
            if *known == Some(count) {
                return false;
            }
            let before = self.further.load();
            let kept = before.iter().cloned().chain(std::iter::repeat_with(Arc::default));
            self.further.store(Arc::new(kept.take(usize::from(count) - 1).collect()));
            self.count.store(count, Relaxed);
            *known = Some(count);
            true
        });
    }

    /// Whether requests can be pinned to a rank; `None` while unknown.
    pub fn takes_rank_header(&self) -> Option<bool> {
        match self.pins.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records whether requests can be pinned; `None` forgets it because the engine's process may
    /// be another one. A configured value takes precedence.
    pub fn set_takes_rank_header(&self, pins: Option<bool>) {
        let known = self.pins_configured.or(pins);
        self.pins.store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// Whether the router chooses among several ranks.
    pub fn are_chosen_by_the_router(&self) -> bool {
        self.count() > 1 && self.takes_rank_header() == Some(true)
    }

    /// Whether the engine chooses among several ranks, so that the router does not know where a
    /// request runs.
    pub fn are_chosen_by_the_engine(&self) -> bool {
        self.count() > 1 && self.takes_rank_header() != Some(true)
    }

    /// The rank with this number, if it exists.
    pub fn get(&self, rank: u16) -> Option<Arc<Rank>> {
        match rank.checked_sub(1) {
            None => Some(Arc::clone(&self.first)),
            Some(further) => self.further.load().get(usize::from(further)).cloned(),
        }
    }

    /// All ranks, in order.
    pub fn all(&self) -> Vec<Arc<Rank>> {
        let further = self.further.load();
        std::iter::once(&self.first).chain(further.iter()).cloned().collect()
    }

    /// Whether the KV events of all ranks are being received.
    pub fn are_current(&self) -> bool {
        self.are_known() && self.every(Rank::is_current)
    }

    /// Whether the KV events of a rank are being received.
    pub fn is_current(&self, rank: u16) -> bool {
        self.are_known() && self.get(rank).is_some_and(|rank| rank.is_current())
    }

    /// Records for all ranks whether their KV events are being received.
    pub fn set_all_current(&self, current: bool) {
        self.first.set_current(current);
        self.further.load().iter().for_each(|rank| rank.set_current(current));
    }

    /// Whether the index left out blocks of any rank because of its size limit.
    pub fn is_any_truncated(&self) -> bool {
        !self.every(|rank| !rank.index_truncated.load(Relaxed))
    }

    /// Records whether the index left out blocks of a rank, or, for `None`, of any rank.
    pub fn set_truncated(&self, rank: Option<u16>, truncated: bool) {
        let set = |rank: &Arc<Rank>| rank.index_truncated.store(truncated, Relaxed);
        match rank {
            Some(rank) => self.get(rank).iter().for_each(set),
            None => self.all().iter().for_each(set),
        }
    }

    fn every(&self, holds: impl Fn(&Rank) -> bool) -> bool {
        holds(&self.first) && (self.count() == 1 || self.further.load().iter().all(|r| holds(r)))
    }
}

impl Rank {
    /// Whether the rank's KV events are being received.
    pub fn is_current(&self) -> bool {
        self.events_current.load(Relaxed)
    }

    /// Records whether the rank's KV events are being received.
    pub fn set_current(&self, current: bool) {
        self.events_current.store(current, Relaxed);
    }
}

/// The key of a rank in the index.
pub fn rank_key(worker: WorkerIndex, rank: u16) -> WorkerKey {
    WorkerKey { worker: worker.0, rank }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_workload::Booking;

    #[test]
    fn configured_ranks_take_precedence_over_the_engines_report() {
        let ranks = Ranks::new(Some(2), Some(false));
        ranks.expect();
        assert!(ranks.are_known());
        ranks.set_count(4);
        ranks.set_takes_rank_header(Some(true));
        assert_eq!((ranks.count(), ranks.takes_rank_header()), (2, Some(false)));
        assert!(ranks.are_chosen_by_the_engine());
    }

    #[test]
    fn ranks_that_come_are_not_current_and_those_that_stay_keep_what_they_have() {
        let ranks = Ranks::new(None, None);
        ranks.set_all_current(true);
        let _booking = Booking::new(&ranks.get(0).unwrap().booked, 3, 4);
        ranks.set_count(3);
        assert_eq!(ranks.all().len(), 3);
        assert!(ranks.is_current(0) && !ranks.is_current(2) && !ranks.are_current());
        ranks.get(1).unwrap().set_current(true);
        ranks.set_count(2);
        assert!(ranks.are_current() && ranks.get(2).is_none());
        assert_eq!(ranks.get(0).unwrap().booked.requests(), 1);
    }

    #[test]
    fn nothing_is_current_while_it_is_not_known_how_many_there_are() {
        let ranks = Ranks::new(None, None);
        ranks.set_all_current(true);
        ranks.expect();
        assert!(!ranks.are_current() && !ranks.is_current(0));
        ranks.set_count(1);
        assert!(ranks.are_current() && !ranks.are_chosen_by_the_router());
    }

    #[test]
    fn an_engine_with_a_thousand_ranks_is_not_believed() {
        let ranks = Ranks::new(None, Some(true));
        for (said, count) in [(0, 1), (1000, RANKS_MAX), (u32::MAX, RANKS_MAX), (2, 2)] {
            ranks.set_count(said);
            assert_eq!((ranks.count(), ranks.all().len()), (count, usize::from(count)));
        }
        assert!(ranks.are_chosen_by_the_router());
    }
}
