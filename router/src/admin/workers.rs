//! The workers from an operator's point of view.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::context::Admin;
use super::index::by_tier;
use crate::attention;
use crate::ingress::reply::json_reply;
use crate::live::in_order;
use splitrail_fleet::ServedModel;
use splitrail_fleet::Worker;
use splitrail_fleet::ranks::{Rank, rank_key};
use splitrail_fleet::shim_report::EventOrigin;
use splitrail_policy::Leg;

/// Every worker of every model.
pub(super) async fn list(State(admin): State<Admin>) -> Response {
    let serving = admin.core.serving();
    let of_model = |served| -> Vec<Value> {
        let served: &ServedModel = served;
        let roster = served.pool.roster();
        in_order(&roster).into_iter().map(|worker| view(&admin, served, worker)).collect()
    };
    let workers: Vec<_> = serving.models.iter().flat_map(|served| of_model(served)).collect();
    json_reply(json!({ "workers": workers }))
}

/// One worker.
pub(super) fn view(admin: &Admin, served: &ServedModel, worker: &Worker) -> Value {
    let known = admin.fleet.known(served.name(), worker.id());
    let sources = known.into_iter().flat_map(|known| known.sources);
    let sources: Vec<_> = sources.map(|source| source.name()).collect();
    let load = worker.load(Instant::now());
    let since = worker.health.lifecycle.since();
    let parity = worker.kv.parity.parity();
    let mut view = json!({
        "model": served.name(),
        "id": worker.id(),
        "role": worker.config.role.name(),
        "transfer_group": worker.config.transfer_group,
        "location": worker.config.location,
        "url": worker.config.url,
        "sources": sources,
        "up": worker.is_up(),
        "state": worker.state().name(),
        "state_since_unix_ms": since.unix_ms,
        "state_why": since.why,
        "draining": worker.is_draining(),
        "quarantined": worker.is_quarantined(),
        "kv_events": worker.engine.facts.publisher(),
        "index_synced": worker.is_synced(),
        "events_origin": worker.event_origin().map(EventOrigin::name),
        "events_current": worker.events_are_current(),
        "events_cut_off": worker.tells_blocks() && !worker.events_are_current(),
        "index_truncated": worker.index_is_truncated(),
        "breakers_open": attention::open_breakers(worker),
        "shim": worker.config.shim,
        "capabilities": worker.shim_report.capabilities().map(|known| known.to_json()),
        "supports_cache_hit_threshold": worker.supports_cache_hit_threshold(),
        "context_tokens": worker.engine.facts.context_tokens(),
        "index_blocks": by_tier(&served.pool.block_counts(worker)),
        "ranks": ranks(served, worker),
        "takes_rank_header": worker.ranks.takes_rank_header(),
        "speculative_index_blocks": served.pool.speculative_index.blocks(worker),
        "requests": worker.load.booked.requests(),
        "prefill_tokens": worker.load.booked.prefill_tokens(),
        "active_tokens": worker.load.booked.active_tokens(),
        "parity": parity.name(),
        "parity_cause": parity.cause_name(),
        "parity_advice": parity.advice(),
        "kv_routing": worker.tells_blocks() && worker.overlap_is_believed(None) && worker.state().takes_work(),
        "overlap_discount": worker.kv.drift.discount(),
        "drift": worker.kv.drift.view(),
        "audit": worker.kv.usage_stats.view(),
        "engine_running": load.as_ref().and_then(|load| load.running),
        "engine_waiting": load.as_ref().and_then(|load| load.waiting),
        "engine_kv_used_ratio": load.as_ref().and_then(|load| load.kv_used_ratio),
    });
    for part in [performance(worker), trust(worker), movement(served, worker)] {
        if let (Some(members), Value::Object(part)) = (view.as_object_mut(), part) {
            members.extend(part);
        }
    }
    view
}

/// How well a worker does its work.
fn performance(worker: &Worker) -> Value {
    json!({
        "last_failure": worker.health.last_failure(),
        "full": worker.health.rest.is_full(),
        "costs": worker.load.costs.view(Instant::now()),
        "slowdown": worker.load.costs.slowdown(),
        "hits": worker.kv.usage_stats.hit_totals(),
        "legs": legs(worker),
        "needs_attention": attention::find_of_worker(worker),
    })
}

/// The legs of a worker whose time is known, and their time in total.
fn legs(worker: &Worker) -> Value {
    let served = [Leg::Prefill, Leg::Decode].into_iter().filter(|leg| worker.serves(*leg));
    let view = |leg: Leg| {
        let (count, seconds) = worker.counts.series.legs_taken(leg.name());
        (leg.name().to_owned(), json!({ "count": count, "seconds": seconds }))
    };
    Value::Object(served.map(view).collect())
}

/// What the index of a worker does not say.
fn trust(worker: &Worker) -> Value {
    json!({
        "load_failure": worker.load_failure().map(|cause| cause.to_string()),
        "index_rebuilt_often": worker.kv.event_stats.often_rebuilt(Instant::now()),
        "cache_groups": worker.kv.event_stats.followed_groups().names().collect::<Vec<_>>(),
        "unfollowed_cache_groups":
            worker.kv.event_stats.unfollowed_groups().names().collect::<Vec<_>>(),
        "drops_last_block": worker.kv.last_block.is_dropped(),
    })
}

/// What is known of the KV that a worker hands over, keeps and takes.
fn movement(served: &ServedModel, worker: &Worker) -> Value {
    let names = worker.engine.facts.kv_names();
    json!({
        "kv_dtype": names.dtype,
        "kv_layout": names.layout,
        "kv_block_size": worker.engine.facts.block_size(),
        "adapters": served.config.adapters.iter()
            .filter(|name| worker.has_adapter(name) == Some(true)).collect::<Vec<_>>(),
        "no_hand_off": worker.transfer.missing_hand_offs.missing(),
        "push_engine": worker.transfer.push.view(),
        "stranded_legs": worker.transfer.push.stranded(),
        "keeps_for_read_back": worker.transfer.read_back.keeps_for_read_back(),
        "prewarm": worker.transfer.prewarm.view(),
        "read_back_pinned_blocks": served.pool.read_back.pinned_blocks(worker.index),
    })
}

/// The data-parallel ranks. If requests cannot be pinned, bookings exist only for the worker as a
/// whole.
fn ranks(served: &ServedModel, worker: &Worker) -> Vec<Value> {
    let ranks = worker.ranks.all();
    let index = served.pool.index();
    let blocks = |rank| index.block_counts(rank_key(worker.index, rank)).iter().sum::<usize>();
    let view = |(number, rank): (u16, &Arc<Rank>)| {
        let booked = if ranks.len() == 1 { &worker.load.booked } else { &rank.booked };
        json!({
            "rank": number,
            "events_current": worker.ranks.is_current(number),
            "index_blocks": blocks(number),
            "requests": booked.requests(),
            "prefill_tokens": booked.prefill_tokens(),
            "active_tokens": booked.active_tokens(),
        })
    };
    (0..).zip(&ranks).map(view).collect()
}
