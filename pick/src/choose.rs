//! The choice of a worker for a leg.

use crate::candidate::{Candidate, Leg, Query};
use crate::policy::Policy;

/// A choice with its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The place of the chosen one among the candidates given.
    pub index: usize,
    /// Every candidate's cost under the policy, in the order given; lower is better.
    pub costs: Vec<f64>,
    /// The most overlap that any candidate had.
    pub best_overlap_blocks: u32,
}

/// Picks one of the candidates; `None` if there are none.
///
/// Workers that are down are considered only where all are: a real attempt then
/// gives the client the real error.
pub fn pick(policy: &Policy, candidates: &[Candidate], query: Query) -> Option<Choice> {
    let any_up = candidates.iter().any(|candidate| candidate.up);
    let mut eligible: Vec<usize> =
        (0..candidates.len()).filter(|i| candidates[*i].up || !any_up).collect();
    spare_the_slow(&mut eligible, candidates, query.draw);
    if eligible.is_empty() {
        return None;
    }
    let costs: Vec<f64> = candidates.iter().map(|c| cost(policy, c, query)).collect();
    let index = match policy {
        Policy::RoundRobin {} => eligible[(query.turn % eligible.len() as u64) as usize],
        Policy::Random {} => eligible[(query.draw % eligible.len() as u64) as usize],
        Policy::KvOverlap { temperature, .. } if *temperature > 0.0 => {
            softmax(&eligible, &costs, *temperature, query.draw)
        }
        Policy::KvOverlap { .. } | Policy::LeastLoaded {} => {
            cheapest(&eligible, candidates, &costs, query.draw)
        }
    };
    let best_overlap_blocks =
        eligible.iter().map(|i| candidates[*i].overlap_blocks).max().unwrap_or(0);
    Some(Choice { index, costs, best_overlap_blocks })
}

/// Leaves those out whose share is less than the largest, in as many of all draws as it is
/// less. Who holds some of the prompt is not cold, and stays.
fn spare_the_slow(eligible: &mut Vec<usize>, candidates: &[Candidate], draw: u64) {
    let largest = eligible.iter().map(|i| candidates[*i].share).fold(0.0, f64::max);
    eligible.retain(|i| {
        let Candidate { share, worker, overlap_blocks, .. } = candidates[*i];
        share >= largest || overlap_blocks > 0 || even(draw, worker) * largest < share
    });
}

