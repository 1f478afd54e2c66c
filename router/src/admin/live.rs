//! The stream of snapshots for those who watch the router, as server-sent events.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::context::Admin;
use super::guard::may_still_read;
use super::query::Query;
use super::refusal::{AdminError, Result};
use crate::core::Core;
use crate::ingress::http::X_ACCEL_BUFFERING;
use crate::ingress::reply::{json_reply, reply_error};
use crate::live::{SubscribeRefusal, Subscriber};
use splitrail_api::error::{Error, ErrorKind};

/// The last event of a stream whose router has drained.
const DRAINED: Bytes = Bytes::from_static(b"event: end\ndata: {\"reason\":\"drained\"}\n\n");

/// The last event of a stream whose credential is not valid any more.
const REVOKED: Bytes = Bytes::from_static(b"event: end\ndata: {\"reason\":\"credential\"}\n\n");

/// Snapshots of the cluster, until the router has drained.
pub(super) async fn stream(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Response {
    match admin.live.subscribe(peer.ip()) {
        Ok(subscriber) => {
            let body = Body::from_stream(events(admin.core, headers, subscriber));
            let headers = [
                (CONTENT_TYPE, "text/event-stream"),
                (CACHE_CONTROL, "no-store"),
                (X_ACCEL_BUFFERING, "no"),
            ];
            (headers, body).into_response()
        }
        Err(why @ (SubscribeRefusal::Full | SubscribeRefusal::Ended)) => {
            reply_error(Error::new(ErrorKind::Overloaded, why.to_string()))
        }
    }
}

/// The events for one subscriber.
fn events(
    core: Arc<Core>,
    headers: HeaderMap,
    subscriber: Subscriber,
) -> impl Stream<Item = std::result::Result<Bytes, Infallible>> {
    let watcher = Arc::new((core, headers));
    stream::unfold(Some(subscriber), move |subscriber| {
        let watcher = Arc::clone(&watcher);
        async move {
            let mut subscriber = subscriber?;
            let (event, is_last) = match subscriber.next().await {
                Some(snapshot) if may_still_read(&watcher.0, &watcher.1) => (snapshot, false),
                Some(_) => (REVOKED, true),
                None => (DRAINED, true),
            };
            Some((Ok(event), (!is_last).then_some(subscriber)))
        }
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HistoryQuery {
    /// The model; required if there are several.
    model: Option<String>,
}

/// The last minutes of one model.
pub(super) async fn history(
    State(admin): State<Admin>,
    Query(query): Query<HistoryQuery>,
) -> Result<Response> {
    let serving = admin.core.serving();
    let served = super::lookup::the_model(&serving, query.model.as_deref())?;
    let history = admin.live.history(served.name()).ok_or_else(|| {
        let message = "nothing has been read of this model yet; retry in a few seconds";
        AdminError::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
    })?;
    Ok(json_reply(history))
}
