//! How often snapshots and readings are made.

use std::time::Duration;

/// Maximum rate at which one subscriber is sent snapshots, in bytes per second, on average from one
/// snapshot to the next.
pub(super) const BYTES_PER_S: u64 = 10_000;

/// Time between two snapshots that are small enough for it.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// Time between two readings of the metrics, from which rates and percentiles are computed. They
/// are made without subscribers too, so that the first one sees the last minutes.
pub(super) const READING_INTERVAL: Duration = Duration::from_secs(5);

/// The time that so many bytes take at [`BYTES_PER_S`].
pub(super) fn send_time(bytes: usize) -> Duration {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    Duration::from_millis(bytes.saturating_mul(1000).div_ceil(BYTES_PER_S))
}
