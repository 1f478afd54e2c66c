//! The access log of the shipped program: one line for each request of a client, whatever became of
//! it, without content, and without ever delaying a request.

mod failures;
mod grpc;
mod queue;
mod ttft;

use std::process::{Command, Stdio};

use http::Method;
use serde_json::{Value, json};
use splitrail_tests::binary::built;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::grpc::{generate, text_request};
use splitrail_tests::process::Process;
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt, streamed};
use splitrail_tests::{Client, Cluster, Spec};
use tempfile::TempDir;

/// Simulated engines, and the shipped router in front of them.
struct Logged {
    cluster: Cluster,
    router: Process,
    http: Client,
    admin: Client,
    files: TempDir,
}

impl Logged {
    /// Starts them; `top` are further keys of the router's configuration.
    async fn start(spec: Spec, top: &str) -> Self {
        let cluster = Cluster::start(spec).await;
        let files = tempfile::tempdir().unwrap();
        let config = files.path().join("splitrail.yaml");
        std::fs::write(&config, format!("{}\n{top}", cluster.yaml)).unwrap();
        let config = config.display().to_string();
        let args = ["serve", "--config", &config, "--log-format", "json"].map(str::to_owned);
        let router = Process::start("router", files.path(), &args).await;
        let (http, admin) = (router.client("http"), router.client("admin"));
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { cluster, router, http, admin, files }
    }

