//! Explains the placement of a request: one that is sent only for this purpose, or one that was
//! served recently.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::context::Admin;
use super::lookup::the_tenant;
use super::query::Query;
use super::refusal::{AdminError, Result, check_is_json};
use crate::ingress::reply::json_reply;
use crate::service::explain;
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_api::steering::Steering;
use splitrail_flow::prepare::Payload;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExplainQuery {
    /// The id of a recently served request.
    request_id: Option<String>,
    /// The name of the tenant whose request it is.
    tenant: Option<String>,
    /// The path for which the body is meant; if it is missing, it is derived from the body's
    /// members.
    endpoint: Option<String>,
}

/// Explains the request in the body, or the one with the given id.
pub(super) async fn show(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Query(wanted): Query<ExplainQuery>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response> {
    if let Some(id) = &wanted.request_id {
        return past(&admin, id);
    }
    let message = "send the request as `content-type: application/json`, or name one that was \
                   served with `?request_id=`";
    check_is_json(&headers, message)?;
    let endpoint = endpoint(wanted.endpoint.as_deref(), &body)?;
    let steering = Steering::read(&headers).map_err(refused)?;
    let access = admin.core.access.load();
    let tenant = match wanted.tenant.as_deref() {
        None => None,
        Some(name) => the_tenant(&access, Some(name))?,
    };
    drop(access);
    let core = &admin.core;
    let memory = core.memory.of_client(core.admission.of_address(peer.ip()));
    let body = Payload::Json(body);
    let _permit = explain::permit(&core.operator_dry_runs).await.map_err(refused)?;
    let explained = explain::dry_run(core, endpoint, body, steering, tenant.as_ref(), &memory);
    Ok(json_reply(explained.await.map_err(refused)?))
}

/// The endpoint for which a body is meant.
fn endpoint(named: Option<&str>, body: &[u8]) -> Result<Endpoint> {
    if let Some(path) = named {
        return Endpoint::at(path).ok_or_else(|| {
            let known = Endpoint::ALL.map(Endpoint::path).join(", ");
            let message = format!("`endpoint` must be one of {known}");
            AdminError::new(StatusCode::BAD_REQUEST, "invalid_request", message)
        });
    }
    #[derive(Deserialize)]
    struct Members<'a> {
        #[serde(borrow)]
        messages: Option<&'a serde_json::value::RawValue>,
        #[serde(borrow)]
        token_ids: Option<&'a serde_json::value::RawValue>,
        #[serde(borrow)]
        input: Option<&'a serde_json::value::RawValue>,
        #[serde(borrow)]
        tokens: Option<&'a serde_json::value::RawValue>,
    }
    // A body that is not a JSON object is refused with its place when it is prepared.
    let members = serde_json::from_slice(body).ok();
    Ok(match members {
        Some(Members { messages: Some(_), .. }) => Endpoint::Chat,
        Some(Members { token_ids: Some(_), .. }) => Endpoint::Generate,
        Some(Members { input: Some(_), .. }) => Endpoint::Responses,
        Some(Members { tokens: Some(_), .. }) => Endpoint::Detokenize,
        _ => Endpoint::Completions,
    })
}

/// The refusal with the front door's status.
fn refused(error: Error) -> AdminError {
    let status = StatusCode::from_u16(error.status().as_u16());
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    AdminError::new(status, error.outcome(), error.message())
}

/// The decisions for a request, as far as they are still kept.
fn past(admin: &Admin, id: &str) -> Result<Response> {
    explain::past(&admin.core, id, None).map(json_reply).ok_or_else(|| {
        let message = explain::not_kept(&admin.core, id);
        AdminError::new(StatusCode::NOT_FOUND, "unknown_request", message)
    })
}
