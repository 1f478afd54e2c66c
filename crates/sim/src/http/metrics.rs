//! `/metrics` with the metric names of vLLM, or of SGLang for its connector.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::{ApiError, App, text_response};
use crate::config::KvConnector;
use crate::engine::Counters;
use crate::record::SimState;

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    if app.faults.is_active("no_metrics") {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    text_response("text/plain; version=0.0.4; charset=utf-8", render(&app))
}

/// Text in the exposition format, built line by line; each metric has a sample for each rank.
struct Page {
    text: String,
    model: String,
    states: Vec<SimState>,
    /// Whether the names are SGLang's, which names a rank only if there are several.
    of_sglang: bool,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, extra: &str, value: impl Fn(&SimState) -> f64) {
        self.sample_of(name, extra, |state| Some(value(state)));
    }

    fn sample_of(&mut self, name: &str, extra: &str, value: impl Fn(&SimState) -> Option<f64>) {
        let Self { text, model, states, of_sglang } = self;
        let several = states.len() > 1;
        for (rank, state) in states.iter().enumerate() {
            let Some(value) = value(state) else { continue };
            let rank = match (*of_sglang, several) {
                (false, _) => format!("engine=\"{rank}\","),
                (true, true) => format!("dp_rank=\"{rank}\","),
                (true, false) => String::new(),
            };
            let labels = format!("{rank}model_name=\"{model}\"{extra}");
            let _ = writeln!(text, "{name}{{{labels}}} {value:?}");
        }
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Fn(&SimState) -> f64) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }

    /// A gauge that vLLM with several ranks, and so with several API servers, reports for a rank
    /// only from its first request on.
    fn load(&mut self, name: &str, help: &str, value: impl Fn(&SimState) -> f64) {
        self.family(name, "gauge", help);
        let alone = self.states.len() == 1;
        self.sample_of(name, "", |state| {
            let has_begun = state.running + state.waiting > 0 || state.totals.prompt_tokens > 0;
            (alone || has_begun).then(|| value(state))
        });
    }
}

/// The value of a label, and the counter that it selects.
type LabelValue = (&'static str, fn(&Counters) -> u64);

/// A counter's name, meaning and value.
type Counter = (&'static str, &'static str, fn(&Counters) -> u64);

const COUNTERS: [Counter; 8] = [
    ("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", |totals| {
        totals.prompt_tokens
    }),
    ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", |totals| {
        totals.local_cache_hit_tokens
    }),
    ("vllm:external_prefix_cache_queries_total", "Tokens asked of a connector.", |totals| {
        totals.prompt_tokens - totals.local_cache_hit_tokens
    }),
    ("vllm:external_prefix_cache_hits_total", "Tokens that a connector had.", |totals| {
        totals.external_kv_transfer_tokens
    }),
    ("vllm:prompt_tokens_total", "Prompt tokens.", |totals| totals.prompt_tokens),
    ("vllm:prompt_tokens_cached_total", "Prompt tokens not computed here.", cached),
    ("vllm:generation_tokens_total", "Generated tokens.", |totals| totals.generation_tokens),
    ("vllm:nixl_num_kv_expired_reqs_total", EXPIRED, |totals| totals.hand_offs_expired),
];

const EXPIRED: &str = "Requests whose KV was not pulled within its lease.";

fn cached(totals: &Counters) -> u64 {
    totals.local_cache_hit_tokens + totals.external_kv_transfer_tokens
}

