//! Tests of which way is chosen, what is learned, and what the exploration costs.

use super::*;
use crate::candidate::Leg;
use crate::kv_format::KvFormat;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;
const BLOCK: u32 = 512;

fn query(prompt_tokens: u64, draw: u64) -> Query {
    Query {
        leg: Leg::Aggregated,
        prompt_tokens,
        prompt_blocks: prompt_tokens.div_ceil(u64::from(BLOCK)) as u32,
        block_size: BLOCK,
        turn: 0,
        draw,
        sharing: Default::default(),
    }
}

fn worker(number: u32) -> Candidate {
    Candidate { worker: WorkerIndex(number), up: true, ..Candidate::default() }
}

/// A decode worker with streams that holds some of the prompt.
fn streaming(number: u32, overlap_blocks: u32) -> Candidate {
    Candidate { requests: 40, active_tokens: 200_000, overlap_blocks, ..worker(number) }
}

fn input<'a>(
    query: Query,
    prefill: &'a [Candidate],
    decode: &'a [Candidate],
) -> ComparisonInput<'a> {
    ComparisonInput { query, prefill, decode, sources: &[], waiting: 0, ahead_ms: 0.0 }
}

/// No step is too long for the goal, so the budget plays no part.
fn gentle() -> Threshold {
    let config = ThresholdConfig { chunk_tokens: 512, tbt_goal_ms: 1e4, ..Default::default() };
    Threshold::new(config, 0.8)
}

/// Whether a prompt of `tokens` tokens, of which the decode worker holds some blocks, is computed
/// there.
fn stays(tokens: u64, held: u32, change: impl Fn(&mut Candidate, &mut Candidate)) -> bool {
    let (mut p, mut d) = (worker(0), streaming(1, held));
    change(&mut p, &mut d);
    let (p, d) = ([p], [d]);
    gentle().compare(SECOND, &input(query(tokens, 1), &p, &d)).local
}

#[test]
fn short_tails_stay_and_long_ones_go_unless_the_other_side_is_busy() {
    let as_is = |_: &mut Candidate, _: &mut Candidate| {};
    assert!(stays(12_000, 23, as_is));
    assert!(!stays(12_000, 0, as_is));
    let queue = |p: &mut Candidate, _: &mut Candidate| p.wait_ns = 9 * SECOND;
    assert!(stays(12_000, 0, queue));
    let local_queue = |_: &mut Candidate, d: &mut Candidate| d.prefill_tokens = 30_000;
    assert!(!stays(12_000, 23, local_queue));
    let slow_network = |p: &mut Candidate, d: &mut Candidate| {
        p.coefficients.bandwidth_bytes_per_second = 0.3e9;
        d.coefficients.bandwidth_bytes_per_second = 0.3e9;
    };
    assert!(stays(12_000, 0, slow_network));
    let holder = |p: &mut Candidate, _: &mut Candidate| p.overlap_blocks = 22;
    assert!(!stays(12_000, 12, holder));
    assert!(stays(12_000, 0, |p, _| p.up = false), "where nobody else can");
    assert!(!stays(12_000, 23, |_, d| d.up = false));
}

#[test]
fn long_steps_use_up_a_budget_that_comes_back() {
    let config = ThresholdConfig { chunk_tokens: 0, ..ThresholdConfig::default() };
    let mut threshold = Threshold::new(config, 0.8);
    // The queue is so long that local prefill is better for every prompt; its steps take some 600
    // ms.
    let p = [Candidate { wait_ns: 60 * SECOND, ..worker(0) }];
    let d = [streaming(1, 0)];
    let long = input(query(6_000, 1), &p, &d);
    let mut at = 100 * SECOND;
    let mut stay = 0;
    while threshold.compare(at, &long).local {
        let comparison = threshold.compare(at, &long);
        assert!(comparison.at_decode.unwrap().excess_ms > 400.0);
        threshold.record_way_taken(at, &comparison, &long);
        at += SECOND / 100;
        stay += 1;
        assert!(stay < 10, "no bound on long steps");
    }
    assert!(stay >= 1);
    // Steps that fit between two tokens are still allowed.
    let short = input(query(1_000, 1), &p, &d);
    assert!(threshold.compare(at, &short).local);
    // 4.4 ms per step, 25 ms each: three to four seconds for one more.
    assert!(threshold.compare(at + 10 * SECOND, &long).local);
}

