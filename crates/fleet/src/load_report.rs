//! The last load report of a worker, and for how long it counts.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::Guard;
use splitrail_engine::load::EngineLoad;

/// Age from which decisions ignore a load report.
pub const LOAD_STALE: Duration = Duration::from_secs(5);

/// A worker's load, and when it was reported.
#[derive(Debug, Default)]
pub(super) struct LoadReport {
    /// When the report was requested; `None` before the first report.
    pub(super) asked: Option<Instant>,
    /// What the worker reported.
    pub(super) load: EngineLoad,
}

/// Borrows a load report that is recent enough, without copying it.
pub struct RecentLoad(Guard<Arc<LoadReport>>);

impl RecentLoad {
    /// The report, unless its age has reached `max_age`.
    pub(super) fn within(
        report: Guard<Arc<LoadReport>>,
        now: Instant,
        max_age: Duration,
    ) -> Option<Self> {
        (now.saturating_duration_since(report.asked?) < max_age).then(|| Self(report))
    }
}

impl Deref for RecentLoad {
    type Target = EngineLoad;

    fn deref(&self) -> &EngineLoad {
        &self.0.load
    }
}
