//! Stores a worker's state. This is the only place that changes it.

use std::fmt::Display;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounterVec;
use tokio::sync::watch;

use super::state::{Event, WorkerState};
use splitrail_telemetry::clock::unix_ms;

/// A worker's state, with the time and the cause of the last change.
#[derive(Debug)]
pub struct Lifecycle {
    /// The state, for readers that take no lock. Changed only while `since` is locked.
    state: AtomicU8,
    since: Mutex<StateEntry>,
    /// The labels in logs and metrics.
    model: String,
    worker: String,
    transitions: Option<IntCounterVec>,
    /// How often the worker was down, or its engine withdrew. Whoever waits for it is woken as well when it
    /// is stuck.
    departures: watch::Sender<u32>,
}

/// When and why a worker entered its state.
#[derive(Clone, Debug)]
pub struct StateEntry {
    /// The time of the change, on the monotonic clock.
    pub at: Instant,
    /// The same time in milliseconds since 1970.
    pub unix_ms: u64,
    /// The cause of the change.
    pub why: String,
}

impl Lifecycle {
    /// The lifecycle of a new worker, in state `joining`.
    pub fn new(worker: &str) -> Self {
        let since = StateEntry { at: Instant::now(), unix_ms: unix_ms(), why: "it is new".into() };
        Self {
            state: AtomicU8::new(WorkerState::Joining as u8),
            since: Mutex::new(since),
            model: String::new(),
            worker: worker.to_owned(),
            transitions: None,
            departures: watch::Sender::default(),
        }
    }

    /// Sets the counter of state changes and the model's name in it.
    pub fn counted(self, model: &str, transitions: IntCounterVec) -> Self {
        Self { model: model.to_owned(), transitions: Some(transitions), ..self }
    }

    /// The name of the worker's model; empty before [`counted`](Self::counted).
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Follows how often the worker leaves service.
    pub fn departures(&self) -> watch::Receiver<u32> {
        self.departures.subscribe()
    }

    /// The current state.
    pub fn state(&self) -> WorkerState {
        WorkerState::from_u8(self.state.load(Relaxed))
    }

    /// When and why the worker entered its state.
    pub fn since(&self) -> StateEntry {
        self.lock().clone()
    }

    /// The time since the worker entered its state.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.lock().at)
    }

    /// Applies an event. A change of state is logged and counted. Returns whether the state
    /// changed.
    pub fn change(&self, event: Event, why: impl Display) -> bool {
        let (from, to) = {
            let mut since = self.lock();
            let from = self.state();
            let Some(to) = from.after(event) else { return false };
            self.state.store(to as u8, Relaxed);
            *since = StateEntry { at: Instant::now(), unix_ms: unix_ms(), why: why.to_string() };
            (from.name(), to)
        };
        match to {
            WorkerState::Down | WorkerState::Unready => {
                self.departures.send_modify(|gone| *gone += 1);
            }
            WorkerState::Stuck => self.departures.send_modify(|_| {}),
            _ => {}
        }
        let (model, worker) = (&self.model, &self.worker);
        let is_fault = matches!(
            to,
            WorkerState::Down | WorkerState::Ejected | WorkerState::Stuck | WorkerState::Unready
        );
        let (to, why) = (to.name(), why.to_string());
        if is_fault {
            tracing::warn!(model, worker, from, to, why, "worker changes state");
        } else {
            tracing::info!(model, worker, from, to, why, "worker changes state");
        }
        if let Some(transitions) = &self.transitions {
            transitions.with_label_values(&[model, worker, from, to]).inc();
        }
        true
    }

    /// A poisoned lock is still used: the value is replaced as a whole.
    fn lock(&self) -> MutexGuard<'_, StateEntry> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
