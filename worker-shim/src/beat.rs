//! Common times for what is done again and again. Waking up costs a shim more than most of
//! what it wakes up for, so that which can wait a little waits for the same moment.

use std::sync::OnceLock;
use std::time::Duration;

use splitrail_engine::zmtp::Pace;
use tokio::time::Instant;

/// Between two of them: less than a step of a busy engine, or about one. Half of 64 ms: the
/// runtime sorts its timers anew every 64 ms, and wakes up for it where a timer passes that.
pub(crate) const EVERY: Duration = Duration::from_millis(32);

/// One of them.
static SINCE: OnceLock<Instant> = OnceLock::new();

/// Begins them. Called just before the runtime is made, they fall on the times at which it
/// sorts its timers; later, or never, they are as good but for some needless wake-ups.
pub fn begin() {
    SINCE.get_or_init(Instant::now);
}

/// The beats of this process.
pub(crate) fn pace(every: Duration) -> Pace {
    Pace { every, since: *SINCE.get_or_init(Instant::now) }
}

/// The first beat after something is due.
pub(crate) fn after(due: Instant) -> Instant {
    pace(EVERY).after(due)
}