fn render(app: &App) -> String {
    let config = &app.engine.config;
    let states = app.ranks.iter().map(|engine| engine.state()).collect();
    let of_sglang = config.connector == KvConnector::Sglang;
    let mut page = Page { text: String::new(), model: config.model.clone(), states, of_sglang };
    if of_sglang {
        let (page_tokens, pages) = (config.block_size as f64, f64::from(config.kv_blocks));
        sglang(&mut page, page_tokens, pages);
        return page.text;
    }
    page.load("vllm:num_requests_running", "Requests that run.", |state| state.running as f64);
    page.load("vllm:num_requests_waiting", "Requests that wait.", |state| state.waiting as f64);
    page.load("vllm:kv_cache_usage_perc", "KV cache usage, 1 is full.", |state| {
        state.blocks_used as f64 / state.blocks_total as f64
    });
    let is_awake = f64::from(!app.faults.is_active("asleep"));
    page.family("vllm:engine_sleep_state", "gauge", "Whether the engine is awake.");
    page.sample("vllm:engine_sleep_state", ",sleep_state=\"awake\"", |_| is_awake);
    page.one("vllm:num_preemptions_total", "counter", "Preemptions.", |_| 0.0);
    // An engine has the metrics of its connector only.
    let has_connector = config.connector != KvConnector::None;
    let counters = COUNTERS.iter().filter(|(name, ..)| has_connector || !name.contains("nixl"));
    for (name, help, value) in counters {
        page.one(name, "counter", help, |state| value(&state.totals) as f64);
    }
    by_source(&mut page);
    let name = "vllm:request_success_total";
    page.family(name, "counter", "Finished requests by reason.");
    let reasons: [LabelValue; 5] = [
        ("stop", |totals| totals.finished_stop),
        ("length", |totals| totals.finished_length),
        ("abort", |totals| totals.aborted),
        ("error", |totals| totals.failed),
        ("cache_threshold", |totals| totals.finished_cache_threshold),
    ];
    for (reason, value) in reasons {
        let label = format!(",finished_reason=\"{reason}\"");
        page.sample(name, &label, |state| value(&state.totals) as f64);
    }
    let name = "vllm:cache_config_info";
    page.family(name, "gauge", "The cache's configuration.");
    // As in vLLM, each rank's line has the total over all ranks.
    let info = format!(
        ",block_size=\"{}\",cache_dtype=\"{}\",enable_prefix_caching=\"True\",num_gpu_blocks=\"{}\",prefix_caching_hash_algo=\"xxh3\"",
        config.block_size,
        config.kv_dtype,
        config.kv_blocks.saturating_mul(page.states.len() as u32)
    );
    page.sample(name, &info, |_| 1.0);
    let name = "process_start_time_seconds";
    page.family(name, "gauge", "Start time of the process since unix epoch in seconds.");
    let _ = writeln!(page.text, "{name} {}", app.started_at.as_secs_f64());
    page.text
}

/// What SGLang says of itself. It does not say when it was started.
fn sglang(page: &mut Page, page_tokens: f64, pages: f64) {
    page.one("sglang:num_running_reqs", "gauge", "Running.", |state| state.running as f64);
    page.one("sglang:num_queue_reqs", "gauge", "Waiting.", |state| state.waiting as f64);
    page.one("sglang:token_usage", "gauge", "Used part of the KV cache.", |state| {
        state.blocks_used as f64 / state.blocks_total as f64
    });
    page.one("sglang:page_size", "gauge", "Tokens per page.", |_| page_tokens);
    page.one("sglang:num_pages", "gauge", "Pages.", |_| pages);
    let counters: [Counter; 3] = [
        ("sglang:prompt_tokens_total", "Prompt tokens.", |totals| totals.prompt_tokens),
        ("sglang:generation_tokens_total", "Generated.", |totals| totals.generation_tokens),
        ("sglang:cached_tokens_total", "Cached.", |totals| totals.local_cache_hit_tokens),
    ];
    for (name, help, value) in counters {
        page.one(name, "counter", help, |state| value(&state.totals) as f64);
    }
}

fn by_source(page: &mut Page) {
    let name = "vllm:prompt_tokens_by_source_total";
    page.family(name, "counter", "Prompt tokens by source.");
    let sources: [LabelValue; 3] = [
        ("local_compute", |totals| totals.local_compute_tokens),
        ("local_cache_hit", |totals| totals.local_cache_hit_tokens),
        ("external_kv_transfer", |totals| totals.external_kv_transfer_tokens),
    ];
    for (source, value) in sources {
        let label = format!(",source=\"{source}\"");
        page.sample(name, &label, |state| value(&state.totals) as f64);
    }
    let name = "vllm:prompt_tokens_cached_by_source_total";
    page.family(name, "counter", "Prompt tokens not computed here, by the tier they came from.");
    let tiers: [LabelValue; 4] = [
        ("device", |totals| totals.local_cache_hit_tokens),
        ("host", |_| 0),
        ("disk", |_| 0),
        ("p2p", |totals| totals.external_kv_transfer_tokens),
    ];
    for (source, value) in tiers {
        let label = format!(",source=\"{source}\"");
        page.sample(name, &label, |state| value(&state.totals) as f64);
    }
}
