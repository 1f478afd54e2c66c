//! The names, types and labels of the metrics. There is one registry per router.
//!
//! `model` is always a configured name, or `none` if a request named no known model: a client's
//! string is never a label.

use std::collections::BTreeSet;

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{
    CounterVec, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::clock::unix_ms;

/// Latency buckets, in seconds: 1 ms to about 2 minutes.
const SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0,
    90.0, 120.0,
];
/// Buckets of work inside the router, in seconds: 1 us to 10 s.
const FINE_SECONDS: [f64; 14] = [
    0.000_001, 0.000_005, 0.000_01, 0.000_05, 0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5,
    1.0, 10.0,
];
/// Buckets of block counts.
const BLOCKS: [f64; 14] =
    [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];

macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $field:ident: $kind:ident $([$buckets:ident])? ($name:literal; $($label:literal),*);)+) => {
        /// Every metric of a router.
        #[allow(missing_docs)]
        pub struct Metrics {
            registry: Registry,
            $($(#[doc = $help])+ pub $field: $kind,)+
        }

        impl Metrics {
            /// Registers all metrics.
            ///
            /// # Errors
            /// If two metrics have the same name, which a test excludes.
            pub fn new() -> Result<Self, prometheus::Error> {
                let registry = Registry::new_custom(Some("splitrail".into()), None)?;
                $(let $field = metrics!(@make $kind $([$buckets])? $name, concat!($($help),+).trim(), &[$($label),*])?;
                registry.register(Box::new($field.clone()))?;)+
                Ok(Self { registry, $($field),+ })
            }

            /// Removes the series of a worker that has left.
            pub fn forget_worker(&self, model: &str, worker: &str) {
                $(forget_series(&self.$field, &[$($label),*], model, worker);)+
            }

            /// Name, type, labels and meaning of each metric, for the reference.
            fn reference() -> Vec<(&'static str, &'static str, &'static [&'static str], &'static str)> {
                vec![$(($name, stringify!($kind), &[$($label),*], concat!($($help),+).trim())),+]
            }
        }
    };
    (@make HistogramVec [$buckets:ident] $name:expr, $help:expr, $labels:expr) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets($buckets.to_vec()), $labels)
    };
    (@make $kind:ident $name:expr, $help:expr, $labels:expr) => {
        $kind::new(Opts::new($name, $help), $labels)
    };
}

