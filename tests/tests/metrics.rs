//! The names, types and labels of metrics, which dashboards depend on.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Spec};

const CHAT: &str = "/v1/chat/completions";

fn chat(name: &str) -> Value {
    let text: String = (0..40).map(|i| format!("{name}{i} ")).collect();
    json!({"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": text}]})
}

fn with(mut body: Value, key: &str, value: impl Into<Value>) -> Value {
    body[key] = value.into();
    body
}

/// Names, types and labels that dashboards depend on, of what this version has.
const METRICS: [(&str, &str, &[&str]); 33] = [
    ("requests_total", "counter", &["model", "endpoint", "flow", "outcome"]),
    ("requests_in_flight", "gauge", &["model"]),
    ("ttft_seconds", "histogram", &["model", "flow"]),
    ("inter_token_seconds", "histogram", &["model", "flow"]),
    ("request_seconds", "histogram", &["model", "flow"]),
    ("stage_seconds", "histogram", &["model", "stage"]),
    ("prompt_tokens_total", "counter", &["model", "leg", "source", "tier"]),
    ("generation_tokens_total", "counter", &["model"]),
    ("wasted_prompt_tokens_total", "counter", &["model", "reason"]),
    ("cached_tokens_total", "counter", &["model", "source"]),
    ("cached_tokens_error_blocks", "histogram", &["model", "direction"]),
    ("overlap_blocks", "histogram", &["model", "role"]),
    ("overlap_blocks_lost_total", "counter", &["model"]),
    ("prefix_cache_requests_total", "counter", &["model", "result"]),
    ("local_prefills_total", "counter", &["model", "reason"]),
    ("retries_total", "counter", &["model", "leg", "reason"]),
    ("shed_total", "counter", &["model", "reason"]),
    ("removed_fields_total", "counter", &["model", "reason"]),
    ("worker_up", "gauge", &["model", "worker", "role"]),
    ("worker_state", "gauge", &["model", "worker", "state"]),
    ("worker_transitions_total", "counter", &["model", "worker", "from", "to"]),
    ("worker_requests", "gauge", &["model", "worker", "role"]),
    ("worker_prefill_tokens", "gauge", &["model", "worker", "role"]),
    ("worker_parity", "gauge", &["model", "worker", "result"]),
    ("worker_kv_routing_enabled", "gauge", &["model", "worker"]),
    ("worker_overlap_discount_ratio", "gauge", &["model", "worker"]),
    ("worker_kv_blocks", "gauge", &["model", "worker", "role", "state"]),
    ("index_blocks", "gauge", &["model", "worker", "tier"]),
    ("index_events_total", "counter", &["model", "worker"]),
    ("index_gaps_total", "counter", &["model", "worker"]),
    ("index_resyncs_total", "counter", &["model", "worker", "reason"]),
    ("index_event_lag_seconds", "histogram", &["model", "worker"]),
    ("build_info", "gauge", &["version"]),
];

/// The labels of a sample line.
fn labels(line: &str) -> Vec<(String, String)> {
    let Some((_, rest)) = line.split_once('{') else {
        return Vec::new();
    };
    let inside = rest.rsplit_once('}').unwrap().0;
    inside
        .split("\",")
        .map(|pair| {
            let (name, value) = pair.split_once("=\"").unwrap();
            (name.to_owned(), value.trim_end_matches('"').to_owned())
        })
        .filter(|(name, _)| name != "le")
        .collect()
}

/// Makes a cluster do everything that has a metric.
async fn exercise(cluster: &Cluster) {
    let first = chat("m");
    let forged = with(first.clone(), "kv_transfer_params", json!({"do_remote_prefill": true}));
    assert_eq!(cluster.http.post(CHAT, &forged).await.status, 200);
    let streamed = with(first.clone(), "stream", true);
    cluster.http.stream(CHAT, &streamed).await.chunks().await;
    cluster.http.post(CHAT, &with(first.clone(), "max_tokens", 1)).await;
    // A decode leg that fails wastes its prefill and is retried.
    cluster
        .engine("d0")
        .set_fault(Fault { kind: FaultKind::Status { status: 503 }, times: Some(1) });
    // A lost batch is a gap where there is no replay.
    cluster.engine("p0").set_fault(Fault { kind: FaultKind::DropEventBatches, times: Some(1) });
    let mut number = 0;
    eventually("a retry and a gap are counted", async || {
        number += 1;
        cluster.http.post(CHAT, &chat(&format!("m{number}-"))).await;
        cluster.metric("splitrail_retries_total", &[]).await > 0.0
            && cluster.metric("splitrail_index_gaps_total", &[]).await > 0.0
    })
    .await;
    // While one request hangs, there is no room for another.
    for engine in ["p0", "p1"] {
        cluster.engine(engine).set_fault(Fault { kind: FaultKind::Hang, times: None });
    }
    let hanging = cluster.http.post(CHAT, &first);
    let shed = eventually("a request is shed", async || {
        cluster.http.post(CHAT, &with(first.clone(), "model", "nope")).await.status == 503
    });
    tokio::select! {
        reply = hanging => panic!("{}", reply.text()),
        () = shed => {}
    }
    eventually("the workers' own figures are there", async || {
        cluster.metric("splitrail_worker_kv_blocks", &[]).await > 0.0
    })
    .await;
}

