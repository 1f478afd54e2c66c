//! Requests over HTTP that are refused, fail or are left: one line each.

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{Logged, TENANTS};

/// A request, and what its line says of it.
struct Case<'a> {
    id: &'a str,
    key: Option<&'a str>,
    body: Value,
    status: u16,
    outcome: &'a str,
    tenant: Option<&'a str>,
}

impl Logged {
    async fn check(&self, case: Case<'_>) {
        let authorization = case.key.map(bearer).unwrap_or_default();
        let mut headers = vec![("x-request-id", case.id), ("content-type", "application/json")];
        headers.extend(case.key.map(|_| ("authorization", authorization.as_str())));
        let reply = self.http.post_with(COMPLETIONS, &headers, case.body.to_string()).await;
        assert_eq!(reply.status, case.status, "{}: {}", case.id, reply.text());
        if reply.status != 200 {
            assert_eq!(reply.json()["error"]["code"], case.outcome, "{}", case.id);
        }
        self.check_line(&case).await;
    }

    async fn check_line(&self, case: &Case<'_>) {
        let line = self.line(case.id).await;
        let told = (&line["status"], &line["outcome"], &line["tenant"], &line["endpoint"]);
        let expected =
            (&json!(case.status), &json!(case.outcome), &json!(case.tenant), &json!("completions"));
        assert_eq!(told, expected, "{line}");
    }

    /// Has the decode engine misbehave in this way from now on. A count of one would not do: a trial
    /// of a worker that seems to hang would take the fault of the next request.
    pub(super) fn fault(&self, kind: FaultKind) {
        let engine = self.cluster.engine("d0");
        engine.clear_faults();
        engine.set_fault(Fault { kind, times: None });
    }

    /// Ends the prefill engine, and waits until the router knows.
    pub(super) async fn loses_its_prefill_engine(&mut self) {
        self.cluster.engines.retain(|(name, _)| name != "p0");
        eventually("the worker is down", async || {
            let workers = self.admin.get("/admin/workers").await.json()["workers"].clone();
            let mut workers = workers.as_array().unwrap().iter();
            workers.any(|worker| worker["id"] == "p0" && worker["state"] == "down")
        })
        .await;
    }

    /// Waits until the engine has got another request.
    pub(super) async fn is_asked(&self, requests_before: usize) {
        let asked = || self.cluster.engine("d0").requests().len();
        eventually("the engine has the request", async || asked() > requests_before).await;
    }
}

/// A pair of engines without which no request is served, with a further key of the model.
pub(super) fn pair(key: &str) -> Spec {
    Spec {
        prefill: 1,
        decode: 1,
        model: format!("on_no_prefill: fail\n{key}"),
        limits: "{ drain_delay: 10ms, drain_grace: 5s, body_size_max: 65536 }",
        ..Spec::default()
    }
}

