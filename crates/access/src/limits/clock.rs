//! The clock of the limits of tenants.

use std::time::Instant;

/// The time in milliseconds since 1970 as it was at the start, and from then on at the pace of a
/// clock that never jumps, so that a corrected wall clock neither empties a window nor stops it.
#[derive(Clone, Copy, Debug)]
pub struct SteadyClock {
    start: Instant,
    start_ms: u64,
}

impl SteadyClock {
    /// A clock that agrees with the wall clock now.
    #[must_use]
    pub fn start() -> Self {
        Self { start: Instant::now(), start_ms: splitrail_telemetry::clock::unix_ms() }
    }

    /// The time now, in milliseconds since 1970.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.start_ms + u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
