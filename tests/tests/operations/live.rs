//! The live stream of the admin listener: what it shows, and what it may cost.

use std::net::Ipv4Addr;
use std::path::Path;

use serde_json::Value;
use splitrail_sim::{Fault, FaultKind, Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::cluster::eventually;
use splitrail_tests::live::LiveStream;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::process::Process;
use splitrail_tests::raw::connect_from;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

/// The model of a snapshot that has one.
fn model(snapshot: &Value) -> &Value {
    &snapshot["models"][0]
}

fn worker<'s>(snapshot: &'s Value, id: &str) -> &'s Value {
    let workers = model(snapshot)["workers"].as_array().unwrap();
    workers.iter().find(|worker| worker["id"] == id).unwrap_or(&Value::Null)
}

#[tokio::test]
async fn a_snapshot_shows_workers_flows_rates_and_decisions() {
    let model_keys = "cache_loss_tracking: {}".to_owned();
    let cluster = Cluster::start(Spec { model: model_keys, ..Spec::default() }).await;
    let mut live = LiveStream::open(&cluster.admin, &[]).await;
    assert_eq!(live.status, 200);
    assert_eq!(live.headers["content-type"], "text/event-stream");
    assert_eq!(live.headers["cache-control"], "no-store");
    let first = live.snapshot().await;
    assert_eq!((&first["schema"], &first["ready"]), (&1.into(), &true.into()), "{first}");
    let config = cluster.admin.get("/admin/config").await;
    assert_eq!(config.header("etag"), format!("\"{}\"", first["config_hash"].as_str().unwrap()));
    let ids: Vec<_> =
        model(&first)["workers"].as_array().unwrap().iter().map(|w| &w["id"]).collect();
    assert_eq!(ids, ["p0", "p1", "d0", "d1"]);
    assert!(first["decisions"].as_array().unwrap().is_empty());

    let secret = prompt(64, "secret");
    // Rates are those of the last seconds: there are requests until they are seen.
    let seen = loop {
        let reply = cluster.http.post(COMPLETIONS, &completion(&secret)).await;
        assert_eq!(reply.status, 200);
        let seen = live.snapshot().await;
        let served = model(&seen);
        let lags = ["p0", "p1"].map(|id| &worker(&seen, id)["event_lag_ms"]);
        if served["hit_ratio"].as_f64().is_some_and(|ratio| ratio > 0.0)
            && lags.iter().any(|lag| lag.is_number())
            && served["requests_per_s"].as_f64().is_some_and(|rate| rate > 0.0)
            && served["flows"][0].is_object()
            && served["prompt_tokens_per_s"]["decode"]["transferred"] != 0.0
        {
            break seen;
        }
    };
    let text = seen.to_string();
    assert!(!text.contains("secret"), "a prompt in {text}");
    let served = model(&seen);
    assert_eq!(served["failures_per_s"], serde_json::json!({}));
    let legs = &served["prompt_tokens_per_s"];
    assert!(legs["prefill"]["computed"].as_f64().unwrap() > 0.0, "{legs}");
    assert!(served["cache_loss"]["best_blocks"].as_u64().unwrap() > 0, "{served}");
    assert!(served["flows"][0]["prefill_worker"].as_str().unwrap().starts_with('p'), "{served}");
    let decision = &seen["decisions"][0];
    assert_eq!((&decision["outcome"], &decision["flow"]), (&"ok".into(), &"prefill_first".into()));
    assert!(decision["margin"].is_number() && decision["margin_unit"] == "blocks", "{decision}");
    let id = decision["request_id"].as_str().unwrap();
    assert_eq!(cluster.decisions(id).await.len(), 1);

    cluster.admin.post_with("/admin/workers/d1/drain", &[], "").await;
    let drained = live.until(|seen| worker(seen, "d1")["draining"] == true).await;
    let d1 = worker(&drained, "d1");
    assert_eq!(
        (&d1["state"], &d1["state_why"]),
        (&"draining".into(), &"an operator drains it".into())
    );
}

#[tokio::test]
async fn a_snapshot_tells_the_faults_of_engines_from_those_of_clients() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut live = LiveStream::open(&cluster.admin, &[]).await;
    for (status, result) in [(400, "invalid"), (500, "failed")] {
        let kind = FaultKind::Status { status };
        cluster.engine("w0").set_fault(Fault { kind, times: None });
        // Rates are those of the last seconds: there are requests until they are seen.
        let seen = loop {
            let reply = cluster.http.post(COMPLETIONS, &completion(&prompt(16, result))).await;
            assert_ne!(reply.status, 200);
            let seen = model(&live.snapshot().await).clone();
            if seen["results_per_s"][result].as_f64().is_some_and(|rate| rate > 0.0) {
                break seen;
            }
            assert!(seen["results_per_s"].is_object(), "{seen}");
        };
        assert_eq!(seen["results_per_s"]["ok"], Value::Null, "{seen}");
        let is_failed = seen["results_per_s"]["failed"].is_number();
        assert_eq!(is_failed, result == "failed", "{seen}");
    }
}

