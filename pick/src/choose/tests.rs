//! What each policy takes.

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
