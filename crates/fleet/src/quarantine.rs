//! The drain of a worker, and its quarantine. The cache of a worker in quarantine may hold KV under
//! the hashes of other tokens, and a later prompt could read it. The worker gets no work and none
//! of its blocks counts, until its engine is another process or an operator takes the worker back
//! into service.

use std::fmt::Display;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::state::{Event, WorkerState};
use super::worker::Worker;

/// An operator wants the worker drained.
const OPERATOR: u8 = 1;
/// The worker's shim leaves.
const SHIM: u8 = 2;
/// The worker is in quarantine.
const QUARANTINE: u8 = 4;

/// Why one worker is drained: none, or several of the causes above.
#[derive(Debug, Default)]
pub struct DrainCauses(AtomicU8);

impl DrainCauses {
    /// Whether the worker is in quarantine.
    pub fn has_quarantine(&self) -> bool {
        self.0.load(Relaxed) & QUARANTINE != 0
    }

    fn add(&self, causes: u8) {
        self.0.fetch_or(causes, Relaxed);
    }

    /// Removes causes. Returns whether the worker was drained because of these alone.
    fn remove(&self, causes: u8) -> bool {
        let before = self.0.fetch_and(!causes, Relaxed);
        before != 0 && before & !causes == 0
    }
}

impl Worker {
    /// Whether the worker is being drained.
    pub fn is_draining(&self) -> bool {
        self.state() == WorkerState::Draining
    }

    /// Starts draining for an operator, or ends all draining, and with it a quarantine. Returns
    /// whether the state changed.
    pub fn set_draining(&self, draining: bool, why: impl Display) -> bool {
        if draining {
            self.drain_causes.add(OPERATOR);
            return self.life.change(Event::Drain, why);
        }
        self.drain_causes.remove(OPERATOR | SHIM | QUARANTINE);
        self.life.change(Event::Undrain, why)
    }

    /// Drains the worker because its shim leaves, until its shim attaches again, or its engine is down
    /// or another process.
    pub fn drain_for_shim(&self, why: impl Display) {
        self.drain_causes.add(SHIM);
        self.life.change(Event::Drain, why);
    }

    /// Takes back a worker that its shim has drained, unless it is drained for another reason.
    pub fn rejoin(&self, why: impl Display) {
        if self.drain_causes.remove(SHIM) {
            self.life.change(Event::Undrain, why);
        }
    }

    /// Drains the worker and believes none of its blocks, because its cache may hold KV of other
    /// tokens: until its engine reports another process, or the draining is ended.
    pub fn quarantine(&self, why: impl Display) {
        self.drain_causes.add(QUARANTINE);
        self.life.change(Event::Drain, why);
    }

    /// Whether the worker's cache may hold KV of other tokens.
    pub fn is_quarantined(&self) -> bool {
        self.drain_causes.has_quarantine()
    }

    /// Ends a quarantine. The worker stays drained if it is for another reason.
    pub(super) fn end_quarantine(&self, why: impl Display) {
        if self.drain_causes.remove(QUARANTINE) {
            self.life.change(Event::Undrain, why);
        }
    }

    /// Takes over the drain of the worker that this one replaces.
    pub(super) fn take_over_drain(&self, before: &Self, why: impl Display) {
        let causes = before.drain_causes.0.load(Relaxed);
        if causes == 0 {
            return;
        }
        self.drain_causes.add(causes);
        match causes & QUARANTINE == 0 {
            true => self.life.change(Event::Drain, why),
            false => self.life.change(Event::Drain, before.life.since().why),
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::worker::tests::worker;

    #[test]
    fn the_end_of_a_quarantine_ends_no_other_drain() {
        let restarts = |worker: &Worker| {
            worker.end_quarantine("a test");
            (worker.is_quarantined(), worker.is_draining())
        };
        let other = worker("w");
        other.quarantine("a test");
        other.quarantine("again");
        assert!(other.is_quarantined() && other.is_draining());
        assert_eq!(restarts(&other), (false, false));
        for drained_first in [true, false] {
            let drained = worker("w");
            let drain = |now: bool| now.then(|| drained.set_draining(true, "a test"));
            drain(drained_first);
            drained.quarantine("a test");
            drain(!drained_first);
            drained.drain_for_shim("a test");
            drained.rejoin("a test");
            assert!(drained.is_quarantined() && drained.is_draining());
            assert_eq!(restarts(&drained), (false, true), "an operator drained it");
        }
        let other = worker("w");
        other.quarantine("a test");
        other.drain_for_shim("a test");
        other.rejoin("a test");
        assert_eq!(restarts(&other), (false, false));
    }

    #[test]
    fn the_drain_of_a_shim_ends_with_its_engine_or_when_the_shim_is_back() {
        let leaves = || {
            let before = worker("w");
            before.set_probed(true, "a test");
            before.drain_for_shim("a test");
            // Another source leads.
            let after = worker("w");
            after.succeed_to(&before);
            assert!(after.is_draining() && after.is_up(), "its engine may be about to stop");
            after
        };
        let ends: [fn(&Worker); 3] = [
            |worker| worker.rejoin("its shim is back"),
            |worker| {
                worker.set_up(false, "a test");
            },
            Worker::record_restart,
        ];
        for end in ends {
            let after = leaves();
            end(&after);
            assert!(!after.is_draining());
            let after = leaves();
            after.set_draining(true, "a test");
            end(&after);
            assert!(after.is_draining(), "an operator drained it");
        }
        let after = leaves();
        after.quarantine("a test");
        after.rejoin("its shim is back");
        assert!(after.is_draining() && after.is_quarantined());
    }
}
