//! The values of labels that are known when the router starts. A counter whose labels all have
//! such values exists from the start, at 0, so that `increase()` sees its first event.

/// The legs of a request.
pub(crate) const LEGS: &[&str] = &["prefill", "decode"];
/// How a leg is placed: `aggregated` is a leg that computes its prompt and generates.
pub(crate) const PLACED_LEGS: &[&str] = &["prefill", "decode", "aggregated"];
/// The legs that have a circuit breaker; `tokenizer` stands for requests that need no model.
pub(crate) const SLOWED: &[&str] = &["prefill", "decode"];
pub(crate) const BREAKERS: &[&str] = &["prefill", "decode", "tokenizer"];
/// The roles of workers.
pub(crate) const ROLES: &[&str] = &["prefill", "decode", "both"];
/// The flows of requests; `none` for requests that were refused before they had one.
pub(crate) const FLOWS: &[&str] =
    &["aggregated", "prefill_first", "decode_first", "decode_only", "auto", "none"];
/// Whether a reply is a stream; `none` for requests that were refused before this was known.
pub(crate) const STREAMS: &[&str] = &["true", "false", "none"];
/// Whether the reply of a request whose model is known is a stream.
pub(crate) const REPLIES: &[&str] = &["true", "false"];
/// How requests end, for service level objectives.
pub(crate) const RESULTS: &[&str] = &["ok", "cancelled", "invalid", "limited", "shed", "failed"];
/// Why an attempt fails: the codes of errors of engines.
pub(crate) const FAILURES: &[&str] = &[
    "engine_rejected",
    "not_offered",
    "engine_full",
    "engine_lacks_model",
    "engine_lost",
    "engine_unreachable",
    "engine_failed",
    "stale_connection",
    "foreign_reply",
    "foreign_hand_off",
    "loop_detected",
    "engine_timeout",
    "below_threshold",
    "lease_expired",
    "decode_lost",
];
/// Why the work of an attempt is lost: why it fails, how its request ends, why nothing was handed over,
/// or that another attempt has replaced it.
pub(crate) const WASTE: &[&str] = &[
    "engine_rejected",
    "engine_full",
    "engine_lacks_model",
    "engine_lost",
    "engine_unreachable",
    "engine_failed",
    "stale_connection",
    "foreign_reply",
    "foreign_hand_off",
    "loop_detected",
    "engine_timeout",
    "below_threshold",
    "lease_expired",
    "decode_lost",
    "cancelled",
    "no_worker",
    "busy",
    "overloaded",
    "over_share",
    "not_offered",
    "reply_too_large",
    "invalid_request",
    "router_stopping",
    "internal",
    "no_hand_off",
    "prefill_ended",
    "superseded",
];
/// How prefill legs that were to read KV back ended.
pub(crate) const READ_BACKS: &[&str] =
    &["read", "not_needed", "unknown", "failed", "refused", "cancelled", "mismatch"];
/// Why pinned KV is no longer known.
pub(crate) const PIN_ENDS: &[&str] =
    &["read", "left", "expired", "unusable", "superseded", "bound", "holder", "stopped"];
/// What became of requests that release pinned KV.
pub(crate) const PIN_RELEASES: &[&str] = &["released", "failed", "left"];
/// Why a credential is refused.
pub(crate) const REFUSED_CREDENTIALS: &[&str] =
    &["missing", "unknown", "expired", "no_tenant", "wrong_use"];
/// What counts as tokens of a tenant.
pub(crate) const TOKEN_KINDS: &[&str] = &["prompt", "cached", "completion"];
/// The limits of a tenant.
pub(crate) const LIMITS: &[&str] =
    &["requests_in_flight", "requests_per_minute", "tokens_per_minute", "tokens_per_day"];
/// The work of the router for a request.
pub(crate) const STAGES: &[&str] = &["tokenize", "match", "pick"];
/// The parts of a request that engines do.
pub(crate) const ENGINE_STAGES: &[&str] =
    &["decode_try", "peer_fetch", "prefill", "first_token", "failed"];
/// The ways of a peer fetch.
pub(crate) const FETCH_WAYS: &[&str] = &["two_step", "one_shot"];
/// How peer fetches end.
pub(crate) const PEER_FETCHES: &[&str] = &[
    "fetched",
    "declined",
    "shared",
    "recomputed",
    "lost",
    "gone",
    "full",
    "unusable",
    "foreign_hand_off",
    "mismatch",
    "failed",
    "timed_out",
    "cancelled",
];
/// How prewarming of a worker ends.
pub(crate) const PREWARM_ENDS: &[&str] = &["done", "tokens", "time", "full", "stopped"];
/// How fetches of prewarming end.
pub(crate) const PREWARM_FETCHES: &[&str] = &[
    "fetched",
    "recomputed",
    "lost",
    "gone",
    "full",
    "unusable",
    "foreign_hand_off",
    "failed",
    "timed_out",
    "cancelled",
];
/// Where prompt tokens come from.
pub(crate) const TOKEN_SOURCES: &[&str] =
    &["local_cache_hit", "read_back", "fetched", "external_kv_transfer", "local_compute"];
