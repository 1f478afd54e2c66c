//! Tests of the choice between fetching and computing.

use proptest::prelude::*;

use super::*;
use crate::coefficients::Coefficients;
use crate::{CandidateIndex, Choice, KvFormat, Leg, Policy, pick};

const BLOCK_TOKENS: u32 = 500;

fn query(leg: Leg) -> Query {
    Query {
        leg,
        prompt_tokens: 16_000,
        prompt_blocks: 32,
        block_size: BLOCK_TOKENS,
        turn: 0,
        draw: 0,
        sharing: Default::default(),
    }
}

fn worker(number: u32) -> Candidate {
    Candidate { worker: WorkerIndex(number), up: true, can_fetch: true, ..Candidate::default() }
}

fn source(number: u32, blocks: u32) -> Source {
    let (worker, kv_format) = (WorkerIndex(number), KvFormat::default());
    Source { worker, rank: None, blocks, wait_ns: 0, kv_format }
}

fn decide(candidates: &[Candidate], sources: &[Source]) -> Choice {
    pick(&Policy::predicted_ttft(), candidates, sources, query(Leg::Prefill)).unwrap()
}

#[test]
fn nothing_is_fetched_from_an_engine_that_stores_kv_otherwise() {
    let of = |dtype| KvFormat::of(Some(dtype), None);
    let fetcher = Candidate { kv_format: of("auto"), ..worker(1) };
    let strange = Source { kv_format: of("fp8"), ..source(0, 30) };
    let known = Source { kv_format: of("auto"), ..source(2, 20) };
    let fetched = |sources: &[Source]| decide(&[fetcher], sources).fetch().map(|plan| plan.source);
    assert_eq!(fetched(&[strange]), None);
    assert_eq!(fetched(&[strange, known]), Some(WorkerIndex(2)), "though it holds less");
    assert_eq!(fetched(&[source(0, 30)]), Some(WorkerIndex(0)), "nothing is known of it");
}

#[test]
fn an_idle_worker_fetches_what_a_busy_one_holds() {
    let holder = Candidate { overlap_blocks: 30, wait_ns: 9_000_000_000, ..worker(0) };
    let choice = decide(&[holder, worker(1)], &[source(0, 30)]);
    let fetch = choice.fetch().unwrap();
    assert_eq!(choice.index, CandidateIndex(1));
    assert_eq!((fetch.source, fetch.blocks, fetch.tokens), (WorkerIndex(0), 30, 15_000));
    // 30 ms and 15,000 x 327,680 bytes at 100 GB/s.
    assert!((choice.terms[choice.index].fetch_ms - 79.152).abs() < 1e-6, "{choice:?}");
    assert_eq!(choice.available_prefix(&[holder, worker(1)], &query(Leg::Prefill)).blocks, 30);
    assert_eq!(choice.fetches[0], None, "the holder has nothing to fetch");
}

#[test]
fn a_worker_that_cannot_fetch_computes() {
    let holder = Candidate { overlap_blocks: 30, wait_ns: 9_000_000_000, ..worker(0) };
    let idle = Candidate { can_fetch: false, ..worker(1) };
    let choice = decide(&[holder, idle], &[source(0, 30)]);
    assert_eq!((choice.index, choice.fetch()), (CandidateIndex(1), None));
    assert!(choice.terms.iter().all(|terms| terms.fetch_ms == 0.0));
}

#[test]
fn a_fetch_is_hidden_by_the_wait() {
    let busy = Candidate { wait_ns: 1_000_000_000, ..worker(1) };
    let choice = decide(&[busy], &[source(0, 30)]);
    assert_eq!(choice.terms[choice.index].fetch_ms, 0.0);
    assert!(choice.fetch().unwrap().ready_ms > 0.0);
}

#[test]
fn over_a_slow_link_only_what_arrives_during_the_wait_is_fetched() {
    let mut busy = Candidate { wait_ns: 1_000_000_000, ..worker(1) };
    busy.coefficients.fetch_bytes_per_second = 1e9;
    // In the 970 ms after the base, five blocks of 163.84 ms arrive.
    let busy_fleet = Policy::PredictedTtft { extra_work_weight: Some(10.0), temperature: 0.0 };
    let decide =
        |candidate| pick(&busy_fleet, &[candidate], &[source(0, 30)], query(Leg::Prefill)).unwrap();
    let choice = decide(busy);
    assert_eq!(choice.fetch().map(|fetch| fetch.blocks), Some(5));
    assert_eq!(choice.terms[choice.index].fetch_ms, 0.0);
    assert_eq!(decide(Candidate { wait_ns: 0, ..busy }).fetch(), None);
}

