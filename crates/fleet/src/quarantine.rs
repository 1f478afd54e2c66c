//! The drain of a worker, and its quarantine. The cache of a worker in quarantine may hold KV under
//! the hashes of other tokens, and a later prompt could read it. The worker gets no work and none
//! of its blocks counts, until its engine is another process or an operator takes the worker back
//! into service.

use std::fmt::Display;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

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
pub struct DrainCauses {
    /// The causes, for readers that take no lock. Changed only while `changing` is locked.
    causes: AtomicU8,
    /// Held until the worker's state has followed a change of the causes.
    changing: Mutex<()>,
}

impl DrainCauses {
    fn has(&self, cause: u8) -> bool {
        self.causes.load(Relaxed) & cause != 0
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
        match draining {
            true => self.drain_for(OPERATOR, why),
            false => self.end_drain_for(OPERATOR | SHIM | QUARANTINE, why),
        }
    }

    /// Drains the worker because its shim leaves, until its shim attaches again, or its engine is down
    /// or another process.
    pub fn drain_for_shim(&self, why: impl Display) {
        self.drain_for(SHIM, why);
    }

    /// Whether the worker is drained because its shim leaves.
    pub fn is_drained_for_shim(&self) -> bool {
        self.health.drain_causes.has(SHIM)
    }

    /// Takes back a worker that its shim has drained, unless it is drained for another reason.
    pub fn rejoin(&self, why: impl Display) {
        self.end_drain_for(SHIM, why);
    }

    /// Drains the worker and believes none of its blocks, because its cache may hold KV of other
    /// tokens: until its engine reports another process, or the draining is ended.
    pub fn quarantine(&self, why: impl Display) {
        self.drain_for(QUARANTINE, why);
    }

    /// Whether the worker's cache may hold KV of other tokens.
    pub fn is_quarantined(&self) -> bool {
        self.health.drain_causes.has(QUARANTINE)
    }

    /// Ends a quarantine. The worker stays drained if it is for another reason.
    pub(super) fn end_quarantine(&self, why: impl Display) {
        self.end_drain_for(QUARANTINE, why);
    }

    /// Takes over the drain of the worker that this one replaces.
    pub(super) fn take_over_drain(&self, before: &Self, why: impl Display) {
        let causes = before.health.drain_causes.causes.load(Relaxed);
        match causes & QUARANTINE == 0 {
            true => self.drain_for(causes, why),
            false => self.drain_for(causes, before.health.lifecycle.since().why),
        };
    }

    fn drain_for(&self, causes: u8, why: impl Display) -> bool {
        self.change_drain(|before| before | causes, why)
    }

    /// Takes the worker back if it is drained for no other cause.
    fn end_drain_for(&self, causes: u8, why: impl Display) -> bool {
        self.change_drain(|before| before & !causes, why)
    }

    /// Changes the causes, and the worker's state accordingly, in one step: otherwise a drain that
    /// begins while another one ends would be lost. Returns whether the state changed.
    fn change_drain(&self, change: impl FnOnce(u8) -> u8, why: impl Display) -> bool {
        let DrainCauses { causes, changing } = &self.health.drain_causes;
        // A poisoned lock is still used: it guards no value of its own.
        let _changing = changing.lock().unwrap_or_else(PoisonError::into_inner);
        let after = change(causes.load(Relaxed));
        causes.store(after, Relaxed);
        self.health.lifecycle.change(if after == 0 { Event::Undrain } else { Event::Drain }, why)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Barrier;

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

    /// Runs two actions on a worker at the same time, many times over.
    fn race(rounds: usize, prepare: fn(&Worker), actions: [fn(&Worker); 2], check: fn(&Worker)) {
        for _ in 0..rounds {
            let worker = worker("w");
            prepare(&worker);
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                for action in actions {
                    let (worker, start) = (&worker, &start);
                    scope.spawn(move || {
                        start.wait();
                        action(worker);
                    });
                }
            });
            check(&worker);
        }
    }

    #[test]
    fn a_drain_that_begins_while_another_one_ends_is_not_lost() {
        let operator: fn(&Worker) = |worker| {
            worker.set_draining(true, "a test");
        };
        type Change = fn(&Worker);
        let ends: [[Change; 2]; 2] = [
            [|worker| worker.quarantine("a test"), |worker| worker.end_quarantine("a test")],
            [|worker| worker.drain_for_shim("a test"), |worker| worker.rejoin("a test")],
        ];
        for [prepare, end] in ends {
            race(10_000, prepare, [operator, end], |worker| assert!(worker.is_draining()));
        }
        race(
            10_000,
            operator,
            [
                |worker| worker.quarantine("a test"),
                |worker| {
                    worker.set_draining(false, "a test");
                },
            ],
            |worker| assert_eq!(worker.is_draining(), worker.is_quarantined()),
        );
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
