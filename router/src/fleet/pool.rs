//! One model's workers and the index of their KV blocks.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use http::uri::Authority;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use splitrail_engine::vllm::load::EngineLoad;
use splitrail_kv::{BlockHash, Index, IndexConfig, IndexReader, Overlap, Overlaps, WorkerKey};
use tokio::sync::watch;

use super::booking::Booked;
use super::bootstrap::Bootstrap;
use super::breaker::Breaker;
use super::pace::Pace;
use crate::config::model::{BreakerConfig, Role, Worker as WorkerConfig};
use crate::error::{Error, Fault};
use crate::ledger::audit::Audit;
use crate::pick::{Candidate, Leg};

/// A load report older than this says nothing about now.
const LOAD_STALE: Duration = Duration::from_secs(5);

/// One engine.
#[derive(Debug)]
pub struct Worker {
    /// Its place in its model's list.
    pub index: usize,
    /// Its configuration.
    pub config: WorkerConfig,
    /// Host and port of its HTTP address.
    pub authority: Authority,
    /// Where decode workers meet it, for connectors that send both legs at once.
    pub bootstrap: Option<Bootstrap>,
    /// What the router has given it to do.
    pub booked: Arc<Booked>,
    /// What it reports, and how far the index was off.
    pub audit: Audit,
    /// Whether its last probe or request found it alive.
    up: AtomicBool,
    /// Whether it was probed at all.
    probed: AtomicBool,
    /// Whether its KV events are known from the beginning, or will not be.
    synced: AtomicBool,
    /// Whether its KV events come in, so that the index is what it holds.
    events_current: AtomicBool,
    /// Whether the index lacks blocks of it that were beyond the bound.
    index_truncated: AtomicBool,
    /// The longest sequence that it takes, in tokens; 0 until it has said so.
    context_tokens: AtomicU32,
    /// Whether it honours `cache_hit_threshold`: 1 for no, 2 for yes, 0 for not known.
    honours_threshold: AtomicU8,
    /// Of its prefill leg, and of its others.
    breakers: [Breaker; 2],
    /// How fast its queue moves.
    pub pace: Pace,
    /// When it last said that nobody waits in its queue.
    idle_at: ArcSwapOption<Instant>,
    /// What it last said of its load.
    load: ArcSwapOption<(Instant, EngineLoad)>,
}

impl Worker {
    /// A worker, presumed alive until a probe says otherwise.
    pub fn new(index: usize, config: WorkerConfig, authority: Authority) -> Self {
        let synced = AtomicBool::new(config.kv_events.is_none());
        let bootstrap = Bootstrap::new(config.bootstrap.as_deref(), &authority);
        let honours_threshold =
            AtomicU8::new(config.honours_threshold.map_or(0, |yes| 1 + u8::from(yes)));
        Self {
            index,
            config,
            authority,
            bootstrap,
            booked: Arc::default(),
            audit: Audit::default(),
            up: AtomicBool::new(true),
            probed: AtomicBool::new(false),
            synced,
            events_current: AtomicBool::new(false),
            index_truncated: AtomicBool::new(false),
            context_tokens: AtomicU32::new(0),
            honours_threshold,
            breakers: [BreakerConfig::default(); 2].map(Breaker::new),
            pace: Pace::default(),
            idle_at: ArcSwapOption::empty(),
            load: ArcSwapOption::empty(),
        }
    }

    /// The same worker with breakers as configured.
    pub fn with_breakers(self, config: BreakerConfig) -> Self {
        Self { breakers: [config; 2].map(Breaker::new), ..self }
    }

    /// The breaker of a leg.
    pub fn breaker(&self, leg: Leg) -> &Breaker {
        let [prefill, others] = &self.breakers;
        if leg == Leg::Prefill { prefill } else { others }
    }

    /// Whether it may be asked for a leg: it is up, and has not failed that leg too often.
    pub fn is_available(&self, leg: Leg, now: Instant) -> bool {
        self.is_up() && self.breaker(leg).allows(now)
    }