#[test]
fn a_leg_that_takes_the_prefix_itself_saves_a_request() {
    let planned = |within_s: f64, wait_ns| {
        let one_shot_within_ns = (within_s * 1e9) as u64;
        let candidate = Candidate { one_shot_within_ns, wait_ns, ..worker(1) };
        let choice = decide(&[candidate], &[source(0, 30)]);
        (choice.fetch().unwrap(), choice.terms[choice.index].fetch_ms)
    };
    let (plan, fetch_ms) = planned(10.0, 0);
    assert!(plan.one_shot && plan.way() == "one_shot");
    // Half of 30 ms, and 15,000 x 327,680 bytes at 100 GB/s.
    assert!((fetch_ms - 64.152).abs() < 1e-6 && (plan.ready_ms - fetch_ms).abs() < 1e-6);
    let (plan, fetch_ms) = planned(10.0, 10_000_000);
    assert!(plan.one_shot && (fetch_ms - 54.152).abs() < 1e-6, "{plan:?}");
    // The 1,000 other tokens, or the wait before them, take longer than the lease is trusted.
    assert!(!planned(0.1, 0).0.one_shot);
    assert!(!planned(10.0, 9_950_000_000).0.one_shot);
    assert_eq!(planned(0.0, 0).0.way(), "two_step");
}

#[test]
fn a_leg_takes_no_prefix_that_its_engine_would_compute_or_if_it_reads_back() {
    let able = Candidate { one_shot_within_ns: u64::MAX, ..worker(1) };
    let short = Query { block_size: 2, ..query(Leg::Prefill) };
    let few = Candidate { coefficients: dear(), ..able };
    let planned = |candidate, blocks, query| {
        let policy = Policy::predicted_ttft();
        pick(&policy, &[candidate], &[source(0, blocks)], query).unwrap().fetch().unwrap()
    };
    assert!(planned(few, 32, short).one_shot, "64 tokens");
    assert!(!planned(few, 31, short).one_shot, "62 tokens");
    assert!(planned(able, 20, query(Leg::Prefill)).one_shot);
    let coefficients = Coefficients { read_ratio: 10.0, ..able.coefficients };
    let reads = Candidate { readable_blocks: 31, coefficients, ..able };
    assert!(!planned(reads, 20, query(Leg::Prefill)).one_shot);
}

/// A worker that computes slowly, and fetches at once.
fn dear() -> Coefficients {
    let (prefill_seconds_per_token, fetch_base_seconds) = (1.0, 0.0);
    Coefficients { prefill_seconds_per_token, fetch_base_seconds, ..Coefficients::default() }
}

#[test]
fn of_two_sources_the_one_is_asked_that_can_send_sooner() {
    let far = Source { wait_ns: 5_000_000_000, ..source(0, 30) };
    let choice = decide(&[worker(2)], &[far, source(1, 29)]);
    assert_eq!(
        choice.fetch().map(|fetch| (fetch.source, fetch.blocks)),
        Some((WorkerIndex(1), 29))
    );
}

#[test]
fn a_decode_leg_fetches_nothing() {
    let choice =
        pick(&Policy::predicted_ttft(), &[worker(1)], &[source(0, 30)], query(Leg::Decode))
            .unwrap();
    assert_eq!((choice.fetch(), choice.fetches.len()), (None, 0));
}

fn candidate() -> impl Strategy<Value = Candidate> {
    let wait_ns = prop_oneof![Just(0u64), 0..3_000_000_000u64];
    let blocks = (0..32u32, 0..32u32, prop_oneof![Just(0.0), 0.0..1.0f64]);
    let link = prop_oneof![Just(0u64), 0..500_000_000u64];
    let speed = prop_oneof![Just(100e9), 1e9..200e9f64];
    (wait_ns, blocks, link, speed, 0.0f64..1.0, any::<(bool, bool)>()).prop_map(
        |(
            wait_ns,
            (overlap_blocks, speculative_blocks, discount),
            link_wait_ns,
            speed,
            busy,
            (can, shot),
        )| {
            let mut candidate =
                Candidate { wait_ns, overlap_blocks, speculative_blocks, ..worker(0) };
            candidate.overlap_discount = discount;
            candidate.link_wait_ns = link_wait_ns;
            candidate.busy_share = busy;
            candidate.can_fetch = can;
            candidate.one_shot_within_ns = if shot { 5_000_000_000 } else { 0 };
            candidate.coefficients.fetch_bytes_per_second = speed;
            candidate
        },
    )
}

/// Workers, and sources that are these workers and others.
fn fleet() -> impl Strategy<Value = (Vec<Candidate>, Vec<Source>)> {
    let sources = (0..12u32, 0..40u32, prop_oneof![Just(0u64), 0..800_000_000u64]);
    let sources = proptest::collection::vec(sources, 0..12);
    (proptest::collection::vec(candidate(), 1..9), sources).prop_map(|(mut fleet, sources)| {
        let numbered = (0..).map(WorkerIndex).zip(&mut fleet);
        numbered.for_each(|(number, candidate)| candidate.worker = number);
        let of = |(number, blocks, wait_ns)| Source { wait_ns, ..source(number, blocks) };
        (fleet, sources.into_iter().map(of).collect())
    })
}

