//! Common times for what is done again and again. Waking up costs a side-car more than most of
//! what it wakes up for, so that which can wait a little waits for the same moment.

use std::sync::OnceLock;
use std::time::Duration;

use splitrail_engine::zmtp::Pace;
use tokio::time::Instant;

/// Between two of them: less than a step of a busy engine, or about one.
pub(crate) const EVERY: Duration = Duration::from_millis(25);

/// The beats of this process.
pub(crate) fn pace(every: Duration) -> Pace {
    static SINCE: OnceLock<Instant> = OnceLock::new();
    Pace { every, since: *SINCE.get_or_init(Instant::now) }
}

/// The first beat after something is due.
pub(crate) fn after(due: Instant) -> Instant {
    pace(EVERY).after(due)
}
