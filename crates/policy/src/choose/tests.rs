//! Tests of the choice of each policy.

use super::*;
use proptest::prelude::*;
use splitrail_kv::{PromptSharing, SharedPrefix};

const OVERLAP: Policy =
    Policy::KvOverlap { overlap_weight: 1.0, load_weight: 1.0, temperature: 0.0 };

fn query(leg: Leg) -> Query {
    Query {
        leg,
        prompt_tokens: 160,
        prompt_blocks: 10,
        block_size: 16,
        turn: 0,
        draw: 0,
        sharing: PromptSharing::default(),
    }
}

fn up(number: u32) -> Candidate {
    Candidate { worker: WorkerIndex(number), up: true, ..Candidate::default() }
}

#[test]
fn an_overlap_that_was_seen_to_be_less_counts_for_less() {
    let full = Candidate { overlap_blocks: 8, ..up(0) };
    let part = Candidate { overlap_discount: 0.5, ..full };
    let none = Candidate { overlap_discount: 1.0, ..full };
    let blocks = [full, part, none].map(|candidate| candidate.believed_blocks());
    assert_eq!(blocks, [8, 4, 0]);
    let other = Candidate { overlap_blocks: 5, ..up(1) };
    assert_eq!(
        pick(&OVERLAP, &[full, other], &[], query(Leg::Prefill)).unwrap().index,
        CandidateIndex(0)
    );
    let choice = pick(&OVERLAP, &[part, other], &[], query(Leg::Prefill)).unwrap();
    assert_eq!((choice.index, choice.costs), (CandidateIndex(1), vec![6.0, 5.0]));
    let mut candidates = vec![part, other];
    holders(&mut candidates, 5);
    assert_eq!(candidates, [other]);
}

#[test]
fn overlap_wins_until_its_holder_is_busier_than_the_overlap_is_worth() {
    let warm = Candidate { overlap_blocks: 8, prefill_tokens: 7 * 16, ..up(0) };
    let cold = up(1);
    assert_eq!(
        pick(&OVERLAP, &[warm, cold], &[], query(Leg::Prefill)).unwrap().index,
        CandidateIndex(0)
    );
    let busy = Candidate { prefill_tokens: 9 * 16, ..warm };
    let choice = pick(&OVERLAP, &[busy, cold], &[], query(Leg::Prefill)).unwrap();
    assert_eq!((choice.index, choice.best_overlap_blocks), (CandidateIndex(1), 8));
    assert_eq!(choice.costs, vec![11.0, 10.0]);
}

#[test]
fn speculative_blocks_count_for_the_choice_and_not_as_overlap() {
    let guess = Candidate { overlap_blocks: 2, speculative_blocks: 8, ..up(0) };
    let known = Candidate { overlap_blocks: 5, speculative_blocks: 5, ..up(1) };
    let choice = pick(&OVERLAP, &[guess, known], &[], query(Leg::Prefill)).unwrap();
    assert_eq!((choice.index, choice.best_overlap_blocks), (CandidateIndex(0), 5));
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
        first.speculative_blocks = 10;
        first.underway_blocks = underway_blocks;
        first.prefill_tokens = prefill_tokens;
        pick(&OVERLAP, &[first, up(1)], &[], query(Leg::Prefill)).unwrap().index
    };
    assert_eq!(chosen(10 * 16 + 9, 10), CandidateIndex(0));
    assert_eq!(chosen(20 * 16 - 1, 10), CandidateIndex(0));
    assert_eq!(chosen(20 * 16 + 1, 10), CandidateIndex(1));
    // Blocks that were computed earlier are not in the queue: the whole queue belongs to other
    // prompts.
    assert_eq!(chosen(10 * 16 + 9, 0), CandidateIndex(1));
}

#[test]
fn each_leg_reads_its_own_load() {
    let a = Candidate { prefill_tokens: 100, active_tokens: 0, ..up(0) };
    let b = Candidate { prefill_tokens: 0, active_tokens: 90, ..up(1) };
    let least = Policy::LeastLoaded {};
    assert_eq!(pick(&least, &[a, b], &[], query(Leg::Prefill)).unwrap().index, CandidateIndex(1));
    assert_eq!(pick(&least, &[a, b], &[], query(Leg::Decode)).unwrap().index, CandidateIndex(0));
    assert_eq!(
        pick(&least, &[a, b], &[], query(Leg::Aggregated)).unwrap().index,
        CandidateIndex(1)
    );
}

