//! The guarantees of this project's own policy, tested with generated conversations.

use splitrail_policy::{Coefficients, mix};
use splitrail_replay::trace::{TraceSelection, read};
use splitrail_replay::{Entry, FetchBounds, NamedPolicy, PolicyReport, Scenario, coefficients};
use splitrail_sim::cluster::{RequestResult, SimulationResult, Workload};

/// An even fraction in (0, 1].
fn even(seed: u64, i: u64) -> f64 {
    ((mix(seed ^ mix(i)) >> 11) as f64 + 1.0) / (1u64 << 53) as f64
}

/// Conversations of some turns after one of a few system prompts; prompts with a long tail.
fn conversations(requests: usize) -> Workload {
    let mut turns: Vec<(u64, u64, u64, Vec<u64>)> = Vec::new();
    let mut next = 1_000;
    let mut seed = 0;
    while turns.len() < requests {
        seed += 1;
        let system = (even(seed, 1) * even(seed, 2) * 12.0) as u64;
        let mut blocks: Vec<u64> = (system * 10..system * 10 + 2).collect();
        let mut at_ms = even(seed, 3) * 3_600e3;
        for turn in 0..1 + (-even(seed, 4).ln() * 3.0) as u64 {
            // Median 2,000 tokens, every twentieth more than 20,000.
            let normal = (0..6).map(|i| even(seed, 100 * turn + 10 + i)).sum::<f64>() - 3.0;
            let added = ((normal * 2.0).exp() * 4.0).clamp(1.0, 120.0) as u64;
            blocks.extend(next..next + added);
            next += added;
            let output = 20 + (even(seed, 100 * turn + 20) * 400.0) as u64;
            turns.push((at_ms as u64, blocks.len() as u64 * 512 - 40, output, blocks.clone()));
            at_ms += 5e3 - even(seed, 100 * turn + 30).ln() * 60e3;
        }
    }
    turns.sort();
    let line = |(at, input, output, blocks): &(u64, u64, u64, Vec<u64>)| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": {output}, \
             \"hash_ids\": {blocks:?}}}\n"
        )
    };
    let lines: String = turns.iter().map(line).collect();
    read(lines.as_bytes(), TraceSelection::default()).unwrap()
}

/// As fast as keeps prefill workers busy, most of whose work hits spare.
fn busy() -> Scenario {
    let mut scenario = Scenario { utilisation: Some(1.7), ..Scenario::default() };
    scenario.cluster.prefill_workers = 4;
    scenario.cluster.decode_workers = 4;
    scenario.cluster.prefill_cache_blocks = 4_000;
    scenario
}

fn serve(workload: &Workload, name: &str, scenario: &Scenario) -> (SimulationResult, PolicyReport) {
    let entry = Entry { policy: NamedPolicy::parse(name).unwrap(), scenario: scenario.clone() };
    entry.serve(workload, &mut |_| {})
}

fn mean_s(outcome: &SimulationResult, from: usize) -> f64 {
    let rows = &outcome.rows[from..];
    rows.iter().map(|row| row.ttft_ns() as f64 / 1e9).sum::<f64>() / rows.len() as f64
}

#[test]
fn requests_wait_less_than_under_any_published_policy() {
    let workload = conversations(1_500);
    let mean = |name: &str| {
        let (outcome, report) = serve(&workload, name, &busy());
        assert_eq!(report.rejected, 0);
        mean_s(&outcome, 0)
    };
    let ours = mean("predicted_ttft");
    for other in ["mooncake", "work_aware", "dynamo", "llmd", "exact_overlap"] {
        let theirs = mean(other);
        assert!(ours < 0.9 * theirs, "{ours} s, {other} {theirs} s");
    }
    let direct = mean("predicted_ttft_direct");
    let theirs = mean("work_aware");
    assert!(direct < 1.02 * theirs, "without the queue {direct} s, work_aware {theirs} s");
}

#[test]
fn wrong_coefficients_are_corrected_within_a_thousand_requests() {
    let workload = conversations(2_000);
    let mut scenario = busy();
    scenario.utilisation = Some(1.4);
    scenario.cluster.prefill_slowness = vec![2.0];
    let truth = coefficients(&scenario.cluster.cost);
    let times = |factor: f64| Coefficients {
        prefill_base_seconds: truth.prefill_base_seconds * factor,
        prefill_seconds_per_token: truth.prefill_seconds_per_token * factor,
        prefill_seconds_per_token_pair: truth.prefill_seconds_per_token_pair * factor,
        ..truth
    };
    let informed = Scenario { assumed_coefficients: vec![times(2.0), truth], ..scenario.clone() };
    let informed_s = mean_s(&serve(&workload, "predicted_ttft", &informed).0, 1_000);
    for factor in [0.5, 2.0] {
        let wrong = Scenario {
            assumed_coefficients: vec![times(factor)],
            learns: true,
            ..scenario.clone()
        };
        let learned_s = mean_s(&serve(&workload, "predicted_ttft", &wrong).0, 1_000);
        assert!(learned_s < 1.1 * informed_s, "{factor}: {learned_s} s, informed {informed_s} s");
    }
}

