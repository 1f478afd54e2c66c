//! Traces: the shipped program in front of simulated engines, and collectors that take spans or
//! behave badly.

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, KvConnector, RecordedRequest};
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process::Process;
use splitrail_tests::tls_server::{ServerCertificate, TlsServer, fixture};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt, streamed};
use splitrail_tests::{Client, Cluster, Spec};
use tempfile::TempDir;
use tokio::task::JoinSet;

pub(crate) mod collector;

use collector::{Collector, Protocol, Reply, attribute};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Simulated engines, and the shipped router in front of them.
struct Traced {
    cluster: Cluster,
    router: Process,
    http: Client,
    admin: Client,
    _files: TempDir,
}

impl Traced {
    /// Starts them; `top` are further keys of the router's configuration.
    async fn start(spec: Spec, top: &str) -> Self {
        let cluster = Cluster::start(spec).await;
        let files = tempfile::tempdir().unwrap();
        let config = files.path().join("splitrail.yaml");
        std::fs::write(&config, format!("{}\n{top}", cluster.yaml)).unwrap();
        let args = ["serve".to_owned(), "--config".into(), config.display().to_string()];
        let router = Process::start("router", files.path(), &args).await;
        let (http, admin) = (router.client("http"), router.client("admin"));
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        Self { cluster, router, http, admin, _files: files }
    }

    /// The requests of a path that an engine has received.
    fn asked(&self, engine: &str, path: &str) -> Vec<RecordedRequest> {
        let requests = self.cluster.engine(engine).requests();
        requests.into_iter().filter(|request| request.path == path).collect()
    }

    async fn spans_total(&self, result: &str) -> f64 {
        let text = self.admin.get("/metrics").await.text();
        metric_in(&text, "splitrail_spans_total", &[("result", result)])
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

fn only<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found = named(spans, name);
    assert_eq!(found.len(), 1, "{name}: {:?}", tree(spans));
    found[0]
}

/// Each span's name with the name of its parent.
fn tree(spans: &[Span]) -> Vec<(String, String)> {
    let names: BTreeMap<_, _> = spans.iter().map(|span| (&span.span_id, &span.name)).collect();
    let parent = |span: &Span| names.get(&span.parent_span_id).map_or("", |name| name.as_str());
    let mut tree: Vec<_> =
        spans.iter().map(|span| (span.name.clone(), parent(span).to_owned())).collect();
    tree.sort();
    tree
}

/// Checks that the parts of the time to first token follow each other without a gap, and add up to
/// the measured time.
fn check_ttft(spans: &[Span]) {
    let request = only(spans, "request");
    let mut parts: Vec<&Span> =
        spans.iter().filter(|span| attribute(span, "splitrail.ttft.part") == "true").collect();
    parts.sort_by_key(|span| span.start_time_unix_nano);
    let mut at = request.start_time_unix_nano;
    for part in &parts {
        assert_eq!(part.start_time_unix_nano, at, "{}: {parts:#?}", part.name);
        at = part.end_time_unix_nano;
    }
    let told: f64 = attribute(request, "gen_ai.response.time_to_first_chunk").parse().unwrap();
    let sum = (at - request.start_time_unix_nano) as f64 / 1e9;
    assert!((sum - told).abs() <= told / 100.0, "{sum} s of {told} s");
}

fn pairs<'a>(expected: &[(&'a str, &'a str)]) -> Vec<(String, String)> {
    let mut pairs: Vec<_> =
        expected.iter().map(|(name, of)| ((*name).to_owned(), (*of).to_owned())).collect();
    pairs.sort();
    pairs
}

