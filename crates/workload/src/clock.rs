//! Times in nanoseconds, as the pure crates take them.

use std::time::Instant;

/// The nanoseconds from `epoch` to `at`; 0 if `at` is earlier.
pub fn ns_since(epoch: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(epoch).as_nanos()).unwrap_or(u64::MAX)
}
