//! The rules of other routers decide as published.

use super::*;
use splitrail_policy::{Leg, WorkerIndex};

fn query(prompt_tokens: u64, draw: u64) -> Query {
    Query {
        leg: Leg::Prefill,
        prompt_tokens,
        prompt_blocks: prompt_tokens.div_ceil(512) as u32,
        block_size: 512,
        turn: 5,
        draw,
        sharing: Default::default(),
    }
}

fn worker(number: u32) -> Candidate {
    Candidate { worker: WorkerIndex(number), up: true, ..Candidate::default() }
}

/// Of these candidates, to which no block was routed lately.
fn chosen(policy: PublishedPolicy, candidates: &[Candidate], query: Query) -> PublishedChoice {
    let visible_blocks = |candidate: &Candidate| match policy.visible_blocks() {
        VisibleBlocks::Present => candidate.overlap_blocks,
        VisibleBlocks::Recent => 0,
        VisibleBlocks::Pending => candidate.speculative_blocks.max(candidate.overlap_blocks),
    };
    let published = candidates
        .iter()
        .map(|candidate| Candidate { overlap_blocks: visible_blocks(candidate), ..*candidate });
    let published: Vec<_> = published.collect();
    policy.choose(&published, query, &[0, 1]).expect("there are candidates")
}

#[test]
fn each_has_its_name() {
    for (name, policy) in PublishedPolicy::ALL {
        assert_eq!(PublishedPolicy::named(name), Some(policy));
    }
    assert_eq!(PublishedPolicy::named("other"), None);
}

#[test]
fn ties_go_to_the_first_or_to_the_draw() {
    let all = [worker(0), worker(1), worker(2)];
    for (policy, index, tied) in [
        (PublishedPolicy::Random, 1, 3),
        (PublishedPolicy::RoundRobin, 2, 1),
        (PublishedPolicy::LeastLoaded, 0, 1),
        (PublishedPolicy::ExactOverlap, 0, 1),
        (PublishedPolicy::Dynamo, 1, 3),
        (PublishedPolicy::Llmd, 1, 3),
        (PublishedPolicy::Mooncake, 0, 1),
        (PublishedPolicy::WorkAware, 0, 1),
        (PublishedPolicy::MooncakeFetch, 0, 1),
    ] {
        let chosen = chosen(policy, &all, query(1000, 4));
        assert_eq!((chosen.index, chosen.tied), (CandidateIndex(index), tied), "{policy:?}");
    }
}

#[test]
fn overlap_first_looks_at_load_only_among_equals() {
    let a = Candidate { overlap_blocks: 2, active_tokens: 900, ..worker(0) };
    let b = Candidate { overlap_blocks: 2, active_tokens: 800, ..worker(1) };
    let idle = Candidate { overlap_blocks: 1, ..worker(2) };
    assert_eq!(
        chosen(PublishedPolicy::ExactOverlap, &[a, b, idle], query(2000, 0)).index,
        CandidateIndex(1)
    );
    let routed = |candidate, overlap_blocks| Candidate { overlap_blocks, ..candidate };
    let lately = [routed(a, 1), routed(b, 0), routed(idle, 0)];
    let approximate = PublishedPolicy::ApproxPrefix.choose(&lately, query(2000, 0), &[0, 1]);
    assert_eq!(approximate.map(|choice| choice.index), Some(CandidateIndex(0)));
    assert_eq!(
        chosen(PublishedPolicy::LeastLoaded, &[a, b, idle], query(2000, 0)).index,
        CandidateIndex(2)
    );
}

#[test]
fn dynamo_counts_blocks_to_compute_here_and_in_the_queue() {
    let holder = Candidate { overlap_blocks: 2, prefill_tokens: 1024, ..worker(0) };
    let idle = worker(1);
    let query = query(1536, 1);
    assert_eq!([holder, idle].map(|worker| dynamo::cost(&worker, query)), [3.0, 3.0]);
    let chosen = chosen(PublishedPolicy::Dynamo, &[holder, idle], query);
    assert_eq!((chosen.index, chosen.tied), (CandidateIndex(1), 2));
}

