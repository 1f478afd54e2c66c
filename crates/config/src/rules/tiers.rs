//! Rules about blocks in slower tiers: what loading them costs.

use crate::model::{CostsConfig, Policy};
use crate::value::{typed, typed_or};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Warns of a slower tier that is said to be faster than a faster one: it counts as equally fast.
pub(super) fn check(model: &Node, path: &str, report: &mut ProblemReport) {
    costs(model, path, report);
    let workers = model.get("workers").map(Node::items).unwrap_or_default();
    for (index, worker) in workers.iter().enumerate() {
        costs(worker, &format!("{path}.workers[{index}]"), report);
    }
    let policy = typed::<Policy>(model, "policy");
    if let Some(Policy::KvOverlap { load_weights: Some(load_weights), .. }) = policy {
        let weights = model.get("policy").and_then(|policy| policy.get("load_weights"));
        let tiers = [
            ("host", load_weights.host),
            ("disk", load_weights.disk),
            ("remote", load_weights.remote),
        ];
        in_order(weights, &format!("{path}.policy.load_weights"), tiers, report);
    }
}

fn costs(holder: &Node, path: &str, report: &mut ProblemReport) {
    let Some(costs) = typed_or(holder, "costs", CostsConfig::default()) else { return };
    let seconds = [
        ("host_gb_per_second", 1.0 / costs.host_gb_per_second),
        ("disk_gb_per_second", 1.0 / costs.disk_gb_per_second),
        ("remote_gb_per_second", 1.0 / costs.remote_gb_per_second),
    ];
    in_order(holder.get("costs"), &format!("{path}.costs"), seconds, report);
}

/// `tiers` are keys and costs, from the fastest tier to the slowest. Keys that are not written have
/// their defaults, and are no reason for a warning.
fn in_order(
    section: Option<&Node>,
    path: &str,
    tiers: [(&str, f64); 3],
    report: &mut ProblemReport,
) {
    for pair in tiers.windows(2) {
        let [(faster, faster_cost), (slower, cost)] = pair else { continue };
        let key = |key: &str| section.and_then(|section| section.get(key));
        let (Some(_), Some(node)) = (key(faster), key(slower)) else { continue };
        if cost < faster_cost {
            let message = format!("`{path}.{slower}` makes a slower tier cheaper than `{faster}`");
            let hint = format!("it counts as `{faster}` does: swap the two values");
            report.warn(node.at, message, hint);
        }
    }
}