#[tokio::test]
async fn a_snapshot_shows_failures_before_the_model_is_known() {
    let limits = "{ in_flight_max: 1, drain_delay: 10ms, drain_grace: 1s }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut hanging = JoinSet::new();
    let (http, body) = (cluster.http.clone(), completion(&prompt(4, "hangs")));
    hanging.spawn(async move { http.post(COMPLETIONS, &body).await });
    eventually("the router is full", async || {
        cluster.metric("splitrail_requests_in_flight", &[]).await == 1.0
    })
    .await;
    let mut live = LiveStream::open(&cluster.admin, &[]).await;
    assert_eq!(live.snapshot().await["unplaced_failures_per_s"], serde_json::json!({}));
    loop {
        let refused = cluster.http.post(COMPLETIONS, &completion("too many")).await;
        assert_eq!(refused.status, 503);
        let seen = live.snapshot().await;
        assert_eq!(model(&seen)["failures_per_s"].as_object().map_or(0, |of| of.len()), 0);
        if seen["unplaced_failures_per_s"]["shed"].as_f64().is_some_and(|rate| rate > 0.0) {
            break;
        }
    }
    hanging.shutdown().await;
}

#[tokio::test]
async fn the_last_minutes_are_known_to_whom_comes_later() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    for turn in 0..3 {
        let body = completion(&prompt(16, &format!("h{turn}")));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
    }
    let history = || async { cluster.admin.get("/admin/live/history?model=sim").await };
    let mut last = Value::Null;
    eventually("a point is recorded that has the requests", async || {
        let reply = history().await;
        last = if reply.status == 200 { reply.json() } else { Value::Null };
        let rates = last["requests_per_s"].as_array().cloned().unwrap_or_default();
        rates.iter().any(|rate| rate.as_f64().is_some_and(|rate| rate > 0.0))
    })
    .await;
    let length = last["time_unix_ms"].as_array().unwrap().len();
    for column in [&last["ttft_ms"]["p99"], &last["prompt_tokens_per_s"]["decode"]["computed"]] {
        assert_eq!(column.as_array().unwrap().len(), length, "{last}");
    }
    assert_eq!(cluster.admin.get("/admin/live/history?model=other").await.status, 404);
}

/// A router process whose model has workers where nobody lives, besides an engine.
struct Crowd {
    router: Process,
    admin: Client,
    http: Client,
    _engine: SimEngine,
    _files: TempDir,
}

impl Crowd {
    async fn start(model: &str, absent: usize, limits: &str) -> Self {
        let engine =
            SimConfig { role: Role::Both, model: model.to_owned(), ..SimConfig::default() };
        Self::before(engine, absent, limits).await
    }

    async fn before(config: SimConfig, absent: usize, limits: &str) -> Self {
        Self::with(config, absent, limits, "").await
    }

    /// The same, with a further key of the model.
    async fn with(config: SimConfig, absent: usize, limits: &str, key: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        write_tokenizer(files.path()).unwrap();
        let model = config.model.clone();
        let engine = SimEngine::start(config).await.unwrap();
        let mut workers = format!("      - {{ id: w, role: both, url: \"{}\" }}\n", engine.url());
        for at in 0..absent {
            // Each has an address of its own, on which nobody listens.
            let (b, c) = (at / 200 + 1, at % 200 + 1);
            workers += &format!(
                "      - {{ id: absent-{at}, role: both, url: \"http://127.9.{b}.{c}:9\" }}\n"
            );
        }
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {limits}
models:
  - name: {}
    flow: aggregated
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    policy: {{ kind: kv_overlap }}
    canary: {{ enabled: false }}
    {key}
    workers:
{workers}",
            Value::from(model)
        );
        let router = serve(files.path(), &yaml).await;
        let (admin, http) = (router.client("admin"), router.client("http"));
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { router, admin, http, _engine: engine, _files: files }
    }
}

async fn serve(folder: &Path, yaml: &str) -> Process {
    let config = folder.join("c.yaml");
    std::fs::write(&config, yaml).unwrap();
    let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
    Process::start("router", folder, &args).await
}

const LIMITS: &str = "{ drain_delay: 1ms, drain_grace: 20s }";

