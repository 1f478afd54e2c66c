//! The listener at which decode engines fetch hand-offs, and which acts as bootstrap server.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::future::select_ok;
use http::{HeaderMap, StatusCode};
use serde_json::{Map, Value, json};

use super::{App, BODY_LIMIT_BYTES};
use crate::config::KvConnector;
use crate::engine::hand_off::{PullRequest, refused};
use crate::engine::{Engine, PULL_PATH, PulledBlocks};
use crate::error::{ApiError, json_response};

/// The side channel's routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(PULL_PATH, post(pull))
        .route("/query", get(query))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .with_state(app)
}

/// The reply of Mooncake's bootstrap server: the engine id of each rank.
async fn query(State(app): State<Arc<App>>) -> Response {
    if app.engine.config.connector != KvConnector::Mooncake {
        return StatusCode::NOT_FOUND.into_response();
    }
    app.log.push("/query", &HeaderMap::new(), b"");
    let rank = |engine: &Arc<Engine>| {
        let origin = &engine.origin;
        let workers = json!({"0": {"0": format!("tcp://{}:{}", origin.host, origin.port)}});
        json!({"engine_id": origin.engine_id, "worker_addr": workers})
    };
    let ranks = app.ranks.iter().enumerate();
    let ranks: Map<String, Value> =
        ranks.map(|(number, engine)| (number.to_string(), rank(engine))).collect();
    json_response(StatusCode::OK, &Value::Object(ranks))
}

async fn pull(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let Ok(pull) = serde_json::from_slice::<PullRequest>(&body) else {
        return refused("hand_off_unknown", "was asked for in an unknown way").into_response();
    };
    if app.faults.occurs_now("refuse_pulls") {
        return refused("hand_off_refused", "is refused by a fault").into_response();
    }
    if pull.kv_dtype != app.engine.config.kv_dtype {
        return refused("hand_off_mismatch", "has KV of another data type").into_response();
    }
    // Held during the transfer, and freed even if the decode engine disconnects.
    let pulled = match take(&app, &pull).await {
        Ok(pulled) => pulled,
        Err(error) => return error.into_response(),
    };
    let us = app.engine.config.transfer_us_per_block.saturating_mul(pull.wanted_blocks);
    if us > 0 {
        tokio::time::sleep(Duration::from_micros(us)).await;
    }
    if pulled.is_lost() {
        return ApiError::engine_dead().into_response();
    }
    drop(pulled);
    json_response(StatusCode::OK, &json!({"transferred_blocks": pull.wanted_blocks}))
}

/// Takes a hand-off from the rank that the request names; without a name, from the rank that has
/// it.
async fn take(app: &App, pull: &PullRequest) -> Result<PulledBlocks, ApiError> {
    let named = |engine: &&Arc<Engine>| pull.engine_id.as_ref() == Some(&engine.origin.engine_id);
    if let Some(engine) = app.ranks.iter().find(named) {
        return engine.take_hand_off(pull).await;
    }
    if pull.engine_id.is_some() || app.ranks.len() == 1 {
        return app.engine.take_hand_off(pull).await;
    }
    let asked = app.ranks.iter().map(|engine| Box::pin(engine.take_hand_off(pull)));
    select_ok(asked).await.map(|(pulled, _)| pulled)
}
