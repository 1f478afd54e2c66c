//! The metric series of one model that every request updates, looked up only once: looking up a
//! series by its labels takes a lock that all requests share.

use prometheus::{Histogram, IntCounter, IntGauge};

use crate::metrics::Metrics;
use crate::series::Series;

/// Series of one model, by the labels that differ.
#[derive(Debug, Default)]
pub struct ModelSeries {
    /// `stage_seconds` by stage.
    pub stage_seconds: Series<Histogram, 1>,
    /// `prompt_tokens_total` by leg, source and tier.
    pub prompt_tokens: Series<IntCounter, 3>,
    in_flight: Series<IntGauge, 0>,
    requests: Series<IntCounter, 3>,
    ttft: Series<Histogram, 1>,
    request: Series<Histogram, 1>,
    generation_tokens: Series<IntCounter, 0>,
    usage_prompt_tokens: Series<IntCounter, 0>,
    cached_tokens: Series<IntCounter, 1>,
    prefix_cache_requests: Series<IntCounter, 1>,
    untokenized_prompts: Series<IntCounter, 1>,
}

/// The series of a model with the model's name, which is their label `model`.
#[derive(Clone, Copy, Debug)]
pub struct LabelledSeries<'a> {
    /// The model's name.
    pub model: &'a str,
    /// The model's series.
    pub series: &'a ModelSeries,
}

impl ModelSeries {
    /// Adds `more` to the requests in flight; negative when a request ends.
    pub fn in_flight(&self, all: &Metrics, model: &str, more: i64) {
        let find = || all.requests_in_flight.with_label_values(&[model]);
        self.in_flight.with([], find, |series| series.add(more));
    }

    /// Records the time to first token of a request, in seconds.
    pub fn begun(&self, all: &Metrics, model: &str, flow: &'static str, seconds: f64) {
        let find = || all.ttft.with_label_values(&[model, flow]);
        self.ttft.with([flow], find, |series| series.observe(seconds));
    }

    /// Counts a request with its endpoint, flow and outcome, and records its duration in seconds.
    pub fn ended(&self, all: &Metrics, model: &str, labels: [&'static str; 3], seconds: f64) {
        let [endpoint, flow, outcome] = labels;
        let find = || all.requests.with_label_values(&[model, endpoint, flow, outcome]);
        self.requests.with(labels, find, IntCounter::inc);
        let find = || all.request.with_label_values(&[model, flow]);
        self.request.with([flow], find, |series| series.observe(seconds));
    }

    /// Counts generated tokens.
    pub fn generated(&self, all: &Metrics, model: &str, tokens: u64) {
        let find = || all.generation_tokens.with_label_values(&[model]);
        self.generation_tokens.with([], find, |series| series.inc_by(tokens));
    }

    /// Counts the tokens of a served prompt.
    pub fn prompted(&self, all: &Metrics, model: &str, tokens: u64) {
        let find = || all.usage_prompt_tokens.with_label_values(&[model]);
        self.usage_prompt_tokens.with([], find, |series| series.inc_by(tokens));
    }

    /// Counts cached tokens of a prompt by the source of the figure.
    pub fn cached(&self, all: &Metrics, model: &str, source: &'static str, tokens: u64) {
        let find = || all.cached_tokens.with_label_values(&[model, source]);
        self.cached_tokens.with([source], find, |series| series.inc_by(tokens));
    }

    /// Counts a request as hit or miss.
    pub fn hit_or_miss(&self, all: &Metrics, model: &str, result: &'static str) {
        let find = || all.prefix_cache_requests.with_label_values(&[model, result]);
        self.prefix_cache_requests.with([result], find, IntCounter::inc);
    }

    /// Counts a prompt whose tokens are not known; the reason becomes `label`.
    pub fn unknown(
        &self,
        all: &Metrics,
        model: &str,
        reason: &'static str,
        label: impl Fn() -> String,
    ) {
        let find = || all.untokenized_prompts.with_label_values(&[model, &label()]);
        self.untokenized_prompts.with([reason], find, IntCounter::inc);
    }
}