#[tokio::test]
async fn one_subscriber_gets_at_most_10_kb_per_second_whatever_the_fleet() {
    let crowd = Crowd::start("sim", 60, LIMITS).await;
    let mut live = LiveStream::open(&crowd.admin, &[]).await;
    for turn in 0..40 {
        let body = completion(&prompt(4, &format!("c{turn}")));
        assert_eq!(crowd.http.post(COMPLETIONS, &body).await.status, 200);
    }
    let mut before: Option<(u64, u64)> = None;
    for _ in 0..4 {
        let event = live.next().await.unwrap();
        let seen = &event.data;
        assert!(event.bytes > 10_000, "the fleet is too small for the test: {}", event.bytes);
        assert!(seen["decisions"].as_array().unwrap().len() <= 8);
        assert!(model(seen)["flows"].as_array().unwrap().len() <= 24);
        let now_ms = seen["uptime_ms"].as_u64().unwrap();
        if let Some((before_ms, due_in_ms)) = before {
            assert!(
                now_ms - before_ms >= due_in_ms,
                "{due_in_ms} ms were due: {before_ms}, {now_ms}"
            );
        }
        let least_ms = event.bytes as u64 * 1000 / 10_000;
        let told_ms = seen["next_in_ms"].as_u64().unwrap();
        assert!(told_ms.abs_diff(least_ms) < 50, "{told_ms} ms for {} bytes", event.bytes);
        before = Some((now_ms, least_ms));
    }
    // A second one, that comes between two snapshots, has the same pace.
    let mut second = LiveStream::open(&crowd.admin, &[]).await;
    let (first, next) = (second.next().await.unwrap(), second.next().await.unwrap());
    let gap_ms =
        next.data["uptime_ms"].as_u64().unwrap() - first.data["uptime_ms"].as_u64().unwrap();
    assert!(gap_ms >= first.bytes as u64 / 10, "{gap_ms} ms for {} bytes", first.bytes);
}

/// A snapshot reads at most 4,096 decisions, however many there are in a second.
#[tokio::test]
async fn a_thousand_workers_and_as_many_decisions_as_are_read_keep_the_pace_and_the_memory() {
    const PROMPTS: usize = 64;
    let limits =
        "{ drain_delay: 1ms, drain_grace: 20s, decisions_kept: 8192, in_flight_max: 4096 }";
    let engine = SimConfig { role: Role::Both, ..SimConfig::default() };
    let crowd = Crowd::with(engine, 1000, limits, "health: { probe_interval: 60s }").await;
    for turn in 0..4096 / PROMPTS {
        let prompts = (0..PROMPTS).map(|at| format!("prompt {at} of batch {turn}"));
        let prompts: Vec<Value> = prompts.map(Value::from).collect();
        let body = serde_json::json!({"model": "sim", "max_tokens": 1, "prompt": prompts});
        assert_eq!(crowd.http.post(COMPLETIONS, &body).await.status, 200);
    }
    let mut all = vec![LiveStream::open(&crowd.admin, &[]).await];
    let event = all[0].next().await.unwrap();
    let seen = &event.data;
    assert_eq!(model(seen)["workers"].as_array().unwrap().len(), 1001);
    assert!(seen["decisions"].as_array().unwrap().len() <= 8);
    assert!(model(seen)["flows"].as_array().unwrap().len() <= 24);
    let next_in_ms = seen["next_in_ms"].as_u64().unwrap();
    assert!(
        event.bytes as u64 * 1000 <= (next_in_ms + 50) * 10_000,
        "{} bytes, the next ones in {next_in_ms} ms",
        event.bytes
    );
    // All subscribers share the bytes.
    let before = memory(crowd.router.pid());
    reset_peak(crowd.router.pid());
    for _ in 1..57 {
        let mut live = LiveStream::open(&crowd.admin, &[]).await;
        assert!(live.next().await.unwrap().bytes > 100_000);
        all.push(live);
    }
    let after = memory(crowd.router.pid());
    assert!(after.peak_kib <= before.now_kib + (16 << 10), "{before:?}, {after:?}");
}

