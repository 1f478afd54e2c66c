//! The listener on which decode engines fetch hand-offs, and bootstrap servers answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::{App, BODY_LIMIT_BYTES};
use crate::config::KvConnector;
use crate::engine::PULL_PATH;
use crate::engine::handoff::{PullRequest, refused};
use crate::error::json_response;

/// The side channel's routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(PULL_PATH, post(pull))
        .route("/query", get(query))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(app)
}

/// What Mooncake's bootstrap server tells: the engine id of each rank.
async fn query(State(app): State<Arc<App>>) -> Response {
    if app.engine.config.connector != KvConnector::Mooncake {
        return StatusCode::NOT_FOUND.into_response();
    }
    app.log.push("/query", &HeaderMap::new(), b"");
    let origin = &app.engine.origin;
    let workers = json!({"0": {"0": format!("tcp://{}:{}", origin.host, origin.port)}});
    let rank = json!({"engine_id": origin.engine_id, "worker_addr": workers});
    json_response(StatusCode::OK, &json!({"0": rank}))
}

async fn pull(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let Ok(pull) = serde_json::from_slice::<PullRequest>(&body) else {
        return refused("handoff_unknown", "was asked for in an unknown way").into_response();
    };
    if app.faults.strikes("refuse_pulls") {
        return refused("handoff_refused", "is refused by a fault").into_response();
    }
    // Held while the transfer takes; freed even if the decode engine goes away.
    let pulled = match app.engine.take_handoff(&pull).await {
        Ok(pulled) => pulled,
        Err(error) => return error.into_response(),
    };
    let us = app.engine.config.transfer_us_per_block.saturating_mul(pull.wanted_blocks);
    if us > 0 {
        tokio::time::sleep(Duration::from_micros(us)).await;
    }
    drop(pulled);
    json_response(StatusCode::OK, &json!({"transferred_blocks": pull.wanted_blocks}))
}