    /// The lines on standard output.
    fn lines(&self) -> Vec<Value> {
        let output = self.router.output();
        // A line may be half written.
        output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits for the line of a request, and returns its fields.
    async fn line(&self, request_id: &str) -> Value {
        let find = || self.lines().into_iter().find(|line| line["request_id"] == request_id);
        eventually(&format!("{request_id} is logged"), async || find().is_some()).await;
        find().unwrap()
    }
}

/// Tenants with keys, who may use everything (`acme`), little (`small`) or another model (`other`).
const TENANTS: &str = "tenants:
  - { name: acme }
  - { name: small, limits: { requests_per_minute: 1 } }
  - { name: other, models: [default] }
";

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[tokio::test]
async fn a_served_request_has_a_line_with_its_route_tokens_and_times() {
    let logged = Logged::start(Spec::default(), "").await;
    let parent = format!("00-{TRACE}-b7ad6b7169203331-00");
    let headers = [("x-request-id", "served-1"), ("traceparent", parent.as_str())];
    let mut body = streamed(&chat(&prompt(40, "secretword")));
    body["stream_options"] = json!({"include_usage": true});
    let mut events = logged.http.stream_with(CHAT, &headers, &body).await;
    let timing = events.headers["server-timing"].to_str().unwrap().to_owned();
    let route = events.headers["x-splitrail-route"].to_str().unwrap().to_owned();
    let usage = events.chunks().await.last().unwrap()["usage"].clone();
    let line = logged.line("served-1").await;
    for (key, value) in [
        ("version", json!(1)),
        ("trace_id", json!(TRACE)),
        ("client", json!("127.0.0.1")),
        ("model", json!("sim")),
        ("endpoint", json!("chat")),
        ("protocol", json!("http")),
        ("status", json!(200)),
        ("outcome", json!("ok")),
        ("flow", json!("prefill_first")),
        ("attempts", json!(1)),
        ("cached_tokens", json!(0)),
        ("prompt_tokens", usage["prompt_tokens"].clone()),
        ("output_tokens", usage["completion_tokens"].clone()),
    ] {
        assert_eq!(line[key], value, "{key}: {line}");
    }
    for (key, leg) in [("prefill_worker", "prefill"), ("decode_worker", "decode")] {
        assert!(route.contains(&format!("{leg}={}", line[key].as_str().unwrap())), "{line}");
    }
    // The log agrees with what the client was told: the stages add up to the time to first token.
    let ms = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"));
    let stage = |entry: &str| entry.split_once(";dur=").unwrap().1.parse::<f64>().unwrap();
    let sum: f64 = timing.split(", ").map(stage).sum();
    assert!((sum - ms("ttft_ms")).abs() <= ms("ttft_ms") / 100.0, "{timing}: {line}");
    assert!(timing.contains(&format!("prefill;dur={:.3}", ms("prefill_ms"))), "{timing}: {line}");
    assert!(ms("prefill_ms") + ms("hand_off_ms") <= ms("ttft_ms"), "{line}");
    assert!(ms("ttft_ms") <= ms("total_ms"), "{line}");
    assert!(!logged.router.output().contains("secretword"), "no content");
    assert!(!logged.router.log().contains("served-1"), "not in the log as well");
    // A whole reply has no first token; a batch has the number of its prompts.
    let mut batch = completion("");
    batch["prompt"] = json!([prompt(20, "x"), prompt(20, "y")]);
    let headers = [("x-request-id", "batch-1")];
    logged.http.post_with(COMPLETIONS, &headers, batch.to_string()).await;
    let line = logged.line("batch-1").await;
    assert_eq!((&line["prompts"], &line["attempts"]), (&json!(2), &json!(2)));
    assert_eq!(line["ttft_ms"], Value::Null);
}

#[tokio::test]
async fn a_refused_request_has_a_line_with_its_status() {
    let spec = Spec {
        limits: "{ drain_delay: 10ms, drain_grace: 5s, body_size_max: 65536 }",
        ..Spec::aggregated(1)
    };
    let logged = Logged::start(spec, "").await;
    let large = completion(&"x ".repeat(60_000)).to_string();
    let hostile = "no\"such\n<b>model</b>\u{1b}[31m=x";
    let unknown = json!({"model": hostile, "prompt": "x"}).to_string();
    let wrong = json!({"model": "sim", "prompt": "x", "n": -1}).to_string();
    let json = [("content-type", "application/json")];
    for (id, method, path, headers, body, status, outcome, endpoint) in [
        (
            "a",
            Method::POST,
            COMPLETIONS,
            &json[..],
            large.as_str(),
            413,
            "body_too_large",
            "completions",
        ),
        ("b", Method::POST, COMPLETIONS, &json, &unknown, 404, "model_not_found", "completions"),
        ("c", Method::POST, COMPLETIONS, &json, &wrong, 400, "invalid_request", "completions"),
        (
            "d",
            Method::POST,
            COMPLETIONS,
            &[("content-type", "text/plain")],
            "{}",
            415,
            "unsupported_media",
            "completions",
        ),
        ("e", Method::GET, "/nowhere", &[], "", 404, "path_not_found", "none"),
        ("f", Method::GET, COMPLETIONS, &[], "", 405, "method_not_allowed", "none"),
        ("g", Method::GET, "/v1/models", &[], "", 200, "ok", "models"),
    ] {
        let mut all = vec![("x-request-id", id)];
        all.extend(headers);
        let request = logged.http.request(method, path, &all, body.as_bytes().to_vec());
        let reply = logged.http.send(request).await;
        assert_eq!(reply.status(), status, "{path}");
        let line = logged.line(id).await;
        let told = (&line["status"], &line["outcome"], &line["endpoint"]);
        assert_eq!(told, (&json!(status), &json!(outcome), &json!(endpoint)), "{line}");
    }
    assert_eq!(logged.line("b").await["model"], hostile);
    // Probes are not logged.
    assert_eq!(logged.http.get("/health").await.status, 200);
    assert_eq!(logged.lines().len(), 7);
}

#[tokio::test]
async fn a_call_over_grpc_has_a_line_with_the_code_of_its_status() {
    let logged = Logged::start(Spec::aggregated(1), "").await;
    let address = logged.router.told("grpc").parse().unwrap();
    let request = |id: &str, model: &str| {
        let mut request = text_request(&prompt(20, "g"), "");
        (request.request_id, request.model) = (id.to_owned(), model.to_owned());
        request
    };
    generate(address, request("good", "sim")).await.unwrap();
    let refused = generate(address, request("bad", "none")).await.unwrap_err();
    let line = logged.line("good").await;
    assert_eq!((&line["status"], &line["protocol"]), (&json!(0), &json!("grpc")), "{line}");
    assert!(line["ttft_ms"].as_f64().unwrap() > 0.0 && line["prompt_tokens"].as_u64().unwrap() > 0);
    let line = logged.line("bad").await;
    assert_eq!(line["status"], json!(refused.code() as i32), "{line}");
    assert_eq!(line["outcome"], "model_not_found");
}

#[tokio::test]
async fn errors_are_logged_whatever_the_sample_is_and_a_file_gets_the_lines_alone() {
    let top = "access_log: { enabled: true, sample_ratio: 0, path: access.jsonl }\n";
    let mut logged = Logged::start(Spec::aggregated(1), top).await;
    for _ in 0..5 {
        let body = completion(&prompt(20, "s"));
        assert_eq!(logged.http.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(logged.http.get("/nowhere").await.status, 404);
    eventually("the line is counted", async || {
        let text = logged.admin.get("/metrics").await.text();
        let written = [("result", "written")];
        metric_in(&text, "splitrail_access_log_lines_total", &written) == 1.0
    })
    .await;
    logged.router.terminate();
    assert!(logged.router.ended().await.success());
    let text = std::fs::read_to_string(logged.files.path().join("access.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert_eq!((&lines[0]["version"], &lines[0]["status"]), (&json!(1), &json!(404)));
    assert_eq!(logged.router.output(), "", "not on standard output as well");
}

#[tokio::test]
async fn a_log_that_a_reload_switches_on_is_written_to_its_file() {
    let top = |enabled: bool| format!("access_log: {{ enabled: {enabled}, path: access.jsonl }}\n");
    let logged = Logged::start(Spec::aggregated(1), &top(false)).await;
    assert_eq!(logged.http.get("/nowhere").await.status, 404);
    let yaml = format!("{}\n{}", logged.cluster.yaml, top(true));
    std::fs::write(logged.files.path().join("splitrail.yaml"), yaml).unwrap();
    let reload = logged.admin.post_with("/admin/reload", &[], "").await;
    assert_eq!(reload.status, 200, "{}", reload.text());
    assert_eq!(logged.http.get("/elsewhere").await.status, 404);
    let path = logged.files.path().join("access.jsonl");
    let text = || std::fs::read_to_string(&path).unwrap_or_default();
    eventually("the line is in the file", async || text().ends_with('\n')).await;
    let text = text();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "none of the time before: {text}");
    assert_eq!(lines[0]["outcome"], "path_not_found");
    assert_eq!(logged.router.output(), "", "not on standard output as well");
}

#[tokio::test]
async fn lost_lines_are_logged_with_their_file_and_the_metric_that_counts_them() {
    let top = "access_log: { enabled: true, path: /dev/full }\n";
    let logged = Logged::start(Spec::aggregated(1), top).await;
    assert_eq!(logged.http.get("/nowhere").await.status, 404);
    eventually("the loss is logged", async || logged.router.log().contains("records are lost"))
        .await;
    let log = logged.router.log();
    assert!(log.contains("splitrail_access_log_lines_total counts"), "{log}");
    assert!(log.contains("/dev/full"), "{log}");
    let metrics = logged.admin.get("/metrics").await.text();
    assert!(metrics.contains("output_file_writable{file=\"access_log\"} 0\n"), "{metrics}");
    assert!(!log.contains("splitrail_ledger_records_total"), "{log}");
}

#[tokio::test]
async fn a_client_that_leaves_is_logged_as_cancelled() {
    let spec =
        Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..Spec::aggregated(1) };
    let logged = Logged::start(spec, "").await;
    let headers = [("x-request-id", "gone")];
    let mut body = streamed(&completion(&prompt(20, "c")));
    body["max_tokens"] = json!(500);
    let mut events = logged.http.stream_with(COMPLETIONS, &headers, &body).await;
    events.next().await.unwrap();
    drop(events);
    let line = logged.line("gone").await;
    assert_eq!((&line["outcome"], &line["status"]), (&json!("cancelled"), &json!(200)), "{line}");
}

/// The system holds 64 KiB for a reader who does not read, and the router a queue of bounded size.
#[tokio::test]
async fn a_reader_of_the_access_log_who_does_not_read_delays_no_request() {
    const CLIENTS: usize = 8;
    const REQUESTS: usize = 2_600;
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let files = tempfile::tempdir().unwrap();
    let [config, ready] = ["splitrail.yaml", "ready.json"].map(|name| files.path().join(name));
    std::fs::write(&config, &cluster.yaml).unwrap();
    let mut router = Command::new(built("splitrail"))
        .arg("serve")
        .args([std::ffi::OsStr::new("--config"), config.as_os_str()])
        .args([std::ffi::OsStr::new("--ready-file"), ready.as_os_str()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the router is ready", async || ready.is_file()).await;
    let told: Value = serde_json::from_slice(&std::fs::read(&ready).unwrap()).unwrap();
    let client = |key: &str| Client::new(told[key].as_str().unwrap().parse().unwrap());
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let client = client("http");
        clients.spawn(async move {
            for _ in 0..REQUESTS {
                assert_eq!(client.get("/nowhere").await.status, 404);
            }
        });
    }
    clients.join_all().await;
    let admin = client("admin");
    let text = admin.get("/metrics").await.text();
    let dropped = [("result", "queue_full")];
    assert!(metric_in(&text, "splitrail_access_log_lines_total", &dropped) > 0.0, "{text}");
    let status = admin.get("/admin/attention").await.text();
    assert!(status.contains("standard output is not read"), "{status}");
    // It also ends, although its last lines cannot be written.
    splitrail_tests::proc::signal(router.id(), "TERM");
    eventually("the router ends", async || router.try_wait().unwrap().is_some()).await;
    assert!(router.wait().unwrap().success());
}
