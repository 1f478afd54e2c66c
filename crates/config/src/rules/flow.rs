//! Rules about flows: the workers that they need, and which gates are possible.

use super::workers::Workers;
use crate::model::{Connector, Flow, GateConfig, GateKind, RequestFlow, TokenizerConfig};
use crate::value::{typed, typed_or};
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::Node;

/// Checks a model's own flow and the flows that its requests may select.
pub(super) fn check(model: &Node, path: &str, workers: &Workers<'_>, report: &mut ProblemReport) {
    let own = typed::<Flow>(model, "flow").map(RequestFlow::from);
    if let (Some(own), Some(node)) = (own, model.get("flow")) {
        let named = NamedFlow { flow: own, path, key: "flow", at: node.at };
        feasible(model, named, workers, report);
    }
    let asked = model.get("request_flows").map(Node::items).unwrap_or_default();
    for (index, node) in asked.iter().enumerate() {
        let flow = serde_json::from_value::<RequestFlow>(node.to_json()).ok();
        // What is missing for the model's own flow has been reported already.
        let told = own.is_some_and(RequestFlow::hands_over);
        if let Some(flow) = flow.filter(|flow| !(told && flow.hands_over())) {
            let key = format!("request_flows[{index}]");
            let named = NamedFlow { flow, path, key: &key, at: node.at };
            feasible(model, named, workers, report);
        }
    }
    gate(model, path, workers, report);
    if own == Some(RequestFlow::DecodeFirst) {
        sees_anything(model, path, workers, report);
    }
}

/// Warns about decode-first if neither the router nor a shim can know what the engines hold: every
/// prompt would then be prefilled remotely.
fn sees_anything(model: &Node, path: &str, workers: &Workers<'_>, report: &mut ProblemReport) {
    let tokenizer = typed::<TokenizerConfig>(model, "tokenizer");
    let blind = matches!(tokenizer, Some(TokenizerConfig::None {}));
    let seen = (workers.decode_publishes || workers.decode_has_shim) && !blind;
    let kind = typed_or::<GateConfig>(model, "gate", GateConfig::default()).map(|gate| gate.kind);
    if kind == Some(GateKind::Auto) && !seen {
        let at = model.get("flow").unwrap_or(model).at;
        let message = format!("`{path}.flow: decode_first` can only be gated by the engines");
        let hint = match blind {
            true => {
                "vLLM does not support cache_hit_threshold, and without a tokenizer neither router \
                 nor shim knows what a decode worker holds, so that every prompt is prefilled \
                 remotely: add `tokenizer`"
            }
            false => {
                "vLLM does not support cache_hit_threshold, and then every prompt is prefilled \
                 remotely: add `kv_events` to decode workers, or a shim"
            }
        };
        report.warn(at, message, hint);
    }
}

/// A flow that is named by a key of a model.
struct NamedFlow<'a> {
    flow: RequestFlow,
    /// The path of the model.
    path: &'a str,
    /// The key within the model.
    key: &'a str,
    at: Place,
}

/// Reports what a model lacks for a flow.
fn feasible(model: &Node, named: NamedFlow<'_>, workers: &Workers<'_>, report: &mut ProblemReport) {
    let NamedFlow { flow, path, key, at } = named;
    let name = flow.name();
    let all = model.get("workers").unwrap_or(model).at;
    let needed: &[(bool, &str)] = if flow.hands_over() {
        if typed_or(model, "connector", Connector::default()).is_some_and(|c| !c.hands_over()) {
            let place = model.get("connector").map_or(at, |node| node.at);
            let message = format!("`{path}.{key}: {name}` needs a connector");
            report.error(place, message, "add a `connector`, or use `flow: aggregated`");
        }
        if workers.count == 1 && workers.can_prefill && workers.can_decode {
            let message = format!("`{path}.workers` has one worker, {name} needs two");
            let hint = "an engine does not hand over to itself: add a worker, or use \
                        `flow: aggregated`";
            report.error(all, message, hint);
            return;
        }
        &[(workers.can_prefill, "prefill"), (workers.can_decode, "decode")]
    } else {
        &[(workers.can_decode, "decode")]
    };
    for (_, role) in needed.iter().filter(|(there, _)| !there) {
        let message = format!("`{path}.workers` has no worker with role {role} or both");
        let hint = format!("add its URL under `{role}:`, or choose another flow");
        report.error(all, message, hint);
    }
}

fn gate(model: &Node, path: &str, workers: &Workers<'_>, report: &mut ProblemReport) {
    let Some(node) = model.get("gate") else { return };
    let Some(GateConfig { kind, .. }) = typed::<GateConfig>(model, "gate") else { return };
    let at = node.get("kind").unwrap_or(node).at;
    let tokenizer = typed::<TokenizerConfig>(model, "tokenizer");
    let blind = matches!(tokenizer, Some(TokenizerConfig::None {}));
    if matches!(kind, GateKind::Shim | GateKind::Router) && blind {
        let message = format!("`{path}.gate` needs a tokenizer, and there is none");
        report.error(at, message, "add one, or let the engine gate: `kind: engine`");
    }
    if kind == GateKind::Shim && !workers.decode_has_shim {
        let message = format!("`{path}.gate.kind: shim` has no decode worker with `shim: true`");
        report.error(at, message, "mark the workers whose address is a shim's");
    }
    if kind == GateKind::Router && !workers.decode_publishes {
        let message = format!("`{path}.gate.kind: router` sees no decode worker's KV events");
        report.error(at, message, "add `kv_events: tcp://HOST:PORT` to decode workers");
    }
}
