//! The inputs of a decision: the state of each worker that a leg could be sent to.

use splitrail_kv::{PromptSharing, Tier};

use crate::coefficients::Coefficients;
use crate::index::WorkerIndex;
use crate::kv_format::KvFormat;

/// The room in a worker's KV cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvRoom {
    /// Tokens for which there is room now; `u64::MAX` if that is not known.
    pub free_tokens: u64,
    /// Tokens of the requests that use the rest.
    pub used_tokens: u64,
    /// The usual time for which a request keeps its tokens, in seconds.
    pub kept_seconds: f64,
}

impl Default for KvRoom {
    fn default() -> Self {
        Self { free_tokens: u64::MAX, used_tokens: 0, kept_seconds: 0.0 }
    }
}

impl KvRoom {
    /// The predicted seconds until there is room for so many tokens: running requests end one after
    /// another.
    pub fn wait_seconds(&self, tokens: u64) -> f64 {
        let lacking = tokens.saturating_sub(self.free_tokens);
        if lacking == 0 {
            return 0.0;
        }
        self.kept_seconds * (lacking as f64 / self.used_tokens.max(1) as f64).min(1.0)
    }
}

/// The state of one worker, or of one of its ranks, at the time of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The worker's number in the roster of its model.
    pub worker: WorkerIndex,
    /// The data-parallel rank to which the request would be pinned. Each rank is a candidate of its
    /// own, with its own cache and queue. `None` if the worker has one rank or chooses the rank
    /// itself.
    pub rank: Option<u16>,
    /// Whether the last probe or request succeeded and the circuit breaker allows requests.
    pub up: bool,
    /// Whether the worker is saturated, so that other workers are preferred.
    pub busy: bool,
    /// The part of its normal share of requests that the worker gets, above 0 and up to 1; less
    /// than 1 during slow start.
    pub share: f64,
    /// Whether workers of another transfer group have joined lately, so that this one is probably going
    /// to be replaced, together with what it holds.
    pub is_outgoing: bool,
    /// Requests that the worker works on: the router's own bookings plus the requests of others
    /// that its shim reports, or the engine's count of running and waiting requests if that is
    /// larger.
    pub requests: u32,
    /// Prompt tokens that the worker still has to compute, from the same sources.
    pub prefill_tokens: u64,
    /// Prompt tokens of all requests on the worker, from the same sources.
    pub active_tokens: u64,
    /// Leading blocks of this prompt that the worker holds and can use, confirmed by its events.
    pub overlap_blocks: u32,
    /// Leading blocks of this prompt that a worker with several cache groups holds in full attention,
    /// or is about to hold. Without a resume point it does not use those beyond the overlap.
    pub spine_blocks: u32,
    /// The same blocks by the fastest tier that has them (`Tier as usize`).
    pub overlap_by_tier: [u32; Tier::COUNT],
    /// The overlap in blocks if the worker's engine did the opposite with the last block of a hit, which
    /// is learned from such differences.
    pub overlap_otherwise: u32,
    /// The share of the overlap, from 0 to 1, that does not count because the worker has found
    /// fewer blocks than the index said (drift).
    pub overlap_discount: f64,
    /// Leading blocks of the speculative index: at least the blocks that count as confirmed, plus
    /// blocks of prompts that were lately sent to the worker. They influence the choice and prove
    /// nothing.
    pub speculative_blocks: u32,
    /// The part of these blocks that was sent very recently and is not confirmed: another prompt
    /// computes them, so they are in the worker's queue.
    pub underway_blocks: u32,
    /// Requests among `requests` that the worker has not begun.
    pub waiting: u32,
    /// The predicted time until the worker could begin one more request: the rest of the present
    /// work and the estimates for waiting requests.
    pub wait_ns: u64,
    /// The room in the worker's KV cache.
    pub kv_room: KvRoom,
    /// The share of the last minute, from 0 to 1, in which the worker computed prompts; see
    /// [`BusyShare`](crate::learn::BusyShare).
    pub busy_share: f64,
    /// Whether the worker can fetch a prefix from another worker now: its engine and the connector
    /// can, and it does not fetch as much as it may already.
    pub can_fetch: bool,
    /// The least number of prompt tokens that a fetch must bring.
    pub fetch_min_tokens: u32,
    /// Within which time from the decision a prefill leg on the worker must have computed its prompt
    /// if it takes a prefix by itself (one shot); 0 if it cannot.
    pub one_shot_within_ns: u64,
    /// The predicted time until a transfer to the worker could begin: earlier transfers on its
    /// incoming link.
    pub link_wait_ns: u64,
    /// Leading blocks of the prompt that the worker can read back from a decode worker, which keeps
    /// them for one reader; 0 if there are none.
    pub readable_blocks: u32,
    /// Which of the kept KV that is: two requests cannot read the same.
    pub readable_pin: u64,
    /// The share of the worker's KV cache, from 0 to 1, that has blocks of any prompt; 0 if that is not
    /// known.
    pub cache_fill: f64,
    /// How the worker's engine stores KV.
    pub kv_format: KvFormat,
    /// The coefficients of the worker's cost model.
    pub coefficients: Coefficients,
}

