//! Endpoints for tests: the engine's blocks, the requests that it received, and faults.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::App;
use crate::error::{ApiError, json_response};
use crate::faults::Fault;

pub(super) async fn state(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!(app.state()))
}

/// The rank of the requested blocks.
#[derive(Deserialize)]
pub(super) struct RankQuery {
    #[serde(default)]
    rank: usize,
}

/// The blocks in a rank's prefix cache, by their announced names.
pub(super) async fn resident(
    State(app): State<Arc<App>>,
    Query(which): Query<RankQuery>,
) -> Response {
    let Some(engine) = app.ranks.get(which.rank) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let mut names: Vec<u64> = engine.core().cache.resident().map(|(name, _)| name).collect();
    names.sort_unstable();
    json_response(StatusCode::OK, &json!(names))
}

pub(super) async fn requests(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!(app.log.list()))
}

pub(super) async fn faults(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!(app.faults.list()))
}

/// Activates one fault or a list of faults.
pub(super) async fn set_faults(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let faults = serde_json::from_slice::<Value>(&body).and_then(|body| match body {
        Value::Array(_) => serde_json::from_value::<Vec<Fault>>(body),
        one => serde_json::from_value::<Fault>(one).map(|fault| vec![fault]),
    });
    match faults {
        Ok(faults) => {
            for fault in faults {
                app.faults.set(fault);
            }
            json_response(StatusCode::OK, &json!(app.faults.list()))
        }
        Err(error) => {
            ApiError::new(StatusCode::BAD_REQUEST, format!("Not a fault: {error}")).into_response()
        }
    }
}

pub(super) async fn clear_faults(State(app): State<Arc<App>>) -> Response {
    app.faults.clear();
    json_response(StatusCode::OK, &json!([]))
}

/// Drops all prefixes, like vLLM's endpoint of this name. Refused while blocks are in use.
pub(super) async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Response {
    let cleared: Vec<bool> = app.ranks.iter().map(|engine| engine.core().cache.clear()).collect();
    match cleared.into_iter().all(|cleared| cleared) {
        true => StatusCode::OK.into_response(),
        false => {
            let message = "Blocks are in use; the prefix cache was not reset.";
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}

#[derive(Deserialize)]
struct LoadRequest {
    lora_name: String,
    lora_path: String,
    #[serde(default)]
    load_inplace: bool,
}

#[derive(Deserialize)]
struct UnloadRequest {
    lora_name: String,
}

fn invalid(message: String) -> Response {
    ApiError::new(StatusCode::BAD_REQUEST, message).into_response()
}

/// `/v1/load_lora_adapter`.
pub(super) async fn load_adapter(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let request: LoadRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return invalid(error.to_string()),
    };
    let LoadRequest { lora_name, lora_path, load_inplace } = request;
    if lora_name == app.engine.config.model {
        return invalid(format!("The lora adapter '{lora_name}' conflicts with the base model."));
    }
    if !load_inplace && app.adapters.loaded().contains_key(&lora_name) {
        return invalid(format!("The lora adapter '{lora_name}' has already been loaded."));
    }
    app.adapters.load(&lora_name, lora_path);
    format!("Success: LoRA adapter '{lora_name}' added successfully.").into_response()
}

/// `/v1/unload_lora_adapter`.
pub(super) async fn unload_adapter(State(app): State<Arc<App>>, body: Bytes) -> Response {
    let request: UnloadRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return invalid(error.to_string()),
    };
    let name = request.lora_name;
    match app.adapters.loaded().remove(&name) {
        Some(_) => format!("Success: LoRA adapter '{name}' removed successfully.").into_response(),
        None => {
            let message = format!("The lora adapter '{name}' cannot be found.");
            ApiError::new(StatusCode::NOT_FOUND, message).into_response()
        }
    }
}
