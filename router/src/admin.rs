//! The admin listener: metrics, health, and what the router knows. On loopback by
//! default; it shows addresses and decisions, but no content and no keys.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::json;
use splitrail_kv::Tier;

use crate::core::Core;
use crate::error::{Error, Kind};
use crate::fleet::parity::{Cause, Parity};
use crate::fleet::pool::worker_key;
use crate::flow::plan::THRESHOLD;
use crate::ingress::reply::{health, json_reply, ready, reply_error};
use crate::pick::Leg;

/// The admin listener's routes.
pub fn routes(core: Arc<Core>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/admin/decisions", get(decisions))
        .route("/admin/workers", get(workers))
        .route("/admin/models", get(models))
        .route("/admin/requests", get(requests))
        .fallback(async || reply_error(Error::new(Kind::UnknownPath, "there is no such path")))
        .with_state(core)
}

async fn metrics(State(core): State<Arc<Core>>) -> Response {
    observe_fleet(&core);
    let text = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, text)], core.metrics.encode()).into_response()
}

/// Gauges of the fleet are set when they are read.
fn observe_fleet(core: &Core) {
    let metrics = &core.metrics;
    for served in &core.serving().models {
        let model = served.name();
        let threshold = served.config.cache_hit_threshold.unwrap_or(THRESHOLD);
        metrics.cache_hit_threshold.with_label_values(&[model]).set(threshold);
        let index = served.pool.index();
        for worker in served.pool.roster().iter() {
            let role = worker.config.role.name();
            let labels = [model, worker.id(), role];
            metrics.worker_up.with_label_values(&labels).set(worker.is_up().into());
            for leg in [Leg::Prefill, Leg::Decode].into_iter().filter(|leg| worker.serves(*leg)) {
                let labels = [model, worker.id(), role, leg.name()];
                let open = worker.breaker(leg).is_open();
                metrics.worker_breaker_open.with_label_values(&labels).set(open.into());
            }
            let requests = i64::from(worker.booked.requests());
            metrics.worker_requests.with_label_values(&labels).set(requests);
            let tokens = worker.booked.prefill_tokens() as i64;
            metrics.worker_prefill_tokens.with_label_values(&labels).set(tokens);
            if let Some(load) = worker.load(Instant::now())
                && let (Some(total), Some(used)) = (load.total_blocks, load.kv_used_ratio)
            {
                let total = f64::from(total);
                for (state, blocks) in [("total", total), ("used", total * used)] {
                    let labels = [model, worker.id(), role, state];
                    metrics.worker_kv_blocks.with_label_values(&labels).set(blocks);
                }
            }
            let audit = worker.audit.view();
            for (direction, blocks) in
                [("over", audit.drift_over_blocks), ("under", audit.drift_under_blocks)]
            {
                let labels = [model, worker.id(), direction];
                metrics.worker_drift.with_label_values(&labels).set(blocks);
            }
            let discount = metrics.worker_overlap_discount.with_label_values(&labels[..2]);
            discount.set(worker.drift.discount());
            let takes_part = metrics.worker_kv_routing.with_label_values(&labels[..2]);
            takes_part.set(worker.takes_part_in_kv_routing().into());
            let parity = worker.parity.parity().name();
            for result in Parity::RESULTS {
                let labels = [model, worker.id(), result];
                metrics.worker_parity.with_label_values(&labels).set((result == parity).into());
            }
            if worker.config.kv_events.is_some() {
                let current = metrics.index_events_current.with_label_values(&labels[..2]);
                current.set(worker.events_are_current().into());
                let truncated = metrics.index_truncated.with_label_values(&labels[..2]);
                truncated.set(worker.index_is_truncated().into());
            }
            let assumed = served.pool.assumed.blocks(worker.index);
            for (kind, blocks) in
                [("speculative", assumed.speculative), ("approximate", assumed.approximate)]
            {
                let labels = [model, worker.id(), kind];
                metrics.index_assumed_blocks.with_label_values(&labels).set(blocks as i64);
            }
            let held = index.block_counts(worker_key(worker.index));
            for tier in Tier::ALL {
                let labels = [model, worker.id(), tier.name()];
                let blocks = held[tier as usize] as i64;
                metrics.index_blocks.with_label_values(&labels).set(blocks);
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DecisionsQuery {
    request_id: Option<String>,
    limit: Option<usize>,
}

async fn decisions(State(core): State<Arc<Core>>, query: Query<DecisionsQuery>) -> Response {
    let limit = query.limit.unwrap_or(100).min(core.serving().limits.decisions_kept);
    let decisions = core.decisions.newest(query.request_id.as_deref(), limit);
    json_reply(json!({ "decisions": decisions }))
}

async fn workers(State(core): State<Arc<Core>>) -> Response {
    let mut workers = Vec::new();
    for served in &core.serving().models {
        let index = served.pool.index();
        for worker in served.pool.roster().iter() {
            let load = worker.load(Instant::now());
            let parity = worker.parity.parity();
            let open: Vec<_> = [Leg::Prefill, Leg::Decode]
                .into_iter()
                .filter(|leg| worker.serves(*leg) && worker.breaker(*leg).is_open())
                .map(Leg::name)
                .collect();
            let blocks = index.block_counts(worker_key(worker.index));
            let blocks: serde_json::Map<_, _> = Tier::ALL
                .iter()
                .map(|tier| (tier.name().to_owned(), blocks[*tier as usize].into()))
                .collect();
            workers.push(json!({
                "model": served.name(),
                "id": worker.id(),
                "role": worker.config.role.name(),
                "url": worker.config.url,
                "up": worker.is_up(),
                "kv_events": worker.config.kv_events,
                "index_synced": worker.is_synced(),
                "events_current": worker.events_are_current(),
                "index_truncated": worker.index_is_truncated(),
                "breakers_open": open,
                "shim": worker.config.shim,
                "honours_threshold": worker.honours_threshold(),
                "context_tokens": worker.context_tokens(),
                "index_blocks": blocks,
                "assumed_blocks": served.pool.assumed.blocks(worker.index),
                "requests": worker.booked.requests(),
                "prefill_tokens": worker.booked.prefill_tokens(),
                "active_tokens": worker.booked.active_tokens(),
                "parity": parity.name(),
                "parity_cause": parity.cause(),
                "parity_advice": parity.cause().map(Cause::advice),
                "kv_routing": worker.takes_part_in_kv_routing(),
                "overlap_discount": worker.drift.discount(),
                "drift": worker.drift.view(),
                "audit": worker.audit.view(),
                "engine_running": load.as_ref().and_then(|load| load.running),
                "engine_waiting": load.as_ref().and_then(|load| load.waiting),
                "engine_kv_used_ratio": load.as_ref().and_then(|load| load.kv_used_ratio),
            }));
        }
    }
    json_reply(json!({ "workers": workers }))
}

async fn models(State(core): State<Arc<Core>>) -> Response {
    let models: Vec<_> = core
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
                "gate": config.gate,
                "policy": config.policy,
                "tokenizer": served.prompt.is_some(),
            })
        })
        .collect();
    json_reply(json!({ "models": models }))
}

async fn requests(State(core): State<Arc<Core>>) -> Response {
    let live: Vec<_> = core.live.iter().map(|entry| entry.value().clone()).collect();
    json_reply(json!({ "requests": live }))
}
