//! Keys that follow from others where they are left out: flow, connector, queue and loss tracking.

use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Node, Value};

use crate::model::{
    Connector, Discovery, Engine, Flow, Policy, RequestFlow, Role, TokenizerConfig,
};
use crate::value::{typed, typed_or};

/// Writes out the keys of `model` that follow from others. Returns what was derived, and what is off
/// because of other keys.
pub(super) fn expand(model: &mut Node, path: &str, report: &mut ProblemReport) -> Vec<String> {
    let roles = Roles::of(model);
    let blind =
        matches!(typed::<TokenizerConfig>(model, "tokenizer"), Some(TokenizerConfig::None {}));
    let hand_off = match typed::<Engine>(model, "engine") {
        Some(Engine::Sglang) => Connector::Sglang,
        Some(Engine::Vllm) | None => Connector::Nixl,
    };
    let mut told = Vec::new();
    if model.get("flow").is_none() {
        match roles.flow(typed_or(model, "connector", hand_off), blind) {
            Ok(flow) => {
                told.push(format!("flow {}", RequestFlow::from(flow).name()));
                set(model, "flow", RequestFlow::from(flow).name());
            }
            Err(NoFlow::UnknownRoles) => {
                let message = format!("`{path}` has no `flow`, and some of its workers no role");
                let hint = "add `flow:`, one of: aggregated, prefill_first, decode_first, auto";
                report.error(model.at, message, hint);
            }
            Err(NoFlow::DecodeAlone) => {
                let at = model.get("workers").unwrap_or(model).at;
                let message = format!("`{path}` has no `flow`, and only workers for decode");
                let hint = "add `prefill:`, or write engines that do both under `workers:`";
                report.error(at, message, hint);
            }
            // What is wrong with the workers is reported elsewhere.
            Err(NoFlow::NoWorkers) => {}
        }
    }
    if model.get("connector").is_none() && roles.prefill && hands_over(model) {
        told.push(format!("connector {}, since it has prefill workers", hand_off.name()));
        set(model, "connector", hand_off.name());
    }
    let mut notes = Vec::new();
    if !told.is_empty() {
        notes.push(told.join(" and "));
    }
    notes.extend(switch_on(model, blind));
    notes
}

/// Writes out the sections that are on unless they are `none`. Returns what is off instead.
fn switch_on(model: &mut Node, blind: bool) -> Option<String> {
    let predicts = match model.get("policy") {
        None => true,
        Some(_) => matches!(typed(model, "policy"), Some(Policy::PredictedTtft { .. })),
    };
    let left_out = |key: &&str| model.get(key).is_none();
    let sections: Vec<_> = ["queue", "cache_loss_tracking"].into_iter().filter(left_out).collect();
    if sections.is_empty() {
        return None;
    }
    if blind {
        return Some(format!("{} off: no tokenizer", sections.join(" and ")));
    }
    let mut off = None;
    for key in sections {
        if key == "queue" && !predicts {
            off = Some("queue off: the policy is not predicted_ttft (`queue: {}` adds one)".into());
        } else {
            model.insert(key, Node::new(model.at, Value::Map(Vec::new())));
        }
    }
    off
}

fn set(model: &mut Node, key: &str, value: &str) {
    model.insert(key, Node::new(model.at, Value::Str(value.to_owned())));
}

/// Whether a request of the model may hand its KV over.
fn hands_over(model: &Node) -> bool {
    let flows = model.get("request_flows").map(Node::items).unwrap_or_default();
    let flows = model.get("flow").into_iter().chain(flows).map(Node::to_json);
    flows
        .filter_map(|flow| serde_json::from_value::<RequestFlow>(flow).ok())
        .any(|f| f.hands_over())
}

/// Why no flow follows from the roles of a model's workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoFlow {
    /// The roles of some workers are known only when they join.
    UnknownRoles,
    /// All workers are for decode.
    DecodeAlone,
    /// There are no workers, or what is written of them is not valid.
    NoWorkers,
}

/// The roles that a model's workers have or may have.
#[derive(Clone, Copy, Debug, Default)]
struct Roles {
    prefill: bool,
    decode: bool,
    both: bool,
    /// The roles of some workers are known only when they join.
    unknown: bool,
    /// The roles of some workers are not valid.
    invalid: bool,
}

impl Roles {
    fn of(model: &Node) -> Self {
        let mut roles = Self::default();
        // Lists that the schema does not allow.
        roles.invalid |= model.get("prefill").is_some() || model.get("decode").is_some();
        let workers = model.get("workers");
        roles.invalid |= workers.is_some_and(|node| !matches!(node.value, Value::Seq(_)));
        for worker in workers.map(Node::items).unwrap_or_default() {
            roles.add(typed::<Role>(worker, "role"));
        }
        let sources = model.get("discovery").map(Node::items).unwrap_or_default();
        for source in sources.iter().map(Node::to_json) {
            match serde_json::from_value::<Discovery>(source) {
                Ok(Discovery::Dns(dns)) => roles.add(Some(dns.role)),
                Ok(Discovery::Kubernetes(pods)) if pods.role.is_some() => roles.add(pods.role),
                Ok(Discovery::Kubernetes(_) | Discovery::Shim {}) => roles.unknown = true,
                Err(_) => roles.invalid = true,
            }
        }
        roles
    }

    fn add(&mut self, role: Option<Role>) {
        match role {
            Some(Role::Prefill) => self.prefill = true,
            Some(Role::Decode) => self.decode = true,
            Some(Role::Both) => self.both = true,
            None => self.invalid = true,
        }
    }

    /// The flow that follows from the roles: with workers for prefill alone, the one that uses them
    /// and still serves from a decode worker's cache what it holds; without a tokenizer, nothing
    /// can tell what it holds.
    ///
    /// # Errors
    /// Why no flow follows.
    fn flow(self, connector: Option<Connector>, blind: bool) -> Result<Flow, NoFlow> {
        let alone = connector.is_none_or(Connector::serves_alone);
        match self {
            _ if self.invalid => Err(NoFlow::NoWorkers),
            _ if self.prefill && (blind || !alone) => Ok(Flow::PrefillFirst),
            _ if self.prefill => Ok(Flow::DecodeFirst),
            _ if self.unknown => Err(NoFlow::UnknownRoles),
            _ if self.both => Ok(Flow::Aggregated),
            _ if self.decode => Err(NoFlow::DecodeAlone),
            _ => Err(NoFlow::NoWorkers),
        }
    }
}
