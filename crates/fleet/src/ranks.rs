//! The data-parallel ranks of one worker.
//!
//! Ranks share a process and an address, but no KV cache: a request on one rank cannot use the blocks
//! of another. Where the engine lets a request name its rank (`X-data-parallel-rank`),
//! each rank is a candidate of its own. Otherwise the engine chooses, and only blocks that
//! all ranks hold are certain to be found.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering::Relaxed};

use arc_swap::ArcSwap;
use splitrail_kv::WorkerKey;
use splitrail_policy::WorkerIndex;
use tokio::sync::watch;

use super::booking::Booked;

/// Ranks of one worker: an engine that says more is not believed.
pub const RANKS_MAX: u16 = 256;

/// A worker's ranks.
#[derive(Debug)]
pub struct Ranks {
    /// How many there are; `None` while somebody is still to say it.
    known: watch::Sender<Option<u16>>,
    /// The same for readers in a hurry; 0 while it is not known.
    count: AtomicU16,
    configured: Option<u16>,
    /// Whether requests can be pinned: 1 for no, 2 for yes, 0 for not known.
    pins: AtomicU8,
    pins_configured: Option<bool>,
    first: Arc<Rank>,
    /// The others, in order.
    further: ArcSwap<Vec<Arc<Rank>>>,
}

/// One rank.
#[derive(Debug, Default)]
pub struct Rank {
    /// What the router has given it to do, where it is pinned.
    pub booked: Arc<Booked>,
    /// Whether its KV events come in.
    events_current: AtomicBool,
    /// Whether the index lacks blocks of it that were beyond the bound.
    index_truncated: AtomicBool,
}

impl Ranks {
    /// One rank, unless it is configured otherwise.
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
        ranks.set_pins(None);
        ranks.set_count(1);
        ranks
    }

    /// Somebody is going to say how many there are. Until then nothing of them is believed.
    pub fn expect(&self) {
        if self.configured.is_none() {
            self.count.store(0, Relaxed);
            self.known.send_replace(None);
        }
    }

    /// How many there are; 1 while it is not known.
    pub fn count(&self) -> u16 {
        self.count.load(Relaxed).max(1)
    }

    /// Whether it is known how many there are.
    pub fn are_known(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Hears how many there are, and when that changes.
    pub fn follow(&self) -> watch::Receiver<Option<u16>> {
        self.known.subscribe()
    }

    /// Records how many there are. What is configured stands.
    pub fn set_count(&self, said: u32) {
        let said = u16::try_from(said).unwrap_or(u16::MAX);
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

    /// Whether requests can be pinned to a rank; `None` until it is known.
    pub fn pins(&self) -> Option<bool> {
        match self.pins.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records whether requests can be pinned; `None` forgets it, for a process that may be
    /// another one. What is configured stands.
    pub fn set_pins(&self, pins: Option<bool>) {
        let known = self.pins_configured.or(pins);
        self.pins.store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// Whether the router chooses among several ranks.
    pub fn are_pinned(&self) -> bool {
        self.count() > 1 && self.pins() == Some(true)
    }

    /// Whether the engine chooses among several ranks: nobody knows where a request will run.
    pub fn are_chosen_by_the_engine(&self) -> bool {
        self.count() > 1 && self.pins() != Some(true)
    }

    /// A rank, if there is such a one.
    pub fn get(&self, rank: u16) -> Option<Arc<Rank>> {
        match rank.checked_sub(1) {
            None => Some(Arc::clone(&self.first)),
            Some(further) => self.further.load().get(usize::from(further)).cloned(),
        }
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<Arc<Rank>> {
        let further = self.further.load();
        std::iter::once(&self.first).chain(further.iter()).cloned().collect()
    }

    /// Whether the KV events of all of them come in.
    pub fn are_current(&self) -> bool {
        self.are_known() && self.every(Rank::is_current)
    }

    /// Whether the KV events of a rank come in.
    pub fn is_current(&self, rank: u16) -> bool {
        self.are_known() && self.get(rank).is_some_and(|rank| rank.is_current())
    }

    /// Records that the KV events of all of them come in, or are cut off.
    pub fn set_all_current(&self, current: bool) {
        self.first.set_current(current);
        self.further.load().iter().for_each(|rank| rank.set_current(current));
    }

    /// Whether the index lacks blocks of any of them.
    pub fn is_any_truncated(&self) -> bool {
        !self.every(|rank| !rank.index_truncated.load(Relaxed))
    }

    /// Records whether the index lacks blocks: of one of them, or of whichever.
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
    /// Whether its KV events come in.
    pub fn is_current(&self) -> bool {
        self.events_current.load(Relaxed)
    }

    /// Records that its KV events come in, or are cut off.
    pub fn set_current(&self, current: bool) {
        self.events_current.store(current, Relaxed);
    }
}

/// A rank's name in the index.
pub fn rank_key(worker: WorkerIndex, rank: u16) -> WorkerKey {
    WorkerKey { worker: worker.0, rank }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Booking;

    #[test]
    fn what_is_configured_stands_whatever_an_engine_says() {
        let ranks = Ranks::new(Some(2), Some(false));
        ranks.expect();
        assert!(ranks.are_known());
        ranks.set_count(4);
        ranks.set_pins(Some(true));
        assert_eq!((ranks.count(), ranks.pins()), (2, Some(false)));
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
        assert!(ranks.are_current() && !ranks.are_pinned());
    }

    #[test]
    fn an_engine_with_a_thousand_ranks_is_not_believed() {
        let ranks = Ranks::new(None, Some(true));
        for (said, count) in [(0, 1), (1000, RANKS_MAX), (u32::MAX, RANKS_MAX), (2, 2)] {
            ranks.set_count(said);
            assert_eq!((ranks.count(), ranks.all().len()), (count, usize::from(count)));
        }
        assert!(ranks.are_pinned());
    }
}
