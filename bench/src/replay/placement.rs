//! Compares `predicted_ttft` with the best of the published policies at the same load.

use splitrail_replay::{Entry, NamedPolicy, PolicyReport, PublishedPolicy, Scenario};

use super::report::{Goal, Row, print_line};
use super::{Failure, Run};

const OURS: &str = "predicted_ttft";

/// A load, the number of blocks of a prefill worker's cache, and the goals for the conversation
/// trace: mean and 99th percentile of TTFT in seconds, and the share of the ceiling in percent.
type Case = (f64, usize, Option<f64>, Option<f64>, Option<f64>);

/// The name of a figure, its unit, the function that reads it, and its goal.
type Measure = (&'static str, &'static str, fn(&PolicyReport) -> f64, Option<Goal>);

const CASES: [Case; 3] = [
    (1.3, 10_000, Some(2.5), Some(22.0), Some(92.0)),
    (0.9, 10_000, Some(1.4), None, None),
    (1.3, 2_000, Some(15.0), None, None),
];

/// Further cases, without goals; left out with `--quick`.
const MORE_CASES: [Case; 3] = [
    (0.5, 10_000, None, None, None),
    (1.1, 5_000, None, None, None),
    (1.5, 10_000, None, None, None),
];

pub(super) fn run(run: &mut Run) -> Result<(), Failure> {
    let Some(ours) = NamedPolicy::parse(OURS) else {
        return Ok(print_line(&format!("# there is no policy {OURS}"))?);
    };
    let more: &[Case] = if run.quick { &[] } else { &MORE_CASES };
    for (load, blocks, mean_s, p99_s, ceiling) in CASES.iter().chain(more).copied() {
        let mut scenario = Scenario { utilisation: Some(load), ..Scenario::default() };
        scenario.cluster.prefill_cache_blocks = blocks;
        let serve = |policy: &NamedPolicy| {
            let entry = Entry { policy: policy.clone(), scenario: scenario.clone() };
            entry.serve(&run.workload, &mut |_| {}).1
        };
        let mine = serve(&ours);
        let published =
            PublishedPolicy::ALL.iter().filter_map(|(name, _)| NamedPolicy::by_name(name));
        // Left out because it fetches prefixes over a network that the other policies do not have.
        let others: Vec<PolicyReport> =
            published.filter(|policy| policy.name != "mooncake_fetch").map(|p| serve(&p)).collect();
        let workload = format!("load {load}, {blocks} blocks");
        let goal = |limit: Option<f64>, goal: fn(f64) -> Goal| {
            limit.filter(|_| run.is_reference).map(goal)
        };
        let measures: [Measure; 4] = [
            ("TTFT mean", "s", |r| r.ttft.mean_s, goal(mean_s, Goal::AtMost)),
            ("TTFT p99", "s", |r| r.ttft.p99_s, goal(p99_s, Goal::AtMost)),
            ("share of the ceiling", "%", |r| -r.ceiling_percent, goal(ceiling, Goal::AtLeast)),
            ("refused", "", |r| r.rejected as f64, Some(Goal::AtMost(0.0))),
        ];
        for (measure, unit, figure, goal) in measures {
            // The share of the ceiling is negated by its function, because more is better.
            let best = others.iter().min_by(|a, b| figure(a).total_cmp(&figure(b)));
            run.report.add(Row {
                workload: workload.clone(),
                measure: measure.to_owned(),
                unit,
                ours: figure(&mine).abs(),
                peer: best.map(|best| (best.policy.clone(), figure(best).abs())),
                goal,
            })?;
        }
    }
    Ok(())
}
