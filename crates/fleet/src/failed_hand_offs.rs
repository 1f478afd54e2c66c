//! Remembers that decode legs fail on the hand-offs of a prefill worker. An engine that cannot pull from
//! another one reports a failure of its own, so that the worker that handed over would never be suspected.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use splitrail_policy::WorkerIndex;
use splitrail_workload::breaker::Breaker;

/// Number of failures in a row, all on one decode worker, that count against the worker that handed over.
/// It is less than the failures that open the decode worker's breaker, which its other legs reset.
const ON_ONE_MAX: u32 = 3;

/// The decode legs that have failed on one worker's hand-offs. It has no clock: callers pass the time.
#[derive(Debug, Default)]
pub struct FailedHandOffs {
    /// Failures on two decode workers in a row open it, and some on one.
    breaker: Breaker,
    /// Failures since the last success.
    in_a_row: AtomicU32,
    /// One more than the index of the worker whose leg has failed since the last success; 0 if none has.
    failed_on: AtomicU64,
}

impl FailedHandOffs {
    /// Whether the worker may hand over, or a trial is due.
    pub fn may_hand_over(&self, now: Instant) -> bool {
        self.breaker.allows(now)
    }

    /// Whether decode workers have lately failed on what it handed over.
    pub fn are_suspected(&self) -> bool {
        self.breaker.is_open()
    }

    /// Records that a prefill is sent. If it is a trial, no other prefill is sent meanwhile.
    pub fn begin(&self, now: Instant) {
        self.breaker.begin(now);
    }

    /// Records that a decode leg has taken a hand-off. Returns whether this ends a suspicion.
    pub fn record_success(&self) -> bool {
        self.in_a_row.store(0, Relaxed);
        self.failed_on.store(0, Relaxed);
        self.breaker.succeed()
    }

    /// Records that a decode leg on this worker has failed on a hand-off. Returns whether this begins a
    /// suspicion: after one failure, the decode worker may be at fault itself.
    pub fn record_failure(&self, decode: WorkerIndex, now: Instant) -> bool {
        let failed_on = u64::from(decode.0) + 1;
        let before = self.failed_on.swap(failed_on, Relaxed);
        let on_another = before != 0 && before != failed_on;
        let in_a_row = self.in_a_row.fetch_add(1, Relaxed).saturating_add(1);
        (on_another || in_a_row >= ON_ONE_MAX || self.breaker.is_open()) && self.breaker.fail(now)
    }

    /// Forgets everything, because the engine is another process.
    pub fn forget(&self) {
        self.record_success();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn failures_in_a_row_on_one_decode_worker_count_as_well() {
        let (hand_offs, now) = (FailedHandOffs::default(), Instant::now());
        let failures = [(); 3].map(|()| hand_offs.record_failure(WorkerIndex(7), now));
        assert_eq!(failures, [false, false, true]);
    }

    #[test]
    fn a_worker_is_suspected_when_two_decode_workers_fail_on_its_hand_offs() {
        let (hand_offs, now) = (FailedHandOffs::default(), Instant::now());
        let [first, second] = [0, 1].map(WorkerIndex);
        assert!(!hand_offs.record_failure(first, now) && !hand_offs.record_failure(first, now));
        assert!(!hand_offs.record_success());
        assert!(!hand_offs.record_failure(second, now), "nothing is known of the first any more");
        assert!(hand_offs.record_failure(first, now));
        assert!(hand_offs.are_suspected() && !hand_offs.may_hand_over(now + 29 * S));
        // A trial fails, and one succeeds.
        let trial = now + 30 * S;
        assert!(hand_offs.may_hand_over(trial));
        hand_offs.begin(trial);
        hand_offs.record_failure(first, trial);
        assert!(!hand_offs.may_hand_over(trial + 59 * S));
        assert!(hand_offs.record_success());
        assert!(hand_offs.may_hand_over(trial) && !hand_offs.are_suspected());
    }
}
