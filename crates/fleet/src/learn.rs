//! Asks an engine what its configuration leaves out: when the router reaches it first, and again
//! whenever its process may be another one.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use splitrail_engine::identity::{EngineModel, EventSource};
use splitrail_engine_client::networks::literal;
use splitrail_engine_client::{Question, WholeReply, random_request_id};
use tokio::time::Instant;

use super::engine_facts::Publication;
use super::trial;
use super::worker::{UnreadyCause, Worker};
use crate::ServedModel;

/// Maximum size of a reply in bytes. A list of models with thousands of adapters has about 2 MB.
const REPLY_MAX_BYTES: usize = 4 << 20;
/// Maximum number of characters of a model name reported by an engine in a log line.
const NAME_MAX_CHARS: usize = 128;

/// Asks one engine. Returns whether everything is known now; otherwise it is asked again. Each question
/// may take `patience`.
pub(super) async fn learn(served: &ServedModel, worker: &Arc<Worker>, patience: Duration) -> bool {
    let models = ask(served, worker, worker.engine.kind.paths().models, patience).await;
    let events = learn_events(served, worker, patience).await;
    let (Some(models), Some(events)) = (models, events) else {
        // An engine that does not say where it publishes is not waited for.
        if worker.engine.facts.publishes().is_none() {
            worker.set_synced();
        }
        return false;
    };
    learn_models(served, worker, &models, patience).await;
    if worker.engine.facts.set_publication(events) {
        // What agreed with the router may have been another process.
        worker.kv.parity.forget();
        tell_events(worker);
    }
    let expects_nixl = served.config.connector.is_pulled();
    let load = worker.load(std::time::Instant::now());
    // Other engines than vLLM have other metrics.
    let lacks_nixl = load.is_some_and(|load| load.block_size.is_some() && !load.has_nixl);
    if expects_nixl && lacks_nixl {
        tracing::warn!(
            model = served.name(),
            worker = worker.id(),
            "connector is nixl, but the engine shows no metrics of NIXL: start it with \
             --kv-transfer-config, or set connector to the engine's"
        );
    }
    true
}

/// Asks one engine again which models it serves: it may have loaded one without a restart.
pub(super) async fn learn_models_again(
    served: &ServedModel,
    worker: &Arc<Worker>,
    patience: Duration,
) {
    if let Some(models) = ask(served, worker, worker.engine.kind.paths().models, patience).await {
        learn_models(served, worker, &models, patience).await;
    }
}

/// Asks one engine which adapters it has loaded now, if the configuration names some.
pub(super) async fn learn_adapters(served: &ServedModel, worker: &Arc<Worker>, patience: Duration) {
    let names = &served.config.adapters;
    if names.is_empty() {
        return;
    }
    let loads = served.pool.adapter_loads(worker, names);
    let reply = ask(served, worker, worker.engine.kind.paths().models, patience).await;
    if let Some(models) = reply.and_then(|reply| listed_models(worker, &reply)) {
        served.pool.learn_adapters(worker, names, &loads, &models);
    }
}

/// The models and adapters in a reply; `None` if it is no such list.
fn listed_models(worker: &Worker, reply: &WholeReply) -> Option<Vec<EngineModel>> {
    let text = std::str::from_utf8(&reply.body).unwrap_or_default();
    worker.engine.kind.served_models(text).filter(|_| reply.status == 200)
}

/// The reply to a `GET`, of any status.
async fn ask(
    served: &ServedModel,
    worker: &Worker,
    path: &str,
    patience: Duration,
) -> Option<WholeReply> {
    let question = Question {
        path,
        body: None,
        rank: None,
        request_id: &random_request_id(),
        max_bytes: REPLY_MAX_BYTES,
        deadline: Instant::now() + patience,
    };
    let reply = served.client.question(worker, question).await;
    reply
        .inspect_err(|why| tracing::debug!(worker = worker.id(), path, ?why, "no reply"))
        .ok()
        // A server that is starting, or a proxy without an engine behind it.
        .filter(|reply| reply.status < 500)
}

