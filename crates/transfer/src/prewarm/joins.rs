//! The workers of one model that are prewarmed: from their start to the end of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::{JoinSet, spawn_blocking};

use super::choose::HotHolders;
use super::fetch::{EndedFetch, PrewarmFetch, fetch};
use super::join::{End, Join, JoinStep, Running, View};
use super::view::{list_senders, look_up};
use crate::peer_fetch::PeerFetchOutcome;
use splitrail_config::model::PrewarmConfig;
use splitrail_engine_client::Engine as _;
use splitrail_fleet::state::WorkerState;
use splitrail_fleet::{Pool, Roster, ServedModel, Worker};
use splitrail_policy::{Leg, WorkerIndex};
use splitrail_telemetry::Metrics;
use splitrail_workload::fetches::FetchBounds;

/// How long after a worker's start prewarming begins: its restart is noticed in several ways, and
/// what the index has of the process before must be gone.
const BEGIN_AFTER: Duration = Duration::from_secs(1);
/// Age up to which the list of hot prefixes is used.
const HOT_AGE_MAX: Duration = Duration::from_millis(250);

/// The workers of one model.
pub(super) struct Joins {
    model: String,
    pool: Weak<Pool>,
    workers: HashMap<WorkerIndex, PrefillWorker>,
    /// The hot prefixes, and when they were looked up.
    hot: Option<(Instant, Arc<[HotHolders]>)>,
    /// Fetches under way; a worker has at most `prewarm.fetches_max`.
    fetches: JoinSet<EndedFetch>,
    /// Told when one ends.
    fetched: Arc<Notify>,
}

/// A worker that serves prefill legs.
struct PrefillWorker {
    worker: Arc<Worker>,
    /// The process of its engine.
    process: u64,
    /// `None` when it has been prewarmed, or needs not be.
    join: Option<Join>,
}

impl Joins {
    /// The workers of a model. `fetched` is notified at the end of each fetch.
    pub(super) fn new(served: &ServedModel, fetched: &Arc<Notify>) -> Self {
        Self {
            model: served.name().to_owned(),
            pool: Arc::downgrade(&served.pool),
            workers: HashMap::new(),
            hot: None,
            fetches: JoinSet::new(),
            fetched: Arc::clone(fetched),
        }
    }

    /// Whether these are workers of the model's present pool.
    pub(super) fn is_of(&self, served: &ServedModel) -> bool {
        std::ptr::eq(self.pool.as_ptr(), Arc::as_ptr(&served.pool))
    }

    /// Ends all of it.
    pub(super) fn stop(&mut self, metrics: &Metrics) {
        for seen in self.workers.values_mut() {
            seen.end(&self.model, metrics, End::Stopped);
        }
    }

    /// Ends all of it, and waits until no fetch runs: what fetches leave behind is being released then.
    pub(super) async fn stopped(mut self, metrics: &Metrics) {
        self.stop(metrics);
        self.fetches.shutdown().await;
    }

    /// Takes over what has changed, and begins the fetches for which there is a place. Returns whether
    /// a worker is being prewarmed.
    pub(super) async fn look(&mut self, served: &Arc<ServedModel>, metrics: &Arc<Metrics>) -> bool {
        let (roster, now) = (served.pool.roster(), Instant::now());
        self.note_ended(served, metrics, now);
        self.note_workers(&roster, metrics, now);
        let config = &served.config.prewarm;
        let mut has_place = false;
        for seen in self.workers.values_mut() {
            match seen.advance(config, now) {
                Some(end) => seen.end(&self.model, metrics, end),
                None => has_place |= seen.has_place(config, now),
            }
        }
        if has_place {
            let hot = self.hot(served, now).await;
            self.begin_fetches(served, metrics, &hot);
        }
        self.workers.values().any(|seen| seen.join.is_some())
    }

    /// The hot prefixes, looked up off the reactor.
    async fn hot(&mut self, served: &Arc<ServedModel>, now: Instant) -> Arc<[HotHolders]> {
        let recent = self.hot.as_ref().filter(|(at, _)| now < *at + HOT_AGE_MAX);
        if let Some((_, hot)) = recent {
            return Arc::clone(hot);
        }
        let looking = Arc::clone(served);
        // It fails only if the router stops.
        let hot = spawn_blocking(move || look_up(&looking)).await.unwrap_or_default();
        Arc::clone(&self.hot.insert((now, hot.into())).1)
    }

    fn begin_fetches(
        &mut self,
        served: &Arc<ServedModel>,
        metrics: &Arc<Metrics>,
        hot: &[HotHolders],
    ) {
        let (roster, now) = (served.pool.roster(), Instant::now());
        let Some(bounds) = served.pool.fetch_bounds() else { return };
        // Requests of clients find a place.
        let reserved = bounds.max_per_worker.saturating_sub(1).max(1);
        let bounds = FetchBounds { max_per_worker: reserved, ..bounds };
        let senders = list_senders(served, &roster, bounds, &self.from(), now);
        let workers: Vec<WorkerIndex> = self.workers.keys().copied().collect();
        for index in workers {
            loop {
                let from = self.from();
                let Some(seen) = self.workers.get_mut(&index) else { break };
                let (roster, senders, from) = (&roster, &senders, &from);
                let view = View { served, roster, bounds, hot, senders, from };
                match seen.step(&view, now) {
                    JoinStep::Fetch(plan) => self.begin(index, served, metrics, plan),
                    JoinStep::Wait => break,
                    JoinStep::End(end) => seen.end(&self.model, metrics, end),
                }
            }
        }
    }