/// Checks that each leg went to the worker that the client was told, with a trace context whose
/// parent is the leg, and that the choices are explained.
fn check_legs(traced: &Traced, spans: &[Span], route: &str, tracestate: &str) {
    for (leg, kind) in [("prefill leg", "prefill"), ("decode leg", "decode")] {
        let span = only(spans, leg);
        let worker = attribute(span, "splitrail.worker");
        assert!(route.contains(&format!("{kind}={worker}")), "{route}");
        let asked = traced.asked(&worker, CHAT);
        let heard = asked.last().unwrap();
        let own = format!("00-{TRACE}-{}-01", hex(&span.span_id));
        assert_eq!(heard.header("traceparent"), Some(own.as_str()), "{leg}");
        assert_eq!(heard.header("tracestate"), Some(tracestate), "{leg}");
    }
    for pick in named(spans, "pick") {
        assert!(!attribute(pick, "splitrail.pick.worker").is_empty(), "{pick:?}");
        let leg = attribute(pick, "splitrail.pick.leg");
        assert!(["prefill", "decode"].contains(&leg.as_str()), "{leg}");
        if leg == "prefill" {
            assert!(!attribute(pick, "splitrail.pick.runner_up.worker").is_empty());
            assert!(!attribute(pick, "splitrail.pick.runner_up.cost").is_empty());
        }
    }
}

#[tokio::test]
async fn a_request_is_one_trace_from_its_client_to_both_engines() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let collector = Collector::start(protocol, Reply::Take).await;
        let traced = Traced::start(Spec::default(), &collector.tracing("")).await;
        let parent = format!("00-{TRACE}-{PARENT}-01");
        let headers = [("traceparent", parent.as_str()), ("tracestate", "vendor=1,other=x")];
        let body = streamed(&chat(&prompt(40, "secretword")));
        let mut events = traced.http.stream_with(CHAT, &headers, &body).await;
        assert_eq!(events.status, 200);
        let route = events.headers["x-splitrail-route"].to_str().unwrap().to_owned();
        events.rest().await;
        let spans = collector.traced(1).await;
        let expected = [
            ("request", ""),
            ("receive", "request"),
            ("tokenize", "request"),
            ("pick", "request"),
            ("prefill leg", "request"),
            ("hand-off", "request"),
            ("pick", "hand-off"),
            ("decode leg", "request"),
        ];
        assert_eq!(tree(&spans), pairs(&expected));
        for span in &spans {
            assert_eq!(
                (hex(&span.trace_id).as_str(), span.trace_state.as_str()),
                (TRACE, headers[1].1)
            );
            assert!(span.status.is_none() && span.end_time_unix_nano >= span.start_time_unix_nano);
        }
        let request = only(&spans, "request");
        assert_eq!(hex(&request.parent_span_id), PARENT);
        for (key, value) in [
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.request.model", "sim"),
            ("gen_ai.request.stream", "true"),
            ("http.response.status_code", "200"),
            ("splitrail.outcome", "ok"),
            ("splitrail.flow", "prefill_first"),
            ("gen_ai.usage.cache_read.input_tokens", "0"),
        ] {
            assert_eq!(attribute(request, key), value, "{key}");
        }
        assert!(attribute(request, "gen_ai.usage.input_tokens").parse::<u64>().unwrap() > 40);
        check_ttft(&spans);
        check_legs(&traced, &spans, &route, headers[1].1);
        let batch = &collector.batches()[0];
        let path = match protocol {
            Protocol::Grpc => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            Protocol::Http => "/v1/traces",
        };
        assert_eq!(batch.path, path);
        let text = String::from_utf8_lossy(&batch.bytes).into_owned();
        assert!(!text.contains("secretword"), "no content");
        eventually("all spans are counted", async || traced.spans_total("exported").await == 8.0)
            .await;
    }
}

#[tokio::test]
async fn a_trace_begins_at_the_router_if_the_client_has_none() {
    let collector = Collector::start(Protocol::Grpc, Reply::Take).await;
    let more = ", service_name: edge, headers: [{ name: authorization, value: { kind: env, name: \
                PATH } }]";
    let spec = Spec { model: "queue: {}\n".to_owned(), ..Spec::aggregated(2) };
    let traced = Traced::start(spec, &collector.tracing(more)).await;
    let body = streamed(&completion(&prompt(30, "x")));
    traced.http.stream(COMPLETIONS, &body).await.rest().await;
    let spans = collector.traced(1).await;
    let expected = [
        ("request", ""),
        ("receive", "request"),
        ("tokenize", "request"),
        ("queue", "request"),
        ("pick", "request"),
        ("decode leg", "request"),
        ("first token", "decode leg"),
    ];
    assert_eq!(tree(&spans), pairs(&expected));
    check_ttft(&spans);
    let batch = &collector.batches()[0];
    let secret = std::env::var("PATH").unwrap();
    assert_eq!(batch.headers["authorization"].to_str().unwrap(), secret);
    let resource = batch.request.resource_spans[0].resource.as_ref().unwrap();
    let names: Vec<_> = resource.attributes.iter().map(|one| one.key.as_str()).collect();
    assert!(names.contains(&"service.name") && names.contains(&"service.instance.id"));
    assert!(String::from_utf8_lossy(&batch.bytes).contains("edge"));
    // The credential is in no log.
    assert!(!traced.router.log().contains(&secret));
}

