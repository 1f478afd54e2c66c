//! Calls over gRPC that are refused, fail or are left: one line each, with the code of their status.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::trial::prompt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::{Code, Request, Status};

use super::failures::pair;
use super::{Logged, TENANTS};

const METHOD: &str = "/splitrail.v1.FrontDoorService/Generate";

/// Calls with a key, within a time; the status with which the call ended.
async fn call(
    address: SocketAddr,
    key: Option<&str>,
    message: v1::GenerateRequest,
    timeout: Option<Duration>,
) -> Code {
    let mut request = Request::new(message);
    if let Some(key) = key {
        request.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
    }
    if let Some(timeout) = timeout {
        request.set_timeout(timeout);
    }
    let call = async {
        let mut stream = grpc_client(address).generate(request).await?.into_inner();
        while stream.message().await?.is_some() {}
        Ok::<_, Status>(())
    };
    call.await.map_or_else(|status| status.code(), |()| Code::Ok)
}

/// Begins a call with these headers whose message never comes; its status.
async fn raw_call(address: SocketAddr, headers: &[(&str, &str)]) -> String {
    let socket = TcpStream::connect(address).await.unwrap();
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(socket));
    let (mut sender, connection) = handshake.await.unwrap();
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let body = StreamBody::new(stream::pending::<Result<Frame<Bytes>, std::io::Error>>());
    let mut request = http::Request::post(format!("http://{address}{METHOD}"))
        .header("content-type", "application/grpc");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let reply = sender.send_request(request.body(body).unwrap()).await.unwrap();
    reply.headers()["grpc-status"].to_str().unwrap().to_owned()
}

/// Begins a call whose message never comes, within a tenth of a second; its status.
async fn silent_call(address: SocketAddr, key: &str) -> String {
    let key = bearer(key);
    raw_call(address, &[("te", "trailers"), ("grpc-timeout", "100m"), ("authorization", &key)])
        .await
}

/// Checks the last of so many lines.
async fn check_last(
    logged: &Logged,
    lines: usize,
    (code, outcome, tenant): (Code, &str, Option<&str>),
) {
    eventually("the line is there", async || logged.lines().len() == lines).await;
    let line: Value = logged.lines().pop().unwrap();
    let told = (&line["status"], &line["outcome"], &line["tenant"], &line["protocol"]);
    let expected = (&json!(code as i32), &json!(outcome), &json!(tenant), &json!("grpc"));
    assert_eq!(told, expected, "{line}");
}

