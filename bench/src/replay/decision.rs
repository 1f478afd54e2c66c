//! Measures the time of one choice among many workers.

use std::hint::black_box;
use std::time::Instant;

use serde_json::json;
use splitrail_policy::{Candidate, Leg, Policy, Query, WorkerIndex, pick};

use super::report::{Goal, Row};
use super::{Failure, Run};
use crate::splitmix::mix;

/// Number of candidates.
const WORKERS: u32 = 1_000;
/// Goal for the median of `predicted_ttft`, in microseconds.
const GOAL_US: f64 = 20.0;

/// The measured policies.
const POLICIES: [&str; 3] = ["predicted_ttft", "kv_overlap", "least_loaded"];

pub(super) fn run(run: &mut Run) -> Result<(), Failure> {
    let candidates: Vec<Candidate> = (0..WORKERS).map(candidate).collect();
    let rounds = if run.quick { 1_001 } else { 10_001 };
    for name in POLICIES {
        let Ok(policy) = serde_json::from_value::<Policy>(json!({ "kind": name })) else {
            continue;
        };
        let mut times_us: Vec<f64> = (0..rounds)
            .map(|i| {
                let query = query(i);
                let start = Instant::now();
                black_box(pick(&policy, black_box(&candidates), &[], query));
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times_us.sort_by(f64::total_cmp);
        let goal = (name == "predicted_ttft").then_some(Goal::AtMost(GOAL_US));
        run.report.add(Row {
            workload: "decision".to_owned(),
            measure: format!("{name}, {WORKERS} candidates"),
            unit: "us",
            ours: times_us[rounds as usize / 2],
            peer: None,
            goal,
        })?;
    }
    Ok(())
}

fn candidate(number: u32) -> Candidate {
    let draw = mix(u64::from(number));
    let overlap_blocks = (draw % 20) as u32;
    Candidate {
        worker: WorkerIndex(number),
        up: true,
        requests: (draw >> 8) as u32 % 30,
        prefill_tokens: (draw >> 16) % 50_000,
        active_tokens: (draw >> 24) % 500_000,
        overlap_blocks,
        speculative_blocks: overlap_blocks + (draw >> 40) as u32 % 3,
        waiting: (draw >> 48) as u32 % 8,
        wait_ns: (draw >> 4) % 3_000_000_000,
        ..Candidate::default()
    }
}

fn query(turn: u64) -> Query {
    Query {
        leg: Leg::Prefill,
        prompt_tokens: 12_000,
        prompt_blocks: 24,
        block_size: 512,
        turn,
        draw: mix(turn),
        sharing: Default::default(),
    }
}
