//! The virtual-time cluster in cases computed by hand, and invariants of every run.

use proptest::prelude::*;
use splitrail_sim::cluster::workload::WorkloadBuilder;
use splitrail_sim::cluster::{
    Cluster, ClusterConfig, CostModel, Decision, InsertAt, Peer, Placement, Pool, Router,
    SimulationResult, Workload, run,
};

const S: u64 = 1_000_000_000;

/// Everything takes whole seconds: a prefill 1 s plus 1 s per token, a transfer 1 s plus 1 s per
/// token, a step 1 s.
fn seconds() -> CostModel {
    CostModel {
        prefill_base_s: 1.0,
        prefill_token_s: 1.0,
        prefill_pair_s: 0.0,
        transfer_base_s: 1.0,
        fetch_base_s: 1.0,
        kv_bytes_per_token: 1.0,
        transfer_bytes_per_s: 1.0,
        step_base_s: 1.0,
        step_request_s: 0.0,
        step_context_s: 0.0,
    }
}

fn small() -> ClusterConfig {
    ClusterConfig {
        prefill_workers: 1,
        decode_workers: 1,
        cost: seconds(),
        prefill_cache_blocks: 100,
        ..ClusterConfig::default()
    }
}

/// Blocks of one token each: a prompt consists of its blocks. (arrival in s, blocks, output)
fn trace(requests: &[(u64, &[u64], u32)]) -> (Workload, Vec<u64>) {
    let mut builder = WorkloadBuilder::new(1);
    for (at, blocks, output) in requests {
        builder.push(*at as f64 * 1e3, blocks.len() as u32, *output, blocks);
    }
    let workload = builder.finish();
    let arrivals = workload.arrivals_ns(1.0, false);
    (workload, arrivals)
}

/// Decides as given, request by request.
struct Told(Vec<Decision>);

impl Router for Told {
    fn arrive(&mut self, _: &Cluster<'_>, request: usize) -> Decision {
        self.0.get(request).copied().unwrap_or(Decision::Prefill(Placement::on(0)))
    }
}

fn serve(
    config: &ClusterConfig,
    requests: &[(u64, &[u64], u32)],
    told: Vec<Decision>,
) -> SimulationResult {
    let (workload, arrivals) = trace(requests);
    run(&workload, &arrivals, config, &mut Told(told), &mut |_| {})
}

/// (hits, prefill start, prefill end, moved tokens, KV ready, first token, last token), in s.
fn told(outcome: &SimulationResult, request: usize) -> (u32, u64, u64, u32, u64, u64, u64) {
    let row = &outcome.rows[request];
    let s = |ns: u64| {
        assert_eq!(ns % S, 0, "whole seconds: {row:?}");
        ns / S
    };
    (
        row.hit_blocks,
        s(row.prefill_start_ns),
        s(row.prefill_end_ns),
        row.moved_tokens,
        s(row.kv_ready_ns),
        s(row.first_token_ns),
        s(row.last_token_ns),
    )
}

fn on(worker: usize) -> Decision {
    Decision::Prefill(Placement::on(worker))
}

#[test]
fn requests_are_served_one_after_the_other() {
    let requests = [(0, &[1, 2, 3][..], 2), (1, &[1, 2, 3, 4], 1)];
    let outcome = serve(&small(), &requests, Vec::new());
    assert_eq!(told(&outcome, 0), (0, 0, 4, 3, 8, 9, 10));
    // Three of its four tokens are cached when it starts.
    assert_eq!(told(&outcome, 1), (3, 4, 6, 4, 11, 12, 12));
    assert_eq!((outcome.prefill_busy_ns[0], outcome.steps_ns[0].len()), (6 * S, 3));
}

#[test]
fn the_last_token_is_computed_even_if_all_blocks_are_cached() {
    let requests = [(0, &[1, 2][..], 1), (9, &[1, 2], 1)];
    let outcome = serve(&small(), &requests, Vec::new());
    assert_eq!(told(&outcome, 1), (2, 9, 11, 2, 14, 15, 15));
}

