//! Blocks in slower tiers: what it costs to load what a worker holds in host memory, on disk or in
//! a store.
//!
//! A block that must be loaded costs its tier's time, but never more than computing it, and never
//! less than a block in a faster tier: a configured or learned order that says otherwise is not
//! believed. Slower tiers are assumed to have the later blocks of a prompt, because engines evict
//! those first.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_kv::Tier;

use crate::candidate::{Candidate, Query};
use crate::coefficients::Coefficients;

/// What a block that must be loaded costs, relative to a block that must be computed: from 0, as a
/// block in accelerator memory, to 1. A slower tier counts at least as much as a faster one.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct LoadWeights {
    /// The weight of a block in host memory.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub host: f64,
    /// The weight of a block on a local disk.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub disk: f64,
    /// The weight of a block in a store that is reached over the network.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub remote: f64,
}

impl Default for LoadWeights {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl LoadWeights {
    /// The weights without a configuration.
    pub const DEFAULT: Self = Self { host: 0.1, disk: 0.7, remote: 0.7 };

    /// The blocks that a candidate holds in slower tiers, each with the weight of its tier.
    pub(crate) fn weigh(&self, candidate: &Candidate) -> f64 {
        if holds_all_on_device(candidate) {
            return 0.0;
        }
        let weights = in_order([0.0, self.host, self.disk, self.remote]);
        let blocks = slower_blocks(candidate).into_iter().zip(weights);
        blocks.map(|(blocks, weight)| f64::from(blocks) * weight.min(1.0)).sum()
    }
}

/// Whether nothing must be loaded, which is the usual case.
#[inline]
fn holds_all_on_device(candidate: &Candidate) -> bool {
    let [_, host, disk, remote] = candidate.overlap_by_tier;
    (host | disk | remote) == 0
}

/// The believed blocks of a candidate by tier, without those in accelerator memory. What does not
/// count because of drift is missing from the slowest tiers: an engine drops blocks from them last.
fn slower_blocks(candidate: &Candidate) -> [u32; Tier::COUNT] {
    let mut blocks = candidate.overlap_by_tier;
    let slower: u32 = Tier::ALL[1..].iter().map(|tier| blocks[*tier as usize]).sum();
    let device = candidate.overlap_blocks.saturating_sub(slower);
    let mut left = candidate.believed_blocks().saturating_sub(device);
    blocks[Tier::Device as usize] = 0;
    for held in &mut blocks[1..] {
        *held = left.min(*held);
        left -= *held;
    }
    blocks
}

/// The costs of tiers, each raised to the largest of faster tiers.
fn in_order(mut costs: [f64; Tier::COUNT]) -> [f64; Tier::COUNT] {
    for tier in 1..Tier::COUNT {
        costs[tier] = costs[tier].max(costs[tier - 1]);
    }
    costs
}

/// Seconds to load what a candidate holds of a prompt in slower tiers. What is faster computed
/// counts as computed: with attention, those are the first tokens of a tier.
#[inline]
pub(crate) fn load_seconds(candidate: &Candidate, query: &Query) -> f64 {
    if holds_all_on_device(candidate) {
        return 0.0;
    }
    slower_seconds(candidate, query)
}

#[inline(never)]
fn slower_seconds(candidate: &Candidate, query: &Query) -> f64 {
    let costs = &candidate.coefficients;
    let blocks = slower_blocks(candidate);
    let believed = candidate.believed_blocks();
    let mut held = believed - blocks.iter().sum::<u32>().min(believed);
    let mut sum = 0.0;
    for (blocks, load) in blocks.into_iter().zip(in_order(costs.load_seconds_per_token())) {
        let begin = query.cached_tokens(held);
        held += blocks;
        let end = query.cached_tokens(held);
        // From this token on, computing a token takes longer than loading it.
        let dearer = (load - costs.prefill_seconds_per_token).max(0.0)
            / costs.prefill_seconds_per_token_pair.max(f64::MIN_POSITIVE);
        let loaded_from = (dearer as u64).clamp(begin, end);
        sum += costs.span_seconds(loaded_from - begin, begin) + load * (end - loaded_from) as f64;
    }
    sum
}

impl Coefficients {
    /// Seconds to load one token's KV from each tier; 0 from accelerator memory.
    pub(crate) fn load_seconds_per_token(&self) -> [f64; Tier::COUNT] {
        let mut seconds = [0.0; Tier::COUNT];
        for (seconds, bytes_per_second) in seconds[1..].iter_mut().zip(self.load_bytes_per_second) {
            *seconds = self.kv_bytes_per_token / bytes_per_second;
        }
        seconds
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{CandidateIndex, Leg, Policy, WorkerIndex, pick};

    fn query() -> Query {
        Query {
            leg: Leg::Prefill,
            prompt_tokens: 16_000,
            prompt_blocks: 32,
            first_blocks: [0; 2],
            block_size: 500,
            turn: 0,
            draw: 0,
        }
    }

    fn holding(number: u32, by_tier: [u32; Tier::COUNT]) -> Candidate {
        Candidate {
            worker: WorkerIndex(number),
            up: true,
            overlap_blocks: by_tier.iter().sum(),
            overlap_by_tier: by_tier,
            ..Candidate::default()
        }
    }

    fn overlap(load_weights: LoadWeights) -> Policy {
        let (overlap_weight, load_weight, temperature) = (1.0, 1.0, 0.0);
        Policy::KvOverlap { overlap_weight, load_weight, temperature, load_weights }
    }

    #[test]
    fn a_worker_is_chosen_that_holds_the_prefix_in_a_faster_tier() {
        let tiers = [[0, 0, 24, 0], [0, 24, 0, 0], [24, 0, 0, 0], [4, 0, 0, 0]];
        let all: Vec<_> = (0..).zip(tiers).map(|(i, tier)| holding(i, tier)).collect();
        for policy in [Policy::predicted_ttft(), overlap(LoadWeights::DEFAULT)] {
            let costs = pick(&policy, &all, &[], query()).unwrap().costs;
            assert!(costs[2] < costs[1] && costs[1] < costs[0] && costs[0] < costs[3], "{costs:?}");
        }
        // 12,000 tokens of 327,680 bytes, at 50 GB/s.
        let load_ms = pick(&Policy::predicted_ttft(), &all, &[], query()).unwrap().terms[1].load_ms;
        assert!((load_ms - 78.6432).abs() < 1e-6, "{load_ms}");
    }

    #[test]
    fn blocks_that_do_not_count_are_not_loaded() {
        let half = Candidate { overlap_discount: 0.5, ..holding(0, [4, 8, 4, 0]) };
        assert_eq!(slower_blocks(&half), [0, 4, 0, 0]);
    }

    proptest! {
        /// A block in a faster tier never costs more, and a block in any tier never more than
        /// computing it.
        #[test]
        fn faster_tiers_are_cheaper_and_all_are_cheaper_than_computing(
            by_tier in proptest::array::uniform4(0u32..8),
            rates in proptest::array::uniform3(0.1f64..100.0),
            weights in proptest::array::uniform3(0.0f64..1.0),
            (from, to) in (1usize..4, 0usize..4),
            discount in prop_oneof![Just(0.0), 0.0..1.0f64],
        ) {
            prop_assume!(to < from && by_tier[from] > 0);
            let of = |by_tier: [u32; Tier::COUNT]| {
                let mut candidate = holding(0, by_tier);
                candidate.overlap_discount = discount;
                candidate.coefficients.load_bytes_per_second = rates.map(|rate| rate * 1e9);
                candidate
            };
            let mut faster = by_tier;
            faster[from] -= 1;
            faster[to] += 1;
            let mut fewer = by_tier;
            fewer[from] -= 1;
            let [host, disk, remote] = weights;
            let overlap = overlap(LoadWeights { host, disk, remote });
            let price = Policy::PredictedTtft { extra_work_weight: Some(0.0), temperature: 0.0 };
            for policy in [overlap, price] {
                let cost = |by_tier| {
                    pick(&policy, &[of(by_tier)], &[], query()).unwrap().costs[CandidateIndex(0)]
                };
                let (slow, fast) = (cost(by_tier), cost(faster));
                prop_assert!(fast <= slow + 1e-9, "{by_tier:?} {slow} {fast}");
                if discount == 0.0 {
                    let none = cost(fewer);
                    prop_assert!(slow <= none + 1e-9, "{by_tier:?} {slow} {none}");
                }
            }
        }
    }
}