/// Runs `count` requests, one per second, whose true times are the given multiples of the predicted
/// ones. Returns the total seconds until first tokens: as decided, always remote, always local.
fn live(
    threshold: &mut Threshold,
    from: u64,
    count: u64,
    (local_off, remote_off): (f64, f64),
) -> [f64; 3] {
    let mut sums = [0.0; 3];
    for i in from..from + count {
        let now_ns = i * SECOND;
        let draw = mix(i);
        let tokens = 1_000 + draw % 15_000;
        let held = (mix(draw) % (tokens / u64::from(BLOCK) + 1)) as u32;
        let (p, d) = ([worker(0)], [streaming(1, held)]);
        let input = input(query(tokens, draw), &p, &d);
        let comparison = threshold.compare(now_ns, &input);
        let truth = |local| {
            let way = if local { comparison.at_decode } else { comparison.at_prefill }.unwrap();
            (
                way,
                (way.parts.longer_ms + way.parts.shorter_ms)
                    * if local { local_off } else { remote_off },
            )
        };
        threshold.record_way_taken(now_ns, &comparison, &input);
        let (way, ttft_ms) = truth(comparison.local);
        threshold.observe(now_ns, comparison.local, &way, ttft_ms);
        sums[0] += ttft_ms / 1e3;
        sums[1] += truth(false).1 / 1e3;
        sums[2] += truth(true).1 / 1e3;
    }
    sums
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever the true durations of both ways are: in steady state, neither always-remote nor
    /// always-local prefill would have been better by more than a twentieth.
    #[test]
    fn the_threshold_is_never_much_worse_than_always_or_never_prefilling_remotely(
        local_off in 0.3f64..4.0, remote_off in 0.3f64..4.0,
    ) {
        let mut threshold = gentle();
        live(&mut threshold, 1, 300, (local_off, remote_off));
        let [auto, remote, local] = live(&mut threshold, 301, 600, (local_off, remote_off));
        prop_assert!(auto <= 1.05 * remote.min(local), "{auto} {remote} {local}");
    }

    /// The same, ten minutes after the network or the engines have changed.
    #[test]
    fn another_regime_is_learned_in_minutes(
        before in (0.3f64..4.0, 0.3f64..4.0), after in (0.3f64..4.0, 0.3f64..4.0),
    ) {
        let mut threshold = gentle();
        live(&mut threshold, 1, 600, before);
        live(&mut threshold, 601, 600, after);
        let [auto, remote, local] = live(&mut threshold, 1_201, 600, after);
        prop_assert!(auto <= 1.05 * remote.min(local), "{auto} {remote} {local}");
    }

    /// Few requests explore, regardless of when requests arrive.
    #[test]
    fn exploration_is_bounded(seed: u64, off in 0.5f64..2.0) {
        let mut threshold = gentle();
        let explored = (0..2_000u64).filter(|i| {
            let (p, d) = ([worker(0)], [streaming(1, (mix(*i) % 20) as u32)]);
            let input = input(query(10_240, mix(seed ^ mix(*i))), &p, &d);
            let now_ns = i * SECOND / 10;
            let comparison = threshold.compare(now_ns, &input);
            let way = *comparison.way().unwrap();
            threshold.record_way_taken(now_ns, &comparison, &input);
            threshold.observe(now_ns, comparison.local, &way, way.ttft_ms * off);
            comparison.explored
        });
        // 2,000 / 64 is 31, and each must be ten seconds after the last: 20 in 200 seconds.
        prop_assert!(explored.count() <= 20);
    }
}

