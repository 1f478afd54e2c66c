//! A healthy router in numbers, and for each alert what must change so that it fires.

/// Series of a healthy router over 90 minutes, one value a minute, in the notation of `promtool`.
pub(crate) const HEALTHY: &[(&str, &str)] = &[
    ("up{job=\"splitrail\",instance=\"r1\"}", "1+0x90"),
    ("splitrail_request_results_total{model=\"m\",result=\"ok\"}", "0+120x90"),
    ("splitrail_request_results_total{model=\"m\",result=\"failed\"}", "0+0x90"),
    ("splitrail_request_results_total{model=\"m\",result=\"shed\"}", "0+0x90"),
    ("splitrail_request_results_total{model=\"m\",result=\"invalid\"}", "0+60x90"),
    ("splitrail_request_results_total{model=\"none\",result=\"invalid\"}", "0+60x90"),
    ("splitrail_request_results_total{model=\"none\",result=\"failed\"}", "0+0x90"),
    ("splitrail_request_results_total{model=\"none\",result=\"shed\"}", "0+0x90"),
    ("splitrail_ttft_seconds_bucket{model=\"m\",flow=\"prefill_first\",le=\"2.0\"}", "0+59x90"),
    ("splitrail_ttft_seconds_count{model=\"m\",flow=\"prefill_first\"}", "0+60x90"),
    ("splitrail_config_last_reload_successful{instance=\"r1\"}", "1+0x90"),
    ("splitrail_config_hash{job=\"splitrail\",instance=\"r1\"}", "7+0x90"),
    ("splitrail_config_hash{job=\"splitrail\",instance=\"r2\"}", "7+0x90"),
    ("splitrail_certificate_expires_timestamp_seconds{listener=\"http\"}", "7776000+0x90"),
    ("splitrail_certificate_expires_timestamp_seconds{listener=\"grpc\"}", "0+0x90"),
    ("splitrail_ledger_records_total{result=\"written\"}", "0+60x90"),
    ("splitrail_ledger_records_total{result=\"write_failed\"}", "5+0x90"),
    ("splitrail_record_lines_total{result=\"queue_full\"}", "5+0x90"),
    ("splitrail_audit_records_total{result=\"queue_full\"}", "0+0x90"),
    ("splitrail_access_log_lines_total{result=\"queue_full\"}", "2+0x90"),
    ("splitrail_log_lines_dropped_total", "2+0x90"),
    ("splitrail_spans_total{result=\"exported\"}", "0+600x90"),
    ("splitrail_spans_total{result=\"dropped\"}", "2+0x90"),
    ("splitrail_key_file_current{file=\"f\"}", "1+0x90"),
    ("splitrail_jwks_refreshes_total{issuer=\"i\",result=\"failed\"}", "1+0x90"),
    ("splitrail_jwks_keys{issuer=\"i\"}", "2+0x90"),
    ("splitrail_runtime_lag_seconds_bucket{instance=\"r1\",le=\"0.005\"}", "0+600x90"),
    ("splitrail_runtime_lag_seconds_bucket{instance=\"r1\",le=\"0.1\"}", "0+600x90"),
    ("splitrail_runtime_lag_seconds_bucket{instance=\"r1\",le=\"+Inf\"}", "0+600x90"),
    ("process_open_fds{job=\"splitrail\",instance=\"r1\"}", "100+0x90"),
    ("process_max_fds{job=\"splitrail\",instance=\"r1\"}", "1024+0x90"),
    ("splitrail_shed_total{instance=\"r1\",model=\"m\",reason=\"queue_full\"}", "9+0x90"),
    ("splitrail_queue_depth{model=\"m\"}", "2+0x90"),
    ("splitrail_queue_max_waiting{model=\"m\"}", "100+0x90"),
    ("splitrail_places_in_use{instance=\"r1\"}", "42+0x90"),
    ("splitrail_requests_in_flight_max{instance=\"r1\"}", "100+0x90"),
    ("splitrail_request_memory_bytes", "1000+0x90"),
    ("splitrail_request_memory_max_bytes", "1000000+0x90"),
    (
        "splitrail_worker_kv_blocks{model=\"m\",worker=\"d0\",role=\"decode\",state=\"used\"}",
        "50+0x90",
    ),
    (
        "splitrail_worker_kv_blocks{model=\"m\",worker=\"d0\",role=\"decode\",state=\"total\"}",
        "100+0x90",
    ),
    ("splitrail_tenant_limit_refusals_total{tenant=\"t\",limit=\"tokens_per_minute\"}", "4+0x90"),
    ("splitrail_tenant_limit_used_ratio{tenant=\"t\",limit=\"tokens_per_day\"}", "0.5+0x90"),
    ("splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"prefill\"}", "1+0x90"),
    ("splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"decode\"}", "2+0x90"),
    ("splitrail_available_workers{instance=\"r2\",model=\"m\",leg=\"decode\"}", "2+0x90"),
    ("splitrail_available_workers{instance=\"r1\",model=\"n\",leg=\"decode\"}", "1+0x90"),
    (
        "splitrail_worker_transfer_group{instance=\"r1\",model=\"m\",worker=\"g0\",group=\"old\"}",
        "1+0x90",
    ),
    (
        "splitrail_worker_transfer_group{instance=\"r1\",model=\"m\",worker=\"g1\",group=\"new\"}",
        "1+0x90",
    ),
    (
        "splitrail_worker_leg_seconds_sum{instance=\"r1\",model=\"m\",worker=\"g0\",leg=\"prefill\"}",
        "0+6x90",
    ),
    (
        "splitrail_worker_leg_seconds_sum{instance=\"r1\",model=\"m\",worker=\"g1\",leg=\"prefill\"}",
        "0+7x90",
    ),
    (
        "splitrail_worker_leg_seconds_count{instance=\"r1\",model=\"m\",worker=\"g0\",leg=\"prefill\"}",
        "0+60x90",
    ),
    (
        "splitrail_worker_leg_seconds_count{instance=\"r1\",model=\"m\",worker=\"g1\",leg=\"prefill\"}",
        "0+60x90",
    ),
    ("splitrail_worker_up{model=\"m\",worker=\"p0\",role=\"prefill\"}", "1+0x90"),
    ("splitrail_worker_up{model=\"m\",worker=\"d0\",role=\"decode\"}", "1+0x90"),
    ("splitrail_worker_up{model=\"m\",worker=\"d1\",role=\"decode\"}", "1+0x90"),
    ("splitrail_worker_up{model=\"n\",worker=\"w0\",role=\"both\"}", "1+0x90"),
    ("splitrail_worker_up{instance=\"r1\",model=\"n\",worker=\"w1\",role=\"both\"}", "1+0x90"),
    ("splitrail_worker_up{instance=\"r1\",model=\"n\",worker=\"w2\",role=\"both\"}", "1+0x90"),
    ("splitrail_worker_state{model=\"m\",worker=\"p0\",state=\"ejected\"}", "0+0x90"),
    ("splitrail_worker_state{model=\"m\",worker=\"p0\",state=\"draining\"}", "0+0x90"),
    ("splitrail_worker_state{model=\"m\",worker=\"d1\",state=\"stuck\"}", "0+0x90"),
    ("splitrail_worker_slowdown_ratio{model=\"m\",worker=\"p0\",leg=\"prefill\"}", "1+0x90"),
    (
        "splitrail_worker_transitions_total{model=\"m\",worker=\"p0\",from=\"serving\",to=\"ejected\"}",
        "1+0x90",
    ),
    (
        "splitrail_worker_breaker_open{model=\"m\",worker=\"d0\",role=\"decode\",leg=\"decode\"}",
        "0+0x90",
    ),
    ("splitrail_retries_refused_total{model=\"m\",leg=\"decode\"}", "4+0x90"),
    ("splitrail_foreign_replies_total{model=\"m\",worker=\"d0\"}", "0+0x90"),
    ("splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_prefill\"}", "8+0x90"),
    ("splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_decode\"}", "8+0x90"),
    ("splitrail_local_prefills_total{model=\"m\",reason=\"no_hand_off\"}", "8+0x90"),
    ("splitrail_local_prefills_total{model=\"m\",reason=\"short_prompt\"}", "0+60x90"),
    ("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"left\"}", "2+0x90"),
    ("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"fetched\"}", "0+1x90"),
    ("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"stranded\"}", "2+0x90"),
    ("splitrail_discovery_successful{model=\"m\",source=\"s\"}", "1+0x90"),
    ("splitrail_discovery_errors_total{model=\"m\",source=\"s\"}", "3+0x90"),
    ("splitrail_attach_calls_total{instance=\"r1\",result=\"unauthenticated\"}", ONCE),
    ("splitrail_attach_calls_total{instance=\"r1\",result=\"unavailable\"}", "0+2x90"),
    ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "1+0x90"),
    ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"mismatch\"}", "0+0x90"),
    ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", "0+0x90"),
    ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"unknown\"}", "0+0x90"),
    ("splitrail_canaries_total{model=\"m\",result=\"unknown\",cause=\"no_reply\"}", "3+0x90"),
    // Model n has no canaries.
    ("splitrail_worker_parity{model=\"n\",worker=\"w0\",result=\"unknown\"}", "1+0x90"),
    ("splitrail_prompt_length_mismatches_total{model=\"m\"}", "2+0x90"),
    ("splitrail_index_events_current{model=\"m\",worker=\"p0\",origin=\"engine\"}", "1+0x90"),
    ("splitrail_index_event_lag_seconds_bucket{model=\"m\",worker=\"p0\",le=\"1.0\"}", "0+60x90"),
    ("splitrail_index_event_lag_seconds_bucket{model=\"m\",worker=\"p0\",le=\"10.0\"}", "0+60x90"),
    ("splitrail_index_event_lag_seconds_bucket{model=\"m\",worker=\"p0\",le=\"+Inf\"}", "0+60x90"),
    ("splitrail_index_truncated{model=\"m\",worker=\"p0\"}", "0+0x90"),
    ("splitrail_index_rejected_total{model=\"m\",worker=\"p0\",reason=\"garbage\"}", "1+0x90"),
    ("splitrail_index_rejected_total{model=\"m\",worker=\"p0\",reason=\"replaced\"}", "0+1x90"),
    ("splitrail_worker_overlap_discount_ratio{model=\"m\",worker=\"p0\"}", "0.05+0x90"),
    ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "1+0x90"),
    (
        "splitrail_engine_reports_total{model=\"m\",worker=\"p0\",figure=\"cached_tokens\",reported=\"yes\"}",
        "0+60x90",
    ),
    (
        "splitrail_engine_reports_total{model=\"m\",worker=\"p0\",figure=\"cached_tokens\",reported=\"no\"}",
        "9+0x90",
    ),
    ("splitrail_broker_connected{instance=\"r1\"}", "1+0x90"),
    ("splitrail_read_backs_total{model=\"m\",outcome=\"read\"}", "0+60x90"),
    ("splitrail_read_backs_total{model=\"m\",outcome=\"mismatch\"}", "0+0x90"),
    ("splitrail_peer_fetches_total{model=\"m\",way=\"one_shot\",outcome=\"fetched\"}", "0+60x90"),
    ("splitrail_peer_fetches_total{model=\"m\",way=\"one_shot\",outcome=\"mismatch\"}", "0+0x90"),
];

