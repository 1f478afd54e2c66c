//! Rules about health checks and outlier ejection.

use crate::scalar::parse_duration;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Reports intervals and times that are too short to be useful.
pub(super) fn check(model: &Node, path: &str, report: &mut ProblemReport) {
    let health = model.get("health");
    let ejection = health.and_then(|health| health.get("ejection"));
    for (parent, below, key) in [
        (health, "health", "probe_interval"),
        (health, "health", "probe_timeout"),
        (ejection, "health.ejection", "interval"),
        (ejection, "health.ejection", "base_time"),
    ] {
        let Some(node) = parent.and_then(|parent| parent.get(key)) else { continue };
        let duration = node.text().and_then(|text| parse_duration(text).ok());
        if duration.is_some_and(|duration| duration.as_millis() < 10) {
            let message = format!("`{path}.{below}.{key}` is less than 10 ms");
            report.error(node.at, message, "the router would do nothing else: give it time");
        }
    }
}