#[test]
fn blocks_inserted_at_the_start_are_found_before_the_end() {
    let requests = [(0, &[9][..], 1), (1, &[1, 2, 3], 1), (1, &[1, 2, 3], 1)];
    let chunked = ClusterConfig { budget_tokens: Some(4), ..small() };
    let outcome = serve(&chunked, &requests, Vec::new());
    assert_eq!((outcome.rows[1].hit_blocks, outcome.rows[2].hit_blocks), (0, 0));
    let early = ClusterConfig { insert_at: InsertAt::Start, ..chunked };
    let outcome = serve(&early, &requests, Vec::new());
    // Both are computed in one iteration: 3 tokens of one and the last token of the other.
    assert_eq!(told(&outcome, 1), (0, 2, 7, 3, 11, 12, 12));
    assert_eq!(told(&outcome, 2), (3, 2, 7, 3, 11, 13, 13));
}

#[test]
fn an_iteration_packs_requests_up_to_its_budget() {
    let requests = [(0, &[1, 2, 3, 4, 5][..], 1), (0, &[6, 7], 1), (0, &[8], 1)];
    let config = ClusterConfig { budget_tokens: Some(4), ..small() };
    let outcome = serve(&config, &requests, Vec::new());
    // 4 tokens of the first until 5; its last one, and those of the second and the third, until 10.
    assert_eq!(told(&outcome, 0), (0, 0, 10, 5, 16, 17, 17));
    assert_eq!(told(&outcome, 1), (0, 5, 10, 2, 13, 14, 14));
    assert_eq!(told(&outcome, 2), (0, 5, 10, 1, 12, 13, 13));
}

#[test]
fn the_least_recently_used_blocks_are_evicted_and_leaves_before_parents() {
    let config = ClusterConfig { prefill_cache_blocks: 3, ..small() };
    let requests = [
        (0, &[1, 2][..], 1),
        (10, &[3, 4], 1),
        // 2 has been evicted, and touching 1 makes 4 the oldest.
        (20, &[1, 2], 1),
        (30, &[3, 4], 1),
    ];
    let outcome = serve(&config, &requests, Vec::new());
    let hits: Vec<u32> = outcome.rows.iter().map(|row| row.hit_blocks).collect();
    assert_eq!(hits, [0, 0, 1, 1]);
}

#[test]
fn requests_that_arrive_during_a_step_join_the_next_one() {
    // KV arrives at 4, 5 (by the second worker) and 7; a step takes 2 s.
    let cost = CostModel { step_base_s: 2.0, ..seconds() };
    let config = ClusterConfig { prefill_workers: 3, cost, ..small() };
    let requests = [(0, &[1][..], 3), (1, &[2], 1), (3, &[3], 1)];
    let outcome = serve(&config, &requests, vec![on(0), on(1), on(2)]);
    assert_eq!(told(&outcome, 0), (0, 0, 2, 1, 4, 6, 10));
    assert_eq!(told(&outcome, 1), (0, 1, 3, 1, 5, 8, 8));
    assert_eq!(told(&outcome, 2), (0, 3, 5, 1, 7, 10, 10));
}

#[test]
fn simultaneous_arrivals_do_not_wait_for_each_other_to_start_a_step() {
    let config = ClusterConfig { prefill_workers: 2, ..small() };
    let requests = [(0, &[1][..], 1), (0, &[2], 1)];
    let outcome = serve(&config, &requests, vec![on(0), on(1)]);
    assert_eq!((told(&outcome, 0).5, told(&outcome, 1).5), (5, 6));
}

#[test]
fn a_decode_worker_admits_requests_that_fit_and_an_empty_one_any_request() {
    // Each reserves 1 + 4 tokens: two do not fit, and not even one does.
    let requests = [(0, &[1][..], 4), (0, &[2], 4)];
    let told_both = vec![on(0), on(1)];
    let config = ClusterConfig { prefill_workers: 2, kv_capacity_tokens: 3, ..small() };
    let outcome = serve(&config, &requests, told_both.clone());
    assert_eq!((told(&outcome, 0).5, told(&outcome, 0).6), (5, 8));
    assert_eq!((told(&outcome, 1).5, told(&outcome, 1).6), (9, 12));
    let batch = ClusterConfig { max_batch: 1, kv_capacity_tokens: 100, ..config };
    assert_eq!(told(&serve(&batch, &requests, told_both), 1).5, 9);
}