    /// Records how a leg ended: it has done its part, or failed with this.
    pub fn record(&self, leg: Leg, failed: Option<&Error>) {
        if failed.is_some_and(|error| error.fault() == Fault::Router) {
            return;
        }
        let breaker = self.breaker(leg);
        let failed = failed.is_some_and(Error::speaks_against_its_worker);
        let (worker, leg) = (self.id(), leg.name());
        if failed && breaker.fail(Instant::now()) {
            tracing::warn!(worker, leg, "breaker opened: too many failures in a row");
        } else if !failed && breaker.succeed() {
            tracing::info!(worker, leg, "breaker closed");
        }
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.config.id
    }

    /// Whether its last probe or request found it alive.
    pub fn is_up(&self) -> bool {
        self.up.load(Relaxed)
    }

    /// Records that it is alive, or not; says whether that is news.
    pub fn set_up(&self, up: bool) -> bool {
        if !up {
            // Whatever comes back may be another version of it.
            self.set_honours_threshold(None);
        }
        self.up.swap(up, Relaxed) != up
    }

    /// Whether it was probed at all.
    pub fn is_probed(&self) -> bool {
        self.probed.load(Relaxed)
    }

    /// Records a probe's result; says whether that is news.
    pub fn set_probed(&self, up: bool) -> bool {
        let first = !self.probed.swap(true, Relaxed);
        self.set_up(up) || (first && up)
    }

    /// Whether the first index synchronisation is over.
    pub fn is_synced(&self) -> bool {
        self.synced.load(Relaxed)
    }

    /// Records that the first index synchronisation is over.
    pub fn set_synced(&self) {
        self.synced.store(true, Relaxed);
    }

    /// Whether its KV events come in, so that the index is what it holds.
    pub fn events_are_current(&self) -> bool {
        self.events_current.load(Relaxed)
    }

    /// Records that its KV events come in, or are cut off.
    pub fn set_events_current(&self, current: bool) {
        self.events_current.store(current, Relaxed);
    }

    /// Whether the index lacks blocks of it that were beyond the bound: its overlap
    /// is a lower bound then.
    pub fn index_is_truncated(&self) -> bool {
        self.index_truncated.load(Relaxed)
    }

    /// Records whether the index lacks blocks of it.
    pub fn set_index_truncated(&self, truncated: bool) {
        self.index_truncated.store(truncated, Relaxed);
    }

