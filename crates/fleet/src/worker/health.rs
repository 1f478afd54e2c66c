//! Whether a worker can do its work, and does.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounterVec;

use super::Worker;
use crate::lifecycle::Lifecycle;
use crate::outcomes::{Ejections, OutcomeCounters};
use crate::presence::Presence;
use crate::quarantine::DrainCauses;
use crate::state::{Event, WorkerState};
use crate::work_trial::WorkTrial;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_config::model::{BreakerConfig, HealthConfig};
use splitrail_policy::Leg;
use splitrail_workload::breaker::Breaker;
use splitrail_workload::progress::Progress;
use splitrail_workload::rest::Rest;

/// Why an engine that answers does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum UnreadyCause {
    /// It was put to sleep.
    Asleep = 1,
    /// It does not take the router's key.
    RefusesKey = 2,
    /// It does not serve the model.
    LacksModel = 4,
}

impl UnreadyCause {
    /// The cause, and what an operator does about it.
    fn describe(self) -> &'static str {
        match self {
            Self::Asleep => "its engine sleeps: wake it up (POST /wake_up)",
            Self::RefusesKey => {
                "its engine refuses the router's key (401): set engine_api_key to the engine's"
            }
            Self::LacksModel => {
                "its engine refuses the model's name and does not list it in /v1/models: correct the \
                 name, or start the engine with --served-model-name"
            }
        }
    }
}

/// What is known of a worker's health.
#[derive(Debug)]
pub struct WorkerHealth {
    /// The state of the worker, with its time and cause.
    pub lifecycle: Lifecycle,
    /// Counts of recent results, for outlier ejection.
    pub outcomes: OutcomeCounters,
    /// The worker's ejections in a row.
    pub(crate) ejections: Ejections,
    pub(crate) drain_causes: DrainCauses,
    /// Whether the engine's process is still there, and still the same.
    pub presence: Presence,
    /// Whether the engine makes progress with its legs.
    pub progress: Arc<Progress>,
    /// Requests for one token, while the engine gives no sign of work.
    pub(crate) trial: WorkTrial,
    /// The number of signs of work when the worker was last found stuck.
    pub(crate) signs_when_stuck: AtomicU64,
    /// Whether the engine has said that it is full.
    pub rest: Rest,
    /// The last failure that counted against the worker, without texts of clients or engines.
    last_failure: Mutex<Option<String>>,
    /// Why the engine does not serve, by its own word: the causes below, or none.
    unready: AtomicU8,
    /// The circuit breaker of prefill legs, and that of all other legs.
    breakers: [Breaker; 2],
    /// Duration of the slow start, in milliseconds.
    slow_start_ms: AtomicU64,
    /// Whether the worker was there when the router started and has not been down since. Such
    /// workers have no slow start, since all of them are new.
    pub(crate) initial_member: AtomicBool,
    /// Whether the last probe or request reached the worker.
    up: AtomicBool,
    /// Whether the worker has been probed.
    probed: AtomicBool,
}

impl WorkerHealth {
    /// The health of a new worker, which is presumed alive.
    pub(super) fn new(id: &str) -> Self {
        Self {
            lifecycle: Lifecycle::new(id),
            outcomes: OutcomeCounters::default(),
            ejections: Ejections::default(),
            drain_causes: DrainCauses::default(),
            presence: Presence::default(),
            progress: Arc::default(),
            trial: WorkTrial::default(),
            signs_when_stuck: AtomicU64::new(0),
            rest: Rest::default(),
            last_failure: Mutex::new(None),
            unready: AtomicU8::new(0),
            breakers: [BreakerConfig::default(); 2].map(Breaker::new),
            slow_start_ms: AtomicU64::new(0),
            initial_member: AtomicBool::new(false),
            up: AtomicBool::new(true),
            probed: AtomicBool::new(false),
        }
    }
}

impl WorkerHealth {
    /// The last failure that counted against the worker.
    pub fn last_failure(&self) -> Option<String> {
        self.lock_last_failure().clone()
    }

    fn lock_last_failure(&self) -> MutexGuard<'_, Option<String>> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    /// Sets the slow start, and the counter of state changes.
    pub fn watched(
        mut self,
        model: &str,
        config: &HealthConfig,
        transitions: IntCounterVec,
    ) -> Self {
        self.set_slow_start(config.slow_start);
        self.health.lifecycle = self.health.lifecycle.counted(model, transitions);
        self
    }

    /// Whether the worker was there when the router started and has not been down since.
    pub fn is_initial_member(&self) -> bool {
        self.health.initial_member.load(Relaxed)
    }

    /// Changes the configuration of the circuit breakers and keeps their counts.
    pub fn set_breakers(&self, config: BreakerConfig) {
        let breakers = self.health.breakers.iter().chain([&self.engine.endpoint_support.breaker]);
        breakers.for_each(|breaker| breaker.set_config(config));
    }