#[test]
fn the_decode_worker_with_the_fewest_tokens_is_chosen_and_the_first_on_ties() {
    let config = ClusterConfig { prefill_workers: 1, decode_workers: 2, ..small() };
    let requests = [(0, &[1, 2][..], 50), (0, &[3], 50), (0, &[4], 50)];
    let outcome = serve(&config, &requests, Vec::new());
    let workers: Vec<_> = outcome.rows.iter().map(|row| row.decode_worker.unwrap()).collect();
    assert_eq!(workers, [0, 1, 1]);
}

#[test]
fn a_decode_worker_receives_only_what_its_cache_lacks() {
    let config = ClusterConfig { decode_cache_blocks: 10, ..small() };
    let requests = [(0, &[1, 2, 3][..], 1), (20, &[1, 2, 3, 4], 1), (40, &[1, 2], 1)];
    let outcome = serve(&config, &requests, Vec::new());
    let moved: Vec<u32> = outcome.rows.iter().map(|row| row.moved_tokens).collect();
    assert_eq!(moved, [3, 1, 0]);
}

#[test]
fn a_request_waits_for_its_fetched_prefix_which_counts_as_a_hit() {
    let fetch = Placement { worker: 0, fetch_blocks: 2, fetch_ready_ns: 5 * S, fetch_from: None };
    let requests = [(0, &[1, 2, 3][..], 1), (1, &[9], 1)];
    let outcome = serve(&small(), &requests, vec![Decision::Prefill(fetch)]);
    assert_eq!(told(&outcome, 0), (2, 5, 7, 3, 11, 12, 12));
    // First come, first served: it waits for the fetch of the first request.
    assert_eq!(told(&outcome, 1).1, 7);
}

#[test]
fn a_full_queue_refuses_requests() {
    let config = ClusterConfig { max_queue: Some(1), ..small() };
    let requests = [(0, &[1][..], 1), (0, &[2], 1), (0, &[3], 1), (2, &[4], 1)];
    let outcome = serve(&config, &requests, Vec::new());
    let rejected: Vec<bool> = outcome.rows.iter().map(|row| row.rejected).collect();
    // At 2 s the first request has ended and the second has started.
    assert_eq!(rejected, [false, false, true, false]);
}

#[test]
fn a_local_prefill_advances_by_a_chunk_in_each_step() {
    let config = ClusterConfig {
        chunk_tokens: 2,
        interference: 0.5,
        decode_cache_blocks: 10,
        cost: CostModel { step_base_s: 2.0, ..seconds() },
        ..small()
    };
    // The first request decodes from 4 s on in steps of 2 s; the second arrives at 5 s.
    let requests = [(0, &[9][..], 9), (5, &[1, 2, 3], 2)];
    let outcome = serve(&config, &requests, vec![on(0), Decision::Local(0)]);
    // From 6 s on, a chunk of 2 with the base takes 3 s, plus half of the step's 2 s; the next one
    // takes 1 s against 2 s, so 2.5 s; then the request is in the batch.
    let row = &outcome.rows[1];
    let at = |s: f64| (s * S as f64) as u64;
    assert_eq!((row.prefill_start_ns, row.prefill_end_ns), (at(6.0), at(12.5)));
    assert_eq!((row.first_token_ns, row.last_token_ns), (at(14.5), at(16.5)));
    assert_eq!((row.moved_tokens, row.prefill_worker, row.decode_worker), (0, None, Some(0)));
    assert_eq!(outcome.steps_ns[0][..4], [at(2.0), at(4.0), at(2.5), at(2.0)]);
    // The longest tenth of 8 intervals is one interval.
    assert_eq!(outcome.tbt_ns(0, 9, &mut Vec::new()), at(4.0));
    assert_eq!(outcome.tbt_ns(1, 2, &mut Vec::new()), at(2.0));
}

