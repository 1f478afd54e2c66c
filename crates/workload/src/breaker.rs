//! Circuit breakers: a worker whose requests fail one after another gets no requests for a while.
//! There is one breaker for each leg, since an engine that cannot hand off may still decode.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_config::model::BreakerConfig;

/// Maximum time for which a breaker stays open, as a multiple of the configured cooldown.
const LONGEST: u32 = 16;

/// Maximum number of failures of different requests that are forgiven without a success between them.
const FORGIVEN_MAX: u32 = 3;

/// A circuit breaker. It has no clock: callers pass the time.
#[derive(Debug)]
pub struct Breaker {
    /// Whether the breaker is closed and the last request did not fail. Every decision reads this
    /// for every worker, without the lock. Changed only while `state` is locked.
    calm: AtomicBool,
    state: Mutex<BreakerState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct BreakerState {
    config: BreakerConfig,
    /// Failures in a row.
    failures: u32,
    /// Failures that were forgiven since the last success.
    forgiven: u32,
    open: Option<OpenPeriod>,
}

#[derive(Clone, Copy, Debug)]
struct OpenPeriod {
    /// The time from which one trial request is allowed.
    until: Instant,
    /// How long the breaker was opened for.
    period: Duration,
    /// Whether a trial request is under way.
    trying: bool,
}

/// The breaker of a capability of a worker, for which nothing is configured: one failure opens it for
/// half a minute, and each failed trial doubles the time.
impl Default for Breaker {
    fn default() -> Self {
        Self::new(BreakerConfig { failures: 1, cooldown: Duration::from_secs(30) })
    }
}

impl Breaker {
    /// A closed breaker.
    pub fn new(config: BreakerConfig) -> Self {
        let state = Mutex::new(BreakerState { config, ..BreakerState::default() });
        Self { calm: AtomicBool::new(true), state }
    }

    /// Changes the configuration and keeps the state.
    pub fn set_config(&self, config: BreakerConfig) {
        self.state().config = config;
    }

    /// Whether a request may be sent.
    pub fn allows(&self, now: Instant) -> bool {
        self.calm.load(Relaxed) || self.state().open.is_none_or(|open| now >= open.until)
    }

    /// Whether the breaker is open, with or without a trial under way.
    pub fn is_open(&self) -> bool {
        self.state().open.is_some()
    }

    /// Records that a request is sent. If it is a trial, no other request is allowed meanwhile; if
    /// its result never arrives, the next trial is allowed after the same period.
    pub fn begin(&self, now: Instant) {
        if self.calm.load(Relaxed) {
            return;
        }
        if let Some(open) = &mut self.state().open
            && now >= open.until
        {
            open.trying = true;
            open.until = now + open.period;
        }
    }

    /// Records that a reply has begun: the worker is alive, but the reply may still fail. Returns
    /// whether this closes the breaker.
    pub fn answers(&self) -> bool {
        let mut state = self.state();
        state.forgiven = 0;
        let was_open = state.open.take().is_some();
        if was_open {
            state.failures = state.config.failures.saturating_sub(1);
        }
        was_open
    }

    /// Records a success. Returns whether this closes the breaker.
    pub fn succeed(&self) -> bool {
        if self.calm.load(Relaxed) {
            return false;
        }
        let mut state = self.state();
        self.calm.store(true, Relaxed);
        (state.failures, state.forgiven) = (0, 0);
        state.open.take().is_some()
    }

    /// Takes back the last failure, which was not the worker's fault.
    pub fn forgive(&self) {
        let mut state = self.state();
        state.failures = state.failures.saturating_sub(1);
        state.forgiven = state.forgiven.saturating_add(1);
        if state.failures < state.config.failures {
            state.open = None;
        }
    }

    /// Whether another failure may be forgiven: a worker on which all requests fail is at fault itself.
    pub fn may_forgive(&self) -> bool {
        self.state().forgiven < FORGIVEN_MAX
    }

