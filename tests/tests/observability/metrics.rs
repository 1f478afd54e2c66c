//! The names, types and labels of metrics, which dashboards depend on.

use std::collections::BTreeSet;
use std::time::Instant;

use serde_json::{Value, json};
use splitrail_fleet::parity::{Cause, Parity, UnclearReason};
use splitrail_fleet::state::WorkerState;
use splitrail_flow::decide::plan::LocalReason;
use splitrail_kv::Tier;
use splitrail_policy::Leg;
use splitrail_sim::{Fault, FaultKind, SimConfig};
use splitrail_telemetry::Metrics;
use splitrail_telemetry::metrics::Definition;
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
const METRICS: [(&str, &str, &[&str]); 43] = [
    ("requests_total", "counter", &["model", "endpoint", "flow", "outcome"]),
    ("requests_in_flight", "gauge", &["model"]),
    ("ttft_seconds", "histogram", &["model", "flow"]),
    ("inter_token_seconds", "histogram", &["model", "flow"]),
    ("request_seconds", "histogram", &["model", "flow", "stream"]),
    ("request_results_total", "counter", &["model", "result"]),
    ("time_per_output_token_seconds", "histogram", &["model"]),
    ("stage_seconds", "histogram", &["model", "stage"]),
    ("engine_stage_seconds", "histogram", &["model", "stage", "stream"]),
    ("hand_off_seconds", "histogram", &["model"]),
    ("request_prompt_tokens", "histogram", &["model"]),
    ("request_output_tokens", "histogram", &["model"]),
    ("request_cached_tokens", "histogram", &["model"]),
    ("worker_leg_seconds", "histogram", &["model", "worker", "leg"]),
    ("worker_leg_failures_total", "counter", &["model", "worker", "leg", "reason"]),
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
    ("available_workers", "gauge", &["model", "leg"]),
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

/// Labels have values that the table lists, if it lists any, and series are in the table.
fn check_values(text: &str) {
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let series = line.split(['{', ' ']).next().unwrap();
        if series.starts_with("process_") {
            continue;
        }
        let name = series.strip_prefix("splitrail_").unwrap();
        let is_of = |metric: &&Definition| {
            let rest = name.strip_prefix(metric.name);
            rest.is_some_and(|rest| matches!(rest, "" | "_bucket" | "_sum" | "_count"))
        };
        let metric = Metrics::definitions().iter().find(is_of);
        let metric = metric.unwrap_or_else(|| panic!("not in the table: {line}"));
        for (name, value) in labels(line) {
            let label = metric.labels.iter().find(|label| label.name == name).unwrap();
            let is_known = label.values.is_none_or(|known| known.contains(&value.as_str()));
            assert!(is_known, "{line}");
        }
    }
}

/// `increase()` sees no event of a series that begins with it.
#[tokio::test]
async fn counters_of_models_and_workers_exist_from_their_start_at_zero() {
    let cluster = Cluster::start(Spec::default()).await;
    let exists = async |series: &str| {
        let text = cluster.admin.get("/metrics").await.text();
        text.contains(&format!("splitrail_{series} 0\n"))
    };
    let of_all = [
        "reloads_total{result=\"refused\"}",
        "ledger_records_total{result=\"write_failed\"}",
        "shed_total{model=\"none\",reason=\"in_flight_max\"}",
        "shed_total{model=\"sim\",reason=\"queue_full\"}",
        "local_prefills_total{model=\"sim\",reason=\"no_prefill\"}",
        "retries_total{leg=\"decode\",model=\"sim\",reason=\"engine_failed\"}",
        "prompt_length_mismatches_total{model=\"sim\"}",
        "request_results_total{model=\"sim\",result=\"failed\"}",
        "connections_cut_total{listener=\"http\",reason=\"flood\"}",
        "index_rejected_total{model=\"sim\",reason=\"garbage\",worker=\"p0\"}",
        "worker_leg_failures_total{leg=\"decode\",model=\"sim\",reason=\"engine_failed\",worker=\"d1\"}",
    ];
    for series in of_all {
        assert!(exists(series).await, "{series}");
    }
    let (engine, own) = (cluster.engine("p0").url(), cluster.yaml.clone());
    let joined = "      - { id: p9, role: prefill, url: \"http://127.0.0.1:1\" }\n";
    let later = format!(
        "  - name: later\n    tokenizer: {{ kind: none }}\n    block_size: 16\n    flow: aggregated\n    \
         policy: {{ kind: least_loaded }}\n    workers: [{{ id: w, role: both, url: \"{engine}\" }}]\n"
    );
    let yaml = own + joined + &later;
    let reloaded = cluster.reload(&yaml).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    for series in [
        "index_rejected_total{model=\"sim\",reason=\"garbage\",worker=\"p9\"}",
        "shed_total{model=\"later\",reason=\"queue_full\"}",
    ] {
        assert!(exists(series).await, "{series}");
    }
}

