//! The metric series of one model that every request updates, looked up only once: looking up a
//! series by its labels takes a lock that all requests share.

use prometheus::{Histogram, IntCounter, IntGauge};

use crate::exemplars::{TraceId, TracedHistogram};
use crate::metrics::Metrics;
use crate::series::Series;

/// Series of one model, by the labels that differ.
#[derive(Debug, Default)]
pub struct ModelSeries {
    stage_seconds: Series<Histogram, 1>,
    engine_stage_seconds: Series<Histogram, 2>,
    queue_wait_seconds: Series<Histogram, 1>,
    hand_off_seconds: Series<Histogram, 0>,
    prediction_error: Series<Histogram, 1>,
    /// `prompt_tokens_total` by leg, source and tier.
    pub prompt_tokens: Series<IntCounter, 3>,
    in_flight: Series<IntGauge, 0>,
    requests: Series<IntCounter, 3>,
    results: Series<IntCounter, 1>,
    ttft: Series<TracedHistogram, 1>,
    request: Series<TracedHistogram, 2>,
    inter_token: Series<Histogram, 1>,
    time_per_output_token: Series<Histogram, 0>,
    request_tokens: Series<Histogram, 1>,
    generation_tokens: Series<IntCounter, 0>,
    usage_prompt_tokens: Series<IntCounter, 0>,
    cached_tokens: Series<IntCounter, 1>,
    prefix_cache_requests: Series<IntCounter, 1>,
    untokenized_prompts: Series<IntCounter, 1>,
    overlap_blocks: Series<Histogram, 1>,
    overlap_blocks_lost: Series<IntCounter, 0>,
    cached_tokens_error: Series<Histogram, 1>,
}

/// The series of a model with the model's name, which is their label `model`.
#[derive(Clone, Copy, Debug)]
pub struct LabelledSeries<'a> {
    /// The model's name.
    pub model: &'a str,
    /// The model's series.
    pub series: &'a ModelSeries,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedRequest {
    /// The endpoint.
    pub endpoint: &'static str,
    /// The flow that was executed.
    pub flow: &'static str,
    /// Whether the reply was a stream: `true` or `false`.
    pub stream: &'static str,
    /// The outcome: `ok`, `cancelled` or the code of the error.
    pub outcome: &'static str,
    /// The outcome's kind, for service level objectives.
    pub result: &'static str,
    /// The duration, in seconds.
    pub seconds: f64,
    /// The trace of the request, if its client sent one.
    pub trace: Option<TraceId>,
}

impl ModelSeries {
    /// Adds `more` to the requests in flight; negative when a request ends.
    pub fn in_flight(&self, all: &Metrics, model: &str, more: i64) {
        let find = || all.requests_in_flight.with_label_values(&[model]);
        self.in_flight.with([], find, |series| series.add(more));
    }

    /// Records the time to first token of a stream, in seconds.
    pub fn begun(
        &self,
        all: &Metrics,
        model: &str,
        flow: &'static str,
        seconds: f64,
        trace: Option<TraceId>,
    ) {
        let find = || all.traced_ttft([model, flow]);
        self.ttft.with([flow], find, |series| series.observe(seconds, trace));
    }

    /// Counts a request that has ended, and records its duration.
    pub fn ended(&self, all: &Metrics, model: &str, ended: EndedRequest) {
        let EndedRequest { endpoint, flow, stream, outcome, result, seconds, trace } = ended;
        let find = || all.requests.with_label_values(&[model, endpoint, flow, outcome]);
        self.requests.with([endpoint, flow, outcome], find, IntCounter::inc);
        let find = || all.request_results.with_label_values(&[model, result]);
        self.results.with([result], find, IntCounter::inc);
        let find = || all.traced_request([model, flow, stream]);
        self.request.with([flow, stream], find, |series| series.observe(seconds, trace));
    }

    /// The histogram of the time between the events of a stream.
    pub fn inter_token(&self, all: &Metrics, model: &str, flow: &'static str) -> Histogram {
        let find = || all.inter_token.with_label_values(&[model, flow]);
        self.inter_token.with([flow], find, Histogram::clone)
    }