#[test]
fn a_local_prefill_waits_for_its_fetched_prefix() {
    let config = ClusterConfig { decode_workers: 2, decode_cache_blocks: 10, ..small() };
    let requests = [(0, &[1, 2, 3][..], 1), (20, &[1, 2, 3, 4], 1), (40, &[1, 2, 3], 1)];
    let fetch = Placement::fetching(1, 3, Peer::Decode(0));
    let local = [Decision::LocalFetching(fetch), Decision::Local(1)];
    let outcome = serve(&config, &requests, [vec![on(0)], local.to_vec()].concat());
    // Three tokens take 3 s on the links and 1 s more; the fourth is computed in a step of 2 s.
    let row = &outcome.rows[1];
    assert_eq!((row.fetch_ready_ns, row.prefill_start_ns), (24 * S, 24 * S));
    assert_eq!((row.prefill_end_ns, row.first_token_ns), (26 * S, 27 * S));
    assert_eq!((row.hit_blocks, row.fetched_blocks, row.prefill_worker), (3, 3, None));
    assert_eq!((outcome.rows[2].hit_blocks, outcome.rows[2].fetched_blocks), (3, 0));
}

#[test]
fn transfers_that_share_a_worker_wait_for_each_other() {
    let config = ClusterConfig { prefill_workers: 2, contention: true, ..small() };
    let requests = [(0, &[1][..], 1), (0, &[2], 1)];
    let outcome = serve(&config, &requests, vec![on(0), on(1)]);
    assert_eq!((told(&outcome, 0).4, told(&outcome, 1).4), (4, 5));
}

#[test]
fn a_pool_has_one_queue_and_one_cache() {
    let config = ClusterConfig { prefill_workers: 2, pool: Pool::SharedLru, ..small() };
    let requests = [(0, &[1, 2, 3][..], 1), (0, &[9], 1), (0, &[5, 6, 7], 1), (0, &[9, 8], 1)];
    let outcome = serve(&config, &requests, Vec::new());
    let served = |outcome: &SimulationResult| -> Vec<_> {
        let row = |i: usize| (outcome.rows[i].prefill_worker.unwrap(), told(outcome, i).1);
        (0..4).map(row).collect()
    };
    assert_eq!(served(&outcome), [(0, 0), (1, 0), (1, 2), (0, 4)]);
    assert_eq!(outcome.rows[3].hit_blocks, 1);
    let shortest = ClusterConfig { pool: Pool::SharedShortestFirst, ..config };
    assert_eq!(served(&serve(&shortest, &requests, Vec::new())), [(0, 0), (1, 0), (0, 4), (1, 2)]);
}

/// Holds all requests until a worker is idle, and then releases the latest.
#[derive(Default)]
struct LastFirst(Vec<usize>);

impl Router for LastFirst {
    fn arrive(&mut self, _: &Cluster<'_>, request: usize) -> Decision {
        self.0.push(request);
        Decision::Hold
    }

    fn release(&mut self, cluster: &Cluster<'_>) -> Option<(usize, Decision)> {
        (cluster.outstanding_requests(0) == 0).then(|| self.0.pop()).flatten().map(|r| (r, on(0)))
    }
}

#[test]
fn a_router_that_holds_requests_decides_their_order() {
    let (workload, arrivals) =
        trace(&[(0, &[1, 2][..], 1), (1, &[3], 1), (2, &[4], 1), (3, &[5], 1)]);
    let outcome = run(&workload, &arrivals, &small(), &mut LastFirst::default(), &mut |_| {});
    let starts: Vec<u64> = (0..4).map(|i| told(&outcome, i).1).collect();
    // Arrivals are handled after events at the same time that end something.
    assert_eq!(starts, [0, 7, 3, 5]);
}

#[derive(Debug, Clone)]
struct Case {
    workload: Workload,
    arrivals: Vec<u64>,
    config: ClusterConfig,
    decisions: Vec<Decision>,
}

