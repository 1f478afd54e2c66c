//! The running configuration, the served models, and recent decisions and requests.

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::{CONTENT_TYPE, ETAG};
use serde_json::json;
use splitrail_ledger::decisions::DecisionFilter;
use splitrail_settings::variables::escaped_json;

use super::context::Admin;
use super::query::Query;
use crate::attention;
use crate::ingress::reply::json_reply;

/// The running configuration. The reply is itself a valid configuration file, because JSON is YAML.
/// Secrets are shown as references, as in the file.
pub(super) async fn config(State(admin): State<Admin>) -> Response {
    let serving = admin.core.serving();
    let json = serde_json::to_value(&*serving.config).unwrap_or_default();
    let text = serde_json::to_string_pretty(&escaped_json(json)).unwrap_or_default();
    let tag = format!("\"{:012x}\"", serving.config.digest());
    let json = HeaderValue::from_static("application/json");
    let mut reply = ([(CONTENT_TYPE, json)], text + "\n").into_response();
    // Digits in quotes are always a valid header value.
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        reply.headers_mut().insert(ETAG, tag);
    }
    reply
}

/// What an operator should look at.
pub(super) async fn attention(State(admin): State<Admin>) -> Response {
    let found = attention::find(&admin.core, &admin.live.shed());
    json_reply(json!({ "needs_attention": found }))
}

/// The decisions that the query asks for, among those that are kept.
pub(super) async fn decisions(
    State(admin): State<Admin>,
    Query(query): Query<DecisionFilter>,
) -> Response {
    let limit = query.limit.unwrap_or(100).min(admin.core.serving().limits.decisions_kept);
    let filter = DecisionFilter { limit: Some(limit), ..query };
    json_reply(json!({ "decisions": admin.core.decisions.find(&filter) }))
}

pub(super) async fn models(State(admin): State<Admin>) -> Response {
    let models: Vec<_> = admin
        .core
        .serving()
        .models
        .iter()
        .map(|served| {
            let config = &served.config;
            json!({
                "name": config.name,
                "aliases": config.aliases,
                "adapters": config.adapters,
                "block_size": served.pool.block_size(),
                "flow": config.flow,
                "request_flows": config.request_flows,
                "cache_hit_threshold": config.cache_hit_threshold,
                "learned_threshold": served.pool.calibration.learned(Instant::now()),
                "gate": config.gate,
                "policy": config.policy,
                "tokenizer": served.config.tokenizer.makes_tokens(),
                "requests_in_flight": admin.core.metrics.requests_in_flight(served.name()),
                "queue_requests": config.queue.as_ref().map(|_| served.pool.waiting.len()),
            })
        })
        .collect();
    json_reply(json!({
        "router_version": env!("CARGO_PKG_VERSION"),
        "config_hash": admin.core.metrics.config_hash(),
        "models": models,
    }))
}

pub(super) async fn requests(State(admin): State<Admin>) -> Response {
    let live: Vec<_> = admin.core.live.iter().map(|entry| entry.value().clone()).collect();
    json_reply(json!({ "requests": live }))
}
