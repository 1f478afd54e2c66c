//! The metrics in Prometheus's text format.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderMap;
use http::header::{ACCEPT, CONTENT_TYPE};
use prometheus::core::{Atomic, GenericGaugeVec};
use splitrail_kv::Tier;
use tokio::sync::Mutex;

use super::context::Admin;
use crate::core::Core;
use splitrail_config::model::{HitThreshold, RequestFlow};
use splitrail_fleet::ServedModel;
use splitrail_fleet::Worker;
use splitrail_fleet::exclusion::{excluded, without_taker};
use splitrail_fleet::load_report::LOAD_STALE;
use splitrail_fleet::parity::Parity;
use splitrail_fleet::shim_report::EventOrigin;
use splitrail_fleet::state::WorkerState;
use splitrail_policy::Leg;
use splitrail_policy::loss::Loss;
use splitrail_policy::threshold::DEFAULT_THRESHOLD_RATIO;
use splitrail_telemetry::metrics::{AvailableWorkers, TextFormat};
use splitrail_workload::endpoint_support::TOKENIZER;

pub(super) async fn metrics(
    extract::State(admin): extract::State<Admin>,
    headers: HeaderMap,
) -> Response {
    let format = wanted_format(&headers);
    ([(CONTENT_TYPE, format.content_type())], scrape(&admin.core, format)).into_response()
}

/// Number of load reports that may be missing before a worker's KV blocks are not shown any more.
const REPORTS_MISSED_MAX: u32 = 3;

/// A text that was made, and when.
type CachedText = Option<(Instant, Bytes)>;

/// The metrics for everyone who asks. They are collected once a second at most, so that many or fast
/// scrapers cost no more than one.
#[derive(Clone)]
pub(super) struct PublicMetrics {
    core: Arc<Core>,
    /// The last text of each format.
    recent: Arc<Mutex<[CachedText; 2]>>,
}

impl PublicMetrics {
    /// The metrics of a router.
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core, recent: Arc::default() }
    }

    async fn text(&self, format: TextFormat) -> Bytes {
        const FRESH: Duration = Duration::from_secs(1);
        let mut recent = self.recent.lock().await;
        let kept = &mut recent[format as usize];
        match kept {
            Some((made, text)) if made.elapsed() < FRESH => text.clone(),
            _ => {
                let text = Bytes::from(scrape(&self.core, format));
                *kept = Some((Instant::now(), text.clone()));
                text
            }
        }
    }
}

/// The reply of the listener for metrics.
pub(super) async fn public(
    extract::State(metrics): extract::State<PublicMetrics>,
    headers: HeaderMap,
) -> Response {
    let format = wanted_format(&headers);
    ([(CONTENT_TYPE, format.content_type())], metrics.text(format).await).into_response()
}

/// The format that the scraper prefers; Prometheus' own if the header `accept` names neither.
fn wanted_format(headers: &HeaderMap) -> TextFormat {
    let (mut open_metrics, mut text) = (0.0_f64, 0.0_f64);
    let sent = headers.get_all(ACCEPT).iter().filter_map(|sent| sent.to_str().ok());
    for range in sent.flat_map(|sent| sent.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let (media, mut weight) = (parts.next().unwrap_or_default(), 1.0);
        let mut is_known = true;
        for parameter in parts {
            match parameter.split_once('=') {
                Some(("q", value)) => weight = value.parse().unwrap_or(0.0),
                Some(("version", version)) => is_known = matches!(version, "1.0.0" | "0.0.4"),
                _ => {}
            }
        }
        match media {
            "application/openmetrics-text" if is_known => open_metrics = open_metrics.max(weight),
            "text/plain" => text = text.max(weight),
            _ => {}
        }
    }
    if open_metrics > text { TextFormat::OpenMetrics } else { TextFormat::Prometheus }
}

/// Sets the gauges of the fleet, which are computed at each scrape, and encodes all metrics.
///
/// Workers may leave meanwhile, and requests may end after their workers or models have left: only
/// series of the served models, and of the workers that existed when the gauges were set, are shown.
/// Those of other workers are removed.
fn scrape(core: &Core, format: TextFormat) -> String {
    let present = observe_fleet(core);
    observe_router(core);
    let here = |model: &str, worker: &str, role: Option<&str>| {
        let is = present.get(&(model.to_owned(), worker.to_owned()));
        is.is_some_and(|is| role.is_none_or(|role| role == *is))
    };
    let serving = core.serving();
    let now = |model: &str, worker: &str| {
        serving.model(model).is_some_and(|served| served.pool.roster().named(worker).is_some())
    };
    let served = |model: &str| serving.model(model).is_some();
    core.metrics.scrape(format, served, here, now)
}

