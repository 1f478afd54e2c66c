//! Rules about prewarming: what it needs, and settings that have no effect.

use super::peer_fetch;
use crate::model::peer_fetch::max_per_worker;
use crate::model::{Limits, PeerFetch, PrewarmConfig};
use crate::value::{typed, typed_or};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::size::format_size;
use splitrail_settings::tree::Node;

/// Reports prewarming that cannot happen.
pub(super) fn check(root: &Node, model: &Node, path: &str, report: &mut ProblemReport) {
    let Some(section) = model.get("prewarm") else { return };
    let Some(config) = typed::<PrewarmConfig>(model, "prewarm") else { return };
    if !config.enabled {
        return;
    }
    let at = section.get("enabled").unwrap_or(section).at;
    let off = "it is `off`: delete `peer_fetch`, or `prewarm`";
    let lack = match typed_or(model, "peer_fetch", PeerFetch::default()) {
        Some(PeerFetch::Off) => Some(("is off", off)),
        Some(PeerFetch::Auto) => peer_fetch::missing(model).next(),
        _ => None,
    };
    if let Some((why, hint)) = lack {
        let message = format!("`{path}.prewarm` needs `peer_fetch`, which {why}");
        report.error(at, message, hint);
    }
    let most = typed_or(model, "peer_fetch_max_per_worker", max_per_worker());
    if most.is_some_and(|most| config.fetches_max >= most) {
        let at = section.get("fetches_max").unwrap_or(section).at;
        let message =
            format!("`{path}.prewarm.fetches_max` must be less than `peer_fetch_max_per_worker`");
        let hint = "otherwise fetches for requests of clients would find no place: raise \
                    `peer_fetch_max_per_worker`, or lower `fetches_max`";
        report.error(at, message, hint);
    }
    if root.get("auth").is_some_and(|auth| !auth.items().is_empty()) {
        let message = format!("`{path}.prewarm` has no effect: every request belongs to a tenant");
        let hint =
            "prompts of tenants have a cache salt and are never remembered: delete `prewarm`";
        report.warn(at, message, hint);
    }
}

/// Warns if what all models remember may take more than half of the memory of all requests.
pub(super) fn check_memory(root: &Node, report: &mut ProblemReport) {
    let most = typed_or(root, "limits", Limits::default());
    let Some(Limits { request_memory_max_bytes, .. }) = most else { return };
    let mut sum_bytes = 0_usize;
    for model in root.get("models").map(Node::items).unwrap_or_default() {
        let Some(section) = model.get("prewarm") else { continue };
        let config = typed::<PrewarmConfig>(model, "prewarm").filter(|config| config.enabled);
        let Some(config) = config else { continue };
        sum_bytes = sum_bytes.saturating_add(config.memory_max_bytes);
        if sum_bytes > request_memory_max_bytes / 2 {
            let at = section.get("memory_max").or(section.get("enabled")).unwrap_or(section).at;
            let message = format!(
                "`prewarm.memory_max` of the models up to this one is {} together, more than half of \
                 `limits.request_memory_max` ({})",
                format_size(sum_bytes as u64),
                format_size(request_memory_max_bytes as u64)
            );
            let hint = "what is remembered is forgotten when requests need the memory: lower \
                        `memory_max`, or raise `limits.request_memory_max`";
            report.warn(at, message, hint);
            return;
        }
    }
}
