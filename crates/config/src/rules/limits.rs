//! Rules about limits.

use crate::model::Limits;
use crate::value::typed;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::size::format_size;
use splitrail_settings::tree::Node;

/// Reports limits that contradict each other.
pub(super) fn check(root: &Node, report: &mut ProblemReport) {
    let Some(limits) = root.get("limits") else { return };
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