/// Sets the gauges of the router itself and of its tenants.
fn observe_router(core: &Core) {
    let (metrics, serving) = (&core.metrics, core.serving());
    let (held, held_max) = (core.memory.held_bytes(), serving.limits.request_memory_max_bytes);
    for (gauge, value) in [
        (&metrics.request_memory, held),
        (&metrics.request_memory_max, held_max),
        (&metrics.requests_in_flight_max, core.in_flight.places()),
        (&metrics.places_in_use, core.in_flight.in_use()),
        (&metrics.draining, core.is_draining().into()),
    ] {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        gauge.with_label_values::<&str>(&[]).set(value);
    }
    // A reload may have removed limits.
    metrics.tenant_limit.reset();
    metrics.tenant_limit_used.reset();
    let access = core.access.load();
    access.tenants().for_each(|tenant| tenant.observe_limits(metrics));
    access.observe_key_files(metrics);
    access.observe_broker(metrics);
}

/// The workers of each model, with the role that is a label of some of their series.
type WorkerRoles = HashMap<(String, String), &'static str>;

/// Sets the gauges of the fleet; returns the workers.
fn observe_fleet(core: &Core) -> WorkerRoles {
    let mut present = WorkerRoles::new();
    observe_available(core);
    // A worker may be of another group by now.
    core.metrics.worker_transfer_group.reset();
    for served in &core.serving().models {
        let model = served.name();
        let learned = served.pool.calibration.learned(Instant::now());
        let auto = RequestFlow::from(served.config.flow) == RequestFlow::Auto;
        let (ratio, confidence) = match served.config.cache_hit_threshold {
            Some(HitThreshold::Ratio(ratio)) => (ratio, 1.0),
            Some(HitThreshold::Auto) => (learned.threshold_ratio, learned.confidence),
            None if auto => (learned.threshold_ratio, learned.confidence),
            None => (DEFAULT_THRESHOLD_RATIO, 1.0),
        };
        core.metrics.cache_hit_threshold.with_label_values(&[model]).set(ratio);
        core.metrics.threshold_confidence.with_label_values(&[model]).set(confidence);
        observe_losses(core, served);
        let hot_bytes = i64::try_from(served.pool.hot.bytes()).unwrap_or(i64::MAX);
        core.metrics.hot_prefix_memory.with_label_values(&[model]).set(hot_bytes);
        let waiting = i64::try_from(served.pool.waiting.len()).unwrap_or(i64::MAX);
        core.metrics.queue_depth.with_label_values(&[model]).set(waiting);
        let most = served.config.queue.as_ref().map(|queue| queue.max_waiting);
        let most = most.map(|most| i64::try_from(most).unwrap_or(i64::MAX));
        show(&core.metrics.queue_max_waiting, &[model], most);
        for worker in served.pool.roster().iter() {
            observe_worker(core, served, worker);
            observe_index(core, served, worker);
            let name = (model.to_owned(), worker.id().to_owned());
            present.insert(name, worker.config.role.name());
        }
    }
    present
}

/// Counts the workers that can take each leg of each model. Unlike the series of a worker, the counts
/// are there when all workers have left, so that an alert can see it.
fn observe_available(core: &Core) {
    let (serving, now) = (core.serving(), Instant::now());
    let mut counts = Vec::new();
    for served in &serving.models {
        let hands_over = served.config.flows().any(RequestFlow::hands_over);
        let roster = served.pool.roster();
        let alone = without_taker(&roster, &[], served.config.connector, now);
        for leg in hands_over.then_some(Leg::Prefill).into_iter().chain([Leg::Decode]) {
            let workers = roster.iter().filter(|worker| {
                let has_taker = leg != Leg::Prefill || excluded(&alone, worker.index).is_none();
                worker.serves(leg) && worker.is_available(leg, now) && has_taker
            });
            let (model, leg, workers) = (served.name(), leg.name(), workers.count());
            counts.push(AvailableWorkers { model, leg, workers });
        }
    }
    core.metrics.set_available_workers(&counts);
}

/// Sets a gauge, or removes its series where its value is not known any more: the last value would
/// look like the present one.
fn show<P: Atomic>(gauge: &GenericGaugeVec<P>, labels: &[&str], value: Option<P::T>) {
    match value {
        Some(value) => gauge.with_label_values(labels).set(value),
        None => {
            // Most series of this kind have never existed.
            let _absent = gauge.remove_label_values(labels);
        }
    }
}

fn observe_losses(core: &Core, served: &ServedModel) {
    let (metrics, model, sum) = (&core.metrics, served.name(), served.pool.losses.sum());
    let blocks =
        |of: fn(&Loss) -> u64| sum.as_ref().map(|sum| i64::try_from(of(sum)).unwrap_or(i64::MAX));
    for (reason, lost) in [
        ("cold", blocks(|sum| sum.cold_blocks)),
        ("evicted", blocks(|sum| sum.evicted_blocks)),
        ("diverted", blocks(|sum| sum.diverted_blocks)),
        ("stale", blocks(|sum| sum.stale_blocks)),
        ("parity", blocks(|sum| sum.parity_blocks)),
    ] {
        show(&metrics.cache_loss_blocks, &[model, reason], lost);
    }
    for (of, hits) in [
        ("found", blocks(|sum| sum.hit_blocks)),
        ("fetched", blocks(|sum| sum.fetched_blocks)),
        ("best", blocks(|sum| sum.best_blocks)),
    ] {
        show(&metrics.cache_hit_blocks, &[model, of], hits);
    }
}

