//! A common schedule for periodic work. A wake-up costs the shim more CPU time than most of the
//! work that it is for, so work that can wait a little is done at common ticks.

use std::sync::OnceLock;
use std::time::Duration;

use splitrail_engine::zmtp::Pace;
use tokio::time::Instant;

/// Interval between ticks: about the duration of one step of a busy engine. It is half of
/// 64 ms because the runtime reorders its timers every 64 ms, and wakes up for that if a timer
/// lies beyond.
pub(crate) const INTERVAL: Duration = Duration::from_millis(32);

/// The time of the first tick.
static START: OnceLock<Instant> = OnceLock::new();

/// Sets the time of the first tick. If this is called just before the runtime is created, the
/// ticks coincide with the times at which the runtime reorders its timers. Otherwise there are
/// a few more wake-ups.
pub fn start() {
    START.get_or_init(Instant::now);
}

/// The ticks of this process, as a pace with the given interval.
pub(crate) fn pace(every: Duration) -> Pace {
    Pace { every, since: *START.get_or_init(Instant::now) }
}

/// The first tick at or after `due`.
pub(crate) fn next_after(due: Instant) -> Instant {
    pace(INTERVAL).after(due)
}
