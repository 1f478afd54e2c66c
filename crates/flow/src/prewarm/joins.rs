//! The workers of one model that are prewarmed: from their start to the end of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use splitrail_kv::BlockHash;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinSet};

use super::choose::{Joining, Next};
use super::fetch::{Plan, fetch};
use crate::peer_fetch::Outcome;
use splitrail_engine_client::Engine as _;
use splitrail_fleet::state::State;
use splitrail_fleet::{Pool, Roster, Served, Worker};
use splitrail_policy::{Leg, WorkerIndex};
use splitrail_telemetry::Metrics;

/// How long after a worker's start prewarming begins: its restart is noticed in several ways, and
/// what the index has of the process before must be gone.
const BEGIN_AFTER: Duration = Duration::from_secs(1);
/// How long a worker may have nothing to take over before it counts as prewarmed: blocks and token
/// ids may still become known.
const SETTLED: Duration = Duration::from_secs(2);
/// Maximum pause after a fetch.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Why prewarming of a worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It holds all hot prefixes that other workers can send.
    Done,
    /// It has taken over `prewarm.tokens_max` tokens.
    Tokens,
    /// `prewarm.time_max` is over.
    Time,
    /// Its cache is full.
    Full,
    /// It drains, is down, has restarted or has left, or prewarming was switched off.
    Stopped,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Tokens => "tokens",
            Self::Time => "time",
            Self::Full => "full",
            Self::Stopped => "stopped",
        }
    }
}

/// The workers of one model.
pub(super) struct Joins {
    model: String,
    pool: Weak<Pool>,
    workers: HashMap<WorkerIndex, Seen>,
    /// Fetches under way; a worker has at most `prewarm.fetches_max`.
    fetches: JoinSet<(Outcome, Duration)>,
    /// Told when one ends.
    fetched: Arc<Notify>,
}

/// A worker that serves prefill legs.
struct Seen {
    worker: Arc<Worker>,
    /// The process of its engine.
    process: u64,
    /// `None` when it has been prewarmed, or needs not be.
    join: Option<Join>,
}

/// A worker that is prewarmed, or is going to be.
struct Join {
    /// When its start was noticed.
    noted: Instant,
    /// When it was first ready.
    began: Option<Instant>,
    running: Vec<Running>,
    /// The ends of the pauses after fetches.
    pauses: Vec<Instant>,
    /// How often prefixes were tried, by their last block. Each fetch adds one at most.
    tried: HashMap<BlockHash, u32>,
    prefixes: u32,
    tokens: u64,
    /// Since when there is nothing to take over.
    idle_since: Option<Instant>,
}

/// A fetch under way.
struct Running {
    id: Id,
    task: AbortHandle,
    source: WorkerIndex,
    hashes: Arc<[BlockHash]>,
    tokens: u64,
}

/// What becomes of a worker that is prewarmed.
enum Step {
    Fetch(Plan),
    Wait,
    End(End),
}

impl Joins {
    /// The workers of a model. `fetched` is notified at the end of each fetch.
    pub(super) fn new(served: &Served, fetched: &Arc<Notify>) -> Self {
        Self {
            model: served.name().to_owned(),
            pool: Arc::downgrade(&served.pool),
            workers: HashMap::new(),
            fetches: JoinSet::new(),
            fetched: Arc::clone(fetched),
        }
    }

    /// Whether these are workers of the model's present pool.
    pub(super) fn is_of(&self, served: &Served) -> bool {
        std::ptr::eq(self.pool.as_ptr(), Arc::as_ptr(&served.pool))
    }

    /// Ends all of it.
    pub(super) fn stop(&mut self, metrics: &Metrics) {
        for seen in self.workers.values_mut() {
            seen.end(&self.model, metrics, End::Stopped);
        }
    }

    /// Takes over what has changed, and begins the fetches for which there is a place. Returns whether
    /// a worker is being prewarmed.
    pub(super) fn look(
        &mut self,
        served: &Arc<Served>,
        metrics: &Arc<Metrics>,
        now: Instant,
    ) -> bool {
        let roster = served.pool.roster();
        self.note_ended(served, metrics, now);
        self.note_workers(&roster, metrics, now);
        let workers: Vec<WorkerIndex> = self.workers.keys().copied().collect();
        for index in workers {
            loop {
                match self.step(index, served, &roster, now) {
                    Step::Fetch(plan) => self.begin(index, served, metrics, plan),
                    Step::Wait => break,
                    Step::End(end) => {
                        if let Some(seen) = self.workers.get_mut(&index) {
                            seen.end(&self.model, metrics, end);
                        }
                        break;
                    }
                }
            }
        }
        self.workers.values().any(|seen| seen.join.is_some())
    }