#[tokio::test]
async fn subscribers_of_one_address_are_bounded_and_leave_places_for_others() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mut subscribers = Vec::new();
    // Eight ninths of the 64 places.
    for _ in 0..57 {
        let live = LiveStream::open(&cluster.admin, &[]).await;
        assert_eq!(live.status, 200);
        subscribers.push(live);
    }
    let refused = cluster.admin.get("/admin/live").await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["error"]["code"], "overloaded", "{}", refused.text());
    assert!(!refused.header("retry-after").is_empty());
    let mut elsewhere =
        connect_from(Ipv4Addr::new(127, 0, 0, 2), cluster.running.addresses.admin).await;
    let watch = b"GET /admin/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    elsewhere.write_all(watch).await.unwrap();
    let mut status = [0; 12];
    elsewhere.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200", "another address is served");
    // All of them get the same snapshots, and other paths are served as before.
    for live in &mut subscribers {
        live.snapshot().await;
    }
    assert_eq!(cluster.admin.get("/admin/workers").await.status, 200);
    // The other address holds one of the places.
    subscribers.truncate(55);
    eventually("a place is free again", async || {
        LiveStream::open(&cluster.admin, &[]).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn the_stream_shows_the_drain_and_ends_with_it() {
    // A request that takes as long as its client waits.
    let engine =
        SimConfig { role: Role::Both, decode_us_per_step: 600_000_000, ..SimConfig::default() };
    let limits = "{ drain_delay: 1ms, drain_grace: 600s }";
    let mut crowd = Crowd::before(engine, 0, limits).await;
    let mut live = LiveStream::open(&crowd.admin, &[]).await;
    assert_eq!(live.snapshot().await["draining"], false);
    let mut request = JoinSet::new();
    let http = crowd.http.clone();
    request.spawn(async move { http.post(COMPLETIONS, &completion("a")).await });
    live.until(|seen| model(seen)["requests_in_flight"] == 1).await;
    crowd.router.terminate();
    let seen = live.until(|seen| seen["draining"] == true).await;
    assert_eq!((&seen["ready"], &seen["not_ready_why"]), (&false.into(), &"draining".into()));
    request.shutdown().await;
    let mut last = None;
    while let Some(event) = live.next().await {
        last = Some(event);
    }
    let last = last.expect("an event after the drain began");
    assert_eq!((&*last.name, &last.data["reason"]), ("end", &"drained".into()));
    assert!(crowd.router.ended().await.success());
}

#[tokio::test]
async fn a_reader_that_stops_holds_up_neither_the_drain_nor_others() {
    let mut crowd = Crowd::start("sim", 40, "{ drain_delay: 1ms, drain_grace: 1s }").await;
    let stopped: Vec<LiveStream> = {
        let mut stopped = Vec::new();
        for _ in 0..20 {
            stopped.push(LiveStream::open(&crowd.admin, &[]).await);
        }
        stopped
    };
    let mut reader = LiveStream::open(&crowd.admin, &[]).await;
    for _ in 0..3 {
        reader.snapshot().await;
    }
    crowd.router.terminate();
    assert!(crowd.router.ended().await.success());
    drop(stopped);
}

#[tokio::test]
async fn a_model_may_have_any_name_and_the_stream_stays_well_formed() {
    let name = "\"><script>alert(1)</script>\u{2028}data: x";
    let crowd = Crowd::start(name, 1, LIMITS).await;
    let mut live = LiveStream::open(&crowd.admin, &[]).await;
    let body = serde_json::json!({"model": name, "max_tokens": 2, "prompt": "a"});
    let headers = [("x-request-id", "<img/src=x>")];
    let reply = crowd.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let seen = live.until(|seen| seen["decisions"][0].is_object()).await;
    assert_eq!(model(&seen)["name"], name);
    assert_eq!(seen["decisions"][0]["model"], name);
    // A client's id that is not plain was replaced when the request came.
    assert_eq!(seen["decisions"][0]["request_id"].as_str().unwrap().len(), 32);
    let absent = live.until(|seen| worker(seen, "absent-0")["state"] == "down").await;
    assert!(worker(&absent, "absent-0")["state_why"].as_str().unwrap().chars().count() <= 161);
}

#[tokio::test]
async fn the_page_is_served_with_a_policy_that_lets_nothing_in() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let page = cluster.admin.get("/").await;
    assert_eq!(page.status, 200);
    for (header, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        assert_eq!(page.header(header), value, "{header}");
    }
    let policy = page.header("content-security-policy");
    for directive in [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ] {
        assert!(policy.split("; ").any(|part| part == directive), "{directive} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    // Everything that the page names is there.
    let text = page.text();
    let named = text.split('"').filter(|part| part.starts_with("/page/"));
    let named: Vec<&str> = named.collect();
    assert!(!named.is_empty());
    for path in named {
        assert_eq!(cluster.admin.get(path).await.status, 200, "{path}");
    }
    assert_eq!(cluster.admin.get("/page/../admin.rs").await.status, 404);
    // A page of another site cannot take the places of those who watch.
    let other = [("sec-fetch-site", "cross-site")];
    assert_eq!(cluster.admin.get_with("/admin/live", &other).await.status, 403);
}
