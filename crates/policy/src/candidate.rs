//! The inputs of a decision: the state of each worker that a leg could be sent to.

use splitrail_kv::Tier;

use crate::coefficients::Coefficients;
use crate::index::WorkerIndex;

/// What is known of one worker at the instant of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The worker's number in the roster of its model.
    pub worker: WorkerIndex,
    /// The data-parallel rank that the request would be pinned to: each is a candidate of its
    /// own, with its own cache and queue. `None` where the worker has one, or chooses itself.
    pub rank: Option<u16>,
    /// Whether its last probe or request found it alive, and its breaker lets it be asked.
    pub up: bool,
    /// Whether it has as much as it should, so that others are asked first.
    pub busy: bool,
    /// How much of its share of new work it gets, above 0 and up to 1: less than 1 while it
    /// starts slowly.
    pub share: f64,
    /// Requests that it works on: the router's own bookings and what its shim says that
    /// others sent, or the engine's count of running and waiting ones if that is more.
    pub requests: u32,
    /// Prompt tokens that it still has to compute, by the same words.
    pub prefill_tokens: u64,
    /// Tokens of prompts whose requests it holds, by the same words.
    pub active_tokens: u64,
    /// Leading blocks of this prompt that it holds, confirmed by its events.
    pub overlap_blocks: u32,
    /// The same blocks by the fastest tier that has them (`Tier as usize`).
    pub overlap_by_tier: [u32; Tier::COUNT],
    /// The share of the overlap that does not count, from 0 to 1, since the worker was seen to
    /// find less than the index promised.
    pub overlap_discount: f64,
    /// Leading blocks that it is assumed to hold, the believed ones at least: what was sent
    /// there lately counts as well. It steers, and proves nothing.
    pub assumed_blocks: u32,
    /// Those of them that were sent moments ago and are not confirmed: another prompt has
    /// them computed, and so they are in the worker's queue.
    pub underway_blocks: u32,
    /// Leading blocks of prompts that were routed to it of late, by whoever remembers that
    /// and no more: an index of guesses.
    pub recent_blocks: u32,
    /// Requests among `requests` that it has not begun.
    pub waiting: u32,
    /// Predicted time until it could begin one more request: what is left of the work under
    /// way, and the estimates of what waits.
    pub wait_ns: u64,
    /// The share of the last minute, from 0 to 1, in which it computed prompts: what
    /// [`BusyShare`](crate::learn::BusyShare) says.
    pub busy_share: f64,
    /// What its work costs.
    pub coefficients: Coefficients,
}

/// A worker in full service that is not up and has nothing.
impl Default for Candidate {
    fn default() -> Self {
        Self {
            worker: WorkerIndex::default(),
            rank: None,
            up: false,
            busy: false,
            share: 1.0,
            requests: 0,
            prefill_tokens: 0,
            active_tokens: 0,
            overlap_blocks: 0,
            overlap_by_tier: [0; Tier::COUNT],
            overlap_discount: 0.0,
            assumed_blocks: 0,
            underway_blocks: 0,
            recent_blocks: 0,
            waiting: 0,
            wait_ns: 0,
            busy_share: 0.0,
            coefficients: Coefficients::default(),
        }
    }
}

impl Candidate {
    /// Leading blocks of its overlap that count.
    pub fn believed_blocks(&self) -> u32 {
        let share = (1.0 - self.overlap_discount).clamp(0.0, 1.0);
        (f64::from(self.overlap_blocks) * share) as u32
    }

    /// Leading blocks of a prompt that it will not compute: those that it is believed to hold,
    /// and those that requests before this one leave there.
    pub fn held_blocks(&self) -> u32 {
        self.believed_blocks().max(self.assumed_blocks)
    }
}

/// Which part of a request is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    /// Only the prompt is computed.
    Prefill,
    /// Only generation; the prompt's KV is handed over.
    Decode,
    /// Both.
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

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// The part to place.
    pub leg: Leg,
    /// The prompt's length, or what it weighs where its tokens are not known.
    pub prompt_tokens: u64,
    /// Full blocks of the prompt; 0 if its tokens are not known.
    pub prompt_blocks: u32,
    /// Names of its first two blocks, as far as there are any; `prompt_blocks` says how many.
    pub first_blocks: [u64; 2],
    /// Tokens per block.
    pub block_size: u32,
    /// How many picks came before, for `round_robin`.
    pub turn: u64,
    /// Even random bits, for draws and ties.
    pub draw: u64,
}

impl Query {
    /// Tokens of the prompt in so many leading blocks. The last token is always computed: an
    /// engine needs its output.
    pub fn cached_tokens(&self, blocks: u32) -> u64 {
        let tokens = u64::from(blocks) * u64::from(self.block_size);
        tokens.min(self.prompt_tokens.saturating_sub(1))
    }
}
