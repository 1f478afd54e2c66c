//! The wall clock, for times that people or other programs read.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time now, in milliseconds since 1970.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