#[tokio::test]
async fn a_failed_leg_is_a_span_with_its_error_and_a_part_of_the_time_to_first_token() {
    let collector = Collector::start(Protocol::Http, Reply::Take).await;
    let traced = Traced::start(Spec::default(), &collector.tracing("")).await;
    for engine in ["p0", "p1"] {
        let kind = FaultKind::Status { status: 500 };
        traced.cluster.engine(engine).set_fault(Fault { kind, times: Some(1) });
    }
    let body = streamed(&chat(&prompt(40, "r")));
    let events = traced.http.stream(CHAT, &body).await.rest().await;
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{events:?}");
    let spans = collector.traced(1).await;
    let legs = named(&spans, "prefill leg");
    let failed: Vec<_> =
        legs.iter().filter(|leg| attribute(leg, "error.type") == "engine_failed").collect();
    assert!(!failed.is_empty() && failed.iter().all(|leg| leg.status.is_some()), "{legs:#?}");
    check_ttft(&spans);
}

#[tokio::test]
async fn a_request_that_ends_within_a_stage_has_a_span_of_that_stage() {
    let collector = Collector::start(Protocol::Http, Reply::Take).await;
    let spec = Spec {
        limits: "{ drain_delay: 10ms, drain_grace: 5s, body_size_max: 65536 }",
        ..Spec::aggregated(1)
    };
    let traced = Traced::start(spec, &collector.tracing("")).await;
    let large = completion(&"x ".repeat(60_000)).to_string();
    assert_eq!(traced.http.post_with(COMPLETIONS, &[], large).await.status, 413);
    let spans = collector.traced(1).await;
    assert_eq!(tree(&spans), pairs(&[("request", ""), ("receive", "request")]));
    let unknown = json!({"model": "unknown", "prompt": "x"});
    assert_eq!(traced.http.post(COMPLETIONS, &unknown).await.status, 404);
    let spans = collector.traced(2).await;
    let [receive, tokenize] = [named(&spans, "receive")[1], only(&spans, "tokenize")];
    assert_eq!(receive.end_time_unix_nano, tokenize.start_time_unix_nano);
    let request = named(&spans, "request")[1];
    assert_eq!(tokenize.end_time_unix_nano, request.end_time_unix_nano);
}

#[tokio::test]
async fn legs_that_run_at_the_same_time_are_beside_each_other_in_the_trace() {
    for connector in [KvConnector::Mooncake, KvConnector::Sglang] {
        let collector = Collector::start(Protocol::Grpc, Reply::Take).await;
        let spec = Spec { connector, ..Spec::default() };
        let traced = Traced::start(spec, &collector.tracing("")).await;
        traced.http.stream(CHAT, &streamed(&chat(&prompt(40, "pair")))).await.rest().await;
        let spans = collector.traced(1).await;
        let [prefill, decode] = ["prefill leg", "decode leg"].map(|name| only(&spans, name));
        assert_eq!(prefill.start_time_unix_nano, decode.start_time_unix_nano);
        check_ttft(&spans);
        for leg in [prefill, decode] {
            let asked = traced.asked(&attribute(leg, "splitrail.worker"), CHAT);
            let heard = asked.last().unwrap().header("traceparent").unwrap();
            assert!(heard.ends_with(&format!("-{}-01", hex(&leg.span_id))), "{heard}");
        }
    }
}