#[test]
fn fetching_prefixes_shortens_waits_and_costs_nothing_over_slow_links() {
    let workload = conversations(1_500);
    let mean = |cache_blocks, bytes_per_s, is_on: bool| {
        let fetches = is_on.then_some(FetchBounds::NONE);
        let mut scenario = Scenario { fetches, ..busy() };
        scenario.cluster.prefill_cache_blocks = cache_blocks;
        scenario.cluster.cost.transfer_bytes_per_s = bytes_per_s;
        let (outcome, report) = serve(&workload, "predicted_ttft", &scenario);
        assert_eq!(report.loss.fetched_blocks > 0, is_on);
        mean_s(&outcome, 0)
    };
    for cache_blocks in [1_000, 4_000] {
        let [computed, fetched] = [false, true].map(|f| mean(cache_blocks, 100e9, f));
        assert!(fetched < 0.95 * computed, "{cache_blocks}: {fetched} s, without {computed} s");
        let [computed, fetched] = [false, true].map(|f| mean(cache_blocks, 3e9, f));
        assert!(fetched < 1.02 * computed, "{cache_blocks}: {fetched} s, without {computed} s");
    }
}

#[test]
fn fetches_keep_to_their_bounds() {
    let workload = conversations(800);
    let bounds = FetchBounds { min_tokens: 3_000, max_per_worker: 1 };
    let mut scenario = Scenario { fetches: Some(bounds), ..busy() };
    // Slow enough for several fetches to want the same worker.
    scenario.cluster.cost.transfer_bytes_per_s = 10e9;
    let (outcome, _) = serve(&workload, "predicted_ttft", &scenario);
    let fetches = |outcome: &SimulationResult| {
        let with = outcome.rows.iter().enumerate().filter(|(_, row)| row.fetch_from.is_some());
        with.map(|(i, row)| (i, row.clone())).collect::<Vec<_>>()
    };
    let bounded = fetches(&outcome);
    assert!(bounded.len() > 20, "{}", bounded.len());
    let at_once = |all: &[(usize, RequestResult)]| {
        let most = all.iter().map(|(_, one)| {
            let under_way = |other: &&(usize, RequestResult)| {
                (other.1.placed_ns..other.1.fetch_ready_ns).contains(&one.placed_ns)
            };
            let others = || all.iter().filter(under_way);
            let from = others().filter(|(_, other)| other.fetch_from == one.fetch_from).count();
            let to = others().filter(|(_, other)| other.prefill_worker == one.prefill_worker);
            from.max(to.count())
        });
        most.max().unwrap_or(0)
    };
    assert_eq!(at_once(&bounded), 1);
    for (i, row) in &bounded {
        let cached = |blocks| workload.cached_tokens(*i, blocks);
        // What the source has lost since is not counted here.
        let asked = cached(row.fetch_blocks).saturating_sub(cached(row.chosen_blocks));
        assert!(asked >= 3_000 || row.fetched_blocks < row.fetch_blocks, "{row:?}");
    }
    let unbounded = Scenario { fetches: Some(FetchBounds::NONE), ..scenario };
    assert!(at_once(&fetches(&serve(&workload, "predicted_ttft", &unbounded).0)) > 1);
}

#[test]
fn auto_fetches_for_local_and_remote_prefills_and_waits_no_longer_for_it() {
    let workload = conversations(1_200);
    let [without, with] = [None, Some(FetchBounds::NONE)].map(|fetches| {
        let mut scenario = Scenario { fetches, auto_tbt_goal_ms: Some(200.0), ..busy() };
        scenario.cluster.decode_cache_blocks = 4_000;
        scenario.cluster.chunk_tokens = 512;
        scenario.cluster.interference = 0.3;
        serve(&workload, "predicted_ttft", &scenario).0
    });
    let fetched = |outcome: &SimulationResult, is_local: bool| {
        let rows = outcome.rows.iter().filter(|row| row.prefill_worker.is_none() == is_local);
        rows.filter(|row| row.fetched_blocks > 0).count()
    };
    assert_eq!([false, true].map(|is_local| fetched(&without, is_local)), [0, 0]);
    let [remote, local] = [false, true].map(|is_local| fetched(&with, is_local));
    assert!(remote > 0 && local > 0, "{remote} {local}");
    let (without, with) = (mean_s(&without, 0), mean_s(&with, 0));
    assert!(with < without, "{with} s, without {without} s");
}

#[test]
fn the_learned_threshold_is_as_good_as_the_best_fixed_one() {
    let workload = conversations(1_200);
    for (bytes_per_s, interference) in [(100e9, 0.1), (100e9, 1.0), (3e9, 0.1), (3e9, 1.0)] {
        let mut scenario = busy();
        scenario.cluster.decode_cache_blocks = 4_000;
        scenario.cluster.chunk_tokens = 512;
        scenario.cluster.interference = interference;
        scenario.cluster.cost.transfer_bytes_per_s = bytes_per_s;
        let good = |change: Scenario| serve(&workload, "mooncake", &change).1.good5_percent;
        let fixed = [0.3, 0.5, 0.7, 0.9, 1.1].map(|share| {
            let mut fixed = scenario.clone();
            fixed.cluster.local_threshold = Some(share);
            good(fixed)
        });
        let best = fixed.into_iter().fold(0.0, f64::max);
        let auto = good(Scenario { auto_tbt_goal_ms: Some(200.0), ..scenario.clone() });
        assert!(auto > best - 1.0, "{bytes_per_s} {interference}: {auto} %, fixed {fixed:?}");
    }
}