    /// The longest sequence that it takes, in tokens, if it has said so.
    pub fn context_tokens(&self) -> Option<u32> {
        Some(self.context_tokens.load(Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Records the longest sequence that it takes.
    pub fn set_context_tokens(&self, tokens: u32) {
        self.context_tokens.store(tokens, Relaxed);
    }

    /// Whether it honours `cache_hit_threshold`; `None` until it was asked.
    pub fn honours_threshold(&self) -> Option<bool> {
        match self.honours_threshold.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records whether it honours `cache_hit_threshold`; `None` forgets it, for a process
    /// that may be another one. What is configured stands.
    pub fn set_honours_threshold(&self, honours: Option<bool>) {
        let known = self.config.honours_threshold.or(honours);
        self.honours_threshold.store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// Its load as last reported, unless that is too old to mean anything.
    pub fn load(&self, now: Instant) -> Option<EngineLoad> {
        let report = self.load.load();
        let (at, load) = report.as_deref()?;
        (now.saturating_duration_since(*at) < LOAD_STALE).then(|| load.clone())
    }

    /// Records a load report that was asked for at this instant.
    pub fn set_load(&self, asked: Instant, load: EngineLoad) {
        if load.waiting == Some(0) {
            self.idle_at.store(Some(Arc::new(asked)));
        }
        self.load.store(Some(Arc::new((asked, load))));
    }

    /// Requests that wait in its queue, by its own report; 0 where it has not said so.
    pub fn waiting(&self, now: Instant) -> u64 {
        self.load(now).and_then(|load| load.waiting).unwrap_or(0)
    }

    /// Whether all that it has reported since an instant says that requests wait: one that
    /// was sent then may be among them. Without a report nothing says so.
    pub fn has_queued_since(&self, since: Instant) -> bool {
        let report = self.load.load();
        let queues = report.as_deref().is_some_and(|(asked, load)| {
            *asked >= since && load.waiting.is_some_and(|waiting| waiting > 0)
        });
        queues && self.idle_at.load().as_deref().is_none_or(|idle| *idle < since)
    }

    /// Whether it can take a leg.
    pub fn serves(&self, leg: Leg) -> bool {
        match (leg, self.config.role) {
            (_, Role::Both) => true,
            (Leg::Prefill, role) => role == Role::Prefill,
            // A decode worker without a hand-off computes the prompt by itself.
            (Leg::Decode | Leg::Aggregated, role) => role == Role::Decode,
        }
    }
}

thread_local! {
    /// What a look into the index needs, kept so that none allocates.
    static FOUND: RefCell<Overlaps> = RefCell::default();
}

/// A model's workers with their index.
pub struct Pool {
    /// The workers, in the configuration's order.
    pub workers: Vec<Arc<Worker>>,
    /// Tokens per block; 0 until an engine has said it.
    block_size: watch::Sender<u32>,
    /// Written by whoever follows a worker's events; prompts go through `reader`.
    index: Mutex<Index>,
    reader: IndexReader,
    turns: [AtomicU64; 3],
    draws: Mutex<StdRng>,
}

impl Pool {
    /// A pool over an empty index; its block size is 0 if an engine is to say it.
    /// `draw_seed` makes its draws repeatable.
    pub fn new(workers: Vec<Arc<Worker>>, index: IndexConfig, draw_seed: Option<u64>) -> Self {
        let seed = draw_seed.unwrap_or_else(rand::random);
        let index = Index::new(index);
        Self {
            workers,
            block_size: watch::Sender::new(index.config().block_size),
            reader: index.reader(),
            index: Mutex::new(index),
            turns: Default::default(),
            draws: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// Tokens per block; 0 until an engine has said it, and nothing has a hash.
    pub fn block_size(&self) -> u32 {
        *self.block_size.borrow()
    }

    /// Waits until the block size is known.
    pub async fn block_size_known(&self) {
        let mut sizes = self.block_size.subscribe();
        // The sender is `self`: it outlives the wait.
        let _known = sizes.wait_for(|tokens| *tokens > 0).await;
    }

    /// Takes an engine's word for the block size if it is not known; says whether
    /// the engine's is the one that counts.
    pub fn learn_block_size(&self, tokens: u32) -> bool {
        if self.block_size() == 0 {
            // The index is locked first, as everywhere, and so decides who is first.
            let mut index = self.index();
            // Nothing is indexed before the block size is known.
            if self.block_size() == 0 && index.set_block_size(tokens) {
                self.block_size.send_replace(tokens);
            }
        }
        self.block_size() == tokens
    }

    /// Even random bits for one decision.
    pub fn draw(&self) -> u64 {
        self.draws.lock().unwrap_or_else(PoisonError::into_inner).next_u64()
    }

    /// The index, for its writers and for what readers cannot see. A poisoned lock
    /// still guards whole entries: every change of the index keeps its invariants at
    /// each step.
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of picks for such a leg before this one.
    pub fn next_turn(&self, leg: Leg) -> u64 {
        self.turns[leg as usize].fetch_add(1, Relaxed)
    }

    /// The longest sequence that every worker takes which has said so.
    pub fn context_tokens(&self) -> Option<u32> {
        self.workers.iter().filter_map(|worker| worker.context_tokens()).min()
    }

    /// Whether a worker outside `failed` may be asked for a leg.
    pub fn any_up(&self, leg: Leg, failed: &[usize]) -> bool {
        self.ups(leg, failed).next().is_some()
    }

    /// The one worker outside `failed` that may be asked for a leg, if it is the last.
    pub fn last_up(&self, leg: Leg, failed: &[usize]) -> Option<usize> {
        let mut ups = self.ups(leg, failed);
        let first = ups.next()?;
        ups.next().is_none().then_some(first)
    }

    /// Decode workers whose queue takes longer than this, by their own reports.
    pub fn late(&self, left: Duration, now: Instant) -> Vec<usize> {
        let able = self.workers.iter().filter(|worker| worker.serves(Leg::Decode));
        let late = able.filter(|worker| worker.pace.wait(worker.waiting(now)) > left);
        late.map(|worker| worker.index).collect()
    }

    fn ups(&self, leg: Leg, failed: &[usize]) -> impl Iterator<Item = usize> {
        let now = Instant::now();
        let able = self.workers.iter().filter(move |w| w.serves(leg) && w.is_available(leg, now));
        able.map(|worker| worker.index).filter(|index| !failed.contains(index))
    }

    /// The instant's picture of every worker that can take a leg and is not excluded.
    pub fn candidates(
        &self,
        leg: Leg,
        hashes: &[BlockHash],
        excluded: &[usize],
        now: Instant,
    ) -> Vec<Candidate> {
        let mut overlaps = FOUND.take();
        self.reader.find(hashes, &mut overlaps);
        let able = self
            .workers
            .iter()
            .filter(|worker| worker.serves(leg) && !excluded.contains(&worker.index))
            .map(|worker| {
                let reported = worker
                    .load(now)
                    .map_or(0, |load| load.running.unwrap_or(0) + load.waiting.unwrap_or(0));
                // What may be out of date is not certain.
                let overlap = match worker.events_are_current() {
                    true => overlaps.get(worker_key(worker.index)),
                    false => Overlap::default(),
                };
                Candidate {
                    worker: worker.index,
                    up: worker.is_available(leg, now),
                    requests: worker
                        .booked
                        .requests()
                        .max(u32::try_from(reported).unwrap_or(u32::MAX)),
                    prefill_tokens: worker.booked.prefill_tokens(),
                    active_tokens: worker.booked.active_tokens(),
                    overlap_blocks: overlap.blocks,
                    overlap_by_tier: overlap.by_tier,
                }
            })
            .collect();
        FOUND.set(overlaps);
        able
    }
}

/// A worker's name in the index: rank 0, the only one that requests go to.
pub fn worker_key(index: usize) -> WorkerKey {
    WorkerKey { worker: index as u32, rank: 0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_kv::{EngineHash, HashSeed, KvEvent, Namespace, StoredBlock, Tier, chain_hashes};

    use super::*;

    fn index(block_size: u32) -> IndexConfig {
        IndexConfig { model: "m".into(), block_size, seed: HashSeed(1), max_blocks_per_worker: 8 }
    }

    #[test]
    fn the_first_engine_that_says_its_block_size_decides() {
        let pool = Pool::new(Vec::new(), index(0), None);
        assert_eq!(pool.block_size(), 0);
        assert!(pool.learn_block_size(32));
        assert!(!pool.learn_block_size(16));
        assert_eq!((pool.block_size(), pool.index().config().block_size), (32, 32));
        let configured = Pool::new(Vec::new(), index(16), None);
        assert!(!configured.learn_block_size(32));
        assert_eq!(configured.block_size(), 16);
    }

    #[test]
    fn overlap_is_believed_only_while_events_come_in() {
        let config: WorkerConfig = serde_json::from_str(
            r#"{"id": "w", "role": "both", "url": "http://w:1", "kv_events": "tcp://w:2"}"#,
        )
        .unwrap();
        let worker = Arc::new(Worker::new(0, config, "w:1".parse().unwrap()));
        let pool = Pool::new(vec![Arc::clone(&worker)], index(2), None);
        let tokens = vec![5, 6];
        let block = StoredBlock { hash: EngineHash(1), tokens: tokens.clone(), opaque: false };
        let stored = KvEvent::Stored {
            parent: None,
            blocks: vec![block],
            adapter: None,
            salt: None,
            tier: Tier::Device,
        };
        pool.index().apply(worker_key(0), &stored);
        let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 2 };
        let mut hashes = Vec::new();
        chain_hashes(&namespace, HashSeed(1), &tokens, &mut hashes);
        let overlap = || {
            let seen = pool.candidates(Leg::Aggregated, &hashes, &[], Instant::now());
            seen[0].overlap_blocks
        };
        assert_eq!(overlap(), 0);
        worker.set_events_current(true);
        assert_eq!(overlap(), 1);
        worker.set_events_current(false);
        assert_eq!(overlap(), 0);
    }

    #[test]
    fn a_seed_makes_the_draws_repeatable() {
        let pool = |draw_seed| {
            let pool = Pool::new(Vec::new(), index(2), draw_seed);
            (0..4).map(|_| pool.draw()).collect::<Vec<_>>()
        };
        assert_eq!(pool(Some(7)), pool(Some(7)));
        assert_ne!(pool(Some(7)), pool(Some(8)));
        assert_ne!(pool(None), pool(None));
    }
}
