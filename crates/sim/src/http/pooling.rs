//! The endpoints of an engine that pools (`embeds`) and generates nothing, and those of recordings.

use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::Value;

use super::connection::ConnectionControl;
use super::request_body::{random_hex, read_model};
use super::{App, Shared, apply_faults, audio, embed, parse, scoring, unix_seconds};
use crate::adapters::Adapters;
use crate::config::SimConfig;
use crate::error::{ApiError, json_response};

/// Makes the reply to a body of a known model, except for its date. The text is the request's id.
type Answer = fn(&Value, &SimConfig, &str) -> Result<Value, ApiError>;

const ENDPOINTS: [(&str, Answer); 8] = [
    ("/v1/embeddings", embed::embed),
    ("/pooling", embed::pool),
    ("/classify", scoring::classify),
    ("/score", scoring::score),
    ("/v1/score", scoring::score),
    ("/rerank", scoring::rerank),
    ("/v1/rerank", scoring::rerank),
    ("/v2/rerank", scoring::rerank),
];

pub(super) fn routes() -> Router<Arc<App>> {
    let pooled = ENDPOINTS.into_iter().fold(Router::new(), |routes, (path, answer)| {
        let serve =
            move |State(app): Shared,
                  ConnectInfo(connection): ConnectInfo<ConnectionControl>,
                  headers: HeaderMap,
                  body: Bytes| { serve(app, path, answer, connection, headers, body) };
        routes.route(path, post(serve))
    });
    audio::PATHS.into_iter().fold(pooled, |routes, path| {
        let serve =
            move |State(app): Shared,
                  ConnectInfo(connection): ConnectInfo<ConnectionControl>,
                  headers: HeaderMap,
                  body: Bytes| { serve_form(app, path, connection, headers, body) };
        routes.route(path, post(serve))
    })
}

async fn serve_form(
    app: Arc<App>,
    path: &'static str,
    connection: ConnectionControl,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let config = &app.engine.config;
    let form = audio::form(&headers, &body);
    let recorded = form.as_ref().map_or_else(|_| Value::Null, audio::Form::recorded);
    app.log.push(path, &headers, recorded.to_string().as_bytes());
    let faults = app.faults.of_request(false, false);
    if let Some(refused) = apply_faults(&faults, &connection, ApiError::into_response).await {
        return refused;
    }
    let given_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let id = given_id.map_or_else(|| random_hex(16), str::to_owned);
    let named = (format!("transcribe-{id}"), unix_seconds());
    match form.and_then(|form| audio::answer(&form, path, config, &app.adapters, named, &faults)) {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn serve(
    app: Arc<App>,
    path: &'static str,
    answer: Answer,
    connection: ConnectionControl,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    app.log.push(path, &headers, &body);
    let config = &app.engine.config;
    if !config.embeds {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    let faults = app.faults.of_request(false, false);
    if let Some(refused) = apply_faults(&faults, &connection, ApiError::into_response).await {
        return refused;
    }
    let given_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let id = given_id.map_or_else(|| random_hex(16), str::to_owned);
    let reply = parse(&body).and_then(|body| {
        check(&body, config, &app.adapters)?;
        let mut reply = answer(&body, config, &id)?;
        // vLLM dates all of them but ranks.
        if reply["object"] == "list" {
            reply["created"] = unix_seconds().into();
        }
        Ok(reply)
    });
    match reply {
        Ok(reply) => json_response(StatusCode::OK, &reply),
        Err(error) => error.into_response(),
    }
}

/// Refuses unknown models, and members that only the router may send.
fn check(body: &Value, config: &SimConfig, adapters: &Adapters) -> Result<(), ApiError> {
    read_model(body, config, adapters)?;
    match ["kv_transfer_params", "request_id"].into_iter().find(|name| !body[*name].is_null()) {
        Some(member) => Err(ApiError::bad_request(member, "only the router may say this.")),
        None => Ok(()),
    }
}
