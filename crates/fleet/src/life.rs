//! Stores a worker's state; the only place that changes it.

use std::fmt::Display;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounterVec;

use super::state::{Event, State};
use splitrail_telemetry::clock::unix_ms;

/// A worker's state, with when and why it came about.
#[derive(Debug)]
pub struct Life {
    /// A copy of the state that needs no lock.
    state: AtomicU8,
    since: Mutex<Since>,
    /// Whose life it is, in logs and metrics.
    model: String,
    worker: String,
    transitions: Option<IntCounterVec>,
}

/// When a state came about.
#[derive(Clone, Debug)]
pub struct Since {
    /// The instant.
    pub at: Instant,
    /// In milliseconds since 1970.
    pub unix_ms: u64,
    /// What brought it about.
    pub why: String,
}

impl Life {
    /// The beginning of a worker's life.
    pub fn new(worker: &str) -> Self {
        let since = Since { at: Instant::now(), unix_ms: unix_ms(), why: "it is new".into() };
        Self {
            state: AtomicU8::new(State::Joining as u8),
            since: Mutex::new(since),
            model: String::new(),
            worker: worker.to_owned(),
            transitions: None,
        }
    }

    /// The same, counted under its model's name.
    pub fn counted(self, model: &str, transitions: IntCounterVec) -> Self {
        Self { model: model.to_owned(), transitions: Some(transitions), ..self }
    }

    /// The state now.
    pub fn state(&self) -> State {
        State::from_u8(self.state.load(Relaxed))
    }

    /// When and why it came about.
    pub fn since(&self) -> Since {
        self.lock().clone()
    }

    /// How long ago that was.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.lock().at)
    }

    /// Something happens: the state may change, which is logged and counted. Says whether it
    /// did.
    pub fn change(&self, event: Event, why: impl Display) -> bool {
        let (from, to) = {
            let mut since = self.lock();
            let from = self.state();
            let Some(to) = from.after(event) else { return false };
            self.state.store(to as u8, Relaxed);
            *since = Since { at: Instant::now(), unix_ms: unix_ms(), why: why.to_string() };
            (from.name(), to)
        };
        let (model, worker) = (&self.model, &self.worker);
        if matches!(to, State::Down | State::Ejected) {
            tracing::warn!(model, worker, from, to = to.name(), %why, "worker changes state");
        } else {
            tracing::info!(model, worker, from, to = to.name(), %why, "worker changes state");
        }
        if let Some(transitions) = &self.transitions {
            transitions.with_label_values(&[model, worker, from, to.name()]).inc();
        }
        true
    }

    /// A poisoned lock still guards a whole value.
    fn lock(&self) -> MutexGuard<'_, Since> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
