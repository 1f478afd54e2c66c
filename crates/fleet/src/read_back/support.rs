//! What is known of read-back with one worker: whether its engine pins KV, and whether it may read.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::Instant;

use splitrail_workload::breaker::Breaker;

/// What is known of read-back with one worker.
#[derive(Debug, Default)]
pub struct ReadBackSupport {
    /// Whether the engine keeps KV pinned after decode legs: 0 is unknown, 1 is no, 2 is yes.
    pins: AtomicU8,
    /// Whether prefill legs that were to read have failed lately: an engine without the flag never
    /// answers them.
    reads: Breaker,
}

impl ReadBackSupport {
    /// Whether the engine keeps KV pinned after decode legs; `None` before its first reply.
    pub fn keeps_for_read_back(&self) -> Option<bool> {
        match self.pins.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records what a decode leg's reply says. An engine that has kept KV once can do it, whatever a
    /// later reply of the same process says. Returns whether this is news.
    pub fn set_keeps_for_read_back(&self, pins: bool) -> bool {
        match pins {
            true => self.pins.swap(2, Relaxed) != 2,
            false => self.pins.compare_exchange(0, 1, Relaxed, Relaxed).is_ok(),
        }
    }

    /// Whether a prefill leg on the worker may read.
    pub fn may_read(&self, now: Instant) -> bool {
        self.reads.allows(now)
    }

    /// Records that a prefill leg that reads is sent.
    pub fn begin(&self, now: Instant) {
        self.reads.begin(now);
    }

    /// Records how it ended. Returns whether reads pause from now on.
    pub fn ended(&self, is_ok: bool, now: Instant) -> bool {
        match is_ok {
            true => {
                self.reads.succeed();
                false
            }
            false => self.reads.fail(now),
        }
    }

    /// Forgets all of this, because the engine is or may be another process.
    pub fn forget(&self) {
        self.pins.store(0, Relaxed);
        self.reads.succeed();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_worker_whose_reads_fail_gets_none_for_a_while() {
        let (support, now) = (ReadBackSupport::default(), Instant::now());
        assert!(support.may_read(now) && support.keeps_for_read_back().is_none());
        support.begin(now);
        assert!(support.ended(false, now));
        assert!(!support.may_read(now + 29 * S) && support.may_read(now + 30 * S));
        support.begin(now + 30 * S);
        assert!(!support.may_read(now + 30 * S), "one trial at a time");
        support.ended(true, now + 31 * S);
        assert!(support.may_read(now + 31 * S));
        assert!(support.set_keeps_for_read_back(false) && !support.set_keeps_for_read_back(false));
        assert!(support.set_keeps_for_read_back(true) && !support.set_keeps_for_read_back(true));
        assert!(!support.set_keeps_for_read_back(false), "it has kept KV");
        assert_eq!(support.keeps_for_read_back(), Some(true));
        support.ended(false, now);
        support.forget();
        assert!(support.may_read(now) && support.keeps_for_read_back().is_none());
    }
}
