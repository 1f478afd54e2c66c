//! Decides when a draining shim may stop.
//!
//! A drain waits for requests in flight, and for hand-offs that decode workers have not fetched
//! from a prefill engine yet. The shim is not informed of a fetch. But the engine keeps the
//! blocks of a hand-off no longer than its lease, and if the engine's metrics, read after the
//! last request, show no block in use, no hand-off is left.

use std::time::Duration;

use tokio::time::Instant;

use crate::engine::EnginePoll;
use crate::ticks;

/// Requests that a router sent before it learnt of the drain may still arrive. If none has
/// arrived for this time, no further one is expected.
pub const STRAGGLER_WAIT: Duration = Duration::from_millis(500);

// The events of the last request are read within one tick, and reported at the next.
const _: () = assert!(4 * ticks::INTERVAL.as_millis() <= STRAGGLER_WAIT.as_millis());

/// The inputs of the decision.
#[derive(Clone, Copy, Debug)]
pub struct DrainInputs<'v> {
    /// Requests in flight.
    pub requests: u64,
    /// Hand-offs whose lease has not ended, and which may not have been fetched yet.
    pub staged: u64,
    /// When the drain was announced, or a request was last in flight, whichever is later.
    pub busy_at: Instant,
    /// The engine's last metrics.
    pub polled: &'v EnginePoll,
}

/// What a drain still has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainWait {
    /// Requests in flight.
    Requests,
    /// Requests that may still arrive.
    Stragglers,
    /// Hand-offs that decode workers have to fetch.
    Fetches,
}

impl DrainWait {
    /// The name for logs and the status page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Stragglers => "stragglers",
            Self::Fetches => "fetches",
        }
    }
}

/// Returns what the drain has to wait for, or `None` if the shim may stop.
#[must_use]
pub fn remaining_wait(view: &DrainInputs<'_>, now: Instant) -> Option<DrainWait> {
    if view.requests > 0 {
        return Some(DrainWait::Requests);
    }
    if now.saturating_duration_since(view.busy_at) < STRAGGLER_WAIT {
        return Some(DrainWait::Stragglers);
    }
    (view.staged > 0 && !holds_no_hand_off(view)).then_some(DrainWait::Fetches)
}

/// Whether the engine holds no hand-off: its metrics show no block in use, or it is down.
fn holds_no_hand_off(view: &DrainInputs<'_>) -> bool {
    let figures = &view.polled.figures;
    let is_fresh = view.polled.at.is_some_and(|at| at > view.busy_at);
    let shows_nothing = figures.kv_used_ratio == Some(0.0)
        && figures.running.unwrap_or(0) == 0
        && figures.waiting.unwrap_or(0) == 0;
    !view.polled.up || (is_fresh && shows_nothing)
}

#[cfg(test)]
mod tests {
    use splitrail_engine::load::EngineLoad;

    use super::*;

    fn polled(at: Instant, kv_used_ratio: Option<f64>) -> EnginePoll {
        let figures = EngineLoad { kv_used_ratio, ..EngineLoad::default() };
        EnginePoll { up: true, process: 1, at: Some(at), figures, step_us: None }
    }

    #[test]
    fn a_drain_waits_for_requests_and_then_for_stragglers() {
        let busy_at = Instant::now();
        let polled = polled(busy_at, Some(0.0));
        let view = DrainInputs { requests: 1, staged: 0, busy_at, polled: &polled };
        assert_eq!(
            remaining_wait(&view, busy_at + 100 * STRAGGLER_WAIT),
            Some(DrainWait::Requests)
        );
        let view = DrainInputs { requests: 0, ..view };
        assert_eq!(
            remaining_wait(&view, busy_at + STRAGGLER_WAIT / 2),
            Some(DrainWait::Stragglers)
        );
        assert_eq!(remaining_wait(&view, busy_at + STRAGGLER_WAIT), None);
    }

    #[test]
    fn a_drain_waits_for_hand_offs_unless_the_engine_shows_that_none_is_left() {
        let busy_at = Instant::now();
        let (before, after) = (busy_at - STRAGGLER_WAIT, busy_at + STRAGGLER_WAIT);
        for (at, used, expected) in [
            (after, Some(0.0), None),
            (after, Some(0.01), Some(DrainWait::Fetches)),
            (after, None, Some(DrainWait::Fetches)),
            // Metrics from before the last request prove nothing.
            (before, Some(0.0), Some(DrainWait::Fetches)),
        ] {
            let polled = polled(at, used);
            let view = DrainInputs { requests: 0, staged: 1, busy_at, polled: &polled };
            assert_eq!(remaining_wait(&view, after), expected, "{used:?}");
        }
        let gone = EnginePoll { up: false, ..polled(after, Some(0.5)) };
        let view = DrainInputs { requests: 0, staged: 1, busy_at, polled: &gone };
        assert_eq!(remaining_wait(&view, after), None, "a dead engine serves no fetch");
    }
}