#[test]
fn a_dry_run_changes_nothing_and_says_what_is_learned() {
    let mut threshold = gentle();
    let begin = threshold.learned(SECOND);
    assert_eq!((begin.threshold_ratio, begin.confidence), (0.8, 0.0));
    let (p, d) = ([worker(0)], [streaming(1, 10)]);
    let input = input(query(6_000, 1), &p, &d);
    let comparison = threshold.compare(SECOND, &input);
    assert_eq!(comparison, threshold.compare(SECOND, &input));
    assert_eq!(begin, threshold.learned(SECOND));
    assert!((comparison.hit_ratio - 5_120.0 / 5_999.0).abs() < 1e-9);

    live(&mut threshold, 1, 300, (1.0, 1.0));
    let learned = threshold.learned(301 * SECOND);
    assert!((0.2..0.95).contains(&learned.threshold_ratio), "{learned:?}");
    assert!(learned.confidence > 0.6 && learned.comparisons > 50.0, "{learned:?}");
    assert!((0.8..1.2).contains(&learned.interference), "{learned:?}");
    // An hour later, none of this counts any more.
    let stale = threshold.learned(3_900 * SECOND);
    assert_eq!(stale.threshold_ratio, 0.8);
    assert!(stale.confidence < 0.01 && (stale.interference - 1.0).abs() < 1e-3, "{stale:?}");
}

#[test]
fn the_ratio_is_where_local_prefills_begin_to_save() {
    let mut curve = Curve::new(0.5);
    for i in 0..400u64 {
        let ratio = (i % 100) as f64 / 100.0;
        curve.compared(i * SECOND / 4, ratio, (ratio - 0.62) * 1_000.0);
    }
    let now = 100 * SECOND;
    assert!((0.59..0.66).contains(&curve.threshold_ratio(now)), "{}", curve.threshold_ratio(now));
    assert!(curve.confidence(now) > 0.75, "{}", curve.confidence(now));
    // The conditions change so that local prefill is never better. Five minutes later this is
    // learned.
    for i in 400..1_600u64 {
        curve.compared(i * SECOND / 4, (i % 100) as f64 / 100.0, -500.0);
    }
    assert_eq!(curve.threshold_ratio(400 * SECOND), 1.0);
}

#[test]
fn a_remote_way_that_became_much_faster_is_found_by_few_explorations() {
    let mut threshold = gentle();
    live(&mut threshold, 1, 600, (1.6, 3.8));
    live(&mut threshold, 601, 600, (1.6, 0.3));
    let [auto, remote, _] = live(&mut threshold, 1_201, 300, (1.6, 0.3));
    assert!(auto <= 1.05 * remote, "{auto} {remote}");
}

/// A decode worker that can fetch, and one that holds a prefix and is busy.
fn fetching() -> ([Candidate; 1], [Candidate; 2], [Source; 1]) {
    let busy = Candidate { wait_ns: 60 * SECOND, ..worker(0) };
    let idle = Candidate { can_fetch: true, ..streaming(1, 0) };
    let holder = Candidate { wait_ns: 60 * SECOND, ..streaming(2, 22) };
    let (worker, kv_format) = (WorkerIndex(2), KvFormat::default());
    let source = Source { worker, rank: None, blocks: 22, wait_ns: 0, kv_format };
    ([busy], [idle, holder], [source])
}

#[test]
fn a_local_prefill_fetches_what_another_worker_holds_where_that_is_cheaper() {
    let (p, d, sources) = fetching();
    let without = input(query(12_000, 1), &p, &d);
    let with = ComparisonInput { sources: &sources, ..without };
    let computed = gentle().compare(SECOND, &without).at_decode.unwrap();
    let fetched = gentle().compare(SECOND, &with).at_decode.unwrap();
    assert_eq!((computed.index, computed.fetch), (CandidateIndex(0), None));
    let fetch = fetched.fetch.unwrap();
    assert_eq!(
        (fetched.index, fetch.source, fetch.blocks),
        (CandidateIndex(0), WorkerIndex(2), 22)
    );
    assert_eq!(fetch.tokens, 22 * u64::from(BLOCK));
    assert!(fetched.ttft_ms < computed.ttft_ms && fetched.cost_ms < computed.cost_ms);
    // 30 ms and 11,264 x 327,680 bytes at 100 GB/s, less half of the step of 25 ms.
    let least = gentle().compare(SECOND, &input(query(12_000, 1), &p, &[streaming(1, 22)]));
    let later_ms = fetched.ttft_ms - least.at_decode.unwrap().ttft_ms;
    assert!((later_ms - (66.91 - 12.5)).abs() < 0.01, "{later_ms}");
    // A slow link, a fetch that is too short, and a worker that cannot fetch.
    let changes: [fn(&mut Candidate); 3] = [
        |d| d.coefficients.fetch_bytes_per_second = 1e9,
        |d| d.fetch_min_tokens = 20_000,
        |d| d.can_fetch = false,
    ];
    for change in changes {
        let mut d = d;
        change(&mut d[0]);
        let with = ComparisonInput { decode: &d, ..with };
        assert_eq!(gentle().compare(SECOND, &with).at_decode.unwrap().fetch, None);
    }
}