/// An alert must see that the last worker has left, although the series of workers leave with them.
#[tokio::test]
async fn workers_that_can_take_a_leg_are_counted_as_long_as_their_model_is_served() {
    let model = "discovery: [{ kind: shim }]".to_owned();
    let cluster = Cluster::start(Spec { model, fleet: true, ..Spec::default() }).await;
    let shown = async || {
        let text = cluster.admin.get("/metrics").await.text();
        let lines =
            text.lines().filter_map(|line| line.strip_prefix("splitrail_available_workers"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let of = |leg: &str, workers: u32| format!("{{leg=\"{leg}\",model=\"sim\"}} {workers}");
    assert_eq!(shown().await, [of("decode", 2), of("prefill", 2)]);
    assert_eq!(cluster.admin.post_with("/admin/workers/p0/drain", &[], "").await.status, 200);
    assert_eq!(shown().await, [of("decode", 2), of("prefill", 1)]);
    let is_other = |line: &&str| !line.contains("role: prefill") && !line.contains("role: decode");
    let empty: String =
        cluster.yaml.lines().filter(is_other).map(|line| format!("{line}\n")).collect();
    let reloaded = cluster.reload(&empty.replace("    workers:\n", "")).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    assert_eq!(shown().await, [of("decode", 0), of("prefill", 0)]);
    let alone = empty.replace("prefill_first", "aggregated").replace("connector: nixl", "");
    let reloaded = cluster.reload(&alone.replace("    workers:\n", "")).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    assert_eq!(shown().await, [of("decode", 0)]);
    let other = alone.replace("    workers:\n", "").replace("name: sim", "name: other");
    let reloaded = cluster.reload(&other).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    assert_eq!(shown().await, ["{leg=\"decode\",model=\"other\"} 0"]);
}

/// The time to first token is that of clients, and not that of the whole reply: the router's is never
/// above the client's, and far nearer to it than to the end.
/// Clients and router share a thread, so that neither waits for the other's to be scheduled.
#[tokio::test]
async fn the_time_to_first_token_is_the_one_that_clients_measure() {
    const REQUESTS: usize = 1000;
    let cluster = Cluster::start(Spec {
        engine: |_, config: &mut SimConfig| config.decode_us_per_step = 2000,
        ..Spec::default()
    })
    .await;
    let client = &cluster.http;
    let labels = ["sim", "prefill_first"];
    let routers = cluster.running.core.metrics.ttft.with_label_values(&labels);
    let (mut to_first, mut to_end) = (0.0, 0.0);
    let mut differences_ms = Vec::new();
    for number in 0..REQUESTS {
        let body = with(chat(&format!("t{number}-")), "stream", true);
        let before = routers.get_sample_sum();
        let sent = Instant::now();
        let mut events = client.stream(CHAT, &body).await;
        events.next().await.unwrap();
        let seen = sent.elapsed().as_secs_f64();
        while events.next().await.is_some() {}
        to_end += sent.elapsed().as_secs_f64();
        to_first += seen;
        eventually("the stream is counted", async || {
            routers.get_sample_count() == number as u64 + 1
        })
        .await;
        differences_ms.push((seen - (routers.get_sample_sum() - before)) * 1e3);
    }
    // Whole replies have no first token that anyone sees.
    assert_eq!(cluster.http.post(CHAT, &chat("whole")).await.status, 200);
    let sum = cluster.metric("splitrail_ttft_seconds_sum", &[]).await;
    let count = cluster.metric("splitrail_ttft_seconds_count", &[]).await;
    let whole = [("stream", "false")];
    assert_eq!(cluster.metric("splitrail_request_seconds_count", &whole).await, 1.0);
    assert_eq!(count, REQUESTS as f64);
    assert!(
        sum <= to_first && to_first - sum < (to_end - to_first) / 4.0,
        "{sum} of {to_first}, {to_end}"
    );
    // How much more is for reading: a busy machine adds milliseconds.
    differences_ms.sort_by(f64::total_cmp);
    let [median, late] = [REQUESTS / 2, REQUESTS * 99 / 100].map(|place| differences_ms[place]);
    println!(
        "clients measure {median:.3} ms more than the router in the median, {late:.3} ms in 99 %"
    );
    assert!(differences_ms[0] >= -1e-6, "{differences_ms:?}");
}

/// The known values of labels are those of the code.
#[test]
fn the_table_has_the_values_that_the_code_gives() {
    let known = |metric: &str, label: &str| {
        let metric = Metrics::definitions().iter().find(|one| one.name == metric).unwrap();
        metric.labels.iter().find(|one| one.name == label).unwrap().values.unwrap()
    };
    let check = |metric: &str, label: &str, values: &[&str]| {
        let unknown: Vec<_> =
            values.iter().filter(|value| !known(metric, label).contains(value)).collect();
        assert!(unknown.is_empty(), "{metric}, {label}: {unknown:?}");
    };
    check("worker_state", "state", &WorkerState::ALL.map(WorkerState::name));
    check("worker_parity", "result", &Parity::RESULTS);
    check("canaries_total", "cause", &Cause::ALL.map(Cause::name));
    check("canaries_total", "cause", &UnclearReason::ALL.map(UnclearReason::name));
    check("index_blocks", "tier", &Tier::ALL.map(Tier::name));
    check("overlap_blocks", "role", &[Leg::Prefill, Leg::Decode, Leg::Aggregated].map(Leg::name));
    let reasons = [
        LocalReason::ShortPrompt,
        LocalReason::OneToken,
        LocalReason::PrefillEnded,
        LocalReason::NoHandOff,
        LocalReason::PromptLogprobs,
        LocalReason::PromptEmbeds,
        LocalReason::EngineTools,
        LocalReason::NoDecode,
        LocalReason::Refusable,
        LocalReason::NoPrefill,
        LocalReason::Cheaper,
    ];
    check("local_prefills_total", "reason", &reasons.map(LocalReason::name));
}