    /// Records the mean time per output token of a stream, in seconds.
    pub fn generated_at(&self, all: &Metrics, model: &str, seconds_per_token: f64) {
        let find = || all.time_per_output_token.with_label_values(&[model]);
        self.time_per_output_token.with([], find, |series| series.observe(seconds_per_token));
    }

    /// Records the time of the router's own work for a request, in seconds: `tokenize`, `match` or
    /// `pick`.
    pub fn router_stage(&self, all: &Metrics, model: &str, stage: &'static str, seconds: f64) {
        let find = || all.stage.with_label_values(&[model, stage]);
        self.stage_seconds.with([stage], find, |series| series.observe(seconds));
    }

    /// Records the time of a request in a stage that engines do, in seconds; `stream` says whether
    /// its reply is a stream.
    pub fn engine_stage(
        &self,
        all: &Metrics,
        model: &str,
        stage: &'static str,
        stream: &'static str,
        seconds: f64,
    ) {
        let find = || all.engine_stage.with_label_values(&[model, stage, stream]);
        self.engine_stage_seconds.with([stage, stream], find, |series| series.observe(seconds));
    }

    /// Records the time that a request waited in the queue, in seconds; `stream` says whether its
    /// reply is a stream.
    pub fn queue_wait(&self, all: &Metrics, model: &str, stream: &'static str, seconds: f64) {
        let find = || all.queue_wait.with_label_values(&[model, stream]);
        self.queue_wait_seconds.with([stream], find, |series| series.observe(seconds));
    }

    /// Records the time from the end of a prefill leg to the first token, in seconds.
    pub fn handed_off(&self, all: &Metrics, model: &str, seconds: f64) {
        let find = || all.hand_off.with_label_values(&[model]);
        self.hand_off_seconds.with([], find, |series| series.observe(seconds));
    }

    /// Records how well the time to first token of a stream was predicted; both are in milliseconds.
    pub fn predicted(&self, all: &Metrics, model: &str, predicted_ms: f64, observed_ms: f64) {
        let direction = if predicted_ms > observed_ms { "over" } else { "under" };
        let error = (predicted_ms - observed_ms).abs() / observed_ms.max(0.001);
        let find = || all.prediction_error.with_label_values(&[model, direction]);
        self.prediction_error.with([direction], find, |series| series.observe(error));
    }

    /// Records the tokens of a completed request; `cached` is `None` if it is not known.
    pub fn request_tokens(
        &self,
        all: &Metrics,
        model: &str,
        prompt: u64,
        output: u64,
        cached: Option<u64>,
    ) {
        let tokens = [
            ("prompt", &all.request_prompt_tokens, Some(prompt)),
            ("output", &all.request_output_tokens, Some(output)),
            ("cached", &all.request_cached_tokens, cached),
        ];
        for (of, metric, tokens) in tokens {
            let Some(tokens) = tokens else { continue };
            let find = || metric.with_label_values(&[model]);
            self.request_tokens.with([of], find, |series| series.observe(tokens as f64));
        }
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

    /// Records the blocks of a prompt that the worker chosen for a leg holds, and those that another
    /// candidate holds in addition.
    pub fn placed(&self, all: &Metrics, model: &str, leg: &'static str, blocks: u32, lost: u32) {
        let find = || all.overlap_blocks.with_label_values(&[model, leg]);
        self.overlap_blocks.with([leg], find, |series| series.observe(blocks.into()));
        let find = || all.overlap_blocks_lost.with_label_values(&[model]);
        self.overlap_blocks_lost.with([], find, |series| series.inc_by(lost.into()));
    }

    /// Records by how many blocks the cached tokens of a reply differ from the estimate, which was
    /// `over` or `under` them.
    pub fn cached_tokens_compared(
        &self,
        all: &Metrics,
        model: &str,
        direction: &'static str,
        blocks: f64,
    ) {
        let find = || all.cached_tokens_error.with_label_values(&[model, direction]);
        self.cached_tokens_error.with([direction], find, |series| series.observe(blocks));
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