fn observe_worker(core: &Core, served: &ServedModel, worker: &Worker) {
    let metrics = &core.metrics;
    let (model, role) = (served.name(), worker.config.role.name());
    let labels = [model, worker.id(), role];
    metrics.worker_up.with_label_values(&labels).set(worker.is_up().into());
    for state in WorkerState::ALL {
        let labels = [labels[0], labels[1], state.name()];
        let is = worker.state() == state;
        metrics.worker_state.with_label_values(&labels).set(is.into());
    }
    for leg in [Leg::Prefill, Leg::Decode].into_iter().filter(|leg| worker.serves(*leg)) {
        let labels = [model, worker.id(), role, leg.name()];
        let open = worker.breaker(leg).is_open();
        metrics.worker_breaker_open.with_label_values(&labels).set(open.into());
    }
    let breaker = [model, worker.id(), role, TOKENIZER];
    let open = worker.engine.endpoint_support.breaker.is_open();
    metrics.worker_breaker_open.with_label_values(&breaker).set(open.into());
    let requests = i64::from(worker.load.booked.requests());
    metrics.worker_requests.with_label_values(&labels).set(requests);
    let tokens = worker.load.booked.prefill_tokens() as i64;
    metrics.worker_prefill_tokens.with_label_values(&labels).set(tokens);
    let slowdown = worker.load.costs.slowdown();
    for (leg, times) in [("prefill", slowdown.prefill), ("decode", slowdown.decode)] {
        show(&metrics.worker_slowdown_ratio, &[model, worker.id(), leg], times);
    }
    if let Some(group) = &worker.config.transfer_group {
        metrics.worker_transfer_group.with_label_values(&[model, worker.id(), group]).set(1);
    }
    // If so configured, reports come less often than decisions need them.
    let shims = core.serving().config.fleet.load_interval;
    let interval = served.config.health.probe_interval.max(shims);
    let load = worker
        .load_within(Instant::now(), LOAD_STALE.max(interval.saturating_mul(REPORTS_MISSED_MAX)));
    let blocks = load.and_then(|load| Some((f64::from(load.total_blocks?), load.kv_used_ratio?)));
    for (state, blocks) in [
        ("total", blocks.map(|(total, _)| total)),
        ("used", blocks.map(|(total, used_ratio)| total * used_ratio)),
    ] {
        show(&metrics.worker_kv_blocks, &[model, worker.id(), role, state], blocks);
    }
    let audit = worker.kv.usage_stats.view();
    for (direction, blocks) in
        [("over", audit.drift_over_blocks), ("under", audit.drift_under_blocks)]
    {
        metrics.worker_drift.with_label_values(&[model, worker.id(), direction]).set(blocks);
    }
}

fn observe_index(core: &Core, served: &ServedModel, worker: &Worker) {
    let metrics = &core.metrics;
    let labels = [served.name(), worker.id()];
    let discount = metrics.worker_overlap_discount_ratio.with_label_values(&labels[..2]);
    discount.set(worker.kv.drift.discount());
    let takes_part = metrics.worker_kv_routing_enabled.with_label_values(&labels[..2]);
    takes_part.set(worker.takes_part_in_kv_routing().into());
    let parity = worker.kv.parity.parity().name();
    for result in Parity::RESULTS {
        let labels = [labels[0], labels[1], result];
        metrics.worker_parity.with_label_values(&labels).set((result == parity).into());
    }
    let tells = worker.tells_blocks();
    let origin = worker.event_origin();
    for each in EventOrigin::ALL {
        let current = (origin == Some(each)).then(|| worker.events_are_current().into());
        show(&metrics.index_events_current, &[labels[0], labels[1], each.name()], current);
    }
    let truncated = tells.then(|| worker.index_is_truncated().into());
    show(&metrics.index_truncated, &labels, truncated);
    let [model, worker_id] = labels;
    let blocks = served.pool.speculative_index.blocks(worker);
    for (kind, blocks) in [("speculative", blocks.speculative), ("approximate", blocks.approximate)]
    {
        let labels = [model, worker_id, kind];
        metrics.speculative_index_blocks.with_label_values(&labels).set(blocks as i64);
    }
    let pins = served.config.read_back && worker.serves(Leg::Decode);
    let pinned = pins.then(|| served.pool.read_back.pinned_blocks(worker.index) as i64);
    show(&metrics.read_back_pinned_blocks, &labels, pinned);
    let held = served.pool.block_counts(worker);
    for tier in Tier::ALL {
        let labels = [model, worker_id, tier.name()];
        metrics.index_blocks.with_label_values(&labels).set(held[tier as usize] as i64);
    }
}
