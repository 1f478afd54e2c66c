//! Sends a prompt that an operator types into the live page through the front door, as a chat of a
//! client. Nothing is kept of it but what is kept of every request.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, State};
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use http_body_util::Full;
use serde::Deserialize;

use super::context::Admin;
use super::lookup::the_tenant;
use super::query::Query;
use super::refusal::Result;
use crate::ingress::http::answer_operator;
use crate::ingress::identify::Sender;

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
    let tenant = the_tenant(&admin.core.access.load(), wanted.tenant.as_deref())?;
    let sender = Sender::of_operator(&admin.core, tenant, peer.ip());
    let mut request = http::Request::new(Full::new(body));
    *request.headers_mut() = headers;
    Ok(answer_operator(&admin.core, sender, peer.ip(), request).await)
}