/// The tiers of a worker's cache; `none` for tokens that were in none.
pub(crate) const TOKEN_TIERS: &[&str] = &["none", "device", "host", "disk", "remote"];
/// The tiers of a worker's cache.
pub(crate) const TIERS: &[&str] = &["device", "host", "disk", "remote"];
/// Where a figure comes from.
pub(crate) const SOURCES: &[&str] = &["engine", "estimate"];
/// The direction of an error: the router's figure was too high, or too low.
pub(crate) const DIRECTIONS: &[&str] = &["over", "under"];
/// Why blocks were no cache hits.
pub(crate) const LOSSES: &[&str] = &["cold", "evicted", "diverted", "stale", "parity"];
/// The hits, the part of them that was fetched from other workers, and the best possible hits.
pub(crate) const HITS: &[&str] = &["found", "fetched", "best"];
/// The results of the canary.
pub(crate) const PARITY: &[&str] = &["pending", "ok", "unknown", "mismatch"];
/// The causes of results of the canary.
pub(crate) const CANARY_CAUSES: &[&str] = &[
    "none",
    "template",
    "special_tokens",
    "vocabulary",
    "block_size",
    "salt",
    "adapter",
    "events_absent",
    "unknown_parent",
    "rank",
    "unmatched",
    "no_full_attention",
    "no_reply",
    "no_reply_in_time",
    "refused",
    "events_cut_off",
    "evicted",
    "over_limit",
    "context_too_short",
    "not_served_alone",
    "tokenizer_not_exact",
    "tokenizer_failed",
];
/// Where tokens of engines come from.
pub(crate) const TOKENIZED_BY: &[&str] = &["engine", "kept"];
/// The figures that engines report.
pub(crate) const FIGURES: &[&str] = &["usage", "cached_tokens"];
/// Whether an engine reported a figure.
pub(crate) const REPORTED: &[&str] = &["yes", "no"];
/// What became of a line of a file.
pub(crate) const LINES: &[&str] = &["written", "queue_full", "write_failed"];
/// What became of a span.
pub(crate) const SPANS: &[&str] = &["exported", "dropped", "failed"];
/// Whether a request had cached tokens.
pub(crate) const HIT_OR_MISS: &[&str] = &["hit", "miss"];
/// Why a decode worker computes a prompt.
pub(crate) const LOCAL_REASONS: &[&str] = &[
    "short_prompt",
    "one_token",
    "prefill_ended",
    "no_hand_off",
    "prompt_logprobs",
    "prompt_embeds",
    "engine_tools",
    "no_decode",
    "refusable",
    "no_prefill",
    "cheaper",
];
/// Who decides in decode-first; `none` if no one can tell.
pub(crate) const GATES: &[&str] = &["engine", "shim", "router", "none"];
/// The outcomes of decode-first.
pub(crate) const TRIES: &[&str] = &["served", "rejected", "skipped", "unsupported", "failed"];
/// What became of replies that lost their worker.
pub(crate) const MIGRATIONS: &[&str] = &["resumed", "lost"];
/// What became of hand-offs that no decode worker used.
pub(crate) const HAND_OFFS: &[&str] = &["fetched", "finished", "failed", "left", "stranded"];
/// Why connections of clients are closed, and HTTP/2 streams are reset.
pub(crate) const CUTS: &[&str] = &[
    "header_timeout",
    "idle",
    "write_stall",
    "write_pace",
    "framing",
    "flood",
    "connections_max",
    "connections_per_address",
    "stream_stall",
    "stream_pace",
    "tls_timeout",
    "tls_handshake",
    "tls_client_certificate",
    "plain_text",
];
/// Why requests are refused because of load: those of one model, then those of none.
pub(crate) const SHED: &[&str] = &[
    "queue_full",
    "ttft_goal",
    "max_wait",
    "in_flight_max",
    "fair_share",
    "request_memory",
    "unread_replies",
    "grpc_watches",
];
/// Why fields are removed from requests.
pub(crate) const REMOVED: &[&str] = &["router_only", "steers", "unknown"];
/// The states of workers.
pub(crate) const STATES: &[&str] =
    &["joining", "warming", "serving", "ejected", "down", "draining", "left", "stuck", "unready"];
