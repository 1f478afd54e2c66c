//! Estimates how fast the queue of an engine moves, from the replies that the router sees.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The weight of a new observation.
const WEIGHT: f64 = 0.2;

/// Moving average of the seconds per request in the engine's queue.
#[derive(Debug, Default)]
pub struct Pace(AtomicU64);

impl Pace {
    /// Records that a request with `ahead` requests before it began to be answered after `waited`.
    pub fn observe(&self, waited: Duration, ahead: u64) {
        let seen = waited.as_secs_f64() / (ahead + 1) as f64;
        // A race loses one observation, which an average can bear.
        let before = self.seconds();
        let after = if before == 0.0 { seen } else { before + WEIGHT * (seen - before) };
        self.0.store(after.to_bits(), Relaxed);
    }

    /// The predicted wait of a request with `ahead` requests before it.
    pub fn wait(&self, ahead: u64) -> Duration {
        let seconds = self.seconds() * ahead as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn seconds(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_as_long_as_its_places_take() {
        let pace = Pace::default();
        assert_eq!(pace.wait(100), Duration::ZERO, "nothing is known yet");
        pace.observe(Duration::from_secs(8), 3);
        assert_eq!(pace.wait(0), Duration::ZERO);
        assert_eq!(pace.wait(10), Duration::from_secs(20));
        pace.observe(Duration::from_secs(1), 0);
        assert!(pace.wait(10) < Duration::from_secs(20));
    }
}