/// An even fraction in [0, 1) for each draw and worker.
fn even(draw: u64, worker: usize) -> f64 {
    let bits = mix(draw ^ (worker as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The finalizer of SplitMix64: numbers that differ a little become numbers that have nothing
/// in common.
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Keeps the live candidates that hold at least so many blocks; where none does, those
/// that hold most.
pub fn holders(candidates: &mut Vec<Candidate>, blocks: u32) {
    let up = |candidate: &&Candidate| candidate.up;
    let most = candidates.iter().filter(up).map(Candidate::believed_blocks).max();
    let least = most.unwrap_or(0).min(blocks);
    let any_up = most.is_some();
    candidates
        .retain(|candidate| (candidate.up || !any_up) && candidate.believed_blocks() >= least);
}

/// A candidate's cost in blocks (`kv_overlap`) or tokens (`least_loaded`).
fn cost(policy: &Policy, candidate: &Candidate, query: Query) -> f64 {
    let queued_tokens = |prefill_tokens: u64| match query.leg {
        Leg::Prefill => prefill_tokens,
        Leg::Decode => candidate.active_tokens,
        Leg::Aggregated => prefill_tokens.saturating_add(candidate.active_tokens),
    } as f64;
    match policy {
        Policy::KvOverlap { overlap_weight, load_weight, .. } => {
            let held = candidate.believed_blocks().max(candidate.assumed_blocks);
            let missing = query.prompt_blocks.saturating_sub(held);
            // The part of the queue that is this very prompt's is computed once for all: to
            // wait for it is no dearer than to compute it elsewhere, and wastes nothing.
            let shared = u64::from(candidate.underway_blocks) * u64::from(query.block_size);
            let queued_tokens = queued_tokens(candidate.prefill_tokens.saturating_sub(shared));
            overlap_weight * f64::from(missing)
                + load_weight * queued_tokens / f64::from(query.block_size.max(1))
        }
        Policy::LeastLoaded {} => queued_tokens(candidate.prefill_tokens),
        Policy::RoundRobin {} | Policy::Random {} => 0.0,
    }
}

/// The lowest cost; on a tie the fewest requests; on a tie of both, drawn.
fn cheapest(eligible: &[usize], candidates: &[Candidate], costs: &[f64], draw: u64) -> usize {
    let key = |i: usize| (costs[i], candidates[i].requests);
    let best = eligible
        .iter()
        .copied()
        .map(key)
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        .unwrap_or((0.0, 0));
    let tied: Vec<usize> = eligible.iter().copied().filter(|i| key(*i) == best).collect();
    tied[(draw % tied.len().max(1) as u64) as usize]
}

/// Draws with probability in proportion to `exp(-cost / temperature)`.
fn softmax(eligible: &[usize], costs: &[f64], temperature: f64, draw: u64) -> usize {
    let least = eligible.iter().map(|i| costs[*i]).fold(f64::INFINITY, f64::min);
    let weight = |i: usize| (-(costs[i] - least) / temperature).exp();
    let total: f64 = eligible.iter().map(|i| weight(*i)).sum();
    // The upper 53 bits make an even fraction in [0, 1).
    let mut left = (draw >> 11) as f64 / (1u64 << 53) as f64 * total;
    for i in eligible {
        left -= weight(*i);
        if left < 0.0 {
            return *i;
        }
    }
    eligible[eligible.len() - 1]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OVERLAP: Policy =
        Policy::KvOverlap { overlap_weight: 1.0, load_weight: 1.0, temperature: 0.0 };

    fn query(leg: Leg) -> Query {
        Query {
            leg,
            prompt_tokens: 160,
            prompt_blocks: 10,
            first_blocks: [0; 2],
            block_size: 16,
            turn: 0,
            draw: 0,
        }
    }

    fn up(worker: usize) -> Candidate {
        Candidate { worker, up: true, ..Candidate::default() }
    }

    #[test]
    fn an_overlap_that_was_seen_to_be_less_counts_for_less() {
        let full = Candidate { overlap_blocks: 8, ..up(0) };
        let part = Candidate { overlap_discount: 0.5, ..full };
        let none = Candidate { overlap_discount: 1.0, ..full };
        let blocks = [full, part, none].map(|candidate| candidate.believed_blocks());
        assert_eq!(blocks, [8, 4, 0]);
        let other = Candidate { overlap_blocks: 5, ..up(1) };
        assert_eq!(pick(&OVERLAP, &[full, other], query(Leg::Prefill)).unwrap().index, 0);
        let choice = pick(&OVERLAP, &[part, other], query(Leg::Prefill)).unwrap();
        assert_eq!((choice.index, choice.costs), (1, vec![6.0, 5.0]));
        let mut candidates = vec![part, other];
        holders(&mut candidates, 5);
        assert_eq!(candidates, [other]);
    }

    #[test]
    fn overlap_wins_until_its_holder_is_busier_than_the_overlap_is_worth() {
        let warm = Candidate { overlap_blocks: 8, prefill_tokens: 7 * 16, ..up(0) };
        let cold = up(1);
        assert_eq!(pick(&OVERLAP, &[warm, cold], query(Leg::Prefill)).unwrap().index, 0);
        let busy = Candidate { prefill_tokens: 9 * 16, ..warm };
        let choice = pick(&OVERLAP, &[busy, cold], query(Leg::Prefill)).unwrap();
        assert_eq!((choice.index, choice.best_overlap_blocks), (1, 8));
        assert_eq!(choice.costs, vec![11.0, 10.0]);
    }

    #[test]
    fn what_is_assumed_steers_as_if_it_were_held_and_is_not_told_as_overlap() {
        let guess = Candidate { overlap_blocks: 2, assumed_blocks: 8, ..up(0) };
        let known = Candidate { overlap_blocks: 5, assumed_blocks: 5, ..up(1) };
        let choice = pick(&OVERLAP, &[guess, known], query(Leg::Prefill)).unwrap();
        assert_eq!((choice.index, choice.best_overlap_blocks), (0, 5));
        assert_eq!(choice.costs, vec![2.0, 5.0]);
        let mut candidates = vec![guess, known];
        holders(&mut candidates, 4);
        assert_eq!(candidates, [known], "a guess does not count as holding");
    }

    #[test]
    fn siblings_wait_for_the_first_until_others_queue_before_it() {
        // The first has ten blocks and nine tokens, all of them queued.
        let chosen = |prefill_tokens, underway_blocks| {
            let mut first = up(0);
            first.assumed_blocks = 10;
            first.underway_blocks = underway_blocks;
            first.prefill_tokens = prefill_tokens;
            pick(&OVERLAP, &[first, up(1)], query(Leg::Prefill)).unwrap().index
        };
        assert_eq!(chosen(10 * 16 + 9, 10), 0);
        assert_eq!(chosen(20 * 16 - 1, 10), 0);
        assert_eq!(chosen(20 * 16 + 1, 10), 1);
        // What was sent earlier and is done is not in the queue: all of that is others'.
        assert_eq!(chosen(10 * 16 + 9, 0), 1);
    }

    #[test]
    fn each_leg_reads_its_own_load() {
        let a = Candidate { prefill_tokens: 100, active_tokens: 0, ..up(0) };
        let b = Candidate { prefill_tokens: 0, active_tokens: 90, ..up(1) };
        let least = Policy::LeastLoaded {};
        assert_eq!(pick(&least, &[a, b], query(Leg::Prefill)).unwrap().index, 1);
        assert_eq!(pick(&least, &[a, b], query(Leg::Decode)).unwrap().index, 0);
        assert_eq!(pick(&least, &[a, b], query(Leg::Aggregated)).unwrap().index, 1);
    }

    #[test]
    fn a_slow_starter_gets_its_share_unless_it_holds_the_prompt() {
        let taken = |candidates: [Candidate; 2]| {
            let draws = (0..4000u64).map(|i| i.wrapping_mul(0x2545_f491_4f6c_dd1d));
            let picked = draws.filter(|draw| {
                let query = Query { draw: *draw, ..query(Leg::Aggregated) };
                pick(&Policy::LeastLoaded {}, &candidates, query).unwrap().index == 1
            });
            picked.count()
        };
        let busy = Candidate { active_tokens: 100, ..up(0) };
        let cold = Candidate { share: 0.25, ..up(1) };
        assert!((900..1100).contains(&taken([busy, cold])), "{}", taken([busy, cold]));
        assert_eq!(taken([busy, Candidate { share: 1.0, ..cold }]), 4000);
        assert_eq!(taken([busy, Candidate { overlap_blocks: 1, ..cold }]), 4000);
        // All alike: nobody is spared.
        let both = [Candidate { share: 0.25, ..busy }, cold];
        assert_eq!(taken(both), 4000);
    }

    #[test]
    fn round_robin_takes_each_live_one_in_turn() {
        let candidates = [up(0), Candidate { up: false, ..up(1) }, up(2)];
        let chosen: Vec<_> = (0..4)
            .map(|turn| {
                let query = Query { turn, ..query(Leg::Decode) };
                pick(&Policy::RoundRobin {}, &candidates, query).unwrap().index
            })
            .collect();
        assert_eq!(chosen, [0, 2, 0, 2]);
    }

    #[test]
    fn the_dead_are_tried_only_where_nobody_lives() {
        let dead = Candidate { up: false, ..up(0) };
        assert_eq!(pick(&OVERLAP, &[], query(Leg::Prefill)), None);
        assert!(pick(&OVERLAP, &[dead], query(Leg::Prefill)).is_some());
        let good_but_dead = Candidate { overlap_blocks: 10, ..dead };
        assert_eq!(pick(&OVERLAP, &[good_but_dead, up(1)], query(Leg::Prefill)).unwrap().index, 1);
    }

    #[test]
    fn temperature_spreads_choices_in_proportion() {
        let policy = Policy::KvOverlap { overlap_weight: 1.0, load_weight: 1.0, temperature: 1.0 };
        let candidates = [Candidate { overlap_blocks: 1, ..up(0) }, up(1)];
        let draws = 10_000_u64;
        let first = (0..draws)
            .filter(|i| {
                let draw = i * (u64::MAX / draws);
                let query = Query { draw, ..query(Leg::Prefill) };
                pick(&policy, &candidates, query).unwrap().index == 0
            })
            .count();
        // e / (1 + e) = 0.731
        assert!((7300..7325).contains(&first), "{first}");
    }

    #[test]
    fn holders_hold_enough_or_else_most() {
        let of = |overlap_blocks, up| Candidate { up, overlap_blocks, ..Candidate::default() };
        let all = vec![of(9, false), of(3, true), of(7, true), of(5, true)];
        let kept = |blocks| {
            let mut candidates = all.clone();
            holders(&mut candidates, blocks);
            candidates.iter().map(|candidate| candidate.overlap_blocks).collect::<Vec<_>>()
        };
        assert_eq!(kept(4), [7, 5]);
        assert_eq!(kept(8), [7]);
        assert_eq!(kept(0), [3, 7, 5]);
        let mut down = vec![of(2, false), of(0, false)];
        holders(&mut down, 1);
        assert_eq!(down.len(), 2, "a real attempt gives the real error");
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        (any::<bool>(), 0..9u32, 0..500u64, 0..500u64, 0..12u32).prop_map(
            |(up, requests, prefill_tokens, active_tokens, overlap_blocks)| Candidate {
                worker: 0,
                up,
                requests,
                prefill_tokens,
                active_tokens,
                overlap_blocks,
                ..Candidate::default()
            },
        )
    }

    proptest! {
        #[test]
        fn the_chosen_one_exists_and_is_never_beaten(
            candidates in proptest::collection::vec(candidate(), 1..9), draw: u64, turn: u64
        ) {
            let query = Query { draw, turn, ..query(Leg::Aggregated) };
            for policy in [OVERLAP, Policy::LeastLoaded {}, Policy::RoundRobin {}, Policy::Random {}] {
                let choice = pick(&policy, &candidates, query).unwrap();
                let chosen = candidates[choice.index];
                let any_up = candidates.iter().any(|c| c.up);
                prop_assert!(chosen.up || !any_up);
                if matches!(policy, Policy::KvOverlap { .. } | Policy::LeastLoaded {}) {
                    for (i, other) in candidates.iter().enumerate() {
                        prop_assert!(
                            (!other.up && any_up) || choice.costs[choice.index] <= choice.costs[i]
                        );
                    }
                }
            }
        }
    }
}