/// A gauge that is 1 for five minutes, 0 for the next one, and so on.
const WITH_GAPS: &str = "1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 \
                         1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0 1+0x4 0";

/// A gauge that changes between 1 and 0 each minute.
const UP_AND_DOWN: &str = "1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 \
                           1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0";

/// A counter that grows each ten minutes.
const EVERY_TEN_MINUTES: &str = "0+0x9 1+0x9 2+0x9 3+0x9 4+0x9 5+0x9 6+0x9 7+0x9 8+0x9";

/// An event in the 50th minute of a counter.
const ONCE: &str = "0+0x49 1+0x40";

/// What must change so that an alert fires. Alerts in `also` fire for the same fault.
pub(crate) struct Case {
    pub(crate) alert: &'static str,
    pub(crate) also: &'static [&'static str],
    pub(crate) changes: &'static [(&'static str, &'static str)],
}

const fn case(alert: &'static str, changes: &'static [(&'static str, &'static str)]) -> Case {
    Case { alert, also: &[], changes }
}

/// At least one case for each alert.
pub(crate) const CASES: &[Case] = &[
    Case {
        alert: "SplitrailErrorBudgetBurnsFast",
        also: &["SplitrailErrorBudgetBurnsSlowly"],
        changes: &[("splitrail_request_results_total{model=\"m\",result=\"failed\"}", "0+60x90")],
    },
    // The router is full, and does not read what most requests want.
    Case {
        alert: "SplitrailErrorBudgetBurnsFast",
        also: &["SplitrailErrorBudgetBurnsSlowly"],
        changes: &[("splitrail_request_results_total{model=\"none\",result=\"shed\"}", "0+180x90")],
    },
    // A defect of the router, before the model is known.
    case(
        "SplitrailErrorBudgetBurnsSlowly",
        &[("splitrail_request_results_total{model=\"none\",result=\"failed\"}", "0+1x90")],
    ),
    case(
        "SplitrailErrorBudgetBurnsSlowly",
        &[("splitrail_request_results_total{model=\"m\",result=\"shed\"}", "0+1x90")],
    ),
    Case {
        alert: "SplitrailTtftBudgetBurnsFast",
        also: &["SplitrailTtftBudgetBurnsSlowly"],
        changes: &[(
            "splitrail_ttft_seconds_bucket{model=\"m\",flow=\"prefill_first\",le=\"2.0\"}",
            "0+6x90",
        )],
    },
    case(
        "SplitrailTtftBudgetBurnsSlowly",
        &[(
            "splitrail_ttft_seconds_bucket{model=\"m\",flow=\"prefill_first\",le=\"2.0\"}",
            "0+30x90",
        )],
    ),
    case("SplitrailDown", &[("up{job=\"splitrail\",instance=\"r1\"}", "1+0x49 0+0x40")]),
    // Discovery has lost it.
    case("SplitrailDown", &[("up{job=\"splitrail\",instance=\"r1\"}", "1+0x30 stale")]),
    // Hours ago; nobody has corrected the file since.
    case(
        "SplitrailReloadRefused",
        &[("splitrail_config_last_reload_successful{instance=\"r1\"}", "0+0x90")],
    ),
    case(
        "SplitrailReplicasDiffer",
        &[("splitrail_config_hash{job=\"splitrail\",instance=\"r2\"}", "8+0x90")],
    ),
    case(
        "SplitrailCertificateExpires",
        &[("splitrail_certificate_expires_timestamp_seconds{listener=\"http\"}", "259200+0x90")],
    ),
    case(
        "SplitrailLedgerNotWritten",
        &[("splitrail_ledger_records_total{result=\"write_failed\"}", ONCE)],
    ),
    case(
        "SplitrailRecordsNotWritten",
        &[("splitrail_record_lines_total{result=\"queue_full\"}", ONCE)],
    ),
    case(
        "SplitrailRecordsNotWritten",
        &[("splitrail_audit_records_total{result=\"queue_full\"}", ONCE)],
    ),
    case(
        "SplitrailRecordsNotWritten",
        &[("splitrail_access_log_lines_total{result=\"queue_full\"}", ONCE)],
    ),
    case("SplitrailLogLinesDropped", &[("splitrail_log_lines_dropped_total", ONCE)]),
    case("SplitrailSpansLost", &[("splitrail_spans_total{result=\"dropped\"}", "0+1x90")]),
    case("SplitrailKeyFileUnusable", &[("splitrail_key_file_current{file=\"f\"}", "0+0x90")]),
    case(
        "SplitrailIssuerKeysUnreadable",
        &[("splitrail_jwks_refreshes_total{issuer=\"i\",result=\"failed\"}", "0+1x90")],
    ),
    // They have never been read since the router started.
    Case {
        alert: "SplitrailIssuerWithoutKeys",
        also: &["SplitrailIssuerKeysUnreadable"],
        changes: &[
            ("splitrail_jwks_keys{issuer=\"i\"}", "0+0x90"),
            ("splitrail_jwks_refreshes_total{issuer=\"i\",result=\"failed\"}", "0+1x90"),
        ],
    },
    case(
        "SplitrailRuntimeLags",
        &[("splitrail_runtime_lag_seconds_bucket{instance=\"r1\",le=\"0.005\"}", "0+0x90")],
    ),
    case(
        "SplitrailOpenFilesRunOut",
        &[("process_open_fds{job=\"splitrail\",instance=\"r1\"}", "1000+0x90")],
    ),
    case(
        "SplitrailRequestsShed",
        &[("splitrail_shed_total{instance=\"r1\",model=\"m\",reason=\"queue_full\"}", "0+1x90")],
    ),
    case("SplitrailQueueSaturated", &[("splitrail_queue_depth{model=\"m\"}", "90+0x90")]),
    case("SplitrailInFlightSaturated", &[("splitrail_places_in_use{instance=\"r1\"}", "94+0x90")]),
    case("SplitrailRequestMemorySaturated", &[("splitrail_request_memory_bytes", "950000+0x90")]),
    case(
        "SplitrailKvCacheFull",
        &[(
            "splitrail_worker_kv_blocks{model=\"m\",worker=\"d0\",role=\"decode\",state=\"used\"}",
            "99+0x90",
        )],
    ),
    case(
        "SplitrailTenantOverQuota",
        &[(
            "splitrail_tenant_limit_refusals_total{tenant=\"t\",limit=\"tokens_per_minute\"}",
            "0+1x90",
        )],
    ),
    case(
        "SplitrailTenantNearDailyQuota",
        &[(
            "splitrail_tenant_limit_used_ratio{tenant=\"t\",limit=\"tokens_per_day\"}",
            "0.95+0x90",
        )],
    ),
    // No worker is down: they are ejected or have left.
    case(
        "SplitrailNoPrefillWorker",
        &[("splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"prefill\"}", "0+0x90")],
    ),
    // The decode workers compute prompts because there is none.
    case(
        "SplitrailNoPrefillWorker",
        &[
            ("splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"prefill\"}", "0+0x90"),
            (
                "splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_prefill\"}",
                "0+1x90",
            ),
        ],
    ),
    case(
        "SplitrailPrefillFallbacks",
        &[(
            "splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_prefill\"}",
            "0+1x90",
        )],
    ),
    // The workers have left, and their series with them. Another router still has its workers.
    case(
        "SplitrailNoDecodeWorker",
        &[
            ("splitrail_worker_up{model=\"m\",worker=\"d0\",role=\"decode\"}", "1+0x30 stale"),
            ("splitrail_worker_up{model=\"m\",worker=\"d1\",role=\"decode\"}", "1+0x30 stale"),
            (
                "splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"decode\"}",
                "2+0x30 0+0x60",
            ),
        ],
    ),
    // Decode workers that are only drained are used all the same, and compute prompts.
    case(
        "SplitrailNoDecodeWorker",
        &[
            ("splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"decode\"}", "0+0x90"),
            (
                "splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_decode\"}",
                "0+60x90",
            ),
        ],
    ),
    case(
        "SplitrailWorkerDown",
        &[("splitrail_worker_up{model=\"m\",worker=\"d1\",role=\"decode\"}", "0+0x90")],
    ),
    case(
        "SplitrailWorkerDown",
        &[("splitrail_worker_state{model=\"m\",worker=\"d1\",state=\"stuck\"}", "1+0x90")],
    ),
    case(
        "SplitrailWorkerSlow",
        &[("splitrail_worker_slowdown_ratio{model=\"m\",worker=\"p0\",leg=\"prefill\"}", "4+0x90")],
    ),
    case(
        "SplitrailTransferGroupSlow",
        &[(
            "splitrail_worker_leg_seconds_sum{instance=\"r1\",model=\"m\",worker=\"g1\",leg=\"prefill\"}",
            "0+12x90",
        )],
    ),
    // A worker that is down takes no part in KV routing until its next canary.
    case(
        "SplitrailWorkerDown",
        &[
            ("splitrail_worker_up{model=\"m\",worker=\"p0\",role=\"prefill\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", "1+0x90"),
            ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "0+0x90"),
        ],
    ),
    // Each ejection ends after some minutes, and the next one begins a minute later.
    case(
        "SplitrailWorkerEjected",
        &[("splitrail_worker_state{model=\"m\",worker=\"p0\",state=\"ejected\"}", WITH_GAPS)],
    ),
    // Ejections of half a minute lie between two scrapes.
    case(
        "SplitrailWorkerEjected",
        &[(
            "splitrail_worker_transitions_total{model=\"m\",worker=\"p0\",from=\"serving\",to=\"ejected\"}",
            "0+0x39 1+0x7 2+0x7 3+0x33",
        )],
    ),
    case(
        "SplitrailBreakerOpen",
        &[(
            "splitrail_worker_breaker_open{model=\"m\",worker=\"d0\",role=\"decode\",leg=\"decode\"}",
            "1+0x90",
        )],
    ),
    case(
        "SplitrailRetriesRefused",
        &[("splitrail_retries_refused_total{model=\"m\",leg=\"decode\"}", "0+1x90")],
    ),
    case(
        "SplitrailForeignReplies",
        &[("splitrail_foreign_replies_total{model=\"m\",worker=\"d0\"}", ONCE)],
    ),
    case(
        "SplitrailDecodeWithoutHandOff",
        &[("splitrail_local_prefills_total{model=\"m\",reason=\"no_hand_off\"}", "0+6x90")],
    ),
    case(
        "SplitrailHandOffsUnused",
        &[("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"left\"}", "0+1x90")],
    ),
    case(
        "SplitrailDecodeLegsStranded",
        &[("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"stranded\"}", ONCE)],
    ),
    case(
        "SplitrailDiscoveryFails",
        &[
            ("splitrail_discovery_successful{model=\"m\",source=\"s\"}", "0+0x90"),
            ("splitrail_discovery_errors_total{model=\"m\",source=\"s\"}", "0+1x90"),
        ],
    ),
    case(
        "SplitrailShimsRefused",
        &[("splitrail_attach_calls_total{instance=\"r1\",result=\"unauthenticated\"}", "0+2x90")],
    ),
    case(
        "SplitrailParityMismatch",
        &[
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"mismatch\"}", "1+0x90"),
            ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "0+0x90"),
        ],
    ),
    case(
        "SplitrailParityPending",
        &[
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", "1+0x90"),
            ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "0+0x90"),
        ],
    ),
    // Its URL leads to two engines: each probe seems to find another process.
    case(
        "SplitrailParityPending",
        &[("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", UP_AND_DOWN)],
    ),
    // The engine ends again and again before its canary does.
    case(
        "SplitrailParityPending",
        &[
            ("splitrail_worker_up{model=\"m\",worker=\"p0\",role=\"prefill\"}", UP_AND_DOWN),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", "1+0x90"),
            ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "0+0x90"),
        ],
    ),
    case(
        "SplitrailParityUnknown",
        &[
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "0+0x90"),
            ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"unknown\"}", "1+0x90"),
            (
                "splitrail_canaries_total{model=\"m\",result=\"unknown\",cause=\"no_reply\"}",
                EVERY_TEN_MINUTES,
            ),
        ],
    ),
    case(
        "SplitrailKvOfOtherTokens",
        &[
            ("splitrail_read_backs_total{model=\"m\",outcome=\"mismatch\"}", ONCE),
            // The worker is in quarantine.
            (
                "splitrail_worker_state{model=\"m\",worker=\"p0\",state=\"draining\"}",
                "0+0x49 1+0x40",
            ),
            ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "1+0x49 0+0x40"),
        ],
    ),
    case(
        "SplitrailKvOfOtherTokens",
        &[(
            "splitrail_peer_fetches_total{model=\"m\",way=\"one_shot\",outcome=\"mismatch\"}",
            ONCE,
        )],
    ),
    case(
        "SplitrailPromptLengthMismatch",
        &[("splitrail_prompt_length_mismatches_total{model=\"m\"}", ONCE)],
    ),
    case(
        "SplitrailIndexEventsCutOff",
        &[(
            "splitrail_index_events_current{model=\"m\",worker=\"p0\",origin=\"engine\"}",
            "0+0x90",
        )],
    ),
    case(
        "SplitrailIndexStale",
        &[(
            "splitrail_index_event_lag_seconds_bucket{model=\"m\",worker=\"p0\",le=\"1.0\"}",
            "0+0x90",
        )],
    ),
    case(
        "SplitrailIndexTruncated",
        &[("splitrail_index_truncated{model=\"m\",worker=\"p0\"}", "1+0x90")],
    ),
    case(
        "SplitrailIndexRejectsBlocks",
        &[(
            "splitrail_index_rejected_total{model=\"m\",worker=\"p0\",reason=\"garbage\"}",
            "0+1x90",
        )],
    ),
    case(
        "SplitrailIndexDrifts",
        &[("splitrail_worker_overlap_discount_ratio{model=\"m\",worker=\"p0\"}", "0.5+0x90")],
    ),
    // Every five minutes, the worker's part of the index is built anew.
    case(
        "SplitrailIndexDrifts",
        &[("splitrail_worker_overlap_discount_ratio{model=\"m\",worker=\"p0\"}", WITH_GAPS)],
    ),
    case(
        "SplitrailIndexDrifts",
        &[("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "0+0x90")],
    ),
    case(
        "SplitrailCachedTokensNotReported",
        &[(
            "splitrail_engine_reports_total{model=\"m\",worker=\"p0\",figure=\"cached_tokens\",reported=\"no\"}",
            "0+600x90",
        )],
    ),
    case(
        "SplitrailBrokerDisconnected",
        &[("splitrail_broker_connected{instance=\"r1\"}", "0+0x90")],
    ),
];

/// Changes for which no alert fires.
pub(crate) const QUIET: &[&[(&str, &str)]] = &[
    // A worker that is not tested yet since it joined or came back.
    &[
        ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"ok\"}", "1+0x48 0+0x40"),
        ("splitrail_worker_parity{model=\"m\",worker=\"p0\",result=\"pending\"}", "0+0x48 1+0x40"),
        ("splitrail_worker_kv_routing_enabled{model=\"m\",worker=\"p0\"}", "1+0x48 0+0x40"),
    ],
    // All decode workers were away for half an hour, and came back minutes ago.
    &[
        (
            "splitrail_available_workers{instance=\"r1\",model=\"m\",leg=\"decode\"}",
            "2+0x20 0+0x33 2+0x40",
        ),
        (
            "splitrail_local_prefills_total{instance=\"r1\",model=\"m\",reason=\"no_decode\"}",
            "0+0x20 0+60x33 2040+0x40",
        ),
    ],
    // Faults that lasted three minutes and are over.
    &[
        ("splitrail_spans_total{result=\"dropped\"}", "0+0x44 1 2 3+0x42"),
        ("splitrail_jwks_refreshes_total{issuer=\"i\",result=\"failed\"}", "0+0x44 1 2 3+0x42"),
        (
            "splitrail_local_prefills_total{model=\"m\",reason=\"no_hand_off\"}",
            "0+0x49 30 60 90+0x37",
        ),
        ("splitrail_unused_hand_offs_total{model=\"m\",outcome=\"left\"}", "0+0x49 1 2 3+0x37"),
        (
            "splitrail_index_event_lag_seconds_bucket{model=\"m\",worker=\"p0\",le=\"1.0\"}",
            "0+60x49 2940+0x2 3000+60x37",
        ),
        (
            "splitrail_index_rejected_total{model=\"m\",worker=\"p0\",reason=\"garbage\"}",
            "0+0x49 1 2 3+0x37",
        ),
        (
            "splitrail_runtime_lag_seconds_bucket{instance=\"r1\",le=\"0.005\"}",
            "0+600x54 32400+0x2 33000+600x32",
        ),
        (
            "splitrail_shed_total{instance=\"r1\",model=\"m\",reason=\"queue_full\"}",
            "0+0x54 1 2 3+0x32",
        ),
        ("splitrail_retries_refused_total{model=\"m\",leg=\"decode\"}", "0+0x54 1 2 3+0x32"),
    ],
];
