//! Readings of the counters from which rates are computed.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use prometheus::core::Collector;
use prometheus::proto::{LabelPair, Metric};
use splitrail_config::model::Role;
use splitrail_policy::WorkerIndex;

use super::stages::StageReadings;
use crate::core::Core;
use splitrail_fleet::ServedModel;
use splitrail_fleet::usage_stats::HitTotals;
use splitrail_telemetry::buckets::Buckets;

/// All counters at one time.
#[derive(Debug)]
pub(super) struct CounterReading {
    /// When it was made.
    pub(super) at: Instant,
    /// The models by name.
    pub(super) models: HashMap<String, ModelReading>,
}

/// The counters of one model.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelReading {
    /// Ended requests by outcome.
    pub(super) requests: BTreeMap<String, u64>,
    /// Ended requests by the kind of their outcome.
    pub(super) results: BTreeMap<String, u64>,
    /// Requests that were refused because of load, by reason.
    pub(super) shed: BTreeMap<String, u64>,
    /// Time to first token.
    pub(super) ttft: Buckets,
    /// Time between two events of a stream.
    pub(super) inter_token: Buckets,
    /// The parts of requests up to the first token.
    pub(super) stages: StageReadings,
    /// Time from the end of a prefill leg to the first token: number and sum in seconds.
    pub(super) hand_offs: (u64, f64),
    /// Prompt tokens of prefill legs.
    pub(super) prefill: LegTokens,
    /// Prompt tokens of the legs that answer.
    pub(super) decode: LegTokens,
    /// Prompt tokens, each prompt once.
    pub(super) prompt_tokens: u64,
    /// The part of them that was cached.
    pub(super) cached_tokens: u64,
    /// Generated tokens.
    pub(super) generation_tokens: u64,
    /// The counters of each worker.
    pub(super) workers: HashMap<WorkerIndex, WorkerReading>,
}

/// Prompt tokens of the legs of one kind, by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LegTokens {
    /// Found in the worker's own cache.
    pub(super) cached: u64,
    /// Received by a hand-off, read back, or fetched from another worker.
    pub(super) transferred: u64,
    /// Computed.
    pub(super) computed: u64,
}

/// The counters of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WorkerReading {
    /// Prompt tokens, and what was cached of them.
    pub(super) hits: HitTotals,
    /// KV events whose lag was measured.
    pub(super) events: u64,
    /// The sum of their lags, in seconds.
    pub(super) lag_s: f64,
    /// The legs of its role whose time was measured.
    pub(super) legs: u64,
    /// The sum of their times, in seconds.
    pub(super) legs_s: f64,
}

/// The label of requests that ended before their model was known.
pub(super) const UNPLACED: &str = "none";

impl CounterReading {
    /// Reads the counters of the served models, and of requests without a model.
    pub(super) fn new(core: &Core, at: Instant) -> Self {
        let serving = core.serving();
        let names = serving.models.iter().map(|served| served.name()).chain([UNPLACED]);
        let names = names.map(str::to_owned);
        let mut models: HashMap<String, ModelReading> =
            names.map(|name| (name, ModelReading::default())).collect();
        read_requests(core, &mut models);
        read_stages(core, &mut models);
        read_tokens(core, &mut models);
        let event_lags = worker_times(&core.metrics.index_event_lag);
        let leg_times = worker_times(&core.metrics.worker_leg);
        for served in &serving.models {
            if let Some(model) = models.get_mut(served.name()) {
                model.workers = read_workers(served, &event_lags, &leg_times);
            }
        }
        Self { at, models }
    }

    /// A model's counters; `None` if the model was not served.
    pub(super) fn model(&self, name: &str) -> Option<&ModelReading> {
        self.models.get(name)
    }
}

type Models = HashMap<String, ModelReading>;

fn read_requests(core: &Core, models: &mut Models) {
    let metrics = &core.metrics;
    each(&metrics.requests, models, |model, labels, series| {
        let outcome = labels.get("outcome").to_owned();
        *model.requests.entry(outcome).or_default() += count(series);
    });
    each(&metrics.request_results, models, |model, labels, series| {
        model.results.insert(labels.get("result").to_owned(), count(series));
    });
    each(&metrics.shed, models, |model, labels, series| {
        model.shed.insert(labels.get("reason").to_owned(), count(series));
    });
    each(&metrics.ttft, models, |model, _, series| model.ttft.add(series.get_histogram()));
    each(&metrics.inter_token, models, |model, _, series| {
        model.inter_token.add(series.get_histogram());
    });
}

