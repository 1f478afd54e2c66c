//! The findings about one model so far, and which of them matter for its configuration.

use splitrail_config::model::{Flow, GateKind, Model, RequestFlow, Role};

use crate::facts::WorkerFacts;
use crate::finding::{Finding, FindingKind};

/// Maximum number of workers that a finding lists by their ids.
const IDS_MAX: usize = 4;

/// The findings so far.
pub(super) struct Findings<'a> {
    pub(super) model: &'a Model,
    /// The worker that the next findings are about.
    pub(super) worker: Option<&'a str>,
    pub(super) list: Vec<Finding>,
}

impl<'a> Findings<'a> {
    /// No findings about a model yet.
    pub(super) fn about(model: &'a Model) -> Self {
        Self { model, worker: None, list: Vec::new() }
    }

    /// Adds a finding with the usual remedy.
    pub(super) fn add(&mut self, kind: FindingKind, what: String) {
        let name = &self.model.name;
        let finding = match self.worker {
            Some(worker) => Finding::of_worker(kind, name, worker, what),
            None => Finding::of_model(kind, name, what),
        };
        self.list.push(finding);
    }

    /// Adds a finding with a remedy that names more.
    pub(super) fn add_with(&mut self, kind: FindingKind, what: String, remedy: String) {
        self.add(kind, what);
        if let Some(finding) = self.list.pop() {
            self.list.push(finding.with_remedy(remedy));
        }
    }
}

/// The ids of workers: all of a few, otherwise the first ones and how many more there are.
pub(super) fn named(ids: &[String]) -> String {
    let more = ids.len().saturating_sub(IDS_MAX);
    let first = ids[..ids.len() - more].join(", ");
    match more {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// Whether KV events are of use: the router must be able to compute the blocks of prompts.
pub(super) fn needs_events(model: &Model) -> bool {
    model.tokenizer.makes_tokens()
}

/// Whether requests may hand a prompt's KV over.
pub(super) fn hands_over(model: &Model) -> bool {
    model.flows().any(RequestFlow::hands_over)
}

/// Whether requests may be served by a decode worker that holds enough of the prompt.
pub(super) fn is_gated(model: &Model) -> bool {
    let gated =
        |flow: &RequestFlow| matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly);
    model.flow == Flow::DecodeFirst || model.request_flows.iter().any(gated)
}

/// Whether the router must be able to decide on gates of this worker by its index.
pub(super) fn router_gates(model: &Model, worker: &WorkerFacts) -> bool {
    let by_router = matches!(model.gate.kind, GateKind::Auto | GateKind::Router);
    let by_shim = model.gate.kind == GateKind::Auto && worker.config.shim;
    let by_engine =
        model.gate.kind == GateKind::Auto && worker.supports_cache_hit_threshold == Some(true);
    worker.config.role != Role::Prefill && by_router && !by_shim && !by_engine
}