metrics! {
    /// Requests that have ended, by endpoint, flow and outcome.
    requests: IntCounterVec("requests_total"; "model", "endpoint", "flow", "outcome");
    /// Requests of tenants that have ended, by outcome. Beyond 200 configured tenants, the label is
    /// `other`.
    tenant_requests: IntCounterVec("tenant_requests_total"; "tenant", "outcome");
    /// Tokens of completed requests of tenants, by kind: prompt, cached (a part of prompt) or
    /// completion.
    tenant_tokens: IntCounterVec("tenant_tokens_total"; "tenant", "kind");
    /// Requests that were refused because of their credential, by listener and reason: missing,
    /// unknown, expired, no_tenant or wrong_use.
    refused_credentials: IntCounterVec("refused_credentials_total"; "listener", "reason");
    /// Requests in flight.
    requests_in_flight: IntGaugeVec("requests_in_flight"; "model");
    /// Memory in bytes that requests hold, as charged to `limits.request_memory_max_bytes`.
    request_memory: IntGaugeVec("request_memory_bytes";);
    /// Time from the arrival of a request to the first event of its reply.
    ttft: HistogramVec[SECONDS]("ttft_seconds"; "model", "flow");
    /// Time between two consecutive events of a stream.
    inter_token: HistogramVec[SECONDS]("inter_token_seconds"; "model", "flow");
    /// Time from the arrival of a request to the end of its reply.
    request: HistogramVec[SECONDS]("request_seconds"; "model", "flow");
    /// Time in each stage of a request: admit, tokenize, match, pick, decode_try, prefill,
    /// first_token.
    stage: HistogramVec[FINE_SECONDS]("stage_seconds"; "model", "stage");
    /// Whether the router is connected to the broker of the event plane: 0 or 1.
    broker_connected: IntGaugeVec("broker_connected"; );
    /// Messages of shims that were received over the event plane, by kind: events or reports.
    event_plane_messages: IntCounterVec("event_plane_messages_total"; "model", "kind");
    /// Messages of the event plane that were refused, by reason: spoofed (the message names another
    /// worker than its subject), occupied (another process speaks for the worker), nonsense
    /// (malformed), terms (blocks are hashed differently) or full.
    event_plane_refused: IntCounterVec("event_plane_refused_messages_total"; "model", "reason");
    /// Snapshots over the event plane, by result: applied, asked (requested from a shim) or failed.
    event_plane_snapshots: IntCounterVec("event_plane_snapshots_total"; "model", "result");
    /// Messages in the model's stream that this router has not read yet.
    event_plane_pending: IntGaugeVec("event_plane_pending_messages"; "model");
    /// Prompt tokens of completed requests by leg and source. Never sum over legs.
    prompt_tokens: IntCounterVec("prompt_tokens_total"; "model", "leg", "source", "tier");
    /// Prompt tokens of completed requests as reported to clients. Each prompt counts once.
    usage_prompt_tokens: IntCounterVec("usage_prompt_tokens_total"; "model");
    /// Generated tokens of completed requests.
    generation_tokens: IntCounterVec("generation_tokens_total"; "model");
    /// Prompt tokens of attempts whose result reached no client. No other metric includes them.
    wasted_prompt_tokens: IntCounterVec("wasted_prompt_tokens_total"; "model", "reason");
    /// Prompts for which engine and router count different numbers of tokens, because of another
    /// tokenizer, chat template or engine flag.
    prompt_length_mismatches: IntCounterVec("prompt_length_mismatches_total"; "model");
    /// Cached prompt tokens of completed requests, by the source of the figure: the engine, or an
    /// estimate of the router.
    cached_tokens: IntCounterVec("cached_tokens_total"; "model", "source");
    /// Absolute difference between the router's estimate of the cached tokens and the engine's
    /// figure, in blocks.
    cached_tokens_error: HistogramVec[BLOCKS]("cached_tokens_error_blocks"; "model", "direction");
    /// Leading KV blocks of the prompt that the chosen worker held.
    overlap_blocks: HistogramVec[BLOCKS]("overlap_blocks"; "model", "role");
    /// Overlap of the best candidate minus the overlap of the chosen one, in blocks.
    overlap_blocks_lost: IntCounterVec("overlap_blocks_lost_total"; "model");
    /// Blocks within `cache_loss_tracking.window` that could have been cache hits and were not, by
    /// reason: cold, evicted, diverted, stale or parity.
    cache_loss_blocks: IntGaugeVec("cache_loss_blocks"; "model", "reason");
    /// Blocks within `cache_loss_tracking.window`: those that were cache hits (found), and the
    /// maximum that the prompts allowed (best).
    cache_hit_blocks: IntGaugeVec("cache_hit_blocks"; "model", "of");
    /// Requests that wait in the router's `queue` for a worker.
    queue_depth: IntGaugeVec("queue_depth"; "model");
    /// Decisions of the shadow policy, by whether the policy made the same choice.
    shadow_decisions: IntCounterVec("shadow_decisions_total"; "model", "leg", "choice");
    /// Predicted seconds to the first token by which one policy was better than the other where
    /// their choices differed, by the better one: live or shadow.
    shadow_seconds: CounterVec("shadow_predicted_seconds_total"; "model", "leg", "better");
    /// Moving average of the error of the router's estimate for the worker, in blocks, by
    /// direction: over (too high) or under (too low).
    worker_drift: GaugeVec("worker_cached_tokens_drift_blocks"; "model", "worker", "direction");
    /// The share of the worker's overlap that is not counted, from 0 to 1, because the worker finds
    /// less in its cache than the index states.
    worker_overlap_discount_ratio: GaugeVec("worker_overlap_discount_ratio"; "model", "worker");
    /// Whether the worker takes part in KV routing: 0 or 1. It is 0 if the worker is known to
    /// disagree with the router on tokens or blocks, or finds much less in its cache than the index
    /// states.
    worker_kv_routing_enabled: IntGaugeVec("worker_kv_routing_enabled"; "model", "worker");
    /// 1 for the current result of the worker's canary (ok, unknown, mismatch, or pending before
    /// the first test), 0 for the other results.
    worker_parity: IntGaugeVec("worker_parity"; "model", "worker", "result");
    /// Canary tests, by result and by the cause of a result other than `ok`.
    canaries: IntCounterVec("canaries_total"; "model", "result", "cause");
    /// Replies of engines that could report a figure (usage, cached_tokens), by whether they
    /// reported it.
    engine_reports: IntCounterVec("engine_reports_total"; "model", "worker", "figure", "reported");
    /// Lines of the ledger file: written, queue_full or write_failed.
    ledger_records: IntCounterVec("ledger_records_total"; "result");
    /// Lines of the record file: written, queue_full or write_failed.
    record_lines: IntCounterVec("record_lines_total"; "result");
    /// Lines of the audit file: written, queue_full or write_failed.
    audit_records: IntCounterVec("audit_records_total"; "result");
    /// Completed requests with cached tokens (hit) and without (miss).
    prefix_cache_requests: IntCounterVec("prefix_cache_requests_total"; "model", "result");
    /// Requests of P/D models whose prompt the decode worker computed, by reason.
    local_prefills: IntCounterVec("local_prefills_total"; "model", "reason");
    /// Prompts in decode-first, by the gate that decided and the outcome.
    decode_first: IntCounterVec("decode_first_total"; "model", "gate", "outcome");
    /// The cache hit threshold of requests that set none.
    cache_hit_threshold: GaugeVec("cache_hit_threshold_ratio"; "model");
    /// How well one threshold separates local from remote prefills, from 0 to 1. 1 for a configured
    /// threshold.
    threshold_confidence: GaugeVec("cache_hit_threshold_confidence_ratio"; "model");
    /// Retries of legs, by the outcome of the failed attempt.
    retries: IntCounterVec("retries_total"; "model", "leg", "reason");
    /// Retries that were not made because the model's retry budget was exhausted.
    retries_refused: IntCounterVec("retries_refused_total"; "model", "leg");
    /// Requests that were sent again to the same worker on a new connection, because the kept
    /// connection was closed while they were written.
    resent_requests: IntCounterVec("resent_requests_total"; "model", "worker");
    /// Replies of an engine whose id belongs to another request. The router dropped them and closed
    /// their connections. The engine, or a proxy in front of the engine, mixes up replies.
    foreign_replies: IntCounterVec("foreign_replies_total"; "model", "worker");
    /// Kept connections to an engine on which bytes arrived that belong to no reply. The router
    /// closed them. For a minute afterwards, each connection to the engine serves one request.
    unsolicited_data_connections: IntCounterVec("unsolicited_data_connections_total"; "model", "worker");
    /// Streamed replies that lost their decode worker and could be continued exactly, by outcome:
    /// resumed on another worker, or lost.
    migrations: IntCounterVec("migrations_total"; "model", "outcome");
    /// Hand-offs that no decode worker used, by outcome: fetched by a request for one token so that
    /// their blocks are freed, failed to be fetched, or left until their lease ends.
    unused_hand_offs: IntCounterVec("unused_hand_offs_total"; "model", "outcome");
    /// Open connections of clients.
    connections: IntGaugeVec("connections"; "listener");
    /// Connections that the router closed, and HTTP/2 streams that it reset (`stream_*`), because
    /// of the client's behaviour.
    connections_cut: IntCounterVec("connections_cut_total"; "listener", "reason");
    /// The time at which the certificate of the listener expires, in seconds since 1970; 0 if its
    /// end cannot be read.
    certificate_expires: IntGaugeVec("certificate_expires_timestamp_seconds"; "listener");
    /// Requests that were refused because of load, by reason.
    shed: IntCounterVec("shed_total"; "model", "reason");
    /// Fields that were removed from requests, by reason: only the router may set the field
    /// (`router_only`), the field controls the engine (`steers`), or the field is not known at the
    /// endpoint (`unknown`).
    removed_fields: IntCounterVec("removed_fields_total"; "model", "reason");
    /// Prompts whose tokens the router cannot compute, by reason.
    untokenized_prompts: IntCounterVec("untokenized_prompts_total"; "model", "reason");
    /// Workers that the last lookup of a discovery source found. The value stays while the source
    /// cannot be reached.
    discovery_workers: IntGaugeVec("discovery_workers"; "model", "source");
    /// Errors of a discovery source: it could not be reached, refused the request, or returned
    /// nothing usable.
    discovery_errors: IntCounterVec("discovery_errors_total"; "model", "source");
    /// Whether the worker answered the last probe: 0 or 1.
    worker_up: IntGaugeVec("worker_up"; "model", "worker", "role");
    /// The state of the worker: 1 for the current state, 0 for the others.
    worker_state: IntGaugeVec("worker_state"; "model", "worker", "state");
    /// Changes of the worker's state.
    worker_transitions: IntCounterVec("worker_transitions_total"; "model", "worker", "from", "to");
    /// Whether the circuit breaker of a leg is open: 0 or 1. The leg `tokenizer` stands for
    /// requests that need no model.
    worker_breaker_open: IntGaugeVec("worker_breaker_open"; "model", "worker", "role", "leg");
    /// Requests of this router that are in flight on the worker.
    worker_requests: IntGaugeVec("worker_requests"; "model", "worker", "role");
    /// Prompt tokens that are booked on the worker and not computed yet.
    worker_prefill_tokens: IntGaugeVec("worker_prefill_tokens"; "model", "worker", "role");
    /// KV blocks of the worker, as reported by the worker.
    worker_kv_blocks: GaugeVec("worker_kv_blocks"; "model", "worker", "role", "state");
    /// Shims that are attached.
    attached_shims: IntGaugeVec("attached_shims"; "model");
    /// Attach calls of shims, by result: attached, resumed (with the earlier index), or the reason
    /// of the refusal.
    attach_calls: IntCounterVec("attach_calls_total"; "result");
    /// Whether the worker's KV events arrive: 0 or 1. While 0, its overlap is not used.
    index_events_current: IntGaugeVec("index_events_current"; "model", "worker");
    /// Whether the index lacks blocks of the worker because of
    /// `limits.index_blocks_per_worker_max`: 0 or 1. The worker's part is rebuilt once all blocks
    /// may fit.
    index_truncated: IntGaugeVec("index_truncated"; "model", "worker");
    /// Distinct blocks of the worker in the index.
    index_blocks: IntGaugeVec("index_blocks"; "model", "worker", "tier");
    /// Blocks of the worker in the speculative index, by kind: recently sent to the worker
    /// (`speculative`), or computed there without events (`approximate`). They are never part of
    /// `index_blocks` or of an overlap.
    speculative_index_blocks: IntGaugeVec("speculative_index_blocks"; "model", "worker", "kind");
    /// KV events that were applied to the index.
    index_events: IntCounterVec("index_events_total"; "model", "worker");
    /// Gaps in the worker's KV events, whether or not a replay filled them.
    index_gaps: IntCounterVec("index_gaps_total"; "model", "worker");
    /// Number of times that the worker's part of the index was dropped and rebuilt.
    index_resyncs: IntCounterVec("index_resyncs_total"; "model", "worker", "reason");
    /// Blocks that could not be indexed. The reasons `garbage` and `rank` count events instead of
    /// blocks.
    index_rejected: IntCounterVec("index_rejected_total"; "model", "worker", "reason");
    /// Time from the creation of an event in the engine to its presence in the index.
    index_event_lag: HistogramVec[SECONDS]("index_event_lag_seconds"; "model", "worker");
    /// Reads of the keys with which an issuer signs JSON Web Tokens, by result: changed, unchanged or
    /// failed. A file is read when it changes, and every second while it cannot be used.
    jwks_refreshes: IntCounterVec("jwks_refreshes_total"; "issuer", "result");
    /// Time at which the keys of an issuer were last read, or a file of keys was last seen to be
    /// unchanged, in seconds since 1970.
    jwks_last_success: GaugeVec("jwks_last_success_timestamp_seconds"; "issuer");
    /// Usable keys of an issuer.
    jwks_keys: IntGaugeVec("jwks_keys"; "issuer");
    /// Reloads of the configuration, by result: changed, unchanged or refused.
    reloads: IntCounterVec("reloads_total"; "result");
    /// A hash of 48 bits of the running configuration. Replicas with the same configuration have
    /// the same value.
    config_hash: IntGaugeVec("config_hash";);
    /// Time at which the running configuration was last loaded, or confirmed by an unchanged file,
    /// in seconds since 1970.
    config_loaded: GaugeVec("config_last_reload_success_timestamp_seconds";);
    /// Always 1. The version is the label.
    build_info: IntGaugeVec("build_info"; "version");
}