#[test]
fn a_remote_prefill_that_fetches_is_compared_with_what_it_then_costs() {
    let (_, d, sources) = fetching();
    let p = [Candidate { can_fetch: true, ..worker(0) }];
    // Only the prefill worker can fetch.
    let d = d.map(|worker| Candidate { can_fetch: false, ..worker });
    let at = |ahead_ms, sources| {
        let input = ComparisonInput { sources, ahead_ms, ..input(query(12_000, 1), &p, &d) };
        gentle().compare(SECOND, &input).at_prefill.unwrap()
    };
    let (computed, fetched) = (at(0.0, &[]), at(0.0, &sources));
    assert_eq!((computed.fetch, fetched.fetch.unwrap().blocks), (None, 22));
    assert!(fetched.cost_ms < computed.cost_ms, "{fetched:?} {computed:?}");
    // While the request waits in the router, its blocks arrive.
    let (waits, hidden) = (at(500.0, &[]), at(500.0, &sources));
    let (saved, more) = (computed.ttft_ms - fetched.ttft_ms, waits.ttft_ms - hidden.ttft_ms);
    assert!((more - saved - 66.91).abs() < 0.01, "{saved} {more}");
}

#[test]
fn a_worker_s_wait_and_its_queued_tokens_are_the_same_prompts() {
    // 30,000 tokens take 3.6 s.
    let queued = Candidate { prefill_tokens: 30_000, ..worker(1) };
    let both = Candidate { wait_ns: 2 * SECOND, ..queued };
    let at = |d| gentle().compare(SECOND, &input(query(6_000, 1), &[], &[d])).at_decode.unwrap();
    assert_eq!(at(both).ttft_ms, at(queued).ttft_ms);
    let longer = Candidate { wait_ns: 5 * SECOND, ..queued };
    assert!(at(longer).ttft_ms > at(queued).ttft_ms);
}

proptest! {
    /// A further source never makes either way dearer, and a fetch is chosen only where it makes the
    /// way cheaper.
    #[test]
    fn sources_make_no_way_dearer(
        tokens in 600u64..40_000, held in (0u32..40, 0u32..40), blocks in 1u32..60,
        waits in (0u64..3_000, 0u64..3_000, 0u64..900), ahead_ms in 0.0f64..3_000.0,
        speed in 1e9f64..200e9, busy_share in 0.0f64..1.0,
    ) {
        let change = |mut candidate: Candidate, wait_ms: u64| {
            candidate.wait_ns = wait_ms * 1_000_000;
            (candidate.can_fetch, candidate.busy_share) = (true, busy_share);
            candidate.coefficients.fetch_bytes_per_second = speed;
            candidate
        };
        let p = [change(Candidate { overlap_blocks: held.0, ..worker(0) }, waits.0)];
        let d = [change(streaming(1, held.1), waits.1)];
        let wait_ns = waits.2 * 1_000_000;
        let (worker, kv_format) = (WorkerIndex(2), KvFormat::default());
        let sources = [Source { worker, rank: None, blocks, wait_ns, kv_format }];
        let without = ComparisonInput { ahead_ms, ..input(query(tokens, 3), &p, &d) };
        let with = ComparisonInput { sources: &sources, ..without };
        let (with, without) = (gentle().compare(SECOND, &with), gentle().compare(SECOND, &without));
        for (with, without) in [
            (with.at_prefill.unwrap(), without.at_prefill.unwrap()),
            (with.at_decode.unwrap(), without.at_decode.unwrap()),
        ] {
            prop_assert!(with.cost_ms <= without.cost_ms);
            if with.fetch.is_none() {
                prop_assert_eq!(with, without);
            } else {
                prop_assert!(with.ttft_ms < without.ttft_ms && with.cost_ms < without.cost_ms);
            }
        }
    }
}