#[test]
fn llmd_scales_queues_between_the_shortest_and_the_longest() {
    let a = Candidate { overlap_blocks: 1, waiting: 4, ..worker(0) };
    let b = Candidate { waiting: 2, ..worker(1) };
    let c = worker(2);
    let query = query(1024, 0);
    assert_eq!(llmd::costs(&[a, b, c], query), [-1.0, -0.5, -1.0]);
    let chosen = chosen(PublishedPolicy::Llmd, &[a, b, c], query);
    assert_eq!(chosen.index, CandidateIndex(0));
}

#[test]
fn mooncake_waits_for_an_overlap_as_long_as_it_saves() {
    // 1,024 tokens: 98.2459 ms cold, 54.4... with one block.
    let idle = worker(0);
    let busy = |wait_ns| Candidate { overlap_blocks: 1, wait_ns, ..worker(1) };
    let saved = idle.coefficients.prefill_ns(1024, 0) - idle.coefficients.prefill_ns(1024, 512);
    let index =
        |wait| chosen(PublishedPolicy::Mooncake, &[idle, busy(wait)], query(1024, 0)).index.0;
    assert_eq!((index(saved), index(saved - 1)), (0, 1));
    // A policy that counts the work five times accepts five times the wait, except for the tie.
    let index =
        |wait| chosen(PublishedPolicy::WorkAware, &[idle, busy(wait)], query(1024, 0)).index.0;
    assert_eq!((index(5 * saved), index(5 * saved - 1)), (0, 1));
    // Blocks that are only queued count for policies that count them.
    let queued = Candidate { speculative_blocks: 1, ..worker(1) };
    assert_eq!(
        chosen(PublishedPolicy::Mooncake, &[idle, queued], query(1024, 0)).index,
        CandidateIndex(0)
    );
    assert_eq!(
        chosen(PublishedPolicy::MooncakePending, &[idle, queued], query(1024, 0)).index,
        CandidateIndex(1)
    );
}

#[test]
fn a_prefix_is_fetched_only_where_that_is_sooner() {
    let idle = worker(0);
    let busy = Candidate { overlap_blocks: 10, wait_ns: 10_000_000_000, ..worker(1) };
    let fetched = chosen(PublishedPolicy::MooncakeFetch, &[idle, busy], query(10_000, 0));
    assert_eq!((fetched.index, fetched.fetch_blocks), (CandidateIndex(0), 10));
    // A transfer of 5 ms is not worth saving the one token after the last block.
    let barely = Candidate { overlap_blocks: 1, wait_ns: 1_000_000_000, ..worker(1) };
    let kept = chosen(PublishedPolicy::MooncakeFetch, &[idle, barely], query(10, 0));
    assert_eq!((kept.index, kept.fetch_blocks), (CandidateIndex(0), 0));
}

#[test]
fn the_bound_passes_over_a_worker_above_its_share() {
    let all: Vec<Candidate> = (0..4).map(worker).collect();
    let favourite = chosen(PublishedPolicy::PrefixHash, &all, query(1024, 0)).index;
    assert_eq!(chosen(PublishedPolicy::PrefixHashBl, &all, query(1024, 0)).index, favourite);
    let mut loaded = all.clone();
    loaded.iter_mut().for_each(|worker| worker.requests = 2);
    // ceil(1.25 x (9 + 1) / 4) = 4
    loaded[favourite].requests = 3;
    assert_eq!(chosen(PublishedPolicy::PrefixHashBl, &loaded, query(1024, 0)).index, favourite);
    // ceil(1.25 x (10 + 1) / 4) = 4
    loaded[favourite].requests = 4;
    assert_ne!(chosen(PublishedPolicy::PrefixHashBl, &loaded, query(1024, 0)).index, favourite);
}