const NO_LABELS: [&str; 0] = [];

fn forget_series<T: MetricVecBuilder>(
    metric: &MetricVec<T>,
    labels: &[&str],
    model: &str,
    worker: &str,
) {
    if !labels.contains(&"worker") {
        return;
    }
    // If a worker has exactly one series, its labels are known and no other series is read.
    if labels == ["model", "worker"] {
        // The series may not exist.
        let _gone = metric.remove_label_values(&[model, worker]);
        return;
    }
    for family in metric.collect() {
        for series in family.get_metric() {
            let value = |name: &str| {
                let pair = series.get_label().iter().find(|pair| pair.name() == name);
                pair.map_or("", |pair| pair.value())
            };
            if value("model") == model && value("worker") == worker {
                let values: Vec<_> = labels.iter().map(|name| value(name)).collect();
                // Another thread may have removed the series in the meantime.
                let _gone = metric.remove_label_values(&values);
            }
        }
    }
}

impl Metrics {
    /// The reference of all metrics, as a table in Markdown.
    pub fn reference_markdown() -> String {
        let mut table = String::from("| name | type | labels | meaning |\n|---|---|---|---|\n");
        for (name, kind, labels, help) in Self::reference() {
            let kind = match kind {
                "IntCounterVec" | "CounterVec" => "counter",
                "HistogramVec" => "histogram",
                _ => "gauge",
            };
            let labels = labels.join(", ");
            table.push_str(&format!("| `splitrail_{name}` | {kind} | {labels} | {help} |\n"));
        }
        table
    }