fn faster(fleet: &[Candidate], factor: f64) -> Vec<Candidate> {
    let of = |candidate: &Candidate| {
        let mut candidate = *candidate;
        candidate.coefficients.fetch_bytes_per_second *= factor;
        candidate
    };
    fleet.iter().map(of).collect()
}

/// The cost of a candidate whose work is priced as a whole: the work of the best worker, which is
/// free, differs between decisions.
fn own_cost_ms(terms: &CostTerms, price: f64) -> f64 {
    terms.ttft_ms() + price * (terms.prefill_ms + terms.fetch_ms) + terms.copy_ms
}

proptest! {
    /// Without sources, and without workers that can fetch, nothing changes.
    #[test]
    fn no_sources_no_difference((fleet, sources) in fleet(), leg in 0usize..3) {
        let query = query([Leg::Prefill, Leg::Decode, Leg::Aggregated][leg]);
        let without = pick(&Policy::predicted_ttft(), &fleet, &[], query).unwrap();
        let mut unable = fleet;
        unable.iter_mut().for_each(|candidate| candidate.can_fetch = false);
        let with = pick(&Policy::predicted_ttft(), &unable, &sources, query).unwrap();
        prop_assert_eq!(with.index, without.index);
        prop_assert_eq!(&with.costs, &without.costs);
        prop_assert_eq!(&with.terms, &without.terms);
        prop_assert_eq!((without.fetch(), with.fetch()), (None, None));
    }

    /// A fetch is chosen only if it is predicted to be cheaper than computing, for the request alone
    /// as for all.
    #[test]
    fn a_fetch_is_cheaper_than_computing((fleet, sources) in fleet()) {
        let price = Policy::PredictedTtft { extra_work_weight: Some(2.0), temperature: 0.0 };
        let without = pick(&price, &fleet, &[], query(Leg::Prefill)).unwrap();
        let with = pick(&price, &fleet, &sources, query(Leg::Prefill)).unwrap();
        for i in CandidateIndex::all(with.fetches.len()) {
            let Some(fetch) = with.fetches[i] else {
                prop_assert_eq!(with.terms[i].ttft_ms(), without.terms[i].ttft_ms());
                continue;
            };
            let ms = |terms: &CostTerms| own_cost_ms(terms, 2.0);
            let (fetched, computed) = (ms(&with.terms[i]), ms(&without.terms[i]));
            prop_assert!(fetched < computed, "{fetch:?} {fetched} {computed}");
            prop_assert!(with.terms[i].ttft_ms() < without.terms[i].ttft_ms());
        }
    }

    /// A source is another worker that holds what is fetched, which is more than the candidate
    /// holds.
    #[test]
    fn a_source_is_another_worker_that_holds_more((fleet, sources) in fleet()) {
        let choice = decide(&fleet, &sources);
        for (candidate, fetch) in fleet.iter().zip(&choice.fetches) {
            let Some(fetch) = fetch else { continue };
            prop_assert!(candidate.can_fetch && fetch.source != candidate.worker);
            prop_assert!(fetch.blocks > candidate.held_blocks() && fetch.blocks <= 32);
            let of = |source: &&Source| source.worker == fetch.source;
            let holds = sources.iter().filter(of).map(|source| source.blocks).max();
            prop_assert!(holds.is_some_and(|holds| holds >= fetch.blocks));
            prop_assert!(fetch.tokens > 0 && fetch.tokens <= u64::from(fetch.blocks * BLOCK_TOKENS));
        }
    }

    /// A faster link never makes a request wait longer, and a further source neither.
    #[test]
    fn costs_fall_with_bandwidth_and_with_sources(
        (fleet, sources) in fleet(), factor in 1.0f64..50.0,
    ) {
        let price = Policy::PredictedTtft { extra_work_weight: Some(2.0), temperature: 0.0 };
        let total = |fleet: &[Candidate], sources: &[Source], i: CandidateIndex| {
            let choice = pick(&price, fleet, sources, query(Leg::Prefill)).unwrap();
            own_cost_ms(&choice.terms[i], 2.0)
        };
        for i in CandidateIndex::all(fleet.len()) {
            let slow = total(&fleet, &sources, i);
            let fast = total(&faster(&fleet, factor), &sources, i);
            // What a fetch is worth is known up to the margin.
            let margin = MARGIN_RATIO * total(&fleet, &[], i);
            prop_assert!(fast <= slow + margin, "{fast} {slow}");
            prop_assert!(slow <= total(&fleet, &[], i));
        }
    }
}
