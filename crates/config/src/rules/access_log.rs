//! Rules about the access log.

use crate::model::AccessLogConfig;
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Warns about settings of an access log that is off.
pub(super) fn check(root: &Node, report: &mut ProblemReport) {
    let Some(section) = root.get("access_log") else { return };
    let Some(config) = typed::<AccessLogConfig>(root, "access_log") else { return };
    let is_set =
        ["sample_ratio", "path", "rotate"].into_iter().any(|key| section.get(key).is_some());
    if !config.enabled && is_set && section.get("enabled").is_none() {
        let message = "`access_log` is off, so its settings do nothing".to_owned();
        report.warn(section.at, message, "add `enabled: true`, or `enabled: false` to keep it off");
    }
}
