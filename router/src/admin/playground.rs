//! Sends a prompt that an operator types into the live page through the front door, as a chat of a
//! client. Nothing is kept of it but what is kept of every request.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::Full;
use serde::Deserialize;

use super::context::Admin;
use super::query::Query;
use super::refusal::{AdminError, Result};
use crate::ingress::http::answer_operator;
use crate::ingress::identify::Sender;
use splitrail_access::{Access, Tenant};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlaygroundQuery {
    /// The tenant whose request it is.
    tenant: Option<String>,
}

/// Serves the chat in the body.
pub(super) async fn send(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Query(wanted): Query<PlaygroundQuery>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response> {
    let tenant = tenant(&admin.core.access.load(), wanted.tenant.as_deref())?;
    let sender = Sender::of_operator(&admin.core, tenant, peer.ip());
    let mut request = http::Request::new(Full::new(body));
    *request.headers_mut() = headers;
    Ok(answer_operator(&admin.core, sender, peer.ip(), request).await)
}

/// The tenant of this name; without a name, the default one, or none if the router has no tenants.
pub(super) fn tenant(access: &Access, name: Option<&str>) -> Result<Option<Arc<Tenant>>> {
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