#[tokio::test]
async fn every_refusal_and_failure_is_one_line_with_status_outcome_and_tenant() {
    let mut keys = Keys::empty();
    let [acme, small, other] = ["acme", "small", "other"].map(|name| keys.tenant(name));
    let spec = pair("timeouts: { reply: 3s }");
    let mut logged = Logged::start(spec, &format!("{}\n{TENANTS}", keys.auth())).await;
    let good = completion(&prompt(40, "secretword"));
    let with = |member: &str, value: Value| {
        let mut body = good.clone();
        body[member] = value;
        body
    };
    let large = completion(&"secretword ".repeat(10_000));
    let case = |id, key, body: &Value, status, outcome, tenant| Case {
        id,
        key,
        body: body.clone(),
        status,
        outcome,
        tenant,
    };
    let (acme_key, none) = (Some(acme.as_str()), None);
    for case in [
        case("no-key", none, &good, 401, "invalid_api_key", none),
        case("bad-key", Some("sk-secretword"), &good, 401, "invalid_api_key", none),
        case("other-model", Some(&other), &good, 403, "permission_denied", Some("other")),
        case(
            "no-model",
            acme_key,
            &with("model", "m".into()),
            404,
            "model_not_found",
            Some("acme"),
        ),
        case("large", acme_key, &large, 413, "body_too_large", Some("acme")),
        case("wrong", acme_key, &with("n", (-1).into()), 400, "invalid_request", Some("acme")),
        case("first", Some(&small), &good, 200, "ok", Some("small")),
        case("second", Some(&small), &good, 429, "rate_limit_exceeded", Some("small")),
    ] {
        logged.check(case).await;
    }
    logged.fault(FaultKind::Status { status: 500 });
    logged.check(case("failed", acme_key, &good, 502, "engine_failed", Some("acme"))).await;
    logged.fault(FaultKind::Hang);
    logged.check(case("late", acme_key, &good, 504, "engine_timeout", Some("acme"))).await;
    logged.fault(FaultKind::DieMidStream { after_chunks: 2 });
    // Its status was sent before it broke off.
    let headers = [("x-request-id", "broken"), ("authorization", &bearer(&acme))];
    logged.http.stream_with(COMPLETIONS, &headers, &streamed(&good)).await.rest().await;
    logged.check_line(&case("broken", none, &good, 200, "decode_lost", Some("acme"))).await;
    leaves(&logged, &acme, &streamed(&good)).await;
    logged.check_line(&case("gone", none, &good, 499, "cancelled", Some("acme"))).await;
    logged.loses_its_prefill_engine().await;
    logged.check(case("no-worker", acme_key, &good, 503, "no_worker", Some("acme"))).await;

    let log = logged.router.log();
    assert_eq!(logged.lines().len(), 13, "one line for each request: {log}");
    let output = logged.router.output();
    for secret in ["secretword", &acme, &small, &other] {
        assert!(!log.contains(secret) && !output.contains(secret), "{log}{output}");
    }
}

/// Nothing of the hand-off was sent to the first decode worker, so the second one gets the same.
#[tokio::test]
async fn a_hand_off_that_is_sent_again_is_a_further_attempt() {
    let spec = Spec {
        prefill: 1,
        policy: "{ kind: predicted_ttft }",
        // The router learns from the leg itself that the worker is gone.
        model: "health: { probe_interval: 1h }\nbreaker: { failures: 0 }".into(),
        worker: |name| if name == "d1" { ", costs: { step_base_ms: 1000 }" } else { "" },
        ..Spec::default()
    };
    let mut logged = Logged::start(spec, "").await;
    logged.cluster.engines.retain(|(name, _)| name != "d0");
    let headers = [("x-request-id", "again"), ("content-type", "application/json")];
    let body = streamed(&completion(&prompt(40, "again"))).to_string();
    let reply = logged.http.post_with(COMPLETIONS, &headers, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("decode"), Some("d1"));
    let line = logged.line("again").await;
    assert_eq!(line["attempts"], 2, "{line}");
    let text = logged.admin.get("/metrics").await.text();
    assert_eq!(metric_in(&text, "splitrail_retries_total", &[("leg", "decode")]), 1.0);
    // Only the time of a request without retries says how good a prediction was.
    assert_eq!(metric_in(&text, "splitrail_ttft_prediction_error_ratio_count", &[]), 0.0);
    assert_eq!(logged.cluster.engine("p0").state().totals.hand_offs_staged, 1);
}

/// Sends a request, and leaves when the engine has it, before the reply.
async fn leaves(logged: &Logged, key: &str, body: &Value) {
    logged.fault(FaultKind::Hang);
    let before = logged.cluster.engine("d0").requests().len();
    let mut socket = TcpStream::connect(logged.router.told("http")).await.unwrap();
    let (body, authorization) = (body.to_string(), bearer(key));
    let request = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         x-request-id: gone\r\nauthorization: {authorization}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    logged.is_asked(before).await;
}
