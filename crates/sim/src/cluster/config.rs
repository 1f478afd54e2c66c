//! What the cluster is made of.

use super::cost::CostModel;

/// When a prompt's blocks can be found in the cache of the worker that computes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InsertAt {
    /// When they are started to be computed.
    Start,
    /// When its prefill is done.
    #[default]
    End,
}

/// Who holds the caches, and who takes the next request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pool {
    /// Each worker has its own queue and cache: the only one that a router can serve.
    #[default]
    Separate,
    /// One queue, one least-recently-used cache of the workers' total size: a reference.
    SharedLru,
    /// The same with a cache that knows the future: a reference.
    SharedClairvoyant,
    /// The same, and the shortest prefill is served first: a reference.
    SharedShortestFirst,
}

/// A cluster. [`Default`] is the reference model with eight prefill and four decode workers.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterConfig {
    /// Prefill workers; at least 1.
    pub prefill_workers: usize,
    /// Decode workers; at least 1.
    pub decode_workers: usize,
    /// What things cost.
    pub cost: CostModel,
    /// How much longer than the model says each prefill worker takes; 1 for those not named.
    pub prefill_slowness: Vec<f64>,
    /// Blocks in each prefill worker's cache; `usize::MAX` for no bound.
    pub prefill_cache_blocks: usize,
    /// Blocks in each decode worker's cache of prompts; 0 for none.
    pub decode_cache_blocks: usize,
    /// When computed blocks can be found.
    pub insert_at: InsertAt,
    /// Tokens that one prefill iteration packs; `None`: one whole request at a time.
    pub budget_tokens: Option<u32>,
    /// A request is refused where the chosen worker has so many waiting.
    pub max_queue: Option<usize>,
    /// Tokens that a local prefill advances in one decode step; 0: all that remain.
    pub chunk_tokens: u32,
    /// How much of the shorter of a step's decode and prefill parts adds to the longer one:
    /// 0 where they overlap fully, 1 where one waits for the other.
    pub interference: f64,
    /// Tokens of KV that a decode worker can hold.
    pub kv_capacity_tokens: u64,
    /// Requests that a decode worker can have at once.
    pub max_batch: u32,
    /// Whether transfers wait for each other where they share a sender or a receiver.
    pub contention: bool,
    /// Who holds the caches.
    pub pool: Pool,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            prefill_workers: 8,
            decode_workers: 4,
            cost: CostModel::default(),
            prefill_slowness: Vec::new(),
            prefill_cache_blocks: 10_000,
            decode_cache_blocks: 0,
            insert_at: InsertAt::End,
            budget_tokens: None,
            max_queue: None,
            chunk_tokens: 0,
            interference: 1.0,
            kv_capacity_tokens: 1_300_000,
            max_batch: 256,
            contention: false,
            pool: Pool::Separate,
        }
    }
}
