//! Rules about read-back: what it needs, and settings that have no effect without it.

use crate::model::{Connector, KvLoadFailurePolicy, TokenizerConfig, flow};
use crate::scalar::parse_duration;
use crate::value::{typed, typed_or};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Reports every violation of a rule about read-back in `model`.
pub(super) fn check(root: &Node, model: &Node, path: &str, report: &mut ProblemReport) {
    let is_on = typed_or(model, "read_back", false) == Some(true);
    let Some(node) = model.get("read_back").filter(|_| is_on) else {
        let pin = model.get("read_back_pin").filter(|node| {
            let pin = node.text().and_then(|text| parse_duration(text).ok());
            pin != Some(flow::read_back_pin())
        });
        let percent = model.get("read_back_pinned_percent_max").filter(|_| {
            let percent = typed::<u32>(model, "read_back_pinned_percent_max");
            percent != Some(flow::read_back_pinned_percent_max())
        });
        for (key, node) in [("read_back_pin", pin), ("read_back_pinned_percent_max", percent)] {
            if let Some(node) = node {
                let message = format!("`{path}.{key}` is of no use without `read_back: true`");
                report.warn(node.at, message, "switch read-back on, or delete the key");
            }
        }
        return;
    };
    if !typed_or(model, "connector", Connector::default()).is_some_and(Connector::is_pulled) {
        let message = format!("`{path}.read_back` needs `connector: nixl`");
        report.error(node.at, message, "no other connector reads KV back: delete it");
    }
    if let Some(TokenizerConfig::None {}) = typed::<TokenizerConfig>(model, "tokenizer") {
        let message = format!("`{path}.read_back` needs a tokenizer, and there is none");
        report.error(node.at, message, "the router must know the exact tokens of prompts: add one");
    }
    if typed(model, "kv_load_failure_policy") == Some(KvLoadFailurePolicy::Recompute) {
        let message = format!("`{path}.read_back` needs `kv_load_failure_policy: fail`");
        let hint = "with `recompute`, a prefill leg whose read fails never ends: start the engines \
                    with `fail`";
        report.error(node.at, message, hint);
    }
    if typed_or(root, "hash_seed", 0u64) == Some(0) {
        let message = format!("`{path}.read_back` needs a secret `hash_seed`");
        let hint = "whoever knows the seed can make prompts that read other prompts' KV: set \
                    `hash_seed` to a random number, the same on all routers and shims";
        report.error(node.at, message, hint);
    }
}