fn case() -> impl Strategy<Value = Case> {
    let request = (0u64..40, proptest::collection::vec(0u64..12, 1..7), 1u32..8, 0usize..5);
    let config = (
        (1usize..4, 1usize..3, 0usize..20, 0usize..20),
        (any::<bool>(), proptest::option::of(1u32..9), 0u32..4, any::<bool>()),
        (1u64..60, 1u32..5),
    );
    (proptest::collection::vec(request, 1..40), config).prop_map(|(mut requests, config)| {
        requests.sort_by_key(|request| request.0);
        let ((prefill, decode, blocks, decode_blocks), (start, budget, chunk, contention), room) =
            config;
        let mut builder = WorkloadBuilder::new(2);
        for (at, hashes, output, _) in &requests {
            let input = hashes.len() as u32 * 2 - *output % 2;
            builder.push(*at as f64 * 1e3, input, *output, hashes);
        }
        let decisions = requests.iter().map(|(_, _, _, target)| match target {
            4 => Decision::Local(*target % decode),
            _ => on(target % prefill),
        });
        let decisions = decisions.collect();
        let workload = builder.finish();
        let config = ClusterConfig {
            prefill_workers: prefill,
            decode_workers: decode,
            cost: CostModel { prefill_pair_s: 0.01, step_context_s: 0.02, ..seconds() },
            prefill_cache_blocks: blocks,
            decode_cache_blocks: decode_blocks,
            insert_at: if start { InsertAt::Start } else { InsertAt::End },
            budget_tokens: budget,
            chunk_tokens: chunk,
            contention,
            kv_capacity_tokens: room.0,
            max_batch: room.1,
            ..ClusterConfig::default()
        };
        Case { arrivals: workload.arrivals_ns(1.0, true), workload, config, decisions }
    })
}

/// Checks the cluster's bounds at every call.
struct Watching {
    told: Told,
    computed_tokens: u64,
}

impl Watching {
    fn look(cluster: &Cluster<'_>) {
        let ClusterConfig { kv_capacity_tokens, max_batch, .. } = *cluster.config();
        for worker in 0..cluster.decode_workers() {
            let (batch, tokens) = cluster.decode_batch(worker);
            assert!(batch <= 1 || (tokens <= kv_capacity_tokens && batch <= max_batch));
        }
    }
}

impl Router for Watching {
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision {
        Self::look(cluster);
        self.told.arrive(cluster, request)
    }

    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        Self::look(cluster);
        let row = cluster.row(request);
        let input = cluster.workload().requests()[request].input_tokens;
        let cached = cluster.workload().cached_tokens(request, row.hit_blocks);
        assert!(row.hit_blocks <= cluster.workload().requests()[request].blocks);
        self.computed_tokens += u64::from(input - cached);
    }
}

fn watched(case: &Case) -> (SimulationResult, u64) {
    let told = Told(case.decisions.clone());
    let mut router = Watching { told, computed_tokens: 0 };
    let outcome = run(&case.workload, &case.arrivals, &case.config, &mut router, &mut |_| {});
    (outcome, router.computed_tokens)
}

proptest! {
    #[test]
    fn every_request_is_served_once_in_order_and_within_bounds(case in case()) {
        let (outcome, computed_tokens) = watched(&case);
        prop_assert_eq!(&outcome, &watched(&case).0, "the same again");
        let mut last_start = vec![0; case.config.prefill_workers];
        let mut cached_tokens = 0;
        for (i, row) in outcome.rows.iter().enumerate() {
            let request = case.workload.requests()[i];
            prop_assert!(row.arrival_ns <= row.prefill_start_ns);
            prop_assert!(row.prefill_start_ns < row.prefill_end_ns);
            prop_assert!(row.prefill_end_ns <= row.kv_ready_ns);
            prop_assert!(row.kv_ready_ns < row.first_token_ns);
            let worker = row.decode_worker.unwrap() as usize;
            let first = row.first_step as usize;
            let steps = &outcome.steps_ns[worker][first + 1..first + request.output_tokens as usize];
            prop_assert_eq!(row.last_token_ns - row.first_token_ns, steps.iter().sum::<u64>());
            if let Some(worker) = row.prefill_worker {
                // First come, first served.
                prop_assert!(row.prefill_start_ns >= last_start[worker as usize]);
                last_start[worker as usize] = row.prefill_start_ns;
                prop_assert!(row.moved_tokens <= request.input_tokens);
            }
            cached_tokens += u64::from(case.workload.cached_tokens(i, row.hit_blocks));
        }
        let all: u64 = case.workload.requests().iter().map(|r| u64::from(r.input_tokens)).sum();
        prop_assert_eq!(computed_tokens + cached_tokens, all, "tokens are computed or cached");
    }
}

