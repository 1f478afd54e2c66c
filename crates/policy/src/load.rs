//! Blocks in slower tiers: what it costs to load what a worker holds in host memory, on disk or in
//! a store.
//!
//! A block that must be loaded costs its tier's time, but never more than computing it, and never
//! less than a block in a faster tier: a configured or learned order that says otherwise is not
//! believed. Slower tiers are assumed to have the later blocks of a prompt, because engines evict
//! those first.

use splitrail_kv::Tier;

use crate::candidate::{Candidate, Query};
use crate::coefficients::Coefficients;

/// What a candidate holds in slower tiers, as blocks to compute: each block counts as much as loading it
/// takes of the time to compute it, on average over a prompt, and at most 1.
pub(crate) fn blocks_to_load(candidate: &Candidate, query: &Query) -> f64 {
    if holds_all_on_device(candidate) {
        return 0.0;
    }
    let costs = &candidate.coefficients;
    let tokens = query.prompt_tokens.max(1);
    let compute = costs.span_seconds(tokens, 0) / tokens as f64;
    let loads = in_order(costs.load_seconds_per_token());
    let blocks = slower_blocks(candidate).into_iter().zip(loads);
    let weight = |load: f64| (load / compute.max(f64::MIN_POSITIVE)).min(1.0);
    blocks.map(|(blocks, load)| f64::from(blocks) * weight(load)).sum()
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

/// The leading blocks of a prompt that a worker can send, by the tiers that it has to load them from:
/// for each tier, the blocks up to there and the seconds to load those in slower tiers. `by_tier` are
/// the blocks that it holds.
pub fn loads(
    by_tier: [u32; Tier::COUNT],
    costs: &Coefficients,
    block_size: u32,
) -> impl Iterator<Item = (u32, f64)> {
    let (mut blocks, mut seconds) = (0, 0.0);
    let tiers = by_tier.into_iter().zip(in_order(costs.load_seconds_per_token()));
    let tiers = tiers.filter(|(more, _)| *more > 0);
    tiers.map(move |(more, load)| {
        blocks += more;
        seconds += load * f64::from(more) * f64::from(block_size);
        (blocks, seconds)
    })
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
            block_size: 500,
            turn: 0,
            draw: 0,
            sharing: Default::default(),
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

    const OVERLAP: Policy =
        Policy::KvOverlap { overlap_weight: 1.0, load_weight: 1.0, temperature: 0.0 };

    #[test]
    fn a_worker_is_chosen_that_holds_the_prefix_in_a_faster_tier() {
        let tiers = [[0, 0, 24, 0], [0, 24, 0, 0], [24, 0, 0, 0], [4, 0, 0, 0]];
        let all: Vec<_> = (0..).zip(tiers).map(|(i, tier)| holding(i, tier)).collect();
        for policy in [Policy::predicted_ttft(), OVERLAP] {
            let costs = pick(&policy, &all, &[], query()).unwrap().costs;
            assert!(costs[2] < costs[1] && costs[1] < costs[0] && costs[0] < costs[3], "{costs:?}");
        }
        // 12,000 tokens of 327,680 bytes, at 50 GB/s.
        let load_ms = pick(&Policy::predicted_ttft(), &all, &[], query()).unwrap().terms[1].load_ms;
        assert!((load_ms - 78.6432).abs() < 1e-6, "{load_ms}");
    }

    #[test]
    fn what_was_learned_of_a_worker_s_tiers_counts() {
        let with = |bytes_per_second: f64| {
            let mut slow = holding(0, [0, 24, 0, 0]);
            slow.coefficients.load_bytes_per_second = [bytes_per_second; 3];
            [slow, holding(1, [12, 0, 0, 0])]
        };
        let chosen =
            |bytes_per_second| pick(&OVERLAP, &with(bytes_per_second), &[], query()).unwrap().index;
        assert_eq!(chosen(50e9), CandidateIndex(0));
        assert_eq!(chosen(1e9), CandidateIndex(1), "loading takes as long");
    }

    #[test]
    fn blocks_that_a_source_must_load_are_counted_up_to_each_tier() {
        let costs = Coefficients { load_bytes_per_second: [1e9, 2e9, 1e8], ..Default::default() };
        let costs = Coefficients { kv_bytes_per_token: 1e6, ..costs };
        let all: Vec<_> = loads([4, 2, 1, 1], &costs, 10).collect();
        // The disk is not faster than host memory.
        assert_eq!(all.iter().map(|(blocks, _)| *blocks).collect::<Vec<_>>(), [4, 6, 7, 8]);
        let seconds: Vec<_> = all.iter().map(|(_, seconds)| (seconds * 1e3).round()).collect();
        assert_eq!(seconds, [0.0, 20.0, 30.0, 130.0]);
        assert_eq!(loads([0; Tier::COUNT], &costs, 10).count(), 0);
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
            let price = Policy::PredictedTtft { extra_work_weight: Some(0.0), temperature: 0.0 };
            for policy in [OVERLAP, price] {
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
