//! Reads a replica's state from the paths of its admin listener.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;
use splitrail_settings::command::{Failure, exit};

use super::snapshot::{ModelSnapshot, ReplicaState, WorkerSnapshot};
use crate::admin::{AskError, Replica};
use crate::safe_text::printable;

/// Maximum width of a message that lists models.
const MODELS_MAX_COLUMNS: usize = 1000;

/// Reads everything that `splitrail status` shows.
///
/// # Errors
/// The first error of the paths that were asked.
pub(crate) async fn snapshot(replica: Replica) -> Result<ReplicaState, AskError> {
    let (ready, attention, workers, models) = tokio::join!(
        replica.readiness(),
        replica.get("/admin/attention"),
        replica.get("/admin/workers"),
        replica.get("/admin/models"),
    );
    let (attention, workers, models) = (attention?, workers?, models?);
    let text = |name| models[name].as_str().unwrap_or_default().to_owned();
    Ok(ReplicaState {
        version: text("router_version"),
        config_hash: text("config_hash"),
        not_ready: ready?,
        needs_attention: members(replica.member(&attention, "needs_attention")?),
        models: members(replica.member(&models, "models")?),
        workers: members(replica.member(&workers, "workers")?),
    })
}

/// Reads the workers.
///
/// # Errors
/// The first error of the paths that were asked.
pub(crate) async fn workers(replica: Replica) -> Result<Vec<WorkerSnapshot>, AskError> {
    let reply = replica.get("/admin/workers").await?;
    Ok(members(replica.member(&reply, "workers")?))
}

/// Reads the names of the models that the replica serves.
///
/// # Errors
/// The replica did not say them.
pub(crate) async fn model_names(replica: Replica) -> Result<Vec<String>, AskError> {
    let reply = replica.get("/admin/models").await?;
    let models: Vec<ModelSnapshot> = members(replica.member(&reply, "models")?);
    Ok(models.into_iter().map(|model| model.name).collect())
}

/// Checks a model's name on the command line against those that all replicas serve.
///
/// # Errors
/// No replica serves a model of this name; the message lists those that exist.
pub(crate) fn known_model(
    model: &str,
    served: impl IntoIterator<Item = String>,
) -> Result<(), Failure> {
    let names: BTreeSet<String> = served.into_iter().collect();
    if names.contains(model) {
        return Ok(());
    }
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    let message = format!("no router serves a model `{model}`; there are: {names}");
    Err(Failure::new(exit::DATA_ERROR, printable(&message, MODELS_MAX_COLUMNS)))
}

/// The members of a list that have the expected form.
fn members<T: for<'de> Deserialize<'de>>(list: &Value) -> Vec<T> {
    let members = list.as_array().into_iter().flatten();
    members.filter_map(|member| T::deserialize(member).ok()).collect()
}
