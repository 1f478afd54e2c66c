//! Every policy over whole traces.

use proptest::prelude::*;
use splitrail_replay::trace::{TraceSelection, read};
use splitrail_replay::{Entry, FetchBounds, Model, NamedPolicy, PolicyReport, Scenario};
use splitrail_sim::cluster::{InsertAt, Workload};

/// Conversations whose prompts grow, in bursts: (conversation, blocks added, output).
fn workload(turns: &[(u64, u64, u32)]) -> Workload {
    let mut lines = String::new();
    let mut known: Vec<Vec<u64>> = vec![vec![0]; 8];
    let mut next = 1;
    for (i, (conversation, added, output)) in turns.iter().enumerate() {
        let blocks = &mut known[*conversation as usize % 8];
        blocks.extend(next..next + added);
        next += added;
        let input = blocks.len() as u64 * 512 - 100;
        let at = i as u64 / 3 * 400;
        lines += &format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": {output}, \
             \"hash_ids\": {blocks:?}}}\n"
        );
    }
    read(lines.as_bytes(), TraceSelection::default()).unwrap()
}

fn turns() -> impl Strategy<Value = Vec<(u64, u64, u32)>> {
    proptest::collection::vec((0u64..8, 1u64..12, 1u32..40), 1..60)
}

fn names() -> Vec<&'static str> {
    [NamedPolicy::names(), vec!["kv_overlap"]].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_policy_serves_every_request_and_repeats_its_result(
        turns in turns(), blocks in 5usize..60, insert_early: bool, local in proptest::option::of(0.0..1.0f64),
        engine: bool, fetches: bool,
    ) {
        let workload = workload(&turns);
        let model = if engine { Model::Engine } else { Model::Reference };
        let fetches = fetches.then_some(FetchBounds::NONE);
        let mut scenario = Scenario { cluster: model.cluster(), fetches, ..Scenario::default() };
        scenario.cluster.local_threshold = local;
        scenario.cluster.prefill_workers = 3;
        scenario.cluster.decode_workers = 2;
        scenario.cluster.prefill_cache_blocks = blocks;
        scenario.cluster.decode_cache_blocks = blocks;
        scenario.cluster.insert_at = if insert_early { InsertAt::Start } else { InsertAt::End };
        for name in names() {
            // An oracle panics where its projection is not what happens.
            let entry = Entry { policy: NamedPolicy::parse(name).unwrap(), scenario: scenario.clone() };
            let (outcome, report) = entry.serve(&workload, &mut |_| {});
            prop_assert_eq!(report.rejected, 0, "{}", name);
            prop_assert!(outcome.rows.iter().all(|row| row.first_token_ns > row.arrival_ns));
            prop_assert_eq!(entry.serve(&workload, &mut |_| {}).0, outcome, "{}", name);
        }
    }
}

/// A busy cluster: eight conversations of many turns.
fn busy() -> (Workload, Scenario) {
    let turns: Vec<_> = (0..600).map(|i: u64| (i * 5 % 8, 3 + i * 7 % 5, 20)).collect();
    let mut scenario = Scenario { utilisation: Some(1.5), ..Scenario::default() };
    scenario.cluster.prefill_workers = 3;
    (workload(&turns), scenario)
}

fn report(name: &str) -> PolicyReport {
    let (workload, scenario) = busy();
    let entry = Entry { policy: NamedPolicy::parse(name).unwrap(), scenario };
    entry.serve(&workload, &mut |_| {}).1
}

#[test]
fn a_policy_that_knows_caches_and_queues_beats_one_that_knows_either() {
    let [blind, herding, both, pooled] =
        ["least_loaded", "prefix_hash", "work_aware", "pooled_belady"].map(report);
    assert!(both.ttft.mean_s < blind.ttft.mean_s && both.ttft.mean_s < herding.ttft.mean_s);
    assert!(pooled.ttft.mean_s < both.ttft.mean_s);
    assert!(blind.hit_percent < both.hit_percent && both.hit_percent <= 100.0);
}

#[test]
fn the_seed_matters_only_to_policies_that_choose_at_random() {
    let (workload, scenario) = busy();
    let served = |name: &str, seed| {
        let scenario = Scenario { seed, ..scenario.clone() };
        let entry = Entry { policy: NamedPolicy::parse(name).unwrap(), scenario };
        entry.serve(&workload, &mut |_| {}).0
    };
    assert_ne!(served("random", 1), served("random", 2));
    assert_eq!(served("mooncake", 1), served("mooncake", 2));
}