    /// Records a failure. Returns whether this opens the breaker.
    pub fn fail(&self, now: Instant) -> bool {
        let mut state = self.state();
        self.calm.store(false, Relaxed);
        let config = state.config;
        state.failures = state.failures.saturating_add(1);
        let failures = state.failures;
        match &mut state.open {
            // A request that was sent before the breaker opened is no news.
            Some(open) if !open.trying => false,
            Some(open) => {
                let period = (open.period * 2).min(config.cooldown * LONGEST);
                *open = OpenPeriod { until: now + period, period, trying: false };
                false
            }
            None if config.failures > 0 && failures >= config.failures => {
                let period = config.cooldown;
                state.open = Some(OpenPeriod { until: now + period, period, trying: false });
                true
            }
            None => false,
        }
    }

    /// A poisoned lock is still used: the state stays valid at each step of a change.
    fn state(&self) -> MutexGuard<'_, BreakerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: Duration = Duration::from_secs(1);

    fn breaker() -> Breaker {
        Breaker::new(BreakerConfig { failures: 3, cooldown: 5 * S })
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_good_trial_closes_it() {
        let (breaker, start) = (breaker(), Instant::now());
        for _ in 0..2 {
            assert!(!breaker.fail(start));
        }
        assert!(!breaker.succeed());
        assert!(!breaker.fail(start) && !breaker.fail(start), "not in a row");
        assert!(breaker.fail(start));
        assert!(!breaker.allows(start + 4 * S));
        assert!(breaker.allows(start + 5 * S));
        breaker.begin(start + 5 * S);
        assert!(!breaker.allows(start + 6 * S), "one trial at a time");
        assert!(breaker.succeed());
        assert!(breaker.allows(start + 6 * S));
    }

    #[test]
    fn a_trial_that_fails_doubles_the_time_and_late_failures_do_not() {
        let (breaker, start) = (breaker(), Instant::now());
        for _ in 0..5 {
            breaker.fail(start);
        }
        assert!(breaker.allows(start + 5 * S), "two of them were sent before it opened");
        breaker.begin(start + 5 * S);
        breaker.fail(start + 6 * S);
        assert!(!breaker.allows(start + 15 * S));
        assert!(breaker.allows(start + 16 * S));
    }

    #[test]
    fn a_worker_that_breaks_off_after_each_beginning_is_found_out() {
        let (breaker, start) = (breaker(), Instant::now());
        for _ in 0..3 {
            assert!(!breaker.answers());
            breaker.fail(start);
        }
        assert!(breaker.is_open());
        breaker.begin(start + 5 * S);
        assert!(breaker.answers());
        assert!(breaker.fail(start + 6 * S), "one more is enough");
    }

    #[test]
    fn forgiven_failures_do_not_count_unless_all_requests_fail() {
        let (breaker, now) = (breaker(), Instant::now());
        for _ in 0..2 {
            breaker.fail(now);
        }
        assert!(breaker.fail(now));
        breaker.forgive();
        assert!(!breaker.is_open() && breaker.allows(now));
        assert!(breaker.fail(now), "the two before it still count");
        for _ in 0..2 {
            assert!(breaker.may_forgive());
            breaker.forgive();
        }
        assert!(!breaker.may_forgive());
        breaker.succeed();
        assert!(breaker.may_forgive());
    }

    proptest! {
        #[test]
        fn a_breaker_always_admits_a_trial_in_the_end(steps in proptest::collection::vec(0..4u8, 0..60)) {
            let (breaker, mut now) = (breaker(), Instant::now());
            for step in steps {
                match step {
                    0 => _ = breaker.fail(now),
                    1 => _ = breaker.succeed(),
                    2 => _ = breaker.answers(),
                    _ if breaker.allows(now) => breaker.begin(now),
                    _ => {}
                }
                now += S;
            }
            prop_assert!(breaker.allows(now + 5 * LONGEST * S));
            let never = Breaker::new(BreakerConfig { failures: 0, cooldown: S });
            (0..100).for_each(|_| assert!(!never.fail(now)));
            prop_assert!(never.allows(now));
        }
    }
}
