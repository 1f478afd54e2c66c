//! Whether an engine's process is still there, and still the same.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use splitrail_engine::load::EngineLoad;
use tokio::sync::Semaphore;

/// Maximum number of prefill legs of pairs that were given up which are sent again to one worker at the
/// same time.
const RESENDS_MAX: usize = 32;

/// What is known of the processes of one engine.
#[derive(Debug)]
pub struct Presence {
    /// Number of earlier processes, with those that there may have been.
    processes: AtomicU32,
    /// Number of new processes that the engine's own reports have shown.
    restarts: AtomicU32,
    /// Whether the last probes have failed, as many as make a worker unhealthy.
    fails_probes: AtomicBool,
    /// The last report of the engine's metrics, which identifies its process; a shim may have read them.
    reported: Mutex<Option<EngineLoad>>,
    /// Bounds the prefill legs of pairs that were given up which are sent again to the engine.
    pub resends: Semaphore,
}

impl Default for Presence {
    fn default() -> Self {
        Self {
            processes: AtomicU32::new(0),
            restarts: AtomicU32::new(0),
            fails_probes: AtomicBool::new(false),
            reported: Mutex::default(),
            resends: Semaphore::new(RESENDS_MAX),
        }
    }
}

impl Presence {
    /// Records that the engine's process may be another one.
    pub fn record_possible_restart(&self) {
        self.processes.fetch_add(1, Relaxed);
    }

    /// Records that the engine's own reports are those of a new process.
    pub fn record_restart(&self) {
        self.restarts.fetch_add(1, Relaxed);
        self.record_possible_restart();
    }

    /// Records a report of the engine's own metrics. Returns whether it is of another process than
    /// the last one.
    pub fn reports(&self, load: &EngineLoad) -> bool {
        self.reported().replace(load.clone()).is_some_and(|last| {
            let has_other_blocks = last.block_size.is_some() && last.block_size != load.block_size;
            has_other_blocks || load.is_of_another_process(&last)
        })
    }

    /// Records when the engine's process started, in seconds since 1970, as its shim reports it.
    /// Returns whether the process is another one than that of the last report.
    pub fn reports_start(&self, started_at_s: f64) -> bool {
        if !started_at_s.is_finite() {
            return false;
        }
        let mut reported = self.reported();
        let last = reported.get_or_insert_default();
        let is_other = last.started_at_s.is_some_and(|before| before != started_at_s);
        if is_other {
            *last = EngineLoad::default();
        }
        last.started_at_s = Some(started_at_s);
        is_other
    }

    /// Takes over the last report and the restarts of the worker that this one replaces.
    pub fn succeed_to(&self, before: &Self) {
        self.restarts.store(before.restarts(), Relaxed);
        self.reported().clone_from(&before.reported());
    }

    /// A poisoned lock is still used: the value is replaced as a whole.
    fn reported(&self) -> MutexGuard<'_, Option<EngineLoad>> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether the engine answers its probes.
    pub fn probed(&self, up: bool) {
        self.fails_probes.store(!up, Relaxed);
    }

    /// Number of earlier processes, with those that there may have been.
    pub fn processes(&self) -> u32 {
        self.processes.load(Relaxed)
    }

    /// Number of new processes that the engine's own reports have shown. An engine that was out of
    /// reach for a while may have the same process as before.
    pub fn restarts(&self) -> u32 {
        self.restarts.load(Relaxed)
    }

    /// Whether the last probes have failed. An engine that one request could not reach may be well.
    pub fn fails_probes(&self) -> bool {
        self.fails_probes.load(Relaxed)
    }
}
