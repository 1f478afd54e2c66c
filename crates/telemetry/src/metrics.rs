//! The table of the metrics: names, types, labels with their known values, and meanings. The code,
//! the reference, and the tests of dashboards and rules are made from it. There is one registry per
//! router.
//!
//! `model` is always a configured name, or `none` if a request named no known model: a client's
//! string is never a label.

use prometheus::{GaugeVec, HistogramVec, IntCounterVec, IntGaugeVec};

use crate::clock::unix_ms;
use crate::exemplars::TracedHistogram;

#[macro_use]
mod define;
mod available;
mod buckets;
mod declare;
mod definition;
mod reference;
mod scrape;
#[cfg(test)]
mod tests;
mod values;

pub use available::AvailableWorkers;
pub use declare::{Scope, labels_of_zeros, values_of};
pub use definition::{Definition, LabelDefinition, MetricKind};
pub use scrape::TextFormat;

metrics! {
    /// Requests that have ended.
    requests: IntCounterVec("requests_total"; "model", "endpoint", "flow" in FLOWS, "outcome");
    /// Requests that have ended, by kind of outcome.
    request_results: IntCounterVec("request_results_total"; "model", "result" in RESULTS; if any_case);
    /// Requests of tenants that have ended. Beyond 200 configured tenants, the label is `other`.
    tenant_requests: IntCounterVec("tenant_requests_total"; "tenant", "outcome");
    /// Tokens of served requests of tenants; `cached` is a part of `prompt`.
    tenant_tokens: IntCounterVec("tenant_tokens_total"; "tenant", "kind" in TOKEN_KINDS);
    /// Requests refused because their tenant has reached the limit.
    tenant_refusals: IntCounterVec("tenant_limit_refusals_total"; "tenant", "limit" in LIMITS);
    /// Tokens reserved at the start of requests, as counted towards limits.
    tenant_reserved_tokens: IntCounterVec("tenant_reserved_tokens_total"; "tenant");
    /// Tokens charged at the end of requests, as counted towards limits.
    tenant_settled_tokens: IntCounterVec("tenant_settled_tokens_total"; "tenant");
    /// The limits of the tenant.
    tenant_limit: GaugeVec("tenant_limit"; "tenant", "limit" in LIMITS);
    /// The used share of the limit, 0 to 1.
    tenant_limit_used: GaugeVec("tenant_limit_used_ratio"; "tenant", "limit" in LIMITS);
    /// Requests refused because of their credential.
    refused_credentials: IntCounterVec("refused_credentials_total"; "listener", "reason" in REFUSED_CREDENTIALS);
    /// Requests in flight.
    requests_in_flight: IntGaugeVec("requests_in_flight"; "model");
    /// Used places of `limits.in_flight_max`: one for each prompt, and for each sample sent
    /// separately.
    places_in_use: IntGaugeVec("places_in_use";);
    /// `limits.in_flight_max`.
    requests_in_flight_max: IntGaugeVec("requests_in_flight_max";);
    /// Memory that requests hold, as charged to `limits.request_memory_max`.
    request_memory: IntGaugeVec("request_memory_bytes";);
    /// `limits.request_memory_max`.
    request_memory_max: IntGaugeVec("request_memory_max_bytes";);
    /// Time from the arrival of a request to the first event of its reply, streams only.
    ttft: HistogramVec[SECONDS]("ttft_seconds"; "model", "flow" in FLOWS; if on_first_event);
    /// Time between two events of a stream with one sample.
    inter_token: HistogramVec[TOKEN_SECONDS]("inter_token_seconds"; "model", "flow" in FLOWS; if on_first_event);
    /// Mean time per output token after the first, of completed streams of one prompt with one
    /// sample and at least two tokens.
    time_per_output_token: HistogramVec[TOKEN_SECONDS]("time_per_output_token_seconds"; "model");
    /// Time from the arrival of a request to the end of its reply.
    request: HistogramVec[SECONDS]("request_seconds"; "model", "flow" in FLOWS, "stream" in STREAMS; if on_first_event);
    /// Time of the router's own work: tokens and block hashes (`tokenize`), index lookup (`match`),
    /// choice of a worker (`pick`).
    stage: HistogramVec[FINE_SECONDS]("stage_seconds"; "model", "stage" in STAGES);
    /// Time in the router's `queue`, also of requests that gave up.
    queue_wait: HistogramVec[SECONDS]("queue_wait_seconds"; "model", "stream" in REPLIES; if streams_case);
    /// Time in the parts of a request that engines do: asking a decode worker that held too little
    /// (`decode_try`), `peer_fetch`, `prefill`, the last leg to its first event, or to its end if
    /// the reply is whole (`first_token`), legs that failed (`failed`). Not of requests that
    /// generate nothing.
    engine_stage: HistogramVec[SECONDS]("engine_stage_seconds"; "model", "stage" in ENGINE_STAGES, "stream" in REPLIES; if streams_case);
    /// Time from the end of the prefill leg to the first event of the decode leg, streams only, of
    /// connectors whose legs follow each other.
    hand_off: HistogramVec[SECONDS]("hand_off_seconds"; "model");
    /// Relative error of the predicted time to first token (`over`: predicted too long), of streams
    /// without retries with `predicted_ttft`.
    prediction_error: HistogramVec[RATIOS]("ttft_prediction_error_ratio"; "model", "direction" in DIRECTIONS);
    /// Prompt tokens of a completed request.
    request_prompt_tokens: HistogramVec[TOKENS]("request_prompt_tokens"; "model");
    /// Generated tokens of a completed request.
    request_output_tokens: HistogramVec[TOKENS]("request_output_tokens"; "model");
    /// Cached tokens of a completed request, if known.
    request_cached_tokens: HistogramVec[TOKENS]("request_cached_tokens"; "model");
    /// Whether the router is connected to the broker of `quotas`: 0 or 1. Absent without one.
    broker_connected: IntGaugeVec("broker_connected"; );
    /// Prompt tokens of served requests by leg and source. Never sum over legs.
    prompt_tokens: IntCounterVec("prompt_tokens_total"; "model", "leg" in LEGS, "source" in TOKEN_SOURCES, "tier" in TOKEN_TIERS; if tier_case);
    /// Prompt tokens of served requests, each prompt once.
    usage_prompt_tokens: IntCounterVec("usage_prompt_tokens_total"; "model");
    /// Generated tokens of served requests.
    generation_tokens: IntCounterVec("generation_tokens_total"; "model");
    /// Prompt tokens of attempts whose result reached no client.
    wasted_prompt_tokens: IntCounterVec("wasted_prompt_tokens_total"; "model", "reason" in WASTE);
    /// Prompts for which engine and router count different numbers of tokens.
    prompt_length_mismatches: IntCounterVec("prompt_length_mismatches_total"; "model");
    /// Cached tokens of served requests, by source of the figure.
    cached_tokens: IntCounterVec("cached_tokens_total"; "model", "source" in SOURCES);
    /// Difference between the router's estimate of cached tokens and the engine's figure.
    cached_tokens_error: HistogramVec[BLOCKS]("cached_tokens_error_blocks"; "model", "direction" in DIRECTIONS);
    /// Leading blocks of the prompt that the chosen worker held.
    overlap_blocks: HistogramVec[BLOCKS]("overlap_blocks"; "model", "role" in PLACED_LEGS; if on_first_event);
    /// Overlap of the best candidate minus that of the chosen one.
    overlap_blocks_lost: IntCounterVec("overlap_blocks_lost_total"; "model");
    /// Blocks within `cache_loss_tracking.window` that could have been hits and were not.
    cache_loss_blocks: IntGaugeVec("cache_loss_blocks"; "model", "reason" in LOSSES);
    /// Blocks within `cache_loss_tracking.window`: hits (`found`), the fetched part of them
    /// (`fetched`), and the possible maximum (`best`).
    cache_hit_blocks: IntGaugeVec("cache_hit_blocks"; "model", "of" in HITS);
    /// Requests that wait in the router's `queue`.
    queue_depth: IntGaugeVec("queue_depth"; "model");
    /// `queue.max_waiting` of the model.
    queue_max_waiting: IntGaugeVec("queue_max_waiting"; "model");
    /// Moving average of the error of the router's estimate, `over` or `under`.
    worker_drift: GaugeVec("worker_cached_tokens_drift_blocks"; "model", "worker", "direction" in DIRECTIONS);
    /// The share of the worker's overlap that is not counted because of drift, 0 to 1.
    worker_overlap_discount_ratio: GaugeVec("worker_overlap_discount_ratio"; "model", "worker");
    /// How many times as long as the usual worker of its role the worker takes to compute a prompt or
    /// for a decode step.
    worker_slowdown_ratio: GaugeVec("worker_slowdown_ratio"; "model", "worker", "leg" in SLOWED);
    /// 1 for the transfer group of the worker. Absent for workers without one.
    worker_transfer_group: IntGaugeVec("worker_transfer_group"; "model", "worker", "group");
    /// Whether the worker takes part in KV routing: 0 (parity mismatch, or drift) or 1.
    worker_kv_routing_enabled: IntGaugeVec("worker_kv_routing_enabled"; "model", "worker");
    /// 1 for the current result of the worker's canary, 0 for the others.
    worker_parity: IntGaugeVec("worker_parity"; "model", "worker", "result" in PARITY);
    /// Canaries, by result and cause.
    canaries: IntCounterVec("canaries_total"; "model", "result" in PARITY, "cause" in CANARY_CAUSES; if canary_case);
    /// Replies of engines that could report a figure, by whether they did.
    engine_reports: IntCounterVec("engine_reports_total"; "model", "worker", "figure" in FIGURES, "reported" in REPORTED);
    /// Lines of the ledger file.
    ledger_records: IntCounterVec("ledger_records_total"; "result" in LINES);
    /// Lines of the record file.
    record_lines: IntCounterVec("record_lines_total"; "result" in LINES);
    /// Lines of the audit file.
    audit_records: IntCounterVec("audit_records_total"; "result" in LINES);
    /// Lines of the access log.
    access_log_lines: IntCounterVec("access_log_lines_total"; "result" in LINES);
    /// Whether the last write of ledger, record, audit or access_log was successful: 0 or 1. 1 before
    /// the first. `access_log` is standard output unless a file is configured.
    output_file_writable: IntGaugeVec("output_file_writable"; "file");
    /// Log lines dropped because stderr is not read fast enough.
    log_lines_dropped: IntCounterVec("log_lines_dropped_total";);
    /// Spans of traced requests: `exported`, `dropped` (queue full) or `failed` (not taken by the
    /// collector).
    spans: IntCounterVec("spans_total"; "result" in SPANS);
    /// Served requests with cached tokens (`hit`) and without (`miss`).
    prefix_cache_requests: IntCounterVec("prefix_cache_requests_total"; "model", "result" in HIT_OR_MISS);
    /// Requests of P/D models whose prompt the decode worker computed.
    local_prefills: IntCounterVec("local_prefills_total"; "model", "reason" in LOCAL_REASONS);
    /// Prompts in decode-first.
    decode_first: IntCounterVec("decode_first_total"; "model", "gate" in GATES, "outcome" in TRIES; if gate_case);
    /// The cache hit threshold of requests that set none.
    cache_hit_threshold: GaugeVec("cache_hit_threshold_ratio"; "model");
    /// How well one threshold separates local from remote prefills, 0 to 1; 1 for a configured one.
    threshold_confidence: GaugeVec("cache_hit_threshold_confidence_ratio"; "model");
    /// Retries of legs, by outcome of the failed attempt.
    retries: IntCounterVec("retries_total"; "model", "leg" in LEGS, "reason" in FAILURES);
    /// Retries not made because the model's retry budget was exhausted.
    retries_refused: IntCounterVec("retries_refused_total"; "model", "leg" in LEGS);
    /// Requests sent again to the same worker, because the kept connection was closed while they
    /// were written.
    resent_requests: IntCounterVec("resent_requests_total"; "model", "worker");
    /// Replies with the id of another request, which were dropped: the engine, or a proxy in front
    /// of it, mixes up replies.
    foreign_replies: IntCounterVec("foreign_replies_total"; "model", "worker");
    /// Kept connections closed because bytes arrived that belong to no reply. For a minute, each
    /// connection to the engine serves one request.
    unsolicited_data_connections: IntCounterVec("unsolicited_data_connections_total"; "model", "worker");
    /// Streamed replies that lost their decode worker and could be continued exactly.
    migrations: IntCounterVec("migrations_total"; "model", "outcome" in MIGRATIONS);
    /// Hand-offs that no decode worker used: `fetched` by a request for one token, `failed` to be
    /// fetched, `finished` by a prefill leg that ran on (`mooncake`, `nixl_push`), `left` until
    /// their lease ends, or `stranded`: the decode engine keeps the blocks until it restarts
    /// (`nixl_push`).
    unused_hand_offs: IntCounterVec("unused_hand_offs_total"; "model", "outcome" in HAND_OFFS);
    /// Peer fetches that have ended: `fetched`, `declined` (the leg's engine had or computed the
    /// prefix), `shared` (with another request), `recomputed` (by the source, which had lost it),
    /// `lost` (the source had lost it and refused), `gone` (by its events, before it was asked),
    /// `full` (other fetches were first), `unusable` (no usable hand-off), `foreign_hand_off`,
    /// `mismatch` (the leg's engine counts other tokens: no leg of the model takes anything any
    /// more), `failed`, `timed_out`, `cancelled`.
    peer_fetches: IntCounterVec("peer_fetches_total"; "model", "way" in FETCH_WAYS, "outcome" in PEER_FETCHES; if fetch_case);
    /// Prompt tokens of served requests that peer fetches brought: with `two_step` a part of the
    /// local cache hits, with `one_shot` the fetched tokens.
    peer_fetched_tokens: IntCounterVec("peer_fetched_tokens_total"; "model");
    /// Workers whose prewarming has ended: `done`, `tokens` or `time` (bounds of `prewarm`), `full`
    /// (their cache), `stopped` (the worker drains, is down, restarted or left, or it was switched
    /// off).
    prewarms: IntCounterVec("prewarms_total"; "model", "end" in PREWARM_ENDS);
    /// Fetches of prewarming, each of one prefix, as in `peer_fetches_total`.
    prewarm_fetches: IntCounterVec("prewarm_fetches_total"; "model", "outcome" in PREWARM_FETCHES);
    /// Prompt tokens that prewarming has brought. They belong to no request.
    prewarmed_tokens: IntCounterVec("prewarmed_tokens_total"; "model");
    /// Memory of remembered hot prefixes.
    hot_prefix_memory: IntGaugeVec("hot_prefix_memory_bytes"; "model");
    /// Prefill legs that were to read KV back: `read`, `not_needed` (the engine had or computed the
    /// tokens), `unknown` (no count of cached tokens), `failed`, `refused` (for what the client
    /// asks), `cancelled`, `mismatch` (other tokens than the router's; read-back is off for the
    /// model).
    read_backs: IntCounterVec("read_backs_total"; "model", "outcome" in READ_BACKS);
    /// Prompt tokens read back from decode workers.
    read_back_tokens: IntCounterVec("read_back_tokens_total"; "model");
    /// Pins that the router no longer knows: `read`, `left` after a leg that failed, `expired`,
    /// `unusable` (tokens not known exactly), `superseded` by the next turn, `bound` (of the
    /// worker's blocks or the router's memory), `holder` (its worker left or restarted), `stopped`
    /// (the router, or read-back).
    read_back_pins: IntCounterVec("read_back_pins_total"; "model", "end" in PIN_ENDS);
    /// Requests for one token that make a decode worker free pins: `released`, `failed`, or `left`
    /// until the engine frees them.
    read_back_releases: IntCounterVec("read_back_releases_total"; "model", "outcome" in PIN_RELEASES);
    /// Blocks that the worker keeps pinned, as far as known.
    read_back_pinned_blocks: IntGaugeVec("read_back_pinned_blocks"; "model", "worker");
    /// Open connections of clients.
    connections: IntGaugeVec("connections"; "listener");
    /// Connections closed, and HTTP/2 streams reset (`stream_*`), because of the client.
    connections_cut: IntCounterVec("connections_cut_total"; "listener", "reason" in CUTS);
    /// When the listener's certificate expires, in seconds since 1970; 0 if unknown.
    certificate_expires: IntGaugeVec("certificate_expires_timestamp_seconds"; "listener");
    /// Requests refused because of load.
    shed: IntCounterVec("shed_total"; "model", "reason" in SHED; if shed_case);
    /// Fields removed from requests: `router_only` (only the router may set it), `steers` (it
    /// controls the engine), `unknown` at the endpoint.
    removed_fields: IntCounterVec("removed_fields_total"; "model", "reason" in REMOVED);
    /// Prompts whose tokens the router cannot compute.
    untokenized_prompts: IntCounterVec("untokenized_prompts_total"; "model", "reason");
    /// Prompts whose tokens an engine made: `engine` (asked) or `kept` (asked before).
    engine_tokenized_prompts: IntCounterVec("engine_tokenized_prompts_total"; "model", "source" in TOKENIZED_BY);
    /// Workers that the last lookup found. It stays while the source cannot be reached.
    discovery_workers: IntGaugeVec("discovery_workers"; "model", "source");
    /// Whether the discovery source could be read at last: 0 or 1.
    discovery_successful: IntGaugeVec("discovery_successful"; "model", "source");
    /// Errors of a discovery source.
    discovery_errors: IntCounterVec("discovery_errors_total"; "model", "source");
    /// Workers that can take a leg now: not down, ejected or draining, and their breaker lets a
    /// request through; of prefill workers, those whose KV a decode worker can take. `decode` stands
    /// for all legs that generate; `prefill` exists if a flow of the model has it.
    available_workers: IntGaugeVec("available_workers"; "model", "leg" in LEGS);
    /// Whether the worker answered the last probe: 0 or 1.
    worker_up: IntGaugeVec("worker_up"; "model", "worker", "role" in ROLES);
    /// 1 for the current state, 0 for the others.
    worker_state: IntGaugeVec("worker_state"; "model", "worker", "state" in STATES);
    /// Changes of the worker's state.
    worker_transitions: IntCounterVec("worker_transitions_total"; "model", "worker", "from" in STATES, "to" in STATES; if transition_case);
    /// Whether the circuit breaker of a leg is open: 0 or 1. `tokenizer` stands for requests that
    /// need no model.
    worker_breaker_open: IntGaugeVec("worker_breaker_open"; "model", "worker", "role" in ROLES, "leg" in BREAKERS);
    /// Time of a leg: of a prefill leg to its reply, of another leg of a stream to its first event.
    worker_leg: HistogramVec[WORKER_SECONDS]("worker_leg_seconds"; "model", "worker", "leg" in LEGS);
    /// Legs that failed, by code of the error.
    worker_leg_failures: IntCounterVec("worker_leg_failures_total"; "model", "worker", "leg" in LEGS, "reason" in FAILURES);
    /// This router's requests in flight on the worker.
    worker_requests: IntGaugeVec("worker_requests"; "model", "worker", "role" in ROLES);
    /// Prompt tokens booked on the worker and not computed yet.
    worker_prefill_tokens: IntGaugeVec("worker_prefill_tokens"; "model", "worker", "role" in ROLES);
    /// KV blocks by the worker's last report; absent if it is too old.
    worker_kv_blocks: GaugeVec("worker_kv_blocks"; "model", "worker", "role" in ROLES, "state" in KV_STATES);
    /// Attached shims.
    attached_shims: IntGaugeVec("attached_shims"; "model");
    /// Attach calls of shims: `attached`, `resumed` (with the earlier index), or the refusal.
    attach_calls: IntCounterVec("attach_calls_total"; "result" in ATTACH);
    /// Whether the worker's KV events arrive: 0 or 1. While 0, its overlap is not used. The origin says
    /// who reports them: the engine or its shim. Absent for workers that report no blocks.
    index_events_current: IntGaugeVec("index_events_current"; "model", "worker", "origin" in EVENT_ORIGINS);
    /// Whether the index lacks blocks because of `limits.index_blocks_per_worker_max`: 0 or 1.
    /// Absent for workers that report no blocks.
    index_truncated: IntGaugeVec("index_truncated"; "model", "worker");
    /// Distinct blocks of the worker in the index.
    index_blocks: IntGaugeVec("index_blocks"; "model", "worker", "tier" in TIERS);
    /// Speculative blocks: sent recently (`speculative`), or computed without events
    /// (`approximate`).
    speculative_index_blocks: IntGaugeVec("speculative_index_blocks"; "model", "worker", "kind" in SPECULATIVE);
    /// KV events applied to the index.
    index_events: IntCounterVec("index_events_total"; "model", "worker");
    /// Gaps in KV events, whether or not a replay filled them.
    index_gaps: IntCounterVec("index_gaps_total"; "model", "worker");
    /// Times that the worker's part of the index was dropped and rebuilt.
    index_resyncs: IntCounterVec("index_resyncs_total"; "model", "worker", "reason" in RESYNCS);
    /// Blocks that could not be indexed; `garbage`, `rank`, `unknown_event` and `unusable_event`
    /// count events.
    index_rejected: IntCounterVec("index_rejected_total"; "model", "worker", "reason" in REJECTED);
    /// Time from the creation of an event in the engine to its presence in the index.
    index_event_lag: HistogramVec[SECONDS]("index_event_lag_seconds"; "model", "worker");
    /// Whether the keys in use are those of the file: 1, or 0 if it cannot be used; its previous
    /// keys stay valid, also revoked ones.
    key_file_current: IntGaugeVec("key_file_current"; "file");
    /// Reads of an issuer's keys. A file is read when it changes, and every second while it cannot
    /// be used.
    jwks_refreshes: IntCounterVec("jwks_refreshes_total"; "issuer", "result" in REFRESHES);
    /// When an issuer's keys were last read or seen to be unchanged, in seconds since 1970.
    jwks_last_success: GaugeVec("jwks_last_success_timestamp_seconds"; "issuer");
    /// Usable keys of an issuer.
    jwks_keys: IntGaugeVec("jwks_keys"; "issuer");
    /// Reloads, except those refused while draining or without a file.
    reloads: IntCounterVec("reloads_total"; "result" in RELOADS);
    /// A hash of 48 bits of the running configuration, without what each replica has for itself:
    /// the addresses, `admin_hosts` and certificate files under `listen`, and the paths of ledger,
    /// record, audit and access_log. Replicas with the same configuration have the same value.
    config_hash: IntGaugeVec("config_hash";);
    /// When the running configuration was last loaded or confirmed, in seconds since 1970.
    config_loaded: GaugeVec("config_last_reload_success_timestamp_seconds";);
    /// Whether the last reload was successful: 0 or 1. 1 before the first.
    config_reload_successful: IntGaugeVec("config_last_reload_successful";);
    /// Delay of a task that asks to be woken every 100 ms.
    runtime_lag: HistogramVec[FINE_SECONDS]("runtime_lag_seconds";);
    /// Whether the router is draining: 0 or 1.
    draining: IntGaugeVec("draining";);
    /// Always 1.
    build_info: IntGaugeVec("build_info"; "version");
}

