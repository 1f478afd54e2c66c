//! Which workers can serve a request for an adapter.

use std::sync::Arc;

use splitrail_api::JsonObject;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_config::model::Connector;
use splitrail_fleet::{Exclusion, ServedModel, Worker};
use splitrail_ledger::veto::VetoReason;

/// The adapter of a prompt with this body; `None` if it is for the model itself.
pub(crate) fn adapter_of(served: &ServedModel, body: &JsonObject) -> Option<String> {
    served.adapter_of(body.raw("model"))
}

/// Exclusions for the workers whose engine does not have the adapter of a prompt. Where KV moves between
/// workers, all legs are served by those that have loaded it from the same path, the one from which most
/// have. Empty if no worker in service has it: an engine may load it on demand, and otherwise says itself
/// that it does not exist.
pub(crate) fn lacking_adapter(served: &ServedModel, body: &JsonObject) -> Vec<Exclusion> {
    let Some(adapter) = adapter_of(served, body) else { return Vec::new() };
    let pool = &served.pool;
    if !pool.may_have_adapter(&adapter) {
        return Vec::new();
    }
    let moves_kv = served.config.connector != Connector::None;
    let typical = moves_kv.then(|| pool.typical_holder(&adapter)).flatten();
    let reason = |worker: &Worker| {
        let differs = typical.as_ref().is_some_and(|one| !worker.agrees_on(Some(&adapter), one));
        match worker.has_adapter(&adapter) {
            Some(false) => Some(VetoReason::LacksAdapter),
            _ => differs.then_some(VetoReason::OtherAdapterLoad),
        }
    };
    let roster = pool.roster();
    let lacking = roster.iter().filter_map(|one| Some(Exclusion::new(one.index, reason(one)?)));
    lacking.collect()
}

/// Whether a worker was excluded because of the adapter of the prompt.
pub(crate) fn is_about_adapters(exclusion: &Exclusion) -> bool {
    matches!(exclusion.reason, VetoReason::LacksAdapter | VetoReason::OtherAdapterLoad)
}

/// Allows the workers that do not list the adapter of a prompt again, if an engine that lists it has
/// refused the prompt because it lacks it: adapters have moved since the engines were asked.
pub(crate) fn reconsider(excluded: &mut Vec<Exclusion>, error: &Error) {
    if error.kind() == ErrorKind::EngineLacksModel {
        excluded.retain(|one| one.reason != VetoReason::LacksAdapter);
    }
}

/// The error for the client of a prompt that failed. If no engine that was asked has its adapter, but one
/// that is out of service has, the client may try again.
pub(crate) fn error_for_client(served: &ServedModel, body: &JsonObject, error: Error) -> Error {
    if error.kind() != ErrorKind::EngineLacksModel {
        return error;
    }
    let Some(adapter) = adapter_of(served, body) else { return error };
    let returns = |worker: &Arc<Worker>| {
        !worker.state().takes_work() && worker.has_adapter(&adapter) == Some(true)
    };
    if !served.pool.roster().iter().any(returns) {
        return error;
    }
    let message = format!("no worker with the adapter {adapter} is in service");
    Error::new(ErrorKind::NoWorker, message)
}