    /// All of it, as Prometheus would scrape it.
    pub fn encode(&self) -> String {
        self.scrape(|_, _, _| true, |_, _| true)
    }

    /// The text that Prometheus scrapes, of those workers only that are `present` (model,
    /// worker, and role where that is a label). Whatever was still counted for others after they had left is taken away,
    /// unless they are there again `now`.
    pub fn scrape(
        &self,
        present: impl Fn(&str, &str, Option<&str>) -> bool,
        now: impl Fn(&str, &str) -> bool,
    ) -> String {
        let mut families = self.registry.gather();
        let mut gone = BTreeSet::new();
        for family in &mut families {
            family.mut_metric().retain(|series| {
                let label = |name| {
                    let pair = series.get_label().iter().find(|pair| pair.name() == name);
                    pair.map(|pair| pair.value().to_owned())
                };
                let (Some(model), Some(worker)) = (label("model"), label("worker")) else {
                    return true;
                };
                let stays = present(&model, &worker, label("role").as_deref());
                if !stays {
                    gone.insert((model, worker));
                }
                stays
            });
        }
        families.retain(|family| !family.get_metric().is_empty());
        for (model, worker) in gone.iter().filter(|(model, worker)| !now(model, worker)) {
            self.forget_worker(model, worker);
        }
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }

