//! From facts and configuration to findings. Pure functions.

use splitrail_config::model::{Flow, GateKind, Model, RequestFlow, Role, TokenizerConfig};

use crate::facts::{ModelFacts, SourceState, WorkerFacts};
use crate::finding::{Finding, Kind};

mod blocks;
mod hand_off;
mod identity;
mod pool;
mod reach;
mod shim;
#[cfg(test)]
mod tests;
mod tokens;

/// All findings about one model: those about its sources, about each worker, and about its workers
/// together.
#[must_use]
pub fn findings(model: &Model, facts: &ModelFacts) -> Vec<Finding> {
    let mut found = Findings { model, worker: None, list: Vec::new() };
    for source in &facts.sources {
        let name = &source.name;
        match &source.state {
            SourceState::Found(0) => {
                found.add(Kind::SourceEmpty, format!("{name} found no worker"))
            }
            SourceState::Found(_) => {}
            SourceState::Failed(cause) => found.add(Kind::SourceFails, format!("{name}: {cause}")),
            SourceState::NotAsked => {
                let what = format!("the workers of {name} are known to running routers only");
                found.add(Kind::SourceNotAsked, what);
            }
        }
    }
    for worker in &facts.workers {
        found.worker = Some(&worker.config.id);
        of_worker(&mut found, worker);
    }
    found.worker = None;
    pool::check(&mut found, &facts.workers);
    found.list
}

fn of_worker(found: &mut Findings<'_>, worker: &WorkerFacts) {
    reach::check(found, worker);
    shim::check(found, worker);
    if worker.is_reached() {
        identity::check(found, worker);
        blocks::check(found, worker);
        tokens::check(found, worker);
        hand_off::check(found, worker);
    }
}

/// The findings so far.
struct Findings<'a> {
    model: &'a Model,
    /// The worker that the next findings are about.
    worker: Option<&'a str>,
    list: Vec<Finding>,
}

impl Findings<'_> {
    /// Adds a finding with the usual remedy.
    fn add(&mut self, kind: Kind, what: String) {
        let name = &self.model.name;
        let finding = match self.worker {
            Some(worker) => Finding::of_worker(kind, name, worker, what),
            None => Finding::of_model(kind, name, what),
        };
        self.list.push(finding);
    }

    /// Adds a finding with a remedy that names more.
    fn add_with(&mut self, kind: Kind, what: String, remedy: String) {
        self.add(kind, what);
        if let Some(finding) = self.list.pop() {
            self.list.push(finding.with_remedy(remedy));
        }
    }
}

/// Whether KV events are of use: the router must be able to compute the blocks of prompts.
fn needs_events(model: &Model) -> bool {
    !matches!(model.tokenizer, TokenizerConfig::None {})
}

/// Whether requests may hand a prompt's KV over.
fn hands_over(model: &Model) -> bool {
    model.flow != Flow::Aggregated || model.request_flows.iter().any(|flow| flow.hands_over())
}

/// Whether requests may be served by a decode worker that holds enough of the prompt.
fn is_gated(model: &Model) -> bool {
    let gated =
        |flow: &RequestFlow| matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly);
    model.flow == Flow::DecodeFirst || model.request_flows.iter().any(gated)
}

/// Whether the router must be able to decide on gates of this worker by its index.
fn router_gates(model: &Model, worker: &WorkerFacts) -> bool {
    let by_router = matches!(model.gate.kind, GateKind::Auto | GateKind::Router);
    let by_shim = model.gate.kind == GateKind::Auto && worker.config.shim;
    let by_engine = model.gate.kind == GateKind::Auto && worker.honours_threshold == Some(true);
    worker.config.role != Role::Prefill && by_router && !by_shim && !by_engine
}