#[tokio::test]
async fn a_batch_has_the_legs_of_each_prompt_and_a_whole_reply_no_first_token() {
    let collector = Collector::start(Protocol::Http, Reply::Take).await;
    let traced = Traced::start(Spec::default(), &collector.tracing("")).await;
    let mut batch = completion("");
    batch["prompt"] = json!([prompt(30, "x"), prompt(30, "y")]);
    assert_eq!(traced.http.post(COMPLETIONS, &batch).await.status, 200);
    let spans = collector.traced(1).await;
    let (once, twice) = (("request", ""), ["pick", "prefill leg", "decode leg"]);
    let mut expected = vec![once, ("receive", "request"), ("tokenize", "request")];
    expected.extend([("pick", "request"); 2]);
    expected.extend(twice.iter().flat_map(|name| [(*name, "request"); 2]));
    assert_eq!(tree(&spans), pairs(&expected));
    for name in ["prefill leg", "decode leg"] {
        let mut prompts: Vec<_> = named(&spans, name)
            .iter()
            .map(|leg| attribute(leg, "splitrail.prompt.index"))
            .collect();
        prompts.sort();
        assert_eq!(prompts, ["0", "1"]);
    }
    let end = only(&spans, "request").end_time_unix_nano;
    assert!(spans.iter().all(|span| span.end_time_unix_nano <= end));
}

#[tokio::test]
async fn spans_go_over_tls_to_a_collector_with_the_right_certificate_only() {
    for (protocol, alpn, path) in
        [(Protocol::Grpc, "h2", ""), (Protocol::Http, "http/1.1", "/otlp/v1/traces")]
    {
        let collector = Collector::start(protocol, Reply::Take).await;
        let certificate = ServerCertificate::VALID;
        let tls = TlsServer::of_protocol(collector.address, certificate, alpn).await;
        let endpoint = format!("{}{path}", tls.url());
        let trusting = |authority: &str| {
            let ca = fixture(authority);
            let plain = format!("http://{}", collector.address);
            let more = format!(", ca: {:?}", ca.display().to_string());
            collector.tracing(&more).replace(&plain, &endpoint)
        };
        let body = completion(&prompt(20, "tls"));
        let other = Traced::start(Spec::aggregated(1), &trusting("ca.pem")).await;
        assert_eq!(other.http.post(COMPLETIONS, &body).await.status, 200);
        let traced = Traced::start(Spec::aggregated(1), &trusting("engines/ca.pem")).await;
        assert_eq!(traced.http.post(COMPLETIONS, &body).await.status, 200);
        let spans = collector.traced(1).await;
        assert_eq!(named(&spans, "request").len(), 1, "of the one that trusts it");
        eventually("the other says why", async || {
            other.router.log().contains("no connection: invalid peer certificate")
        })
        .await;
        if protocol == Protocol::Http {
            assert_eq!(collector.batches()[0].path, path);
        }
    }
}

#[tokio::test]
async fn an_unsampled_request_has_no_spans_and_keeps_its_trace_context() {
    let collector = Collector::start(Protocol::Http, Reply::Take).await;
    let traced = Traced::start(Spec::aggregated(1), &collector.tracing(", sample_ratio: 0")).await;
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    let body = completion(&prompt(20, "u"));
    let headers = [("traceparent", unsampled.as_str()), ("tracestate", "a=b")];
    for headers in [&headers[..], &[]] {
        let text = body.to_string();
        assert_eq!(traced.http.post_with(COMPLETIONS, headers, text).await.status, 200);
    }
    // A sampled client is traced whatever the ratio is, and its spans are the first to arrive.
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", sampled.as_str())];
    traced.http.post_with(COMPLETIONS, &headers, body.to_string()).await;
    let spans = collector.traced(1).await;
    assert_eq!(named(&spans, "request").len(), 1);
    let asked = traced.asked("w0", COMPLETIONS);
    let heard: Vec<_> = asked.iter().map(|one| one.header("traceparent")).collect();
    assert_eq!(heard[..2], [Some(unsampled.as_str()), None]);
    assert_ne!(heard[2], Some(sampled.as_str()), "its own leg");
    assert_eq!(asked[0].header("tracestate"), None);
}

