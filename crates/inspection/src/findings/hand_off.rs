//! Hand-offs, and the gate of decode-first.

use splitrail_config::model::{GateKind, Role};

use super::list::{Findings, hands_over, is_gated, named, needs_events, router_gates};
use crate::facts::{FetchOutcome, StagedFact, TrialFact, WorkerFacts};
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, worker: &WorkerFacts) {
    staged(found, worker);
    for fetched in &worker.fetched {
        let from = &fetched.from;
        match &fetched.outcome {
            FetchOutcome::Transferred | FetchOutcome::Served => {}
            FetchOutcome::Computed => {
                let what = format!("the worker computed the prompt that {from} had handed to it");
                found.add(FindingKind::HandOffIgnored, what);
            }
            FetchOutcome::Refused { status, message } => {
                let what = format!("a hand-off from {from} fails: status {status}: {message}");
                found.add(FindingKind::HandOffFails, what);
            }
            FetchOutcome::NoReply(why) => {
                let what = format!("a hand-off from {from} fails: {why}");
                found.add(FindingKind::HandOffFails, what);
            }
            FetchOutcome::Untested(why) => {
                let what = format!("a hand-off from {from} was not tested: {why}");
                found.add(FindingKind::HandOffUntested, what);
            }
        }
    }
    unpaired(found, worker);
    let model = found.model;
    let no_connector = !model.connector.hands_over() || !hands_over(model);
    if no_connector && worker.engine.has_nixl == Some(true) {
        let what = "the engine has the NIXL connector, and the configuration hands nothing over";
        found.add(FindingKind::ConnectorUnused, what.to_owned());
    }
    gate(found, worker);
}

/// Whether a router would ever hand over from the worker, and to it.
fn unpaired(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let why = "the workers are of other transfer groups, or the engines differ in block size, data type or \
               layout of their KV";
    if !worker.without_taker.is_empty() {
        let decode = named(&worker.without_taker);
        let what = format!("the worker can hand over to no decode worker ({decode}): {why}");
        found.add(FindingKind::HandOffUntested, what);
    }
    if !worker.without_source.is_empty() {
        let prefill = named(&worker.without_source);
        let what = format!("no prefill worker ({prefill}) can hand over to the worker: {why}");
        found.add(FindingKind::HandOffUntested, what);
    }
}

fn staged(found: &mut Findings<'_>, worker: &WorkerFacts) {
    match &worker.staged {
        StagedFact::Untested | StagedFact::Usable => {}
        StagedFact::Absent => {
            let what = "the reply to a prefill (`do_remote_decode`) has no `kv_transfer_params`: \
                        the engine cannot hand over";
            found.add(FindingKind::NoHandOff, what.to_owned());
        }
        StagedFact::Foreign(cause) => {
            let name = found.model.connector.name();
            found.add(
                FindingKind::OtherConnector,
                format!("not a hand-off of `connector: {name}`: {cause}"),
            );
        }
        StagedFact::ForbiddenHost(host) => {
            let what = format!(
                "the engine's hand-off names the host `{host}`, which is no worker's and not in \
                 `hand_off_networks`"
            );
            found.add(FindingKind::HandOffHost, what);
        }
    }
}

/// Whether somebody can decide that a decode worker holds enough of a prompt.
fn gate(found: &mut Findings<'_>, worker: &WorkerFacts) {
    let model = found.model;
    if worker.config.role == Role::Prefill || !matches!(worker.trial, TrialFact::Served { .. }) {
        return;
    }
    let claims = worker.config.supports_cache_hit_threshold == Some(true);
    if (claims || model.gate.kind == GateKind::Engine)
        && worker.supports_cache_hit_threshold == Some(false)
    {
        let what = "the engine ignores `cache_hit_threshold`, on which the configuration relies";
        found.add(FindingKind::ThresholdIgnored, what.to_owned());
    }
    let has_events = worker.config.written_events().is_some() && needs_events(model);
    if is_gated(model) && router_gates(model, worker) && !has_events {
        let what = "nothing can tell that this worker holds enough of a prompt: decode-first never \
                    serves a request here";
        found.add(FindingKind::NoGate, what.to_owned());
    }
}
