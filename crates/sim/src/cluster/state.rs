//! The state of the cluster at one time, and the part that routers can read.

use std::collections::VecDeque;

use super::cache::Cache;
use super::clairvoyant::Clairvoyant;
use super::config::{ClusterConfig, Pool};
use super::decode::DecodeWorker;
use super::events::Events;
use super::links::Links;
use super::lru::Lru;
use super::outcome::RequestResult;
use super::prefill::PrefillWorker;
use super::router::Peer;
use super::workload::Workload;

/// The whole cluster. A [`Router`](super::Router) reads it through these methods.
#[derive(Debug)]
pub struct Cluster<'a> {
    pub(super) workload: &'a Workload,
    pub(super) config: &'a ClusterConfig,
    pub(super) now_ns: u64,
    pub(super) rows: Vec<RequestResult>,
    pub(super) events: Events,
    pub(super) prefill: Vec<PrefillWorker>,
    /// One cache per prefill worker, or one for all.
    pub(super) caches: Vec<Cache>,
    /// The common queue of a pool's workers.
    pub(super) shared_queue: VecDeque<usize>,
    pub(super) decode: Vec<DecodeWorker>,
    pub(super) links: Links,
    /// When the router will be called next.
    pub(super) router_due_ns: Option<u64>,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(workload: &'a Workload, config: &'a ClusterConfig) -> Self {
        let (prefill, decode) = (config.prefill_workers.max(1), config.decode_workers.max(1));
        let distinct = workload.distinct_blocks();
        let each = config.prefill_cache_blocks;
        let shared = each.saturating_mul(prefill);
        let caches = match config.pool {
            Pool::Separate => (0..prefill).map(|_| Cache::Lru(Lru::new(distinct, each))).collect(),
            Pool::SharedLru => vec![Cache::Lru(Lru::new(distinct, shared))],
            Pool::SharedClairvoyant | Pool::SharedShortestFirst => {
                vec![Cache::Clairvoyant(Clairvoyant::new(workload, shared))]
            }
        };
        let decode_cache = || Lru::new(distinct, config.decode_cache_blocks);
        Self {
            workload,
            config,
            now_ns: 0,
            rows: vec![RequestResult::default(); workload.requests().len()],
            events: Events::default(),
            prefill: (0..prefill).map(|_| PrefillWorker::default()).collect(),
            caches,
            shared_queue: VecDeque::new(),
            decode: (0..decode).map(|_| DecodeWorker::new(decode_cache())).collect(),
            links: Links::new(prefill, decode),
            router_due_ns: None,
        }
    }

    /// The trace.
    pub fn workload(&self) -> &'a Workload {
        self.workload
    }

    /// The settings of the cluster.
    pub fn config(&self) -> &'a ClusterConfig {
        self.config
    }

    /// The current time, from the first arrival.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The results of a request so far.
    pub fn row(&self, request: usize) -> &RequestResult {
        &self.rows[request]
    }

    /// Number of prefill workers.
    pub fn prefill_workers(&self) -> usize {
        self.prefill.len()
    }

    /// Number of decode workers.
    pub fn decode_workers(&self) -> usize {
        self.decode.len()
    }

    /// Number of leading blocks of a request that a prefill worker's cache holds now.
    pub fn overlap_blocks(&self, worker: usize, request: usize) -> u32 {
        self.cache(worker).leading(self.workload.blocks(request))
    }

    /// The cache that a prefill worker uses.
    pub fn cache(&self, worker: usize) -> &Cache {
        &self.caches[worker.min(self.caches.len() - 1)]
    }

    /// The share of a prefill worker's cache, from 0 to 1, that has blocks.
    pub fn cache_fill(&self, worker: usize) -> f64 {
        self.cache(worker).fill()
    }

    /// Number of requests at a prefill worker whose prefill has not ended.
    pub fn outstanding_requests(&self, worker: usize) -> u32 {
        self.prefill[worker].outstanding_requests
    }

    /// Input tokens of these requests.
    pub fn outstanding_tokens(&self, worker: usize) -> u64 {
        self.prefill[worker].outstanding_tokens
    }

    /// Number of these requests that have not started.
    pub fn waiting_requests(&self, worker: usize) -> usize {
        self.prefill[worker].waiting.len()
    }

    /// Remaining time of its running iteration; 0 if there is none.
    pub fn running_left_ns(&self, worker: usize) -> u64 {
        self.prefill[worker].busy_until_ns.map_or(0, |end| end - self.now_ns)
    }

    /// Time until a worker's link is free to send.
    pub fn outgoing_wait_ns(&self, peer: Peer) -> u64 {
        self.links.outgoing_free_ns(peer).saturating_sub(self.now_ns)
    }

    /// Time until a worker's link is free to receive.
    pub fn incoming_wait_ns(&self, peer: Peer) -> u64 {
        self.links.incoming_free_ns(peer).saturating_sub(self.now_ns)
    }

    /// Number of leading blocks of a request that a worker's cache holds now.
    pub fn peer_overlap_blocks(&self, peer: Peer, request: usize) -> u32 {
        match peer {
            Peer::Prefill(worker) => self.overlap_blocks(worker, request),
            Peer::Decode(worker) => self.decode_overlap_blocks(worker, request),
        }
    }

    /// Number of leading blocks of a request that a decode worker's cache holds now.
    pub fn decode_overlap_blocks(&self, worker: usize, request: usize) -> u32 {
        self.decode[worker].cache.leading(self.workload.blocks(request))
    }

    /// Number of requests in a decode worker's batch, and their tokens.
    pub fn decode_batch(&self, worker: usize) -> (u32, u64) {
        (self.decode[worker].batch, self.decode[worker].context_tokens)
    }

    /// The decode worker with the least load; the first of several.
    pub fn least_loaded_decode_worker(&self) -> usize {
        let loads = self.decode.iter().map(DecodeWorker::load_tokens);
        loads.enumerate().min_by_key(|(_, load)| *load).map_or(0, |(worker, _)| worker)
    }

    /// The decode worker that holds most of a request's prompt, and the number of leading blocks;
    /// of several the one with the least load, and of these the first.
    pub fn best_decode_holder(&self, request: usize) -> (usize, u32) {
        let blocks = self.workload.blocks(request);
        let mut best = (0, 0, u64::MAX);
        for (worker, decode) in self.decode.iter().enumerate() {
            let (hits, load) = (decode.cache.leading(blocks), decode.load_tokens());
            if hits > best.1 || (hits == best.1 && load < best.2) {
                best = (worker, hits, load);
            }
        }
        (best.0, best.1)
    }
}
