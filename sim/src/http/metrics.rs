//! `/metrics`, with vLLM's names.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;

use super::{App, text_response};

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    text_response("text/plain; version=0.0.4; charset=utf-8", render(&app))
}

/// Text of the exposition format, built line by line.
struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, extra: &str, value: f64) {
        let _ = writeln!(self.text, "{name}{{{}{extra}}} {value:?}", self.labels);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, "", value);
    }
}

fn render(app: &App) -> String {
    let state = app.engine.state();
    let totals = &state.totals;
    let config = &app.engine.config;
    let labels = format!("engine=\"0\",model_name=\"{}\"", config.model);
    let mut page = Page { text: String::new(), labels };
    page.one("vllm:num_requests_running", "gauge", "Requests that run.", state.running as f64);
    page.one("vllm:num_requests_waiting", "gauge", "Requests that wait.", state.waiting as f64);
    let usage = state.blocks_used as f64 / state.blocks_total as f64;
    page.one("vllm:kv_cache_usage_perc", "gauge", "KV cache usage, 1 is full.", usage);
    page.one("vllm:num_preemptions_total", "counter", "Preemptions.", 0.0);
    let (hits, moved) = (totals.local_cache_hit_tokens, totals.external_kv_transfer_tokens);
    let prompt = totals.prompt_tokens;
    for (name, help, value) in [
        ("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", prompt),
        ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", hits),
        ("vllm:external_prefix_cache_queries_total", "Tokens asked of a connector.", prompt - hits),
        ("vllm:external_prefix_cache_hits_total", "Tokens that a connector had.", moved),
        ("vllm:prompt_tokens_total", "Prompt tokens.", prompt),
        ("vllm:prompt_tokens_cached_total", "Prompt tokens not computed here.", hits + moved),
        ("vllm:generation_tokens_total", "Generated tokens.", totals.generation_tokens),
    ] {
        page.one(name, "counter", help, value as f64);
    }
    let name = "vllm:prompt_tokens_by_source_total";
    page.family(name, "counter", "Prompt tokens by source.");
    page.sample(name, ",source=\"local_compute\"", totals.local_compute_tokens as f64);
    page.sample(name, ",source=\"local_cache_hit\"", hits as f64);
    page.sample(name, ",source=\"external_kv_transfer\"", moved as f64);
    let name = "vllm:prompt_tokens_cached_by_source_total";
    page.family(name, "counter", "Prompt tokens not computed here, by the tier they came from.");
    for (source, value) in [("device", hits), ("host", 0), ("disk", 0), ("p2p", moved)] {
        page.sample(name, &format!(",source=\"{source}\""), value as f64);
    }
    let name = "vllm:request_success_total";
    page.family(name, "counter", "Finished requests by reason.");
    for (reason, value) in [
        ("stop", totals.finished_stop),
        ("length", totals.finished_length),
        ("abort", totals.aborted),
        ("error", totals.failed),
        ("cache_threshold", totals.finished_cache_threshold),
    ] {
        page.sample(name, &format!(",finished_reason=\"{reason}\""), value as f64);
    }
    let name = "vllm:nixl_num_kv_expired_reqs_total";
    let help = "Requests whose KV was not pulled within its lease.";
    page.one(name, "counter", help, totals.handoffs_expired as f64);
    let name = "vllm:cache_config_info";
    page.family(name, "gauge", "The cache's configuration.");
    let info = format!(
        ",block_size=\"{}\",enable_prefix_caching=\"True\",num_gpu_blocks=\"{}\",prefix_caching_hash_algo=\"xxh3\"",
        config.block_size, config.kv_blocks
    );
    page.sample(name, &info, 1.0);
    page.text
}
