//! Releases pins that will not be read.
//!
//! A request whose prompt is the first token alone carries the parameters of the pin: its engine reads
//! nothing, and tells the engine that keeps the blocks that they are no longer needed.

use std::sync::Arc;
use std::time::Duration;

use splitrail_engine_client::{LegHeaders, RevocableBody, Shape};
use splitrail_policy::Leg;
use splitrail_telemetry::Metrics;
use splitrail_workload::pins::{Pin, PinEnd};

use super::PinPayload;
use crate::{LegRequest, ServedModel, ServedModels, Worker};
use splitrail_api::Endpoint;
use splitrail_config::model::{Model, PeerFetch};
use tokio::task::JoinSet;

/// Maximum time for one release. Afterwards the blocks are freed at the end of their pin.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for the releases of a router that stops. Engines that have not exchanged KV yet take
/// some seconds to find each other.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent releases of a router that stops.
const AT_ONCE: usize = 32;

/// Releases pins in the background, within the bound on such tasks.
pub(super) fn release_in_background(
    served: &Arc<ServedModel>,
    metrics: &Arc<Metrics>,
    pins: Vec<(Pin<PinPayload>, PinEnd)>,
) {
    for (pin, why) in pins {
        count_end(served, metrics, why);
        if pin.payload.is_there() {
            let release = Release::new(served, metrics, pin);
            // Without room for it, it is dropped and counts as left.
            let _runs = served.releases.run(release.run());
        }
    }
}

/// Takes all pins of a model that must be released, because the router stops or the pool is replaced.
/// No pin is added any more.
pub(super) fn close(served: &Arc<ServedModel>, metrics: &Arc<Metrics>) -> Vec<Release> {
    let pins = served.pool.read_back.store().close();
    let kept = pins.into_iter().filter_map(|(pin, why)| {
        count_end(served, metrics, why);
        pin.payload.is_there().then(|| Release::new(served, metrics, pin))
    });
    kept.collect()
}

/// Releases pins of a model. Ends when all are released, and after some seconds in any case.
pub(super) async fn release_all(releases: Vec<Release>) {
    let mut tasks = JoinSet::new();
    let all = async {
        for release in releases {
            if tasks.len() >= AT_ONCE {
                let _ended = tasks.join_next().await;
            }
            tasks.spawn(release.run());
        }
        while tasks.join_next().await.is_some() {}
    };
    let _in_time = tokio::time::timeout(STOP_TIMEOUT, all).await;
}

/// Releases the pins of all models, for a router that stops: side by side, since a prefill worker of
/// one model that does not answer must not delay the others.
pub async fn release_of(serving: &ServedModels, metrics: &Arc<Metrics>) {
    let all = serving.models.iter().map(|served| release_all(close(served, metrics)));
    all.collect::<JoinSet<()>>().join_all().await;
}

/// The release of one pin. If it is dropped before it has ended, its blocks are left to the engine.
pub(super) struct Release {
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    pin: Pin<PinPayload>,
    outcome: &'static str,
}

impl Release {
    fn new(served: &Arc<ServedModel>, metrics: &Arc<Metrics>, pin: Pin<PinPayload>) -> Self {
        let (served, metrics) = (Arc::clone(served), Arc::clone(metrics));
        Self { served, metrics, pin, outcome: "left" }
    }

    async fn run(mut self) {
        self.outcome = match ask(&self.served, &self.pin.payload).await {
            Some(true) => "released",
            Some(false) => "failed",
            None => "left",
        };
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        let labels = [self.served.name(), self.outcome];
        self.metrics.read_back_releases.with_label_values(&labels).inc();
        if self.outcome != "released" {
            // The engine frees the blocks at the end of the pin.
            self.served.pool.read_back.store().leave(&self.pin);
        }
    }
}

/// Whether another engine was made to release the pin; `None` if there is none to ask.
async fn ask(served: &Arc<ServedModel>, kept: &PinPayload) -> Option<bool> {
    let worker = asked(served, &kept.holder)?;
    let params = kept.kv.release_json()?;
    let model = serde_json::to_string(served.name()).ok()?;
    let threshold = match worker.supports_cache_hit_threshold() {
        Some(true) => r#""cache_hit_threshold":0.0,"#,
        _ => "",
    };
    let body = format!(
        r#"{{"model":{model},"prompt":[{}],"max_tokens":1,"temperature":0,"stream":false,{threshold}"kv_transfer_params":{params}}}"#,
        kept.first_token
    );
    let leg_headers = LegHeaders { prefill_tokens: Some(1), ..LegHeaders::with_random_id() };
    let _booking = worker.book(None, 1, 1);
    let body = RevocableBody::new(bytes::Bytes::from(body)).0.once();
    let shape = Shape::whole(Endpoint::Completions);
    let leg = LegRequest { client: &served.client, worker: &worker, shape, headers: &leg_headers };
    let replied = tokio::time::timeout(TIMEOUT, leg.whole(body)).await;
    Some(matches!(replied, Ok(Ok(_))))
}

/// The worker that is up and has the fewest tokens to compute: a prefill worker, unless the only one
/// keeps the blocks itself, as after a peer fetch. Its engine needs the same flag, which all have if
/// the model reads back, or did so until now; otherwise it must have shown it. Of the decode workers,
/// those are asked first that have.
fn asked(served: &ServedModel, holder: &Worker) -> Option<Arc<Worker>> {
    let roster = served.pool.roster();
    let Model { read_back, peer_fetch, .. } = served.config;
    let all_can = read_back || peer_fetch != PeerFetch::OneShot;
    let able = roster.iter().filter(|worker| {
        let can = worker.transfer.read_back.keeps_for_read_back().unwrap_or(all_can);
        can && worker.is_up() && worker.index != holder.index && worker.stores_kv_as(holder)
    });
    let order = |worker: &&Arc<Worker>| {
        let has_shown = worker.transfer.read_back.keeps_for_read_back() == Some(true);
        (!worker.serves(Leg::Prefill), !has_shown, worker.load.booked.prefill_tokens())
    };
    able.min_by_key(order).cloned()
}

fn count_end(served: &ServedModel, metrics: &Metrics, why: PinEnd) {
    metrics.read_back_pins.with_label_values(&[served.name(), why.name()]).inc();
}
