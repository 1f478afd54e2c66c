//! The engine: a queue, a step loop and hand-offs, driven by tokio's clock.

pub(crate) mod core;
mod counters;
pub(crate) mod hand_off;
pub(crate) mod read_back;
pub(crate) mod request;
mod transfer;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use counters::Counters;

use self::core::{Core, EngineStep, Origin};
use crate::config::SimConfig;
use crate::error::ApiError;
use crate::events::EventSink;
use hand_off::{PullRequest, TakenHandOff, refused};
use request::{Output, SampleParams};
pub(crate) use transfer::PULL_PATH;
use transfer::Puller;

/// How long a decode engine waits for KV that is pushed.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// One engine's shared state.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) config: SimConfig,
    pub(crate) origin: Origin,
    core: Mutex<Core>,
    work: Notify,
    /// Notified when hand-offs were staged.
    staged: Notify,
    /// Number of decode engines' legs that wait here for a prefill leg.
    registered: AtomicUsize,
}

/// A decode engine's leg that waits for a prefill leg.
struct RegisteredLeg<'a>(&'a AtomicUsize);

impl<'a> RegisteredLeg<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for RegisteredLeg<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The choices of one HTTP request. Dropping it removes them from the engine.
#[derive(Debug)]
pub(crate) struct Submission {
    engine: Arc<Engine>,
    ids: Vec<u64>,
    outputs: mpsc::Receiver<(usize, Output)>,
}

impl Submission {
    /// The next output of any choice; `None` when all have ended.
    pub(crate) async fn next(&mut self) -> Option<(usize, Output)> {
        self.outputs.recv().await
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        let mut core = self.engine.core();
        for id in &self.ids {
            core.abort(*id);
        }
        drop(core);
        self.engine.work.notify_one();
    }
}

/// The blocks of a hand-off while a decode engine reads them.
#[derive(Debug)]
pub(crate) struct PulledBlocks {
    engine: Arc<Engine>,
    taken: Option<TakenHandOff>,
}

impl PulledBlocks {
    /// Whether the engine has died since the blocks were taken.
    pub(crate) fn is_lost(&self) -> bool {
        self.engine.core().dead
    }
}

impl Drop for PulledBlocks {
    fn drop(&mut self) {
        if let Some(TakenHandOff { mut request, held, .. }) = self.taken.take() {
            let mut core = self.engine.core();
            core.pulling_blocks -= request.sequence.blocks().len();
            core.cache.release(&mut request.sequence);
            if let Some((id, end)) = held {
                request.send(Output::Token { id, end: Some(end) });
            }
            drop(core);
            self.engine.work.notify_one();
        }
    }
}

impl Engine {
    pub(crate) fn new(config: SimConfig, origin: Origin) -> Self {
        let core = Mutex::new(Core::new(&config));
        let (work, staged) = (Notify::new(), Notify::new());
        Self { config, origin, core, work, staged, registered: AtomicUsize::new(0) }
    }