const NO_LABELS: [&str; 0] = [];

impl Metrics {
    /// A reload was refused: the configuration stays.
    pub fn set_reload_refused(&self) {
        self.config_reload_successful.with_label_values(&NO_LABELS).set(0);
    }

    /// From now on, this configuration runs.
    pub fn set_config(&self, hash: u64) {
        self.config_hash.with_label_values(&NO_LABELS).set(hash as i64);
        self.config_loaded.with_label_values(&NO_LABELS).set(unix_ms() as f64 / 1e3);
        self.config_reload_successful.with_label_values(&NO_LABELS).set(1);
    }

    /// The number of the running configuration, in hexadecimal.
    pub fn config_hash(&self) -> String {
        format!("{:012x}", self.config_hash.with_label_values(&NO_LABELS).get())
    }

    /// The requests of a model that are in flight.
    pub fn requests_in_flight(&self, model: &str) -> i64 {
        self.requests_in_flight.with_label_values(&[model]).get()
    }

    /// The time to first token of a model and flow, with its exemplars.
    pub(crate) fn traced_ttft(&self, [model, flow]: [&str; 2]) -> TracedHistogram {
        let labels = [("model", model), ("flow", flow)];
        self.traced("splitrail_ttft_seconds", &self.ttft, &labels)
    }

    /// The duration of requests of a model, flow and kind of reply, with its exemplars.
    pub(crate) fn traced_request(&self, [model, flow, stream]: [&str; 3]) -> TracedHistogram {
        let labels = [("model", model), ("flow", flow), ("stream", stream)];
        self.traced("splitrail_request_seconds", &self.request, &labels)
    }

    /// A series of a histogram of [`buckets::SECONDS`]; `labels` are in the order of the table.
    fn traced(
        &self,
        name: &str,
        metric: &HistogramVec,
        labels: &[(&str, &str)],
    ) -> TracedHistogram {
        let values: Vec<&str> = labels.iter().map(|(_, value)| *value).collect();
        let exemplars = self.exemplars.of_series(name, labels, &buckets::SECONDS);
        TracedHistogram { histogram: metric.with_label_values(&values), exemplars }
    }
}
