//! Reading back: what of a prompt a prefill worker reads from the decode worker that keeps it, and
//! whether that is cheaper than computing it.
//!
//! ```text
//! read    read_ratio x hand-off(tokens that the worker does not hold)
//! cost    wait + read + prefill(the rest) + price x (work(the rest) + read)
//! ```
//!
//! A read is a hand-off in the other direction. It begins when the worker begins the prompt, so no
//! wait hides it, and the worker computes nothing meanwhile: time of reading is priced like work.
//! Wait and price are then the same with and without the read, and it pays if it is shorter than the
//! computing that it replaces. Each further token is as long to read and longer to compute, so either
//! all readable blocks are worth reading or none.

use crate::candidate::{Candidate, Query};
use crate::coefficients::Coefficients;

/// Engines compute a remainder that is shorter than this (vLLM's `kv_recompute_threshold`), so they
/// read only this number of tokens or more.
pub(crate) const READ_MIN_TOKENS: u64 = 64;

/// A part of a prompt that a worker reads back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadPlan {
    /// The number of leading blocks that the worker holds after the read.
    pub blocks: u32,
    /// The number of tokens that are read: what the worker does not hold before.
    pub tokens: u64,
    /// The predicted time of the read in seconds.
    pub seconds: f64,
}

/// The leading part of a prompt that a worker need not compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AvailablePrefix {
    /// The number of leading blocks: those that the worker will hold when it begins, and those that
    /// it reads.
    pub blocks: u32,
    /// The number of tokens that it reads.
    pub read_tokens: u64,
    /// The predicted time of the read in seconds.
    pub read_seconds: f64,
}

/// What a worker that holds `held_blocks` leading blocks of a prompt would read, if `readable_blocks`
/// are kept for it. `None` if computing is as cheap, or if there is too little to read.
#[inline]
pub fn read_plan(
    costs: &Coefficients,
    query: &Query,
    held_blocks: u32,
    readable_blocks: u32,
) -> Option<ReadPlan> {
    if readable_blocks <= held_blocks {
        return None;
    }
    cheaper(costs, query, held_blocks, readable_blocks)
}

#[inline(never)]
fn cheaper(costs: &Coefficients, query: &Query, held: u32, blocks: u32) -> Option<ReadPlan> {
    let tokens = u64::from(blocks - held) * u64::from(query.block_size);
    let seconds = costs.read_seconds(tokens);
    let computing = |held| costs.prefill_seconds(query.prompt_tokens, query.cached_tokens(held));
    let pays = tokens >= READ_MIN_TOKENS && seconds < computing(held) - computing(blocks);
    pays.then_some(ReadPlan { blocks, tokens, seconds })
}

impl Candidate {
    /// The part of a prompt that the worker need not compute if it holds `held_blocks` leading blocks.
    #[inline]
    pub fn available_prefix(&self, query: &Query, held_blocks: u32) -> AvailablePrefix {
        match read_plan(&self.coefficients, query, held_blocks, self.readable_blocks) {
            None => AvailablePrefix { blocks: held_blocks, ..AvailablePrefix::default() },
            Some(ReadPlan { blocks, tokens, seconds }) => {
                AvailablePrefix { blocks, read_tokens: tokens, read_seconds: seconds }
            }
        }
    }
}

impl Coefficients {
    /// Seconds to read the KV of `tokens` tokens back.
    pub fn read_seconds(&self, tokens: u64) -> f64 {
        self.read_ratio * self.hand_off_seconds(tokens)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
