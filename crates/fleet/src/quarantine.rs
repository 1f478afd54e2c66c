//! The drain of a worker, and its quarantine. The cache of a worker in quarantine may hold KV under
//! the hashes of other tokens, and a later prompt could read it. The worker gets no work and none
//! of its blocks counts, until its engine is another process or an operator takes the worker back
//! into service.

use std::fmt::Display;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::state::{Event, WorkerState};
use super::worker::Worker;

const NONE: u8 = 0;
/// The worker drains because of its quarantine alone.
const ALONE: u8 = 1;
/// An operator or its shim wants it drained as well.
const DRAINED: u8 = 2;

/// Whether one worker is in quarantine.
#[derive(Debug, Default)]
pub struct Quarantine(AtomicU8);

impl Quarantine {
    /// Whether the worker is in quarantine.
    pub fn is_on(&self) -> bool {
        self.0.load(Relaxed) != NONE
    }

    /// Begins it, on a worker that is drained already or not.
    pub fn begin(&self, is_drained: bool) {
        let begun = if is_drained { DRAINED } else { ALONE };
        let _was_on = self.0.compare_exchange(NONE, begun, Relaxed, Relaxed);
    }

    /// Records whether the worker is to be drained for another reason too. Returns whether it is in
    /// quarantine.
    pub fn set_drained(&self, is_drained: bool) -> bool {
        let next = if is_drained { DRAINED } else { ALONE };
        let is_on = |now| (now != NONE).then_some(next);
        self.0.fetch_update(Relaxed, Relaxed, is_on).is_ok()
    }

    /// Takes over the state of the worker that this one replaces.
    pub fn succeed_to(&self, before: &Self) {
        self.0.store(before.0.load(Relaxed), Relaxed);
    }

    /// Ends it. Returns whether the worker was drained for no other reason.
    pub fn end(&self) -> bool {
        self.0.swap(NONE, Relaxed) == ALONE
    }
}

impl Worker {
    /// Whether the worker is being drained.
    pub fn is_draining(&self) -> bool {
        self.state() == WorkerState::Draining
    }

    /// Starts or ends draining, and with it a quarantine. Returns whether the state changed.
    pub fn set_draining(&self, draining: bool, why: impl Display) -> bool {
        match draining {
            true => self.quarantine.set_drained(true),
            false => self.quarantine.end(),
        };
        self.life.change(if draining { Event::Drain } else { Event::Undrain }, why)
    }

    /// Takes back a worker that its shim has drained, unless it is in quarantine.
    pub fn rejoin(&self, why: impl Display) {
        if !self.quarantine.set_drained(false) {
            self.set_draining(false, why);
        }
    }

    /// Drains the worker and believes none of its blocks, because its cache may hold KV of other
    /// tokens: until its engine reports another process, or the draining is ended.
    pub fn quarantine(&self, why: impl Display) {
        self.quarantine.begin(self.is_draining());
        self.life.change(Event::Drain, why);
    }

    /// Whether the worker's cache may hold KV of other tokens.
    pub fn is_quarantined(&self) -> bool {
        self.quarantine.is_on()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_quarantine_ends_no_other_drain() {
        let quarantine = Quarantine::default();
        assert!(!quarantine.is_on() && !quarantine.set_drained(true) && !quarantine.end());
        quarantine.begin(false);
        quarantine.begin(true);
        assert!(quarantine.is_on() && quarantine.end() && !quarantine.is_on());
        quarantine.begin(true);
        assert!(!quarantine.end(), "it was drained before");
        quarantine.begin(false);
        assert!(quarantine.set_drained(true) && !quarantine.end(), "it was drained meanwhile");
        quarantine.begin(true);
        assert!(quarantine.set_drained(false) && quarantine.is_on() && quarantine.end());
    }
}
