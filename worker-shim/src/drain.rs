//! When a shim that is about to stop may do so.
//!
//! Requests in flight are waited for, and so is KV that decode workers still have to fetch
//! from a prefill engine: that is in no request. Nobody tells the shim of a fetch; but a
//! hand-off is pinned no longer than its lease, and an engine whose figures, taken after the
//! last request, show no used block has nothing pinned.

use std::time::Duration;

use tokio::time::Instant;

use crate::beat;
use crate::engine::Polled;

/// After the routers were told, requests that were under way to us may still arrive; this
/// long without any, none is taken to come.
pub const QUIET: Duration = Duration::from_millis(500);

/// What the last request had the engine publish is read within a beat, and told then.
const _: () = assert!(4 * beat::EVERY.as_millis() <= QUIET.as_millis());

/// What a drain looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'v> {
    /// Requests in flight.
    pub requests: u64,
    /// Hand-offs that may not have been fetched yet.
    pub staged: u64,
    /// When the routers were told, or a request was last seen, whichever is later.
    pub busy_at: Instant,
    /// The engine's own figures.
    pub polled: &'v Polled,
}

/// What a drain still waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Requests in flight.
    Requests,
    /// Requests that may be on their way.
    Stragglers,
    /// KV that decode workers have to fetch.
    Fetches,
}

impl Waiting {
    /// For logs and the status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Stragglers => "stragglers",
            Self::Fetches => "fetches",
        }
    }
}

/// What there is to wait for; `None` if nothing, so that the shim may stop.
#[must_use]
pub fn waiting(view: &View<'_>, now: Instant) -> Option<Waiting> {
    if view.requests > 0 {
        return Some(Waiting::Requests);
    }
    if now.saturating_duration_since(view.busy_at) < QUIET {
        return Some(Waiting::Stragglers);
    }
    (view.staged > 0 && !is_empty(view)).then_some(Waiting::Fetches)
}

/// Whether the engine itself shows that nothing is pinned in it. One that is gone has
/// nothing that could be fetched.
fn is_empty(view: &View<'_>) -> bool {
    let figures = &view.polled.figures;
    let is_fresh = view.polled.at.is_some_and(|at| at > view.busy_at);
    let shows_nothing = figures.kv_used_ratio == Some(0.0)
        && figures.running.unwrap_or(0) == 0
        && figures.waiting.unwrap_or(0) == 0;
    !view.polled.up || (is_fresh && shows_nothing)
}

#[cfg(test)]
mod tests {
    use splitrail_engine::vllm::load::EngineLoad;

    use super::*;

    fn polled(at: Instant, kv_used_ratio: Option<f64>) -> Polled {
        let figures = EngineLoad { kv_used_ratio, ..EngineLoad::default() };
        Polled { up: true, process: 1, at: Some(at), figures, step_us: None }
    }

    #[test]
    fn nothing_ends_before_requests_do_and_stragglers_had_their_time() {
        let busy_at = Instant::now();
        let polled = polled(busy_at, Some(0.0));
        let view = View { requests: 1, staged: 0, busy_at, polled: &polled };
        assert_eq!(waiting(&view, busy_at + 100 * QUIET), Some(Waiting::Requests));
        let view = View { requests: 0, ..view };
        assert_eq!(waiting(&view, busy_at + QUIET / 2), Some(Waiting::Stragglers));
        assert_eq!(waiting(&view, busy_at + QUIET), None);
    }

    #[test]
    fn what_may_be_fetched_is_waited_for_unless_the_engine_shows_that_it_was() {
        let busy_at = Instant::now();
        let (before, after) = (busy_at - QUIET, busy_at + QUIET);
        for (at, used, expected) in [
            (after, Some(0.0), None),
            (after, Some(0.01), Some(Waiting::Fetches)),
            (after, None, Some(Waiting::Fetches)),
            // Figures from before the last request prove nothing.
            (before, Some(0.0), Some(Waiting::Fetches)),
        ] {
            let polled = polled(at, used);
            let view = View { requests: 0, staged: 1, busy_at, polled: &polled };
            assert_eq!(waiting(&view, after), expected, "{used:?}");
        }
        let gone = Polled { up: false, ..polled(after, Some(0.5)) };
        let view = View { requests: 0, staged: 1, busy_at, polled: &gone };
        assert_eq!(waiting(&view, after), None, "a dead engine serves no fetch");
    }
}
