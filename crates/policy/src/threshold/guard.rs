//! Limits the long steps of a decode worker by a budget.
//!
//! A stream's time between tokens is measured by the mean of its slowest tenth. If `a` is a worker's
//! usual step and `g` the goal, then for each step one tenth of `g - a` may be spent on longer
//! steps before that mean exceeds the goal. A quarter of it is made available, because streams
//! differ in length, and short streams have few steps over which a long step is averaged. Unused
//! budget is kept for up to thirty steps, so that no stream gets the savings of an hour at once.

/// The share of a stream's slowest steps by which the stream is measured.
const JUDGED: f64 = 0.1;
/// The share of the budget that is made available.
const GIVEN: f64 = 0.25;
/// The number of steps whose whole budget may be saved.
const SAVED_STEPS: f64 = 30.0;

/// The budget of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Guard {
    saved_ms: f64,
    since_ns: u64,
}

impl Guard {
    /// The budget at the time `now_ns`, if the usual step takes `step_ms`.
    pub(super) fn budget_ms(&self, now_ns: u64, goal_ms: f64, step_ms: f64) -> f64 {
        let spare_ms = (goal_ms - step_ms).max(0.0);
        let elapsed_ms = now_ns.saturating_sub(self.since_ns) as f64 / 1e6;
        // Without requests there are no streams to disturb; steps of one millisecond are assumed
        // then.
        let steps = elapsed_ms / step_ms.max(1.0);
        let saved_ms = self.saved_ms + steps * GIVEN * JUDGED * spare_ms;
        saved_ms.min(SAVED_STEPS * JUDGED * goal_ms)
    }

    pub(super) fn spend(&mut self, now_ns: u64, goal_ms: f64, step_ms: f64, spent_ms: f64) {
        self.saved_ms = self.budget_ms(now_ns, goal_ms, step_ms) - spent_ms;
        self.since_ns = now_ns;
    }
}
