//! Measures how long a replay takes on one core.

use std::time::Instant;

use splitrail_replay::{Entry, NamedPolicy, Scenario};

use super::report::{Goal, Row};
use super::{Failure, Run};

/// Goal for a replay of the conversation trace, in milliseconds.
const GOAL_MS: f64 = 1_000.0;

/// A cheap policy, two expensive ones, and one of the reference model.
const POLICIES: [&str; 4] = ["round_robin", "work_aware", "predicted_ttft", "pooled_belady"];

pub(super) fn run(run: &mut Run) -> Result<(), Failure> {
    let rounds = if run.quick { 3 } else { 9 };
    for policy in POLICIES.into_iter().filter_map(NamedPolicy::parse) {
        let measure = policy.name.clone();
        let scenario = Scenario { utilisation: Some(1.3), ..Scenario::default() };
        let entry = Entry { policy, scenario };
        let mut times_ms: Vec<f64> = (0..rounds)
            .map(|_| {
                let start = Instant::now();
                std::hint::black_box(entry.serve(&run.workload, &mut |_| {}));
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times_ms.sort_by(f64::total_cmp);
        run.report.add(Row {
            workload: "speed".to_owned(),
            measure: format!("{measure}, {} requests", run.workload.requests().len()),
            unit: "ms",
            ours: times_ms[rounds / 2],
            peer: None,
            goal: Some(Goal::AtMost(GOAL_MS)),
        })?;
    }
    Ok(())
}
