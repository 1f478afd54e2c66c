//! The listener on which decode engines fetch hand-offs.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::StatusCode;
use serde_json::json;

use super::{App, BODY_LIMIT_BYTES};
use crate::engine::PULL_PATH;
use crate::engine::handoff::{PullRequest, refused};
use crate::error::json_response;

/// The side channel's only route.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(PULL_PATH, post(pull))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(app)
}

async fn pull(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let Ok(pull) = serde_json::from_slice::<PullRequest>(&body) else {
        return refused("handoff_unknown", "was asked for in an unknown way").into_response();
    };
    if app.faults.strikes("refuse_pulls") {
        return refused("handoff_refused", "is refused by a fault").into_response();
    }
    // Held while the transfer takes; freed even if the decode engine goes away.
    let pulled = match app.engine.take_handoff(&pull) {
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
