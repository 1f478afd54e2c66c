//! Rules about limits.

use crate::model::Limits;
use crate::scalar::parse_duration;
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::size::format_size;
use splitrail_settings::tree::Node;

/// Reports times that are too short for any client, and limits that contradict each other.
pub(super) fn check(root: &Node, report: &mut ProblemReport) {
    let Some(limits) = root.get("limits") else { return };
    for key in ["header_timeout", "idle_timeout", "write_stall", "reply_grace", "body_timeout"] {
        let Some(node) = limits.get(key) else { continue };
        let duration = node.text().and_then(|text| parse_duration(text).ok());
        if duration.is_some_and(|duration| duration.as_millis() < 10) {
            let message = format!("`limits.{key}` is less than 10 ms");
            report.error(node.at, message, "clients would be cut off at once: give them time");
        }
    }
    let Some(Limits { body_max_bytes, request_memory_max_bytes, .. }) = typed(root, "limits")
    else {
        return;
    };
    let size = |bytes: usize| format_size(bytes as u64);
    if request_memory_max_bytes < body_max_bytes {
        let node = limits.get("request_memory_max").or(limits.get("body_size_max"));
        let message = format!(
            "`limits.request_memory_max` ({}) is less than `limits.body_size_max` ({})",
            size(request_memory_max_bytes),
            size(body_max_bytes)
        );
        let hint = "requests together need room for the largest body";
        report.error(node.unwrap_or(limits).at, message, hint);
    }
}