fn read_stages(core: &Core, models: &mut Models) {
    let metrics = &core.metrics;
    each(&metrics.queue_wait, models, |model, _, series| {
        model.stages.add("queue", series.get_histogram());
    });
    for metric in [&metrics.stage, &metrics.engine_stage] {
        each(metric, models, |model, labels, series| {
            // The first token of a whole reply comes with the last one.
            if labels.get("stream") != "false" {
                model.stages.add(labels.get("stage"), series.get_histogram());
            }
        });
    }
    each(&metrics.hand_off, models, |model, _, series| {
        let histogram = series.get_histogram();
        model.hand_offs = (histogram.get_sample_count(), histogram.get_sample_sum());
    });
}

fn read_tokens(core: &Core, models: &mut Models) {
    let metrics = &core.metrics;
    each(&metrics.prompt_tokens, models, |model, labels, series| {
        let leg = match labels.get("leg") {
            "prefill" => &mut model.prefill,
            _ => &mut model.decode,
        };
        let tokens = match labels.get("source") {
            "local_cache_hit" => &mut leg.cached,
            "external_kv_transfer" | "read_back" | "fetched" => &mut leg.transferred,
            _ => &mut leg.computed,
        };
        *tokens += count(series);
    });
    each(&metrics.usage_prompt_tokens, models, |model, _, series| {
        model.prompt_tokens += count(series);
    });
    each(&metrics.cached_tokens, models, |model, _, series| model.cached_tokens += count(series));
    each(&metrics.generation_tokens, models, |model, _, series| {
        model.generation_tokens += count(series);
    });
}

/// Numbers and sums of seconds, by model, worker and leg; without a leg where there is none.
type WorkerTimes = HashMap<[String; 3], (u64, f64)>;

fn worker_times(metric: &impl Collector) -> WorkerTimes {
    let families = metric.collect();
    let series = families.iter().flat_map(|family| family.get_metric());
    let times = |series: &Metric| {
        let (labels, times) = (Labels(series.get_label()), series.get_histogram());
        let name = ["model", "worker", "leg"].map(|label| labels.get(label).to_owned());
        (name, (times.get_sample_count(), times.get_sample_sum()))
    };
    series.map(times).collect()
}

fn read_workers(
    served: &ServedModel,
    event_lags: &WorkerTimes,
    leg_times: &WorkerTimes,
) -> HashMap<WorkerIndex, WorkerReading> {
    let read = |worker: &std::sync::Arc<splitrail_fleet::Worker>| {
        let of = |times: &WorkerTimes, leg: &str| {
            let name = [served.name(), worker.id(), leg].map(str::to_owned);
            times.get(&name).copied().unwrap_or_default()
        };
        let (events, lag_s) = of(event_lags, "");
        let leg = match worker.config.role {
            Role::Prefill => "prefill",
            Role::Decode | Role::Both => "decode",
        };
        let (legs, legs_s) = of(leg_times, leg);
        let hits = worker.kv.usage_stats.hit_totals();
        (worker.index, WorkerReading { hits, events, lag_s, legs, legs_s })
    };
    served.pool.roster().iter().map(read).collect()
}

/// Calls a function with each series that belongs to one of the models.
fn each(
    metric: &impl Collector,
    models: &mut Models,
    mut read: impl FnMut(&mut ModelReading, Labels<'_>, &Metric),
) {
    for family in metric.collect() {
        for series in family.get_metric() {
            let labels = Labels(series.get_label());
            if let Some(model) = models.get_mut(labels.get("model")) {
                read(model, labels, series);
            }
        }
    }
}

/// The labels of a series.
#[derive(Clone, Copy)]
struct Labels<'a>(&'a [LabelPair]);

impl<'a> Labels<'a> {
    fn get(self, name: &str) -> &'a str {
        self.0.iter().find(|pair| pair.name() == name).map_or("", LabelPair::value)
    }
}

fn count(series: &Metric) -> u64 {
    series.get_counter().get_value() as u64
}