    /// The number of fetches from each worker.
    fn from(&self) -> HashMap<WorkerIndex, u32> {
        let mut from = HashMap::new();
        let joins = self.workers.values().filter_map(|seen| seen.join.as_ref());
        for running in joins.flat_map(|join| &join.running) {
            *from.entry(running.source).or_default() += 1;
        }
        from
    }

    /// Takes over the results of fetches that have ended.
    fn note_ended(&mut self, served: &ServedModel, metrics: &Metrics, now: Instant) {
        let link_share = served.config.prewarm.link_share;
        while let Some(ended) = self.fetches.try_join_next_with_id() {
            let (id, ended) = match ended {
                Ok(ended) => ended,
                Err(error) => (
                    error.id(),
                    EndedFetch { outcome: PeerFetchOutcome::Failed, took: Duration::ZERO },
                ),
            };
            for PrefillWorker { worker, join, .. } in self.workers.values_mut() {
                let Some(join) = join else { continue };
                let tokens = join.note_ended(id, ended, link_share, now);
                if let Some(tokens) = tokens.filter(|_| ended.outcome.has_blocks()) {
                    worker.transfer.prewarm.took(tokens);
                    metrics.prewarmed_tokens.with_label_values(&[&self.model]).inc_by(tokens);
                }
            }
        }
    }

    /// Takes over which workers there are, and which have restarted.
    fn note_workers(&mut self, roster: &Roster, metrics: &Metrics, now: Instant) {
        let model = &self.model;
        self.workers.retain(|index, seen| {
            let is_kept = roster.get(*index).is_some();
            if !is_kept {
                seen.end(model, metrics, End::Stopped);
            }
            is_kept
        });
        for worker in roster.iter().filter(|worker| worker.serves(Leg::Prefill)) {
            let process = worker.process();
            let seen = self.workers.entry(worker.index).or_insert_with(|| PrefillWorker {
                worker: Arc::clone(worker),
                process,
                // What was there before the router has its blocks already.
                join: (!worker.is_initial_member()).then(|| Join::new(now)),
            });
            if seen.process != process {
                seen.end(model, metrics, End::Stopped);
                (seen.process, seen.join) = (process, Some(Join::new(now)));
            }
        }
    }

    fn begin(
        &mut self,
        index: WorkerIndex,
        served: &Arc<ServedModel>,
        metrics: &Arc<Metrics>,
        plan: PrewarmFetch,
    ) {
        let Some(join) = self.workers.get_mut(&index).and_then(|seen| seen.join.as_mut()) else {
            return;
        };
        let (source, rank) = (plan.source.index, plan.rank);
        let (hashes, tokens) = (Arc::clone(&plan.hashes), plan.tokens);
        let (served, metrics) = (Arc::clone(served), Arc::clone(metrics));
        let fetched = Arc::clone(&self.fetched);
        let task = self.fetches.spawn(async move {
            let begun = Instant::now();
            let outcome = fetch(served, metrics, plan).await;
            fetched.notify_one();
            EndedFetch { outcome, took: begun.elapsed() }
        });
        join.running.push(Running { id: task.id(), task, source, rank, hashes, tokens });
    }
}

impl PrefillWorker {
    /// Begins the prewarming of the worker when it is ready. Returns why it ends, if it does.
    fn advance(&mut self, config: &PrewarmConfig, now: Instant) -> Option<End> {
        let is_ready = self.is_ready(now);
        let Self { worker, join: Some(join), .. } = self else { return None };
        if join.began.is_none() && is_ready && now >= join.noted + BEGIN_AFTER {
            join.began = Some(now);
            worker.transfer.prewarm.begin();
        }
        let began = join.began?;
        match worker.state() {
            WorkerState::Down | WorkerState::Draining | WorkerState::Left => Some(End::Stopped),
            _ => (now >= began + config.time_max).then_some(End::Time),
        }
    }

    /// Whether requests may be placed on the worker by its cache.
    fn is_ready(&self, now: Instant) -> bool {
        self.worker.is_available(Leg::Prefill, now)
            && self.worker.is_probed()
            && self.worker.overlap_is_believed(None)
    }

    /// Whether the worker may begin a fetch, if there is one.
    fn has_place(&mut self, config: &PrewarmConfig, now: Instant) -> bool {
        let is_ready = self.is_ready(now);
        let join = self.join.as_mut().filter(|join| is_ready && join.began.is_some());
        join.is_some_and(|join| join.has_place(config, now))
    }

    /// What becomes of the worker now.
    fn step(&mut self, view: &View<'_>, now: Instant) -> JoinStep {
        let has_place = self.has_place(&view.served.config.prewarm, now);
        match &mut self.join {
            Some(join) if has_place => join.step(&self.worker, view, now),
            _ => JoinStep::Wait,
        }
    }

    /// Ends the prewarming of the worker, if it is under way, and says what came of it.
    fn end(&mut self, model: &str, metrics: &Metrics, end: End) {
        let Some(join) = self.join.take() else { return };
        join.running.iter().for_each(|running| running.task.abort());
        let Some(began) = join.began else { return };
        let Join { prefixes, tokens, .. } = join;
        self.worker.transfer.prewarm.end();
        metrics.prewarms.with_label_values(&[model, end.name()]).inc();
        tracing::info!(
            model,
            worker = self.worker.id(),
            end = end.name(),
            prefixes,
            tokens,
            seconds = format!("{:.1}", began.elapsed().as_secs_f64()),
            "prewarmed a worker"
        );
    }
}
