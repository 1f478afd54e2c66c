//! Circuit breakers: a worker whose requests fail one after another gets no requests for a while. There is one
//! breaker for each leg, since an engine that cannot hand off may still decode.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_config::model::BreakerConfig;

/// How much longer than configured a breaker stays open at most.
const LONGEST: u32 = 16;

/// A breaker. It has no clock: every instant is its caller's.
#[derive(Debug)]
pub struct Breaker {
    /// Closed, and the last request has not failed: every pick asks that of every worker, and
    /// needs no lock for it. Changed with the state's lock held.
    calm: AtomicBool,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    config: BreakerConfig,
    /// Failures in a row.
    failures: u32,
    open: Option<Open>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    /// Then one request may try.
    until: Instant,
    /// How long it was opened for.
    period: Duration,
    /// Whether a request is trying.
    trying: bool,
}

impl Breaker {
    /// A closed breaker.
    pub fn new(config: BreakerConfig) -> Self {
        let state = Mutex::new(State { config, ..State::default() });
        Self { calm: AtomicBool::new(true), state }
    }

    /// From now on it goes by this; what it has seen stays.
    pub fn set_config(&self, config: BreakerConfig) {
        self.state().config = config;
    }

    /// Whether the worker may be asked.
    pub fn allows(&self, now: Instant) -> bool {
        self.calm.load(Relaxed) || self.state().open.is_none_or(|open| now >= open.until)
    }

    /// Whether it is open, a trial or not.
    pub fn is_open(&self) -> bool {
        self.state().open.is_some()
    }

    /// The worker is asked. Where that is a trial, nobody else is let through meanwhile; a
    /// trial that is never heard of again makes room for the next one in time.
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

    /// The worker has begun to answer: it lives, but may still break off. Says whether that
    /// closes the breaker.
    pub fn answers(&self) -> bool {
        let mut state = self.state();
        let was_open = state.open.take().is_some();
        if was_open {
            state.failures = state.config.failures.saturating_sub(1);
        }
        was_open
    }

    /// The worker has done its part. Says whether that closes the breaker.
    pub fn succeed(&self) -> bool {
        if self.calm.load(Relaxed) {
            return false;
        }
        let mut state = self.state();
        self.calm.store(true, Relaxed);
        state.failures = 0;
        state.open.take().is_some()
    }

    /// The worker has failed. Says whether that opens the breaker.
    pub fn fail(&self, now: Instant) -> bool {
        let mut state = self.state();
        self.calm.store(false, Relaxed);
        let config = state.config;
        state.failures = state.failures.saturating_add(1);
        let failures = state.failures;
        match &mut state.open {
            // What was sent before it opened says nothing new.
            Some(open) if !open.trying => false,
            Some(open) => {
                let period = (open.period * 2).min(config.cooldown * LONGEST);
                *open = Open { until: now + period, period, trying: false };
                false
            }
            None if config.failures > 0 && failures >= config.failures => {
                let period = config.cooldown;
                state.open = Some(Open { until: now + period, period, trying: false });
                true
            }
            None => false,
        }
    }

    /// A poisoned lock still guards a whole state.
    fn state(&self) -> MutexGuard<'_, State> {
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

    proptest! {
        #[test]
        fn it_always_lets_somebody_through_in_the_end(steps in proptest::collection::vec(0..4u8, 0..60)) {
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