    /// Takes over the results of fetches that have ended.
    fn note_ended(&mut self, served: &Served, metrics: &Metrics, now: Instant) {
        while let Some(ended) = self.fetches.try_join_next_with_id() {
            let (id, (outcome, took)) = match ended {
                Ok(ended) => ended,
                Err(error) => (error.id(), (Outcome::Failed, Duration::ZERO)),
            };
            for Seen { worker, join, .. } in self.workers.values_mut() {
                let Some(join) = join else { continue };
                let Some(tokens) = join.note_ended(id, outcome) else { continue };
                let share = served.config.prewarm.link_share.clamp(0.01, 1.0);
                join.pauses.push(now + took.mul_f64((1.0 - share) / share).min(PAUSE_MAX));
                if outcome.has_blocks() {
                    worker.prewarm.took(tokens);
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
            let seen = self.workers.entry(worker.index).or_insert_with(|| Seen {
                worker: Arc::clone(worker),
                process,
                // What was there before the router has its blocks already.
                join: (!worker.is_founder()).then(|| Join::new(now)),
            });
            if seen.process != process {
                seen.end(model, metrics, End::Stopped);
                (seen.process, seen.join) = (process, Some(Join::new(now)));
            }
        }
    }

    /// What becomes of a worker now.
    fn step(&mut self, index: WorkerIndex, served: &Served, roster: &Roster, now: Instant) -> Step {
        let mut from: HashMap<WorkerIndex, u32> = HashMap::new();
        let joins = self.workers.values().filter_map(|seen| seen.join.as_ref());
        for running in joins.flat_map(|join| &join.running) {
            *from.entry(running.source).or_default() += 1;
        }
        let Some(Seen { worker, join: Some(join), .. }) = self.workers.get_mut(&index) else {
            return Step::Wait;
        };
        let is_ready = worker.is_available(Leg::Prefill, now)
            && worker.is_probed()
            && worker.overlap_is_believed(None);
        if join.began.is_none() && is_ready && now >= join.noted + BEGIN_AFTER {
            join.began = Some(now);
            worker.prewarm.begin();
        }
        let Some(began) = join.began else { return Step::Wait };
        let config = &served.config.prewarm;
        if matches!(worker.state(), State::Down | State::Draining | State::Left) {
            return Step::End(End::Stopped);
        }
        if now >= began + config.time_max {
            return Step::End(End::Time);
        }
        join.pauses.retain(|end| *end > now);
        let places = join.running.len() + join.pauses.len();
        if !is_ready || places >= config.fetches_max as usize {
            return Step::Wait;
        }
        join.choose(worker, served, roster, &from, now)
    }

    fn begin(
        &mut self,
        index: WorkerIndex,
        served: &Arc<Served>,
        metrics: &Arc<Metrics>,
        plan: Plan,
    ) {
        let Some(join) = self.workers.get_mut(&index).and_then(|seen| seen.join.as_mut()) else {
            return;
        };
        let (source, hashes, tokens) = (plan.source.index, Arc::clone(&plan.hashes), plan.tokens);
        let (served, metrics) = (Arc::clone(served), Arc::clone(metrics));
        let fetched = Arc::clone(&self.fetched);
        let task = self.fetches.spawn(async move {
            let begun = Instant::now();
            let outcome = fetch(served, metrics, plan).await;
            fetched.notify_one();
            (outcome, begun.elapsed())
        });
        join.running.push(Running { id: task.id(), task, source, hashes, tokens });
    }
}

impl Join {
    fn new(now: Instant) -> Self {
        Self {
            noted: now,
            began: None,
            running: Vec::new(),
            pauses: Vec::new(),
            tried: HashMap::new(),
            prefixes: 0,
            tokens: 0,
            idle_since: None,
        }
    }

    /// Takes over the outcome of a fetch. Returns its tokens; `None` if it is no fetch of this worker.
    fn note_ended(&mut self, id: Id, outcome: Outcome) -> Option<u64> {
        let at = self.running.iter().position(|running| running.id == id)?;
        let Running { hashes, tokens, .. } = self.running.swap_remove(at);
        let tries = self.tried.entry(*hashes.last()?).or_default();
        if outcome.has_blocks() {
            *tries = u32::MAX;
            (self.prefixes, self.tokens) = (self.prefixes + 1, self.tokens + tokens);
        } else if outcome != Outcome::Full {
            *tries = tries.saturating_add(1);
        }
        Some(tokens)
    }

    /// What the worker does next, if it has a place for a fetch.
    fn choose(
        &mut self,
        worker: &Arc<Worker>,
        served: &Served,
        roster: &Roster,
        from: &HashMap<WorkerIndex, u32>,
        now: Instant,
    ) -> Step {
        let pool = &served.pool;
        let arriving: u64 = self.running.iter().map(|running| running.tokens).sum();
        let tokens_max = u64::from(served.config.prewarm.tokens_max);
        let tokens_left = tokens_max.saturating_sub(self.tokens + arriving);
        let is_idle = self.running.is_empty();
        let least = pool.fetch_bounds().map_or(0, |bounds| bounds.min_tokens);
        if tokens_left < u64::from(least) {
            return if is_idle { Step::End(End::Tokens) } else { Step::Wait };
        }
        let joining = Joining {
            served,
            roster,
            worker,
            tokens_left,
            tried: &self.tried,
            running: self.running.iter().map(|running| &*running.hashes).collect(),
            arriving_blocks: arriving / u64::from(pool.block_size().max(1)),
            brought_blocks: self.tokens / u64::from(pool.block_size().max(1)),
            from,
            turn: self.prefixes.wrapping_add(self.running.len() as u32),
        };
        let next = joining.next(now);
        let since = match next {
            Next::Done if is_idle => *self.idle_since.get_or_insert(now),
            _ => {
                self.idle_since = None;
                now
            }
        };
        match next {
            Next::Fetch(plan) => Step::Fetch(plan),
            Next::Full if is_idle => Step::End(End::Full),
            Next::Done if now >= since + SETTLED => Step::End(End::Done),
            Next::Full | Next::Done | Next::Wait => Step::Wait,
        }
    }
}

impl Seen {
    /// Ends the prewarming of the worker, if it is under way, and says what came of it.
    fn end(&mut self, model: &str, metrics: &Metrics, end: End) {
        let Some(join) = self.join.take() else { return };
        join.running.iter().for_each(|running| running.task.abort());
        let Some(began) = join.began else { return };
        let Join { prefixes, tokens, .. } = join;
        self.worker.prewarm.end();
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