#[test]
fn saturated_workers_are_passed_over_unless_all_are_saturated() {
    let busy = Candidate { busy: true, overlap_blocks: 9, ..up(0) };
    let idle = up(1);
    let choice = pick(&OVERLAP, &[busy, idle], &[], query(Leg::Prefill)).unwrap();
    assert_eq!((choice.index, choice.best_overlap_blocks), (CandidateIndex(1), 0));
    assert_eq!(choice.vetoes, [Some(Veto::Busy), None]);
    let down = Candidate { up: false, ..up(2) };
    let other = Candidate { busy: true, ..up(1) };
    let choice = pick(&OVERLAP, &[busy, other, down], &[], query(Leg::Prefill)).unwrap();
    assert_eq!(
        (choice.index, choice.vetoes),
        (CandidateIndex(0), vec![None, None, Some(Veto::Down)])
    );
}

#[test]
fn a_slow_starter_gets_its_share_unless_it_holds_the_prompt() {
    let taken = |candidates: [Candidate; 2]| {
        let draws = (0..4000u64).map(|i| i.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let picked = draws.filter(|draw| {
            let query = Query { draw: *draw, ..query(Leg::Aggregated) };
            pick(&Policy::LeastLoaded {}, &candidates, &[], query).unwrap().index
                == CandidateIndex(1)
        });
        picked.count()
    };
    let busy = Candidate { active_tokens: 100, ..up(0) };
    let cold = Candidate { share: 0.25, ..up(1) };
    assert!((900..1100).contains(&taken([busy, cold])), "{}", taken([busy, cold]));
    assert_eq!(taken([busy, Candidate { share: 1.0, ..cold }]), 4000);
    assert_eq!(taken([busy, Candidate { overlap_blocks: 1, ..cold }]), 4000);
    // All shares are equal: no candidate is excluded.
    let both = [Candidate { share: 0.25, ..busy }, cold];
    assert_eq!(taken(both), 4000);
}

#[test]
fn what_is_about_to_be_replaced_computes_little_while_its_successor_has_time() {
    let old = Candidate { is_outgoing: true, ..up(0) };
    let new = Candidate { active_tokens: 100, ..up(1) };
    let query = Query { prompt_blocks: 10, ..query(Leg::Aggregated) };
    let chosen = |old: Candidate, new: Candidate, leg| {
        let query = Query { leg, ..query };
        let choice = pick(&Policy::LeastLoaded {}, &[old, new], &[], query).unwrap();
        (choice.index.0, choice.vetoes[0])
    };
    assert_eq!(chosen(old, new, Leg::Aggregated), (1, Some(Veto::Outgoing)));
    let half = Candidate { overlap_blocks: 5, ..old };
    assert_eq!(chosen(half, new, Leg::Aggregated), (1, Some(Veto::Outgoing)));
    let most = Candidate { overlap_blocks: 6, ..old };
    assert_eq!(chosen(most, new, Leg::Aggregated), (0, None));
    for unfit in [
        Candidate { prefill_tokens: query.prompt_tokens + 1, ..new },
        Candidate { up: false, ..new },
        Candidate { is_outgoing: true, ..new },
    ] {
        assert_eq!(chosen(old, unfit, Leg::Aggregated), (0, None));
    }
    assert_eq!(chosen(old, new, Leg::Decode), (0, None), "its group is that of the prefill worker");
}

#[test]
fn round_robin_takes_each_live_one_in_turn() {
    let candidates = [up(0), Candidate { up: false, ..up(1) }, up(2)];
    let chosen: Vec<_> = (0..4)
        .map(|turn| {
            let query = Query { turn, ..query(Leg::Decode) };
            pick(&Policy::RoundRobin {}, &candidates, &[], query).unwrap().index
        })
        .collect();
    assert_eq!(chosen, [0, 2, 0, 2].map(CandidateIndex));
}

#[test]
fn dead_workers_are_tried_only_if_all_are_dead() {
    let dead = Candidate { up: false, ..up(0) };
    assert_eq!(pick(&OVERLAP, &[], &[], query(Leg::Prefill)), None);
    assert!(pick(&OVERLAP, &[dead], &[], query(Leg::Prefill)).is_some());
    let good_but_dead = Candidate { overlap_blocks: 10, ..dead };
    assert_eq!(
        pick(&OVERLAP, &[good_but_dead, up(1)], &[], query(Leg::Prefill)).unwrap().index,
        CandidateIndex(1)
    );
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
            pick(&policy, &candidates, &[], query).unwrap().index == CandidateIndex(0)
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
        for policy in [OVERLAP, Policy::LeastLoaded {}, Policy::RoundRobin {}] {
            let choice = pick(&policy, &candidates, &[], query).unwrap();
            let chosen = candidates[choice.index];
            let any_up = candidates.iter().any(|c| c.up);
            prop_assert!(chosen.up || !any_up);
            if matches!(policy, Policy::KvOverlap { .. } | Policy::LeastLoaded {}) {
                for (i, other) in CandidateIndex::all(candidates.len()).zip(&candidates) {
                    prop_assert!(
                        (!other.up && any_up) || choice.costs[choice.index] <= choice.costs[i]
                    );
                }
            }
        }
    }
}