/// Which KV blocks of a worker are counted.
pub(crate) const KV_STATES: &[&str] = &["total", "used"];
/// The results of attach calls.
pub(crate) const ATTACH: &[&str] = &[
    "attached",
    "resumed",
    "unauthenticated",
    "permission_denied",
    "not_found",
    "already_exists",
    "failed_precondition",
    "invalid_argument",
    "resource_exhausted",
    "unavailable",
    "failed",
];
/// How KV events reach the router.
pub(crate) const EVENT_ORIGINS: &[&str] = &["engine", "shim"];
/// The parts of the speculative index.
pub(crate) const SPECULATIVE: &[&str] = &["speculative", "approximate"];
/// Why a worker's part of the index is rebuilt.
pub(crate) const RESYNCS: &[&str] = &[
    "engine_restarted",
    "gap",
    "replay_too_short",
    "replay_failed",
    "unverified",
    "garbage",
    "over_limit",
    "drift",
    "block_size",
    "unclear_removal",
    "silent",
];
/// Why blocks cannot be indexed.
pub(crate) const REJECTED: &[&str] = &[
    "unknown_parent",
    "block_size",
    "over_limit",
    "replaced",
    "garbage",
    "rank",
    "unknown_event",
    "unusable_event",
];
/// The results of reading the keys of an issuer, and of reloads.
pub(crate) const REFRESHES: &[&str] = &["changed", "unchanged", "failed"];
/// The results of reloads.
pub(crate) const RELOADS: &[&str] = &["changed", "unchanged", "refused"];

/// Whether a request is refused for this reason before its model is known (`none`), or after.
pub(crate) fn shed_case(values: &[&str]) -> bool {
    let [model, reason] = values else { return false };
    let of_a_model = ["queue_full", "ttft_goal", "max_wait"].contains(reason);
    (*model != "none") == of_a_model
}

/// Whether a canary can have this cause.
pub(crate) fn canary_case(values: &[&str]) -> bool {
    let [_, result, cause] = values else { return false };
    let known = CANARY_CAUSES.iter().position(|one| one == cause);
    // The causes of a mismatch come after `none`, and those of an unknown result after these.
    match *result {
        "ok" => known == Some(0),
        "mismatch" => known.is_some_and(|at| (1..=10).contains(&at)),
        "unknown" => known.is_some_and(|at| at > 10),
        _ => false,
    }
}

/// Whether a gate can have this outcome: without a gate, no one can tell, or a try fails.
pub(crate) fn gate_case(values: &[&str]) -> bool {
    let [_, gate, outcome] = values else { return false };
    match *outcome {
        "skipped" => *gate == "router",
        "unsupported" => *gate == "none",
        "rejected" => matches!(*gate, "engine" | "shim"),
        _ => true,
    }
}

/// Whether a fetch in two steps can end like this. Series of one shot exist from their first event
/// only, because there would be too many others.
pub(crate) fn fetch_case(values: &[&str]) -> bool {
    let [_, way, outcome] = values else { return false };
    *way == "two_step" && !matches!(*outcome, "declined" | "mismatch")
}

/// Whether a worker's state can change in this way. Any state can be followed by `draining` and
/// `left`.
pub(crate) fn transition_case(values: &[&str]) -> bool {
    let [_, _, from, to] = values else { return false };
    match *from {
        "joining" => matches!(*to, "warming" | "down" | "draining" | "left"),
        "warming" => matches!(*to, "serving" | "ejected" | "down" | "draining" | "left"),
        "serving" => matches!(*to, "ejected" | "down" | "draining" | "left"),
        "ejected" => matches!(*to, "warming" | "down" | "draining" | "left"),
        "down" => matches!(*to, "warming" | "draining" | "left"),
        "draining" => matches!(*to, "joining" | "left"),
        _ => false,
    }
}

/// Whether a request that has no model yet is counted as well: always.
pub(crate) fn any_case(_: &[&str]) -> bool {
    true
}

/// Series that exist from their first event only, because there would be too many others.
pub(crate) fn on_first_event(_: &[&str]) -> bool {
    false
}

/// Whether tokens from a source are in a tier. Tiers of hits except the first exist from their first
/// hit.
pub(crate) fn tier_case(values: &[&str]) -> bool {
    let [_, leg, source, tier] = values else { return false };
    // Only prefill legs read KV from other workers.
    let is_possible = !matches!(*source, "read_back" | "fetched") || *leg == "prefill";
    is_possible && *tier == if *source == "local_cache_hit" { "device" } else { "none" }
}

/// The parts of requests exist from the start for the streams of a model; those of whole replies begin
/// with the first one, since many models have none.
pub(crate) fn streams_case(values: &[&str]) -> bool {
    let [model, .., stream] = values else { return false };
    *model != "none" && *stream == "true"
}
