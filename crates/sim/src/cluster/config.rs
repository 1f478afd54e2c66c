//! The settings of a cluster.

use serde::Deserialize;

use super::cost::CostModel;

/// When a prompt's blocks become available in the cache of the worker that computes them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum InsertAt {
    /// When their computation starts.
    Start,
    /// When the prompt's prefill has ended.
    #[default]
    End,
}

/// How caches and queues are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pool {
    /// Each worker has its own queue and cache: the only kind that a router can serve.
    #[default]
    Separate,
    /// One queue, one least-recently-used cache of the workers' total size: a reference.
    SharedLru,
    /// Like [`SharedLru`](Self::SharedLru), with a cache that knows the future: a reference.
    SharedClairvoyant,
    /// Like [`SharedClairvoyant`](Self::SharedClairvoyant), and the shortest prefill is served
    /// first: a reference.
    SharedShortestFirst,
}

/// The settings of a cluster. [`Default`] is the reference model with eight prefill and four decode
/// workers.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterConfig {
    /// Number of prefill workers; at least 1.
    pub prefill_workers: usize,
    /// Number of decode workers; at least 1.
    pub decode_workers: usize,
    /// The durations of prefills, decode steps and transfers.
    pub cost: CostModel,
    /// Factor by which each prefill worker is slower than the model; 1 for further workers.
    pub prefill_slowness: Vec<f64>,
    /// Number of blocks in each prefill worker's cache; `usize::MAX` for no bound.
    pub prefill_cache_blocks: usize,
    /// Number of blocks in each decode worker's cache of prompts; 0 for none.
    pub decode_cache_blocks: usize,
    /// When computed blocks become available.
    pub insert_at: InsertAt,
    /// Maximum tokens of one prefill iteration; `None`: one whole request at a time.
    pub budget_tokens: Option<u32>,
    /// A request is refused if this many requests wait at the chosen worker.
    pub max_queue: Option<usize>,
    /// A decode worker that holds at least this share of a prompt's blocks computes the rest itself:
    /// no router is asked.
    pub local_threshold: Option<f64>,
    /// Tokens by which a local prefill advances in one decode step; 0: all remaining ones.
    pub chunk_tokens: u32,
    /// How much of the shorter of a step's decode and prefill parts adds to the longer one: 0 if
    /// they overlap fully, 1 if they run one after the other.
    pub interference: f64,
    /// Maximum tokens of KV that a decode worker can hold.
    pub kv_capacity_tokens: u64,
    /// Maximum number of requests at a decode worker.
    pub max_batch: u32,
    /// Whether transfers with a common sender or receiver wait for each other.
    pub contention: bool,
    /// How caches and queues are divided.
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
            local_threshold: None,
            chunk_tokens: 0,
            interference: 1.0,
            kv_capacity_tokens: 1_300_000,
            max_batch: 256,
            contention: false,
            pool: Pool::Separate,
        }
    }
}