fn fetching(worker: usize, blocks: u32, from: Peer) -> Decision {
    Decision::Prefill(Placement::fetching(worker, blocks, from))
}

fn three(prefill_cache_blocks: usize) -> ClusterConfig {
    ClusterConfig { prefill_workers: 3, prefill_cache_blocks, ..small() }
}

#[test]
fn fetches_take_turns_on_the_links_of_their_source_and_after_its_hand_offs() {
    let later = &[1, 2, 3, 4][..];
    let requests = [(0, &[1, 2, 3][..], 1), (5, later, 1), (5, later, 1)];
    let decisions = [1, 2].map(|worker| fetching(worker, 3, Peer::Prefill(0)));
    let outcome = serve(&three(100), &requests, [&[on(0)], &decisions[..]].concat());
    // The hand-off has the link from second 4 to 7, the fetches until 10 and 13; and all arrive a
    // second later.
    assert_eq!(told(&outcome, 0), (0, 0, 4, 3, 8, 9, 9));
    let starts = [1, 2].map(|i| (told(&outcome, i).0, told(&outcome, i).1, told(&outcome, i).2));
    assert_eq!(starts, [(3, 11, 13), (3, 14, 16)]);
    assert_eq!([1, 2].map(|i| outcome.rows[i].fetched_blocks), [3, 3]);
}

#[test]
fn blocks_that_the_source_loses_before_it_sends_them_are_computed() {
    let later = &[1, 2, 3, 4][..];
    let requests = [(0, &[1, 2, 3][..], 1), (4, &[7, 8, 9], 1), (5, later, 1), (5, later, 1)];
    let decisions = [1, 2].map(|worker| fetching(worker, 3, Peer::Prefill(0)));
    let outcome = serve(&three(3), &requests, [&[on(0), on(0)], &decisions[..]].concat());
    // The second prompt evicts the first one in second 8, between the two transfers.
    let hits = [2, 3].map(|i| (outcome.rows[i].hit_blocks, outcome.rows[i].fetched_blocks));
    assert_eq!(hits, [(3, 3), (0, 0)]);
    assert_eq!(outcome.rows[3].prefill_end_ns - outcome.rows[3].prefill_start_ns, 5 * S);
}

#[test]
fn blocks_that_the_fetching_worker_loses_before_it_begins_are_computed() {
    let long = &[10, 11, 12, 13, 14, 15, 16, 17, 18, 19][..];
    let requests = [(0, &[1, 2, 3][..], 1), (5, long, 1), (5, &[1, 2, 3, 4], 1)];
    let decisions = vec![on(0), on(1), fetching(1, 3, Peer::Prefill(0))];
    let outcome = serve(&three(10), &requests, decisions);
    // The fetch is complete while the worker computes the long prompt, whose blocks fill the cache.
    assert_eq!(
        (outcome.rows[2].fetch_ready_ns, outcome.rows[2].prefill_start_ns),
        (11 * S, 16 * S)
    );
    assert_eq!((outcome.rows[2].hit_blocks, outcome.rows[2].fetched_blocks), (0, 0));
}

#[test]
fn a_request_overtakes_another_one_that_still_fetches() {
    let requests = [(0, &[1, 2, 3][..], 1), (5, &[1, 2, 3, 4], 1), (6, &[9], 1)];
    let decisions = vec![on(0), fetching(1, 3, Peer::Prefill(0)), on(1)];
    let outcome = serve(&three(100), &requests, decisions);
    assert_eq!((told(&outcome, 2).1, told(&outcome, 2).2), (6, 8));
    assert_eq!(told(&outcome, 1).1, 11);
}

#[test]
fn a_decode_worker_sends_what_it_keeps() {
    let config = ClusterConfig { decode_cache_blocks: 10, ..three(100) };
    let requests = [(0, &[1, 2, 3][..], 1), (20, &[1, 2, 3, 4], 1)];
    let outcome = serve(&config, &requests, vec![on(0), fetching(1, 3, Peer::Decode(0))]);
    assert_eq!((told(&outcome, 1).0, told(&outcome, 1).1), (3, 24));
}