#[tokio::test]
async fn metrics_have_the_names_types_and_labels_that_dashboards_depend_on() {
    let cluster = Cluster::start(Spec {
        policy: "{ kind: round_robin }",
        limits: "{ in_flight_max: 1, drain_delay: 10ms, drain_grace: 5s }",
        engine: |_, config: &mut SimConfig| config.kv_replay_port = None,
        ..Spec::default()
    })
    .await;
    exercise(&cluster).await;
    let text = cluster.admin.get("/metrics").await.text();
    for (name, kind, expected) in METRICS {
        let name = format!("splitrail_{name}");
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} {kind}");
        assert!(text.contains(&format!("# HELP {name} ")), "{name}");
        let samples = text.lines().filter(|line| {
            let rest = line.strip_prefix(&name).unwrap_or("-");
            let rest = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|suffix| rest.strip_prefix(suffix))
                .unwrap_or(rest);
            rest.starts_with(['{', ' '])
        });
        let mut seen = 0;
        for sample in samples {
            let names: BTreeSet<_> = labels(sample).into_iter().map(|(name, _)| name).collect();
            let expected = expected.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(names, expected, "{sample}");
            seen += 1;
        }
        assert!(seen > 0, "{name} has no sample");
    }
    check_values(&text);
}

/// The table of docs/metrics.md is that of the code, which a test of the crate `telemetry` checks.
#[test]
fn counters_alone_end_in_total_and_units_are_base_units() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let document = std::fs::read_to_string(path).unwrap();
    let rows: Vec<Vec<&str>> = document
        .lines()
        .filter(|line| line.starts_with("| `splitrail_"))
        .map(|line| line.split('|').map(str::trim).collect())
        .filter(|cells: &Vec<&str>| ["counter", "gauge", "histogram"].contains(&cells[2]))
        .collect();
    assert!(rows.len() > 50, "the table was not found");
    for row in rows {
        let (name, kind) = (row[1].trim_matches('`'), row[2]);
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        for unit in ["_ms", "_milliseconds", "_us", "_percent", "_kb", "_mb"] {
            assert!(!name.trim_end_matches("_total").ends_with(unit), "{name}");
        }
    }
}

/// Labels have the values that the contract lists.
fn check_values(text: &str) {
    let listed: [(&str, &[&str]); 8] = [
        ("model", &["sim", "none"]),
        ("flow", &["aggregated", "prefill_first", "none"]),
        ("endpoint", &["chat", "completions", "none"]),
        ("leg", &["prefill", "decode"]),
        ("direction", &["over", "under"]),
        ("result", &["hit", "miss", "pending", "ok", "unknown", "mismatch"]),
        (
            "state",
            &[
                "used", "total", "joining", "warming", "serving", "ejected", "down", "draining",
                "left",
            ],
        ),
        (
            "stage",
            &[
                "admit",
                "tokenize",
                "match",
                "pick",
                "decode_try",
                "prefill",
                "handoff",
                "first_token",
            ],
        ),
    ];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.starts_with("splitrail_"), "{line}");
        for (name, value) in labels(line) {
            if value == "tokenizer" {
                // What needs no model has a breaker, and nothing else of a leg.
                assert!(line.starts_with("splitrail_worker_breaker_open"), "{line}");
                continue;
            }
            let Some((_, values)) = listed.iter().find(|(known, _)| *known == name) else {
                continue;
            };
            assert!(values.contains(&value.as_str()), "{line}");
        }
    }
}