/// A worker that is not up, with its full share, no load and no blocks.
impl Default for Candidate {
    fn default() -> Self {
        Self {
            worker: WorkerIndex::default(),
            rank: None,
            up: false,
            busy: false,
            share: 1.0,
            is_outgoing: false,
            requests: 0,
            prefill_tokens: 0,
            active_tokens: 0,
            overlap_blocks: 0,
            spine_blocks: 0,
            overlap_by_tier: [0; Tier::COUNT],
            overlap_otherwise: 0,
            overlap_discount: 0.0,
            speculative_blocks: 0,
            underway_blocks: 0,
            waiting: 0,
            wait_ns: 0,
            kv_room: KvRoom::default(),
            busy_share: 0.0,
            can_fetch: false,
            fetch_min_tokens: 0,
            one_shot_within_ns: 0,
            link_wait_ns: 0,
            readable_blocks: 0,
            readable_pin: 0,
            cache_fill: 0.0,
            kv_format: KvFormat::default(),
            coefficients: Coefficients::default(),
        }
    }
}

impl Candidate {
    /// The leading blocks of the overlap that count.
    pub fn believed_blocks(&self) -> u32 {
        let share = (1.0 - self.overlap_discount).clamp(0.0, 1.0);
        (f64::from(self.overlap_blocks) * share) as u32
    }

    /// Leading blocks of a prompt that the worker will not compute: blocks that count as confirmed,
    /// and blocks that earlier requests leave there.
    pub fn held_blocks(&self) -> u32 {
        self.believed_blocks().max(self.speculative_blocks)
    }

    /// Leading blocks of a prompt that the worker holds in full attention and will compute
    /// nevertheless, because it has no resume point there.
    pub(crate) fn unresumable_blocks(&self) -> u32 {
        self.spine_blocks.saturating_sub(self.held_blocks())
    }
}

/// The share of the work for a prefix without a resume point that is not counted as a cost where full
/// attention holds the prefix: the prompt that computes it there stores the resume point, which later
/// prompts use. Of 300 requests with shared prefixes on four of vLLM's schedulers with the layout of
/// gpt-oss, engines took 0.675 of the tokens from their caches without such a share, 0.729 with it and
/// 0.250 by load alone.
pub(crate) const RESUME_CREDIT: f64 = 0.25;

/// The part of a request that is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    /// The prompt is computed for another worker.
    Prefill,
    /// The reply is generated; the prompt's KV is handed over.
    Decode,
    /// One worker computes the prompt and generates the reply.
    Aggregated,
}

impl Leg {
    /// The name used in metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Aggregated => "aggregated",
        }
    }
}

/// The properties of the leg that is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// The leg to place.
    pub leg: Leg,
    /// The length of the prompt, or an estimate if its tokens are not known.
    pub prompt_tokens: u64,
    /// Full blocks of the prompt; 0 if its tokens are not known.
    pub prompt_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// The number of earlier choices, for `round_robin`.
    pub turn: u64,
    /// Uniformly distributed random bits, for draws and ties.
    pub draw: u64,
    /// What the prompt has in common with recent conversations.
    pub sharing: PromptSharing,
}

impl Query {
    /// The number of tokens that `blocks` leading blocks save. The last token is always computed,
    /// because an engine needs its output.
    pub fn cached_tokens(&self, blocks: u32) -> u64 {
        let tokens = u64::from(blocks) * u64::from(self.block_size);
        tokens.min(self.prompt_tokens.saturating_sub(1))
    }
}
