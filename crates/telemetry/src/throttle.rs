//! A throttle for log lines that would repeat.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::unix_ms;

/// Lets one kind of log line through at most every 30 seconds.
#[derive(Debug, Default)]
pub struct LogThrottle(AtomicU64);

impl LogThrottle {
    /// Whether the line may be logged now. If so, the next 30 seconds it may not.
    pub fn may_log(&self) -> bool {
        const QUIET_MS: u64 = 30_000;
        let now = unix_ms();
        let last = self.0.load(Relaxed);
        let due = now.saturating_sub(last) >= QUIET_MS;
        due && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}
