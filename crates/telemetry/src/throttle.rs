//! Limits how often a log line is repeated.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::unix_ms;

/// Allows one kind of log line at most every 30 seconds.
#[derive(Debug, Default)]
pub struct LogThrottle(AtomicU64);

impl LogThrottle {
    /// Whether the line may be logged now. If so, it may not be logged for the next 30 seconds.
    pub fn may_log(&self) -> bool {
        const QUIET_MS: u64 = 30_000;
        let now = unix_ms();
        let last = self.0.load(Relaxed);
        let due = now.saturating_sub(last) >= QUIET_MS;
        due && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}