fn timed() -> impl Strategy<Value = Candidate> {
    let wait_ns = 0..3_000_000_000u64;
    let slow = 0.5f64..3.0;
    (wait_ns, 0..40u32, 0..40u32, slow, 0.0f64..1.0, 0..5u32).prop_map(
        |(wait_ns, overlap_blocks, speculative_blocks, slow, busy_share, requests)| {
            let mut candidate = Candidate { up: true, wait_ns, busy_share, ..up(0) };
            candidate.overlap_blocks = overlap_blocks;
            candidate.speculative_blocks = speculative_blocks;
            candidate.requests = requests;
            candidate.coefficients.prefill_seconds_per_token *= slow;
            candidate
        },
    )
}

fn fleet() -> impl Strategy<Value = Vec<Candidate>> {
    proptest::collection::vec(timed(), 2..9).prop_map(|mut fleet| {
        let numbered = (0..).map(WorkerIndex).zip(&mut fleet);
        numbered.for_each(|(number, candidate)| candidate.worker = number);
        fleet
    })
}

const LEGS: [Leg; 3] = [Leg::Prefill, Leg::Decode, Leg::Aggregated];

fn long(leg: usize) -> Query {
    Query { prompt_tokens: 16_000, prompt_blocks: 32, block_size: 500, ..query(LEGS[leg]) }
}

#[test]
fn a_choice_says_what_it_is_made_of() {
    let near = Candidate { overlap_blocks: 30, wait_ns: 100_000_000, ..up(0) };
    let far = Candidate { wait_ns: 0, ..up(1) };
    let down = Candidate { up: false, overlap_blocks: 32, ..up(2) };
    let choice = pick(&Policy::predicted_ttft(), &[near, far, down], &[], long(0)).unwrap();
    assert_eq!((choice.index, choice.runner_up), (CandidateIndex(0), Some(CandidateIndex(1))));
    assert_eq!(choice.vetoes, [None, None, Some(Veto::Down)]);
    assert_eq!(choice.extra_work_price, 1.0);
    assert!((choice.margin - (choice.costs[1] - choice.costs[0])).abs() < 1e-9);
    let [near, far, _] = choice.terms[..] else { panic!() };
    assert!((near.wait_ms - 100.0).abs() < 1e-9 && near.extra_work_ms == 0.0);
    assert!((far.extra_work_ms - (far.prefill_ms - near.prefill_ms)).abs() < 1e-6);
    assert!((far.total_ms() - choice.costs[1]).abs() < 1e-9);
    assert!((far.ttft_ms() + far.extra_work_ms - choice.costs[1]).abs() < 1e-9);
}

/// The worker that gets a prompt of which `held[i]` blocks are on worker `i`, and `shared` blocks are in
/// so many conversations.
fn chosen_of_shared(held: &[u32], shared: u32, conversations: u32) -> CandidateIndex {
    let candidate = |(number, blocks): (usize, &u32)| Candidate {
        overlap_blocks: *blocks,
        cache_fill: f64::from(*blocks) / 100.0,
        ..up(number as u32)
    };
    let candidates: Vec<Candidate> = held.iter().enumerate().map(candidate).collect();
    let prefix = SharedPrefix { blocks: shared, conversations };
    let query = Query { sharing: PromptSharing::new([prefix], 0.0), ..long(0) };
    pick(&Policy::predicted_ttft(), &candidates, &[], query).unwrap().index
}

#[test]
fn conversations_spread_over_the_workers_and_stay_where_their_history_is() {
    let index = CandidateIndex;
    assert_eq!(chosen_of_shared(&[20, 0, 0], 20, 3), index(0), "it is not in enough conversations");
    assert_eq!(chosen_of_shared(&[20, 0, 1], 20, 4), index(1), "an empty cache is preferred");
    assert_eq!(chosen_of_shared(&[24, 20, 0], 20, 30), index(0), "more is held than is shared");
    assert_eq!(chosen_of_shared(&[0, 0, 0], 20, 30), index(0));
    // Where there are many workers, each copy serves eight conversations before there is another.
    let mut fleet = [0; 64];
    fleet[7] = 20;
    assert_eq!(chosen_of_shared(&fleet, 20, 8), index(7));
    assert_eq!(chosen_of_shared(&fleet, 20, 9), index(0));
    fleet[0] = 20;
    assert!([index(0), index(7)].contains(&chosen_of_shared(&fleet, 20, 16)));
    assert_eq!(chosen_of_shared(&fleet, 20, 17), index(1));
}