/// Learns the longest sequence, which engines report as `max_model_len` of each model that it serves,
/// and whether the engine serves the model. An engine that does not list it is tried: SGLang serves a
/// model under any name, and proxies list what they like.
async fn learn_models(
    served: &ServedModel,
    worker: &Arc<Worker>,
    reply: &WholeReply,
    patience: Duration,
) {
    let Some(models) = listed_models(worker, reply) else { return };
    // An engine that does not report a limit is not asked again.
    let said = models.iter().filter_map(|model| model.context_tokens).min();
    worker.engine.facts.set_context_tokens(said.unwrap_or(u32::MAX));
    let is_known = worker.is_unready_for(UnreadyCause::LacksModel);
    if !is_known {
        warn_of_another_engine(worker, &models);
    }
    let is_listed = models.iter().any(|model| model.name == served.name());
    let lacks_model =
        !is_listed && trial::refuses_model(served, worker, patience).await.unwrap_or(is_known);
    worker.set_unready(UnreadyCause::LacksModel, lacks_model);
    if lacks_model && !is_known {
        let shown = |name: &str| name.chars().take(NAME_MAX_CHARS).collect::<String>();
        let serves: Vec<_> = models.iter().map(|model| shown(&model.name)).take(8).collect();
        tracing::error!(
            worker = worker.id(),
            model = served.name(),
            ?serves,
            "the engine does not serve this model: requests to it will be refused"
        );
    }
}

/// Warns of an engine that is another one than the model's workers are to run: it is asked in ways
/// that it does not have.
fn warn_of_another_engine(worker: &Worker, models: &[EngineModel]) {
    let asked = worker.engine.kind;
    let owner = models.iter().find_map(|model| model.owner);
    if let Some(other) = owner.filter(|owner| *owner != asked) {
        tracing::warn!(
            model = worker.model(),
            worker = worker.id(),
            asked_as = asked.name(),
            lists_models_as = other.name(),
            "the engine is another one: set the model's engine (and connector) to what its workers run"
        );
    }
}

/// Where the engine publishes its KV events; `None` if it does not reply.
async fn learn_events(
    served: &ServedModel,
    worker: &Worker,
    patience: Duration,
) -> Option<Publication> {
    if !worker.engine.facts.asks_for_events() {
        return Some(Publication::Nowhere);
    }
    let reply = ask(served, worker, worker.engine.kind.paths().event_sources, patience).await?;
    let text = std::str::from_utf8(&reply.body).unwrap_or_default();
    let host = worker.address.authority.host();
    let sources = match reply.status {
        200 => worker.engine.kind.event_sources(text, host),
        // Older versions do not have the path.
        _ => Ok(Vec::new()),
    };
    let sources = sources.unwrap_or_else(|error| {
        let (model, worker) = (served.name(), worker.id());
        tracing::error!(model, worker, %error, "write its kv_events and kv_replay down");
        Vec::new()
    });
    if let Some(source) = sources.iter().find(|source| is_beyond_reach(source, host)) {
        tracing::error!(
            model = served.name(),
            worker = worker.id(),
            endpoint = %source.events,
            "the engine publishes its KV events on its own host alone: start it with an endpoint \
             such as tcp://*:5557"
        );
        return Some(Publication::Nowhere);
    }
    Some(if sources.is_empty() { Publication::Nowhere } else { Publication::At(sources) })
}

fn tell_events(worker: &Worker) {
    match worker.engine.facts.publisher() {
        Some(kv_events) => {
            let (model, worker) = (worker.model(), worker.id());
            tracing::info!(model, worker, kv_events, "the engine says where it publishes");
        }
        None => {
            // Nothing will be synchronised.
            worker.set_synced();
            tracing::warn!(
                model = worker.model(),
                worker = worker.id(),
                "KV-aware routing is off for this worker: its engine tells of no KV events; start \
                 it with --kv-events-config (a decode engine of SGLang also with \
                 --disaggregation-decode-enable-radix-cache), or write its kv_events down"
            );
        }
    }
}

/// Whether a publisher can be reached from the engine's host only, and the router is on another
/// one.
fn is_beyond_reach(source: &EventSource, host: &str) -> bool {
    is_loopback(source.events.host()) && !is_loopback(host)
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || literal(host).is_some_and(|ip: IpAddr| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_publisher_on_loopback_is_of_use_on_the_same_host_only() {
        for (publisher, host, beyond) in [
            ("tcp://127.0.0.1:5557", "10.0.0.1", true),
            ("tcp://localhost:5557", "engine-0", true),
            ("tcp://[::1]:5557", "10.0.0.1", true),
            ("tcp://127.0.0.1:5557", "127.0.0.2", false),
            ("tcp://127.0.0.1:5557", "localhost", false),
            ("tcp://10.0.0.1:5557", "10.0.0.1", false),
        ] {
            let events = publisher.parse().expect("an endpoint");
            let source = EventSource { rank: 0, events, replay: None };
            assert_eq!(is_beyond_reach(&source, host), beyond, "{publisher} {host}");
        }
    }
}
