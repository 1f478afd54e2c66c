//! Explains the placement of a request: one that is sent only to be explained, or one that was served recently.

use axum::extract::{Query, State};
use axum::response::Response;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::context::Admin;
use super::refusal::{Refusal, Result};
use crate::ingress::reply::json_reply;
use crate::service::explain;
use splitrail_api::Endpoint;
use splitrail_api::error::Error;
use splitrail_api::steering::Steering;
use splitrail_flow::prepare::Payload;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// A request that was served lately.
    request_id: Option<String>,
    /// The path that the body is meant for; left out, its members tell.
    endpoint: Option<String>,
}

/// Explains the request in the body, or the one that is named.
pub(super) async fn show(
    State(admin): State<Admin>,
    wanted: Query<Wanted>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response> {
    if let Some(id) = &wanted.request_id {
        return past(&admin, id);
    }
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().map(str::trim) != Some("application/json") {
        let message = "send the request as `content-type: application/json`, or name one that \
                       was served with `?request_id=`";
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media", message));
    }
    let endpoint = endpoint(wanted.endpoint.as_deref(), &body)?;
    let steering = Steering::read(&headers).map_err(refused)?;
    let explained = explain::dry_run(&admin.core, endpoint, Payload::Json(body), steering);
    Ok(json_reply(explained.await.map_err(refused)?))
}

/// The endpoint that a body is for.
fn endpoint(named: Option<&str>, body: &[u8]) -> Result<Endpoint> {
    if let Some(path) = named {
        return Endpoint::at(path).ok_or_else(|| {
            let known = Endpoint::ALL.map(Endpoint::path).join(", ");
            let message = format!("`endpoint` must be one of {known}");
            Refusal::new(StatusCode::BAD_REQUEST, "invalid_request", message)
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
    // What is no JSON object is refused when it is prepared, with its place.
    let members = serde_json::from_slice(body).ok();
    Ok(match members {
        Some(Members { messages: Some(_), .. }) => Endpoint::Chat,
        Some(Members { token_ids: Some(_), .. }) => Endpoint::Generate,
        Some(Members { input: Some(_), .. }) => Endpoint::Responses,
        Some(Members { tokens: Some(_), .. }) => Endpoint::Detokenize,
        _ => Endpoint::Completions,
    })
}

/// As the front door would refuse it.
fn refused(error: Error) -> Refusal {
    let status = StatusCode::from_u16(error.status().as_u16());
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Refusal::new(status, error.outcome(), error.message())
}

/// What was decided for a request, as far as it is still kept.
fn past(admin: &Admin, id: &str) -> Result<Response> {
    explain::past(&admin.core, id).map(json_reply).ok_or_else(|| {
        let message = explain::not_kept(&admin.core, id);
        Refusal::new(StatusCode::NOT_FOUND, "unknown_request", message)
    })
}