#[tokio::test]
async fn every_call_that_is_refused_fails_or_is_left_is_one_line() {
    let mut keys = Keys::empty();
    let [acme, small, other] = ["acme", "small", "other"].map(|name| keys.tenant(name));
    let spec = pair("timeouts: { first_token: 2s }");
    let mut logged = Logged::start(spec, &format!("{}\n{TENANTS}", keys.auth())).await;
    let address: SocketAddr = logged.router.told("grpc").parse().unwrap();
    let good = || text_request(&prompt(40, "secretword"), "");
    let of = |model: &str| v1::GenerateRequest { model: model.to_owned(), ..good() };
    // The calls follow each other, and so do their lines.
    let mut calls = 0;
    let mut is_told = async |code: Code, outcome: &str, tenant: Option<&str>| {
        calls += 1;
        check_last(&logged, calls, (code, outcome, tenant)).await;
    };
    for (key, message, code, outcome, tenant) in [
        (None, good(), Code::Unauthenticated, "invalid_api_key", None),
        (Some("sk-secretword"), good(), Code::Unauthenticated, "invalid_api_key", None),
        (Some(&*other), good(), Code::PermissionDenied, "permission_denied", Some("other")),
        (Some(&*acme), of("m"), Code::NotFound, "model_not_found", Some("acme")),
        (
            Some(&*acme),
            text_request("secretword", "{\"n\": -1}"),
            Code::InvalidArgument,
            "invalid_request",
            Some("acme"),
        ),
        (
            Some(&*acme),
            text_request(&"secretword ".repeat(10_000), ""),
            Code::OutOfRange,
            "body_too_large",
            Some("acme"),
        ),
        (Some(&*small), good(), Code::Ok, "ok", Some("small")),
        (Some(&*small), good(), Code::ResourceExhausted, "rate_limit_exceeded", Some("small")),
    ] {
        assert_eq!(call(address, key, message, None).await, code, "{outcome}");
        is_told(code, outcome, tenant).await;
    }
    let acme_key = Some(acme.as_str());
    logged.fault(FaultKind::Status { status: 500 });
    assert_eq!(call(address, acme_key, good(), None).await, Code::Unavailable);
    is_told(Code::Unavailable, "engine_failed", Some("acme")).await;
    logged.fault(FaultKind::Hang);
    assert_eq!(call(address, acme_key, good(), None).await, Code::DeadlineExceeded);
    is_told(Code::DeadlineExceeded, "engine_timeout", Some("acme")).await;
    // The client's own deadline.
    logged.fault(FaultKind::Hang);
    let short = Some(Duration::from_millis(100));
    assert_eq!(call(address, acme_key, good(), short).await, Code::DeadlineExceeded);
    is_told(Code::DeadlineExceeded, "cancelled", Some("acme")).await;
    assert_eq!(silent_call(address, &acme).await, "4");
    is_told(Code::DeadlineExceeded, "cancelled", Some("acme")).await;
    // Calls that are malformed.
    assert_eq!(raw_call(address, &[]).await, "13");
    is_told(Code::Internal, "refused", None).await;
    let unreadable = [("te", "trailers"), ("grpc-timeout", "soon")];
    assert_eq!(raw_call(address, &unreadable).await, "3");
    is_told(Code::InvalidArgument, "invalid_request", None).await;
    // The client leaves.
    logged.fault(FaultKind::Hang);
    let before = logged.cluster.engine("d0").requests().len();
    let mut leaving = JoinSet::new();
    let (key, message) = (acme.clone(), good());
    leaving.spawn(async move { call(address, Some(&key), message, None).await });
    logged.is_asked(before).await;
    leaving.shutdown().await;
    is_told(Code::Cancelled, "cancelled", Some("acme")).await;
    logged.loses_its_prefill_engine().await;
    assert_eq!(call(address, acme_key, good(), None).await, Code::Unavailable);
    check_last(&logged, calls + 1, (Code::Unavailable, "no_worker", Some("acme"))).await;

    let log = logged.router.log();
    for secret in ["secretword", &acme, &small, &other] {
        assert!(!log.contains(secret), "{log}");
    }
}

/// An engine whose streams have this event after the first token.
async fn streaming(event: &'static str) -> ScriptedServer {
    let first = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "one", "finish_reason": null}],
    });
    ScriptedServer::start(move |heard| match heard.is_inference() {
        true => {
            ScriptedReply::events(&format!("data: {first}\n\ndata: {event}\n\ndata: [DONE]\n\n"))
        }
        false => ScriptedReply::json(200, "{\"data\": [{\"id\": \"sim\"}]}"),
    })
    .await
}

/// gRPC has types where JSON has none: what has another type there cannot be passed on.
#[tokio::test]
async fn an_event_that_cannot_be_passed_on_is_the_failure_of_its_engine() {
    for event in [
        r#"{"choices": [{"index": 0, "text": "two", "finish_reason": 7}]}"#,
        r#"{"choices": [{"index": 0, "text": ["two"], "finish_reason": null}]}"#,
    ] {
        let engine = streaming(event).await;
        let worker = format!("{{ id: odd, role: both, url: \"{}\" }}", engine.url());
        let spec = Spec { extra_workers: vec![worker], ..Spec::aggregated(0) };
        let logged = Logged::start(spec, "").await;
        let address: SocketAddr = logged.router.told("grpc").parse().unwrap();
        let request = v1::GenerateRequest {
            request_id: "odd-1".to_owned(),
            ..text_request(&prompt(20, "odd"), "")
        };
        let code = call(address, None, request, None).await;
        assert_eq!(code, Code::Aborted, "{event}");
        let line = logged.line("odd-1").await;
        let told = (&line["status"], &line["outcome"]);
        assert_eq!(told, (&json!(code as i32), &json!("decode_lost")), "{line}");
        let text = logged.admin.get("/metrics").await.text();
        let of_engine = [("worker", "odd")];
        let failures = metric_in(&text, "splitrail_worker_leg_failures_total", &of_engine);
        assert_eq!(failures, 1.0, "{event}");
        let failed = [("model", "sim"), ("result", "failed")];
        assert_eq!(metric_in(&text, "splitrail_request_results_total", &failed), 1.0);
    }
}
