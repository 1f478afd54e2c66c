//! Finds the model, the worker and the tenant that a call names.

use std::sync::Arc;

use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::context::Admin;
use super::refusal::{AdminError, Result};
use splitrail_access::{Access, Tenant};
use splitrail_fleet::membership::KnownWorker;
use splitrail_fleet::{ServedModel, ServedModels};

/// The query of a path that names a worker: the model of the worker, which is required if several
/// models have a worker of that name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WorkerQuery {
    pub(super) model: Option<String>,
}

/// The model of this name; without a name, the only model.
pub(super) fn the_model<'s>(
    serving: &'s ServedModels,
    name: Option<&str>,
) -> Result<&'s Arc<ServedModel>> {
    match (name, &serving.models[..]) {
        (Some(name), _) => serving.model(name).ok_or_else(|| {
            let message = format!("model {name} is not served");
            AdminError::new(StatusCode::NOT_FOUND, "model_not_found", message)
        }),
        (None, [only]) => Ok(only),
        (None, all) => Err(ambiguous("there are several models", all.iter().map(|m| m.name()))),
    }
}

/// The worker of this name, in the given model or in the only model that has it.
pub(super) fn the_worker<'s>(
    admin: &Admin,
    serving: &'s ServedModels,
    id: &str,
    model: Option<&str>,
) -> Result<(&'s Arc<ServedModel>, KnownWorker)> {
    let models = match model {
        Some(_) => std::slice::from_ref(the_model(serving, model)?),
        None => &serving.models,
    };
    let knows =
        |served: &'s Arc<ServedModel>| Some((served, admin.fleet.known(served.name(), id)?));
    let mut found: Vec<_> = models.iter().filter_map(knows).collect();
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => Err(no_worker(id)),
        (Some(last), false) => {
            let models = found.iter().chain([&last]).map(|(served, _)| served.name());
            Err(ambiguous(&format!("several models have a worker {id}"), models))
        }
    }
}

/// The tenant of this name; without a name, the default one, or none if the router has no tenants.
pub(super) fn the_tenant(access: &Access, name: Option<&str>) -> Result<Option<Arc<Tenant>>> {
    let refused = |status, code, message: String| Err(AdminError::new(status, code, message));
    match name.or(access.default_tenant()) {
        Some(name) => match access.tenant(name) {
            Some(tenant) => Ok(Some(Arc::clone(tenant))),
            None => {
                let message = format!("no tenant is called `{name}`");
                refused(StatusCode::NOT_FOUND, "unknown_tenant", message)
            }
        },
        None if access.tenants().next().is_none() => Ok(None),
        None => {
            let message = "name the tenant whose request it is (`tenant`)";
            refused(StatusCode::BAD_REQUEST, "invalid_request", message.to_owned())
        }
    }
}

pub(super) fn no_worker(id: &str) -> AdminError {
    let message = format!("there is no worker {id}");
    AdminError::new(StatusCode::NOT_FOUND, "worker_not_found", message)
}

fn ambiguous<'m>(what: &str, models: impl Iterator<Item = &'m str>) -> AdminError {
    let message = format!("{what}: say which one (`model`)");
    let models: Vec<_> = models.collect();
    AdminError::new(StatusCode::CONFLICT, "ambiguous", message).with("models", json!(models))
}
