//! A model in a snapshot.

use std::collections::BTreeMap;

use serde::Serialize;

use super::decisions::Flow;
use super::readings::LegTokens;
use super::spans::{Span, Spans};
use super::worker::WorkerView;
use crate::core::Core;
use splitrail_config::model::RequestFlow;
use splitrail_fleet::ServedModel;
use splitrail_policy::loss::Loss;
use splitrail_telemetry::buckets::Percentiles;
use splitrail_telemetry::figure::{ratio, rounded};

/// A model in a snapshot. Members without a value are left out.
#[derive(Debug, Serialize)]
pub(super) struct ModelView {
    pub(super) name: String,
    flow: &'static str,
    policy: &'static str,
    requests_in_flight: i64,
    /// Requests that wait in the router's queue, if the model has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_requests: Option<usize>,
    #[serde(flatten)]
    rates: Option<Rates>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inter_token_ms: Option<Percentiles>,
    /// Milliseconds of each part of a mean prompt up to its first token.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    stages_ms: BTreeMap<&'static str, f64>,
    /// Mean time from the end of a prefill leg to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    hand_off_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_loss: Option<LossView>,
    flows: Vec<Flow>,
    workers: Vec<WorkerView>,
}

/// The counts of the last seconds, per second.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Rates {
    /// Requests that ended.
    pub(super) requests_per_s: Option<f64>,
    /// Requests that did not end with `ok`, by outcome, without outcomes that did not occur.
    failures_per_s: BTreeMap<String, f64>,
    /// Requests that ended, by the kind of their outcome, as in `splitrail_request_results_total`,
    /// without kinds that did not occur.
    results_per_s: BTreeMap<String, f64>,
    /// Where prompt tokens came from.
    pub(super) prompt_tokens_per_s: PromptRates,
    /// Generated tokens.
    pub(super) generation_tokens_per_s: Option<f64>,
}

/// Where prompt tokens of each kind of leg came from. In P/D the same prompt is in both.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PromptRates {
    /// Legs that compute a prompt for another worker.
    pub(super) prefill: LegRates,
    /// Legs that generate.
    pub(super) decode: LegRates,
}

/// Prompt tokens per second by source.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct LegRates {
    pub(super) cached: Option<f64>,
    pub(super) transferred: Option<f64>,
    pub(super) computed: Option<f64>,
}

/// Where cache hits were lost, in blocks.
#[derive(Debug, Serialize)]
struct LossView {
    window_ms: u64,
    #[serde(flatten)]
    sum: Loss,
}

impl ModelView {
    /// The view of a model, with its counts of the last seconds.
    pub(super) fn new(
        core: &Core,
        served: &ServedModel,
        spans: Option<Spans<'_>>,
        flows: Vec<Flow>,
        workers: Vec<WorkerView>,
    ) -> Self {
        let config = &served.config;
        let minute = spans.map(|spans| spans.minute);
        Self {
            name: served.name().to_owned(),
            flow: RequestFlow::from(config.flow).name(),
            policy: config.policy.name(),
            requests_in_flight: core.metrics.requests_in_flight(served.name()),
            queue_requests: config.queue.as_ref().map(|_| served.pool.waiting.len()),
            rates: spans.map(|spans| Rates::of(spans.seconds)),
            ttft_ms: minute.and_then(|span| span.to.ttft.since(&span.from.ttft).percentiles()),
            inter_token_ms: minute
                .and_then(|span| span.to.inter_token.since(&span.from.inter_token).percentiles()),
            stages_ms: minute
                .map(|span| span.to.stages.means_ms(&span.from.stages))
                .unwrap_or_default(),
            hand_off_ms: minute.and_then(|span| span.hand_off_ms()),
            hit_ratio: minute.and_then(|span| span.hit_ratio()),
            cache_loss: loss(served),
            flows,
            workers,
        }
    }
}

impl Span<'_> {
    /// The share of prompt tokens that were cached.
    pub(super) fn hit_ratio(&self) -> Option<f64> {
        let cached = self.to.cached_tokens.saturating_sub(self.from.cached_tokens);
        ratio(cached, self.to.prompt_tokens.saturating_sub(self.from.prompt_tokens))
    }

    /// The mean time of a hand-off; `None` if there was none.
    fn hand_off_ms(&self) -> Option<f64> {
        let ((count, sum_s), (count_before, sum_before_s)) =
            (self.to.hand_offs, self.from.hand_offs);
        let count = count.saturating_sub(count_before);
        rounded((sum_s - sum_before_s).max(0.0) * 1e3 / count as f64)
    }

    /// How many events per second there were, from two values of a counter.
    pub(super) fn per_s(&self, to: u64, from: u64) -> Option<f64> {
        rounded(to.saturating_sub(from) as f64 / self.seconds)
    }

    /// The rates of several counters by name, without zeros.
    fn rates(
        &self,
        to: &BTreeMap<String, u64>,
        from: &BTreeMap<String, u64>,
    ) -> BTreeMap<String, f64> {
        let rate = |(name, count): (&String, &u64)| {
            let before = from.get(name).copied().unwrap_or(0);
            let rate = self.per_s(*count, before).filter(|rate| *rate > 0.0)?;
            Some((name.clone(), rate))
        };
        to.iter().filter_map(rate).collect()
    }
}

impl Rates {
    /// The rates over a span.
    pub(super) fn of(span: Span<'_>) -> Self {
        let Span { from, to, .. } = span;
        let sum = |counts: &BTreeMap<String, u64>| counts.values().sum();
        let mut failures_per_s = span.rates(&to.requests, &from.requests);
        failures_per_s.remove("ok");
        let leg = |to: LegTokens, from: LegTokens| LegRates {
            cached: span.per_s(to.cached, from.cached),
            transferred: span.per_s(to.transferred, from.transferred),
            computed: span.per_s(to.computed, from.computed),
        };
        Self {
            requests_per_s: span.per_s(sum(&to.requests), sum(&from.requests)),
            failures_per_s,
            results_per_s: span.rates(&to.results, &from.results),
            prompt_tokens_per_s: PromptRates {
                prefill: leg(to.prefill, from.prefill),
                decode: leg(to.decode, from.decode),
            },
            generation_tokens_per_s: span.per_s(to.generation_tokens, from.generation_tokens),
        }
    }
}

fn loss(served: &ServedModel) -> Option<LossView> {
    let window = served.config.cache_loss_tracking.as_ref()?.window;
    let window_ms = u64::try_from(window.as_millis()).unwrap_or(u64::MAX);
    Some(LossView { window_ms, sum: served.pool.losses.sum()? })
}
