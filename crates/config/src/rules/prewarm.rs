//! Rules about prewarming: what it needs, and settings that have no effect.

use std::time::Duration;

use crate::model::{PeerFetch, PrewarmConfig, peer_fetch};
use crate::value::{typed, typed_or};
use splitrail_settings::problem::Report;
use splitrail_settings::tree::Node;

/// Reports prewarming that cannot happen.
pub(super) fn check(root: &Node, model: &Node, path: &str, report: &mut Report) {
    let Some(section) = model.get("prewarm") else { return };
    let Some(config) = typed::<PrewarmConfig>(model, "prewarm") else { return };
    if config.time_max == Duration::ZERO {
        let at = section.get("time_max").unwrap_or(section).at;
        let message = format!("`{path}.prewarm.time_max` is zero");
        report.error(at, message, "give it time, or switch it off with `enabled: false`");
    }
    if !config.enabled {
        return;
    }
    let at = section.get("enabled").unwrap_or(section).at;
    if typed_or(model, "peer_fetch", PeerFetch::default()) == Some(PeerFetch::Off) {
        let message = format!("`{path}.prewarm` needs `peer_fetch`");
        report.error(at, message, "prefixes are taken over by peer fetches: switch them on");
    }
    let most = typed_or(model, "peer_fetch_max_per_worker", peer_fetch::max_per_worker());
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
