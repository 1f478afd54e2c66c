//! Rules about hand-offs: what a connector needs, and which settings have no effect with it.

use crate::model::{Connector, Engine, Flow, OnNoPrefill, RequestFlow, Role};
use crate::short_forms::WorkerPlace;
use crate::value::{typed, typed_or};
use splitrail_engine::EngineKind;
use splitrail_settings::endpoint::{self, BadEndpoint};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;

/// Reports every violation of a rule about the connector of `model`.
pub(super) fn check(model: &Node, path: &str, places: &[WorkerPlace], report: &mut ProblemReport) {
    let Some(connector) = typed_or(model, "connector", Connector::default()) else { return };
    networks(model, path, connector, report);
    engine(model, path, connector, report);
    let flow = typed::<Flow>(model, "flow");
    let workers = model.get("workers").map(Node::items).unwrap_or_default();
    for (node, place) in workers.iter().zip(places) {
        worker(node, place, flow, connector, report);
    }
    if !connector.serves_alone() && flow != Some(Flow::Aggregated) {
        only_pairs(model, path, connector, report);
    }
}

/// Reports an engine that does not have the connector.
fn engine(model: &Node, path: &str, connector: Connector, report: &mut ProblemReport) {
    let Some(written) = typed::<Engine>(model, "engine").map(EngineKind::from) else { return };
    let Some(only) = connector.engine().filter(|only| *only != written) else { return };
    let (written, connector) = (written.name(), connector.name());
    let at = model.get("engine").unwrap_or(model).at;
    let message =
        format!("`{path}.engine: {written}` is not possible with `connector: {connector}`");
    let hint = match only {
        EngineKind::Vllm => {
            "the connector is vLLM's; SGLang moves KV with `connector: sglang`, over NIXL and \
             Mooncake too"
        }
        EngineKind::Sglang => "the connector is SGLang's: delete `engine`",
    };
    report.error(at, message, hint);
}

/// Reports settings that need a worker to serve a request alone, which none does with this connector.
fn only_pairs(model: &Node, path: &str, connector: Connector, report: &mut ProblemReport) {
    let connector = connector.name();
    let place = |key: &str| model.get(key).or(model.get("connector")).unwrap_or(model).at;
    let asked = model.get("request_flows").map(Node::items).unwrap_or_default();
    let asked = asked.iter().enumerate();
    let flows = asked.map(|(index, node)| (format!("request_flows[{index}]"), node));
    let own = model.get("flow").map(|node| ("flow".to_owned(), node));
    for (key, node) in own.into_iter().chain(flows) {
        let flow = serde_json::from_value::<RequestFlow>(node.to_json()).ok();
        if let Some(flow) = flow.filter(|flow| *flow != RequestFlow::PrefillFirst) {
            let flow = flow.name();
            let message =
                format!("`{path}.{key}: {flow}` is not possible with `connector: {connector}`");
            let hint = "a decode worker serves nothing without a prefill: `prefill_first`";
            report.error(node.at, message, hint);
        }
    }
    if typed_or(model, "on_no_prefill", OnNoPrefill::default()) == Some(OnNoPrefill::Local) {
        let message =
            format!("`{path}.on_no_prefill: local` is not possible with `connector: {connector}`");
        let hint = "a decode worker serves nothing without a prefill: add `on_no_prefill: fail`";
        report.error(place("on_no_prefill"), message, hint);
    }
    if typed_or(model, "local_prefill_max_tokens", 0u32).is_some_and(|tokens| tokens > 0) {
        let message = format!(
            "`{path}.local_prefill_max_tokens` is not possible with `connector: {connector}`"
        );
        let hint = "a decode worker serves nothing without a prefill: delete it";
        report.error(place("local_prefill_max_tokens"), message, hint);
    }
}

/// Reports settings of a worker that its model's flow and connector do not allow.
pub(super) fn worker(
    worker: &Node,
    place: &WorkerPlace,
    flow: Option<Flow>,
    connector: Connector,
    report: &mut ProblemReport,
) {
    bootstrap(worker, place.path(), connector, report);
    let pairs = !connector.serves_alone() && flow != Some(Flow::Aggregated);
    if pairs && typed::<Role>(worker, "role") == Some(Role::Both) {
        let at = worker.get("role").unwrap_or(worker).at;
        let role = match place.is_url() {
            true => format!("`{}` with both roles", place.path()),
            false => format!("`{}.role: both`", place.path()),
        };
        let message = format!("{role} is not possible with `connector: {}`", connector.name());
        report.error(at, message, "an engine has one role there: `prefill` or `decode`");
    }
}

fn networks(model: &Node, path: &str, connector: Connector, report: &mut ProblemReport) {
    let Some(list) = model.get("hand_off_networks") else { return };
    super::networks(list, &format!("{path}.hand_off_networks"), report);
    if !connector.names_hosts() && !list.items().is_empty() {
        let message = format!(
            "`{path}.hand_off_networks` is of no use without `connector: nixl` or `nixl_push`"
        );
        report.error(list.at, message, "only NIXL's hand-offs name a host: delete it");
    }
}

fn bootstrap(worker: &Node, path: &str, connector: Connector, report: &mut ProblemReport) {
    let Some(node) = worker.get("bootstrap") else { return };
    let Some(text) = node.text() else { return };
    if let Err(BadEndpoint { why, hint }) = endpoint::parse(text, "http") {
        report.error(node.at, format!("`{path}.bootstrap` {why}"), hint);
    }
    if !connector.has_bootstrap() || typed::<Role>(worker, "role") == Some(Role::Decode) {
        let message = format!("`{path}.bootstrap` is of no use");
        let hint = "only prefill workers have one, with `connector: mooncake` or `sglang`";
        report.error(node.at, message, hint);
    }
}