    /// Sets the duration of the slow start.
    pub fn set_slow_start(&self, lasts: Duration) {
        let ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX);
        self.health.slow_start_ms.store(ms, Relaxed);
    }

    /// The current state.
    pub fn state(&self) -> WorkerState {
        self.health.lifecycle.state()
    }

    /// The fraction of its normal share of new work that the worker gets: below 1 during the slow
    /// start, at least 0.1.
    pub fn share(&self, now: Instant) -> f64 {
        /// The share at the beginning of the slow start.
        const SHARE_MIN: f64 = 0.1;
        let warming =
            self.state() == WorkerState::Warming && !self.health.initial_member.load(Relaxed);
        let whole_ms = self.health.slow_start_ms.load(Relaxed);
        if !warming || whole_ms == 0 {
            return 1.0;
        }
        (self.health.lifecycle.age(now).as_secs_f64() * 1e3 / whole_ms as f64).clamp(SHARE_MIN, 1.0)
    }

    /// The circuit breaker of a leg.
    pub fn breaker(&self, leg: Leg) -> &Breaker {
        let [prefill, others] = &self.health.breakers;
        if leg == Leg::Prefill { prefill } else { others }
    }

    /// Whether the worker may get this leg: its state takes work and its circuit breaker allows it.
    pub fn is_available(&self, leg: Leg, now: Instant) -> bool {
        self.state().takes_work() && self.breaker(leg).allows(now)
    }

    /// Takes back the last failure of a leg: the request was at fault.
    pub fn forgive(&self, leg: Leg) {
        self.breaker(leg).forgive();
        self.health.outcomes.forgive();
    }

    /// Records whether an engine that answers serves, by its own word.
    pub fn set_unready(&self, cause: UnreadyCause, is_unready: bool) {
        let bit = cause as u8;
        let before = match is_unready {
            true => self.health.unready.fetch_or(bit, Relaxed),
            false => self.health.unready.fetch_and(!bit, Relaxed),
        };
        let left = if is_unready { before | bit } else { before & !bit };
        if left != 0 {
            self.health.lifecycle.change(Event::Withdraw, cause.describe());
        } else if before != 0 {
            self.health.lifecycle.change(Event::Return, "its engine serves again");
        }
    }

    /// Whether the engine does not serve for this cause.
    pub fn is_unready_for(&self, cause: UnreadyCause) -> bool {
        self.health.unready.load(Relaxed) & cause as u8 != 0
    }

    /// Records what a refusal says of the worker besides the request.
    pub fn record_refusal(&self, error: &Error, endpoint: Option<Endpoint>) {
        let now = Instant::now();
        match error.kind() {
            ErrorKind::EngineFull { retry_after_s, .. } => {
                self.health.rest.begin(now, Duration::from_secs(retry_after_s.into()));
            }
            ErrorKind::EngineLacksPath => {
                let support = &self.engine.endpoint_support;
                endpoint.iter().for_each(|endpoint| support.lacks(*endpoint, now));
            }
            ErrorKind::EngineRejected(401) => self.set_unready(UnreadyCause::RefusesKey, true),
            _ => {}
        }
    }

    /// Records how a leg ended: with success, or with an error. Errors of the router itself are not
    /// counted.
    pub fn record(&self, leg: Leg, failed: Option<&Error>) {
        if failed.is_some_and(|error| error.fault() == Fault::Router) {
            return;
        }
        let breaker = self.breaker(leg);
        let of_engine = failed.filter(|error| error.fault() == Fault::Engine);
        if let Some(error) = of_engine.filter(|error| error.kind() != ErrorKind::BelowThreshold) {
            let leg = if leg == Leg::Prefill { Leg::Prefill } else { Leg::Decode };
            self.counts.series.leg_failed(leg.name(), error.outcome());
        }
        let speaks_against_it = failed.is_some_and(Error::speaks_against_its_worker);
        // A leg that was late, or that a lost connection or a client ended, does not show that it works.
        let has_answered = failed.is_none_or(|error| match error.kind() {
            ErrorKind::ClientGone => false,
            ErrorKind::EngineFull { .. }
            | ErrorKind::BelowThreshold
            | ErrorKind::EngineLacksPath
            | ErrorKind::EngineLacksModel => true,
            _ => error.fault() == Fault::Client,
        });
        if !speaks_against_it && !has_answered {
            return;
        }
        self.health.outcomes.ended(speaks_against_it);
        let (model, worker, leg) = (self.model(), self.id(), leg.name());
        if let Some(error) = failed.filter(|_| speaks_against_it) {
            *self.health.lock_last_failure() = Some(error.to_string());
        }
        if speaks_against_it && breaker.fail(Instant::now()) {
            let cause = self.health.last_failure();
            tracing::warn!(model, worker, leg, cause, "breaker opened: too many failures in a row");
        } else if !speaks_against_it && breaker.succeed() {
            tracing::info!(model, worker, leg, "breaker closed");
        }
    }

    /// Whether the last probe or request reached the worker.
    pub fn is_up(&self) -> bool {
        self.health.up.load(Relaxed)
    }

    /// Records whether the worker is alive, and why. Returns whether this changed.
    pub fn set_up(&self, up: bool, why: impl Display) -> bool {
        if !up {
            // A worker that comes back may run another version of the engine.
            self.forget_version();
            self.health.initial_member.store(false, Relaxed);
            self.rejoin("its engine is down");
        }
        self.health.lifecycle.change(if up { Event::Alive } else { Event::Dead }, why);
        let is_news = self.health.up.swap(up, Relaxed) != up;
        if is_news && !up {
            self.becomes_another();
        }
        is_news
    }

    /// Whether the worker has been probed.
    pub fn is_probed(&self) -> bool {
        self.health.probed.load(Relaxed)
    }

    /// Records the result of a probe. Returns whether it changed, or is the first success.
    pub fn set_probed(&self, up: bool, why: impl Display) -> bool {
        self.health.presence.probed(up);
        let first = !self.health.probed.swap(true, Relaxed);
        self.set_up(up, why) || (first && up)
    }
}
