//! What an operator meets at 3 a.m.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use splitrail_sim::write_tokenizer;
use splitrail_sim::{SimConfig, SimEngine};
use splitrail_tests::binary;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::ports::HeldPort;
use splitrail_tests::{Client, Cluster, Spec};

const COMPLETIONS: &str = "/v1/completions";

fn completion(max_tokens: u32) -> Value {
    let prompt = "a prompt of several blocks, so that there is something to be found. ".repeat(3);
    json!({"model": "sim", "max_tokens": max_tokens, "temperature": 0, "prompt": prompt})
}

#[tokio::test]
async fn logs_that_cannot_be_written_cost_no_request() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {{ drain_delay: 1ms }}
models:
  - name: sim
    tokenizer: {{ kind: huggingface, path: . }}
    flow: aggregated
    retries: {{ decode: 0 }}
    workers: [ {{ id: w0, role: both, url: \"{}\" }}, {{ id: gone, role: both, url: \"http://127.0.0.1:1\" }} ]
",
        engine.url()
    );
    let (config, ready) = (files.path().join("c.yaml"), files.path().join("ready.json"));
    std::fs::write(&config, yaml).unwrap();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut router = Command::new(binary::built("splitrail"))
        .args(["serve", "--config"])
        .arg(&config)
        .arg("--ready-file")
        .arg(&ready)
        .env("RUST_LOG", "debug")
        .stdin(Stdio::null())
        .stderr(full)
        .spawn()
        .unwrap();
    eventually("it serves", async || ready.exists()).await;
    let address: Value = serde_json::from_slice(&std::fs::read(&ready).unwrap()).unwrap();
    let http = Client::new(address["http"].as_str().unwrap().parse().unwrap());
    eventually("it is ready", async || http.get("/ready").await.status == 200).await;
    for _ in 0..4 {
        assert_eq!(http.post(COMPLETIONS, &completion(2)).await.status, 200);
        // Each of these has something to log.
        assert_eq!(http.post(COMPLETIONS, &json!({"model": "none"})).await.status, 400);
    }
    let running = router.try_wait().unwrap().is_none();
    router.kill().unwrap();
    router.wait().unwrap();
    assert!(running, "the router has ended");
}

#[tokio::test]
async fn unread_output_is_no_panic() {
    let mut command = Command::new(binary::built("splitrail"));
    command.args(["schema", "--markdown"]).stdin(Stdio::null()).stderr(Stdio::piped());
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let said = command.stdout(full).output().unwrap();
    assert_eq!(said.status.code(), Some(74), "{}", String::from_utf8_lossy(&said.stderr));
}

#[tokio::test]
async fn a_late_engine_delays_only_its_own_model() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let late = HeldPort::take();
    let files = tempfile::tempdir().unwrap();
    write_tokenizer(files.path()).unwrap();
    let log = files.path().join("log");
    let yaml = two_models(&engine.url(), &late);
    let router = binary::RouterProcess::serve(files.path(), &yaml, &[], &log).await;
    let http = Client::new(router.http);
    eventually("the other model is served", async || {
        http.post(COMPLETIONS, &completion(2)).await.status == 200
    })
    .await;
    eventually("the other model is not waited for any more", async || {
        let unready = http.get("/ready").await;
        assert_eq!(unready.status, 503);
        unready.text().contains("model late")
    })
    .await;
    let config =
        SimConfig { http_port: late.number(), model: "late".into(), ..SimConfig::default() };
    let _late = SimEngine::start(config).await.unwrap();
    eventually("all is ready", async || http.get("/ready").await.status == 200).await;
    let mut body = completion(2);
    body["model"] = "late".into();
    assert_eq!(http.post(COMPLETIONS, &body).await.status, 200);
}

fn two_models(url: &str, late: &HeldPort) -> String {
    let model = |name: &str, url: &str| {
        format!(
            "  - {{ name: {name}, block_size: auto, flow: aggregated, \
             tokenizer: {{ kind: huggingface, path: . }}, \
             workers: [ {{ id: w, role: both, url: \"{url}\" }} ] }}\n"
        )
    };
    format!(
        "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}\nmodels:\n{}{}",
        model("sim", url),
        model("late", &format!("http://{}", late.address()))
    )
}

#[tokio::test]
async fn a_body_that_does_not_come_is_a_408_and_frees_its_place() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let limits = "{ body_timeout: 100ms, in_flight_max: 1, drain_delay: 10ms }";
    let cluster = Cluster::start(Spec { limits, ..Spec::aggregated(1) }).await;
    let mut socket = tokio::net::TcpStream::connect(cluster.running.addresses.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut reply = [0; 12];
    socket.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 408");
    assert_eq!(cluster.http.post(COMPLETIONS, &completion(2)).await.status, 200);
    let timed_out = [("outcome", "body_timeout")];
    assert_eq!(cluster.metric("splitrail_requests_total", &timed_out).await, 1.0);
}

#[tokio::test]
async fn requests_that_outlive_the_drain_grace_get_an_error() {
    let spec = Spec {
        limits: "{ drain_delay: 1ms, drain_grace: 50ms }",
        engine: |_, config| config.decode_us_per_step = 20_000,
        ..Spec::aggregated(1)
    };
    let Cluster { running, http, admin, engines, .. } = Cluster::start(spec).await;
    let mut body = completion(5000);
    let whole = body.clone();
    body["stream"] = true.into();
    let mut events = http.stream(COMPLETIONS, &body).await;
    events.next().await.unwrap();
    let mut unanswered = tokio::task::JoinSet::new();
    let client = http.clone();
    unanswered.spawn(async move { client.post(COMPLETIONS, &whole).await });
    let core = running.core.clone();
    eventually("both are in flight", async || core.live.len() == 2).await;
    let (cut, last) = tokio::join!(running.drain(), async {
        let mut last = String::new();
        while let Some(event) = events.next().await {
            last = event;
        }
        last
    });
    assert_eq!(cut, 2);
    let error: Value = serde_json::from_str(&last).unwrap();
    // No engine is to blame.
    let told = (&error["error"]["code"], &error["error"]["type"]);
    assert_eq!(told, (&"router_stopping".into(), &"service_unavailable_error".into()), "{last}");
    // One that has no answer yet may go to another router.
    let refused = unanswered.join_next().await.unwrap().unwrap();
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, "1"));
    assert_eq!(refused.json()["error"]["code"], "router_stopping");
    let text = core.metrics.encode();
    let stopping = [("outcome", "router_stopping")];
    assert_eq!(metric_in(&text, "splitrail_requests_total", &stopping), 2.0);
    let failed = [("model", "sim"), ("result", "failed")];
    assert_eq!(metric_in(&text, "splitrail_request_results_total", &failed), 2.0);
    assert_eq!(metric_in(&text, "splitrail_worker_leg_failures_total", &[]), 0.0);
    drop((admin, engines));
}

#[tokio::test]
async fn another_tokenizer_than_the_engines_is_noticed() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let mismatches = "splitrail_prompt_length_mismatches_total";
    cluster.http.post(COMPLETIONS, &completion(2)).await;
    assert_eq!(cluster.metric(mismatches, &[]).await, 0.0);
    let other = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/prompt/tests/fixtures/tokenizer/model");
    let spec = Spec { tokenizer: Some(other), ..Spec::aggregated(1) };
    let cluster = Cluster::start(spec).await;
    assert_eq!(cluster.http.post(COMPLETIONS, &completion(2)).await.status, 200);
    assert_eq!(cluster.metric(mismatches, &[]).await, 1.0);
}
