//! Changes that an operator may make while the router runs.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::context::Admin;
use super::lookup::{WorkerQuery, no_worker, the_model, the_worker};
use super::query::Query;
use super::refusal::{AdminError, Result, check_is_json};
use super::workers::view;
use crate::ingress::reply::json_reply;
use crate::reload::ReloadError;
use splitrail_config::Addition;
use splitrail_fleet::{Fleet, WorkerSource};
use splitrail_settings::logging::warn_of;

/// Adds or redefines a worker, until it is removed or the router ends.
pub(super) async fn add(
    State(admin): State<Admin>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response> {
    check_is_json(&headers, "send it as `content-type: application/json`")?;
    let text = std::str::from_utf8(&body)
        .map_err(|_| AdminError::new(StatusCode::BAD_REQUEST, "invalid_json", "it is not UTF-8"))?;
    let serving = admin.core.serving();
    let joins = |model: Option<&str>| {
        let config = &the_model(&serving, model).ok()?.config;
        Some((config.flow, config.connector))
    };
    let Addition { model, worker, warnings } =
        Addition::parse(text, joins).map_err(|problems| {
            let message = format!("the worker has {} problem(s)", problems.count());
            AdminError::new(StatusCode::BAD_REQUEST, "invalid_request", message)
                .with_problems(problems.as_slice())
        })?;
    warn_of(&warnings);
    let served = the_model(&serving, model.as_deref())?;
    let before = served.pool.roster();
    // The blocks of two workers with the same event stream would be counted for both.
    let publisher = worker.written_events();
    let twin = before.iter().find(|other| {
        publisher.is_some()
            && other.engine.facts.publisher().as_deref() == publisher
            && other.id() != worker.id
            && other.config.url != worker.url
    });
    if let Some(twin) = twin {
        let message = format!("`worker.kv_events` is already used by worker {}", twin.id());
        return Err(AdminError::new(StatusCode::CONFLICT, "conflict", message));
    }
    let model = served.name().to_owned();
    let joined = off_reactor(&admin, move |fleet| fleet.claim(&model, WorkerSource::Admin, worker));
    let worker = joined
        .await?
        .map_err(|error| AdminError::new(StatusCode::CONFLICT, "conflict", error.to_string()))?;
    tracing::info!(model = served.name(), worker = worker.id(), "an operator has added a worker");
    let known = before.get(worker.index).is_some() || before.named(worker.id()).is_some();
    let status = if known { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, json_reply(json!({"worker": view(&admin, served, &worker)}))).into_response())
}

/// Removes what an operator added for a worker.
pub(super) async fn remove(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    Query(which): Query<WorkerQuery>,
) -> Result<Response> {
    let serving = admin.core.serving();
    let (served, known) = the_worker(&admin, &serving, &id, which.model.as_deref())?;
    let sources: Vec<_> = known.sources.iter().map(|source| source.name()).collect();
    let Some(name) = admin.fleet.named_by(served.name(), WorkerSource::Admin, &id) else {
        let message = format!(
            "worker {id} was not added here; it is known from: {}. Remove it there, or drain it",
            sources.join(", ")
        );
        let refusal = AdminError::new(StatusCode::CONFLICT, "conflict", message);
        return Err(refusal.with("sources", json!(sources)));
    };
    let model = served.name().to_owned();
    off_reactor(&admin, move |fleet| fleet.revoke(&model, WorkerSource::Admin, &name)).await?;
    tracing::info!(model = served.name(), worker = id, "an operator has removed a worker");
    let left = admin.fleet.known(served.name(), &id);
    let left = left.map(|known| view(&admin, served, &known.worker));
    // Other sources may still list the worker.
    Ok(json_reply(json!({"model": served.name(), "id": id, "worker": left})))
}

/// Takes a worker out of service: it gets no new requests while others can take them.
pub(super) async fn drain(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    Query(which): Query<WorkerQuery>,
) -> Result<Response> {
    set_draining(&admin, &id, &which, true).await
}

/// Takes a worker back into service.
pub(super) async fn undrain(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    Query(which): Query<WorkerQuery>,
) -> Result<Response> {
    set_draining(&admin, &id, &which, false).await
}

async fn set_draining(
    admin: &Admin,
    id: &str,
    which: &WorkerQuery,
    draining: bool,
) -> Result<Response> {
    let serving = admin.core.serving();
    let (served, known) = the_worker(admin, &serving, id, which.model.as_deref())?;
    let (model, worker_id) = (served.name().to_owned(), known.worker.id().to_owned());
    let drained = off_reactor(admin, move |fleet| fleet.drain(&model, &worker_id, draining));
    let worker = drained.await?.ok_or_else(|| no_worker(id))?;
    Ok(json_reply(json!({"worker": view(admin, served, &worker)})))
}

/// Reads the configuration file again.
pub(super) async fn reload(State(admin): State<Admin>) -> Result<Response> {
    let report = admin.reload.now().await.map_err(|refused| {
        let (status, code) = match &refused {
            ReloadError::Problems { .. } => {
                (StatusCode::UNPROCESSABLE_ENTITY, "configuration_refused")
            }
            ReloadError::Fleet(_) | ReloadError::NoFile => (StatusCode::CONFLICT, "conflict"),
            ReloadError::Draining | ReloadError::Busy => {
                (StatusCode::SERVICE_UNAVAILABLE, "overloaded")
            }
            ReloadError::Defect(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        };
        let message = format!("{refused}; nothing has changed");
        AdminError::new(status, code, message).with_problems(refused.problems())
    })?;
    Ok(json_reply(report.to_json()))
}

/// Changes the fleet on the blocking pool, because removing a worker's blocks from the index may
/// take long.
async fn off_reactor<T: Send + 'static>(
    admin: &Admin,
    change: impl FnOnce(&Fleet) -> T + Send + 'static,
) -> Result<T> {
    let fleet = Arc::clone(&admin.fleet);
    let changing = tokio::task::spawn_blocking(move || change(&fleet)).await;
    changing.map_err(|error| {
        AdminError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string())
    })
}