#[tokio::test]
async fn a_collector_that_behaves_badly_is_felt_by_no_request_and_spans_are_counted() {
    for (protocol, reply) in [
        (Protocol::Grpc, Reply::Refuse),
        (Protocol::Grpc, Reply::Nonsense),
        (Protocol::Http, Reply::Refuse),
        (Protocol::Http, Reply::Nonsense),
    ] {
        let collector = Collector::start(protocol, reply).await;
        let traced = Traced::start(Spec::aggregated(1), &collector.tracing("")).await;
        let body = completion(&prompt(20, "bad"));
        assert_eq!(traced.http.post(COMPLETIONS, &body).await.status, 200);
        eventually("the spans are counted as failed", async || {
            traced.spans_total("failed").await == 5.0
        })
        .await;
        assert_eq!(traced.spans_total("exported").await, 0.0, "{protocol:?} {reply:?}");
        assert!(traced.router.log().contains("the collector of traces does not take spans"));
    }
}

#[tokio::test]
async fn a_silent_collector_holds_a_bounded_number_of_spans() {
    const CLIENTS: usize = 8;
    const EACH: usize = 30;
    let collector = Collector::start(Protocol::Grpc, Reply::Never).await;
    let more = ", queue_spans_max: 512, timeout: 1h";
    let mut traced = Traced::start(Spec::aggregated(1), &collector.tracing(more)).await;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let http = traced.router.client("http");
        clients.spawn(async move {
            for turn in 0..EACH {
                let body = completion(&prompt(4, &format!("s{client}-{turn}")));
                assert_eq!(http.post(COMPLETIONS, &body).await.status, 200);
            }
        });
    }
    clients.join_all().await;
    eventually("all requests are counted", async || {
        // Each has the spans request, receive, tokenize, pick and decode leg. One batch is with the
        // collector, and one more can wait.
        let dropped = traced.spans_total("dropped").await;
        dropped >= (CLIENTS * EACH * 5 - 2 * 520) as f64
    })
    .await;
    // The router does not wait for the collector for ever when it stops.
    traced.router.terminate();
    assert!(traced.router.ended().await.success());
}

#[tokio::test]
async fn batches_share_a_connection_and_none_is_lost_if_the_collector_closes_it() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let collector = Collector::start(protocol, Reply::Take).await;
        let traced = Traced::start(Spec::aggregated(1), &collector.tracing("")).await;
        let mut batches = 0;
        let mut send = async |turn: u32| {
            let body = completion(&prompt(20, &format!("k{turn}")));
            assert_eq!(traced.http.post(COMPLETIONS, &body).await.status, 200);
            batches += 1;
            eventually("the batch has arrived", async || collector.batches().len() == batches)
                .await;
        };
        for turn in 0..2 {
            send(turn).await;
        }
        assert_eq!(collector.accepted(), 1, "{protocol:?}");
        collector.cut();
        send(2).await;
        assert_eq!(collector.accepted(), 2, "{protocol:?}");
        eventually("all spans are counted", async || traced.spans_total("exported").await == 15.0)
            .await;
        assert_eq!(traced.spans_total("failed").await, 0.0);
        assert!(!traced.router.log().contains("does not take spans"));
    }
}

#[tokio::test]
async fn spans_are_exported_before_the_router_ends() {
    let collector = Collector::start(Protocol::Grpc, Reply::Take).await;
    let mut traced = Traced::start(Spec::aggregated(1), &collector.tracing("")).await;
    let body = completion(&prompt(20, "end"));
    assert_eq!(traced.http.post(COMPLETIONS, &body).await.status, 200);
    traced.router.terminate();
    assert!(traced.router.ended().await.success());
    assert_eq!(named(&collector.spans(), "request").len(), 1);
}

#[tokio::test]
async fn an_unreachable_collector_costs_requests_nothing() {
    let traced = Traced::start(
        Spec::default(),
        "tracing: { otlp: { endpoint: 'http://127.0.0.1:1', timeout: 200ms } }\n",
    )
    .await;
    for turn in 0..20 {
        let body = chat(&prompt(20, &format!("n{turn}")));
        let reply = traced.http.post(CHAT, &body).await;
        assert_eq!(reply.status, 200);
        assert!(reply.json()["usage"] != Value::Null);
    }
    eventually("the router says so", async || {
        traced.router.log().contains("the collector of traces does not take spans")
    })
    .await;
}