    /// The state, after expired leases were removed.
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.expire_leases(Instant::now());
        core
    }

    /// Number of decode engines' legs that wait here for a prefill leg.
    pub(crate) fn registered(&self) -> usize {
        self.registered.load(Relaxed)
    }

    /// Queues the choices of one HTTP request.
    pub(crate) fn submit(
        self: &Arc<Self>,
        samples: Vec<SampleParams>,
    ) -> Result<Submission, ApiError> {
        // Started, the tokens, and Finished or Failed: the channel never fills up.
        let room = samples.iter().map(|params| params.max_tokens + 3).sum();
        let (sender, outputs) = mpsc::channel(room);
        let ids = Vec::with_capacity(samples.len());
        let mut submission = Submission { engine: Arc::clone(self), ids, outputs };
        let mut core = self.core();
        let mut refused = None;
        for (choice, params) in samples.into_iter().enumerate() {
            match core.submit(params, &self.config, choice, sender.clone()) {
                Ok(id) => submission.ids.push(id),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        drop(core);
        self.work.notify_one();
        match refused {
            Some(error) => Err(error),
            None => Ok(submission),
        }
    }

    /// Takes a hand-off for a decode engine. Its blocks are freed when the returned value is
    /// dropped.
    pub(crate) async fn take_hand_off(
        self: &Arc<Self>,
        pull: &PullRequest,
    ) -> Result<PulledBlocks, ApiError> {
        let patience = match pull.is_found_by_id {
            true => FOR_EVER,
            false => Duration::from_millis(self.config.rendezvous_timeout_ms),
        };
        let deadline = Instant::now() + patience;
        let forgotten = self.core().hand_offs.times_forgotten(&pull.request_id);
        let _registered = RegisteredLeg::new(&self.registered);
        loop {
            let mut staged = std::pin::pin!(self.staged.notified());
            staged.as_mut().enable();
            if let Some(pulled) = self.try_take(pull, forgotten)? {
                return Ok(pulled);
            }
            if tokio::time::timeout_at(deadline, staged).await.is_err() {
                self.core().counters.pulls_refused += 1;
                return Err(refused("hand_off_unmet", "was not staged in time"));
            }
        }
    }

    /// Takes the hand-off if it is available now; `None` while it may still be staged. `forgotten` is
    /// how often its name had been forgotten when it was asked for.
    fn try_take(
        self: &Arc<Self>,
        pull: &PullRequest,
        forgotten: u32,
    ) -> Result<Option<PulledBlocks>, ApiError> {
        let mut core = self.core();
        let foreign = pull.engine_id.as_ref().is_some_and(|id| *id != self.origin.engine_id);
        let taken = if core.dead && pull.is_found_by_id {
            Ok(None)
        } else if core.dead {
            Err(ApiError::engine_dead())
        } else if foreign {
            Err(refused("hand_off_unknown", "comes from another engine"))
        } else if core.hand_offs.times_forgotten(&pull.request_id) != forgotten {
            Ok(None)
        } else {
            core.hand_offs.take(pull)
        };
        match taken {
            Ok(None) => Ok(None),
            Ok(Some(taken)) => {
                match (pull.read_tokens, pull.wanted_blocks) {
                    (None, _) => core.counters.hand_offs_pulled += 1,
                    (Some(_), 0) => core.counters.pins_released += 1,
                    (Some(_), _) => core.counters.pins_read += 1,
                }
                core.pulling_blocks += taken.request.sequence.blocks().len();
                Ok(Some(PulledBlocks { engine: Arc::clone(self), taken: Some(taken) }))
            }
            Err(error) => {
                core.counters.pulls_refused += 1;
                Err(error)
            }
        }
    }

    /// Ends everything, like a crash of the engine core.
    pub(crate) fn die(&self) {
        self.core().die();
        self.staged.notify_waiters();
    }

    /// Runs steps until dropped.
    pub(crate) async fn run(self: Arc<Self>, mut events: EventSink) {
        let mut pulls = JoinSet::new();
        let puller = Puller::new();
        loop {
            while pulls.try_join_next().is_some() {}
            let step = self.core().begin_step(&self.config);
            match step {
                Some(step) => self.run_step(step, &mut events, &mut pulls, &puller).await,
                None => self.wait_for_work().await,
            }
        }
    }

    async fn run_step(
        self: &Arc<Self>,
        step: EngineStep,
        events: &mut EventSink,
        pulls: &mut JoinSet<()>,
        puller: &Puller,
    ) {
        for job in step.pulls {
            let (engine, puller) = (Arc::clone(self), puller.clone());
            let meeting = Duration::from_millis(self.config.rendezvous_timeout_ms);
            pulls.spawn(async move {
                tokio::select! {
                    result = puller.pull(&job, meeting) => {
                        engine.core().pull_ended(job.id, result, &engine.config);
                        engine.work.notify_one();
                    }
                    // The request has ended; the prefill engine notices the closed connection.
                    () = job.gone.cancelled() => {}
                }
            });
        }
        if step.runs {
            let us = self.config.decode_us_per_step
                + self.config.prefill_us_per_token * step.computed_prompt_tokens
                + self.config.host_load_us_per_block * step.loaded_blocks;
            if us > 0 {
                tokio::time::sleep(Duration::from_micros(us)).await;
            } else {
                tokio::task::yield_now().await;
            }
        }
        events.put(&step.events).await;
        if step.runs {
            self.core().end_step(&self.config, &self.origin, Instant::now());
            self.staged.notify_waiters();
        }
    }

    /// Waits until a request arrives, or a lease ends and frees blocks for a waiting request.
    async fn wait_for_work(&self) {
        let expiry = self.core().hand_offs.next_expiry();
        let lease_ends = async {
            match expiry {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.work.notified() => {}
            () = lease_ends => {}
        }
    }
}