    /// From now on, this configuration runs.
    pub fn set_config(&self, hash: u64) {
        self.config_hash.with_label_values(&NO_LABELS).set(hash as i64);
        self.config_loaded.with_label_values(&NO_LABELS).set(unix_ms() as f64 / 1e3);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_shows_nothing_of_who_has_left_and_forgets_it() {
        let metrics = Metrics::new().unwrap();
        let up = |worker| metrics.worker_up.with_label_values(&["m", worker, "both"]).set(1);
        up("w");
        up("v");
        let text = metrics.scrape(|_, worker, _| worker == "v", |_, worker| worker == "v");
        assert!(text.contains("worker=\"v\"") && !text.contains("worker=\"w\""), "{text}");
        assert!(!metrics.encode().contains("worker=\"w\""));
        // One that came back meanwhile keeps what is counted for it.
        up("w");
        assert!(
            !metrics.scrape(|_, worker, _| worker == "v", |_, _| true).contains("worker=\"w\"")
        );
        assert!(metrics.encode().contains("worker=\"w\""));
    }

    #[test]
    fn names_are_unique_and_prefixed() {
        let metrics = Metrics::new().unwrap();
        metrics.shed.with_label_values(&["m", "full"]).inc();
        assert!(metrics.encode().contains("splitrail_shed_total{model=\"m\",reason=\"full\"} 1"));
    }

    #[test]
    fn the_series_of_a_worker_that_left_are_gone_and_no_others() {
        let metrics = Metrics::new().unwrap();
        for (model, worker) in [("m", "w"), ("m", "v"), ("n", "w")] {
            metrics.worker_up.with_label_values(&[model, worker, "both"]).set(1);
            metrics.index_event_lag.with_label_values(&[model, worker]).observe(0.1);
        }
        metrics.forget_worker("m", "w");
        let text = metrics.encode();
        assert!(!text.contains("model=\"m\",role=\"both\",worker=\"w\""), "{text}");
        assert!(!text.contains("model=\"m\",worker=\"w\""), "{text}");
        for left in ["model=\"m\",worker=\"v\"", "model=\"n\",worker=\"w\""] {
            assert!(text.contains(left), "{text}");
        }
    }

    #[test]
    fn the_documentation_holds_the_reference_of_all_metrics() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let documented = std::fs::read_to_string(path).unwrap();
        assert!(
            documented.contains(&Metrics::reference_markdown()),
            "docs/metrics.md needs this table:\n{}",
            Metrics::reference_markdown()
        );
    }
}
