//! The rest of a worker whose engine has said that it is full. Other workers are preferred meanwhile.
//!
//! Engines ask for whole seconds, but a queue may have room again after some milliseconds. So a rest
//! is short at first; if the engine is still full afterwards, the next one is twice as long, up to
//! what the engine asks for.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The first rest.
const FIRST: Duration = Duration::from_millis(100);
/// The longest rest, whatever the engine asks for.
const LONGEST: Duration = Duration::from_secs(30);

/// The rests of one worker. It has no clock: callers pass the time.
#[derive(Debug, Default)]
pub struct Rest {
    /// Whether the last reply said that the engine is full, for readers that take no lock.
    is_full: AtomicBool,
    period: Mutex<Option<RestPeriod>>,
}

#[derive(Clone, Copy, Debug)]
struct RestPeriod {
    until: Instant,
    lasts: Duration,
}

impl Rest {
    /// Records that the engine is full, and asks to be tried again after `retry_after`.
    pub fn begin(&self, now: Instant, retry_after: Duration) {
        let mut period = self.lock();
        let longest = retry_after.clamp(FIRST, LONGEST);
        let lasts = match *period {
            // Requests that were sent before the rest, or although all workers rest.
            Some(before) if now < before.until => return,
            Some(before) => (2 * before.lasts).min(longest),
            None => FIRST,
        };
        *period = Some(RestPeriod { until: now + lasts, lasts });
        self.is_full.store(true, Relaxed);
    }

    /// Records that the engine has taken a request.
    pub fn end(&self) {
        if self.is_full.load(Relaxed) {
            let mut period = self.lock();
            *period = None;
            self.is_full.store(false, Relaxed);
        }
    }

    /// Whether the last reply said that the engine is full.
    pub fn is_full(&self) -> bool {
        self.is_full.load(Relaxed)
    }

    /// Whether the worker rests.
    pub fn lasts(&self, now: Instant) -> bool {
        self.is_full.load(Relaxed) && self.lock().is_some_and(|period| now < period.until)
    }

    /// A poisoned lock is still used: the value is replaced as a whole.
    fn lock(&self) -> MutexGuard<'_, Option<RestPeriod>> {
        self.period.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_double_while_the_engine_stays_full_and_end_with_a_request_that_it_takes() {
        let (rest, start) = (Rest::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let asked = Duration::from_secs(3);
        assert!(!rest.lasts(at(0)));
        rest.begin(at(0), asked);
        rest.begin(at(50), asked);
        assert!(rest.lasts(at(99)) && !rest.lasts(at(100)), "requests under way prolong nothing");
        rest.begin(at(100), asked);
        assert!(rest.lasts(at(299)) && !rest.lasts(at(300)));
        let mut now_ms = 300;
        for _ in 0..10 {
            rest.begin(at(now_ms), asked);
            now_ms += 10_000;
        }
        rest.begin(at(now_ms), asked);
        assert!(rest.lasts(at(now_ms + 2_999)) && !rest.lasts(at(now_ms + 3_000)));
        rest.end();
        assert!(!rest.lasts(at(now_ms)));
        rest.begin(at(now_ms), asked);
        assert!(!rest.lasts(at(now_ms + 100)), "short again");
    }
}