#[test]
fn a_busy_worker_gets_a_conversation_with_many_later_prompts_only_for_its_history() {
    let busy = Candidate { busy_share: 0.5, overlap_blocks: 4, ..up(0) };
    let chosen = |busy, later_blocks| {
        let query = Query { sharing: PromptSharing::new([], later_blocks), ..long(0) };
        pick(&Policy::predicted_ttft(), &[busy, up(1)], &[], query).unwrap()
    };
    assert_eq!(chosen(busy, 1.0).index, CandidateIndex(0));
    let choice = chosen(busy, 20.0);
    assert_eq!(choice.index, CandidateIndex(1));
    // 20 blocks of 500 tokens at 85 us, twice as long as on an idle worker.
    let later: Vec<f64> = choice.terms.iter().map(|terms| terms.later_turns_ms).collect();
    assert!((later[0] - 850.0).abs() < 1e-6 && later[1] == 0.0, "{later:?}");
    assert_eq!(chosen(Candidate { overlap_blocks: 30, ..busy }, 20.0).index, CandidateIndex(0));
}

proptest! {
    /// A shared prefix costs the same wherever it is, apart from the wait and the hand-off.
    #[test]
    fn a_shared_prefix_attracts_no_prompt(held in proptest::collection::vec(0u32..21, 2..9)) {
        let blocks = held.iter().copied().max().unwrap();
        let candidates: Vec<Candidate> = (0..)
            .zip(&held)
            .map(|(number, held)| Candidate { overlap_blocks: *held, ..up(number) })
            .collect();
        let prefix = SharedPrefix { blocks: 25, conversations: 100 };
        let query = Query { sharing: PromptSharing::new([prefix], 0.0), ..long(0) };
        let choice = pick(&Policy::predicted_ttft(), &candidates, &[], query).unwrap();
        for (terms, cost) in choice.terms.iter().zip(&choice.costs) {
            prop_assert!((cost - choice.costs[0]).abs() < 1e-6, "{terms:?}, {blocks} blocks");
        }
    }

    /// A worker that is better in every term is always chosen.
    #[test]
    fn no_choice_is_worse_than_another_in_every_term(fleet in fleet(), leg in 0usize..3) {
        let choice = pick(&Policy::predicted_ttft(), &fleet, &[], long(leg)).unwrap();
        let chosen = choice.terms[choice.index];
        for other in &choice.terms {
            let better = other.wait_ms < chosen.wait_ms
                && other.fetch_ms <= chosen.fetch_ms
                && other.read_ms <= chosen.read_ms
                && other.load_ms <= chosen.load_ms
                && other.copy_ms <= chosen.copy_ms
                && other.prefill_ms <= chosen.prefill_ms
                && other.hand_off_ms <= chosen.hand_off_ms
                && other.step_ms <= chosen.step_ms
                && other.extra_work_ms <= chosen.extra_work_ms;
            prop_assert!(!better, "{other:?} {chosen:?}");
        }
    }

    /// The order in which workers are listed changes nothing.
    #[test]
    fn the_order_of_workers_changes_no_cost(fleet in fleet(), leg in 0usize..3, turn in 0usize..9) {
        let mut other = fleet.clone();
        other.rotate_left(turn % fleet.len());
        other.swap(0, fleet.len() - 1);
        for policy in [Policy::predicted_ttft(), OVERLAP] {
            let one = pick(&policy, &fleet, &[], long(leg)).unwrap();
            let two = pick(&policy, &other, &[], long(leg)).unwrap();
            for (candidate, cost) in other.iter().zip(&two.costs) {
                let before = one.costs[candidate.worker.place()];
                prop_assert!((cost - before).abs() <= 1e-9 * before.abs().max(1.0));
            }
            let (one, two) = (one.costs[one.index], two.costs[two.index]);
            prop_assert!((one - two).abs() <= 1e-9 * one.abs().max(1.0));
        }
    }

    /// More overlap never makes a worker less likely.
    #[test]
    fn more_overlap_is_never_worse(
        fleet in fleet(), leg in 0usize..3, which in 0usize..9, more in 1u32..20,
        temperature in 1.0f64..2_000.0,
    ) {
        let which = CandidateIndex(which % fleet.len());
        let mut other = fleet.clone();
        other[which].overlap_blocks += more;
        other[which].speculative_blocks += more;
        for policy in [Policy::predicted_ttft(), OVERLAP] {
            let before = pick(&policy, &fleet, &[], long(leg)).unwrap();
            let after = pick(&policy, &other, &[], long(leg)).unwrap();
            prop_assert!(before.index != which || after.index == which);
            let weight = |costs: &[f64]| {
                let of = |i: CandidateIndex| (-(costs[i] - costs[which]) / temperature).exp();
                CandidateIndex::all(costs.len()).map(of).sum::<f64>()
            };
            // The probability is 1 divided by this sum.
            prop_assert!(weight(&after.costs) <= weight(&before.costs) * (1.0 + 1e-9));
        }
    }
}
