//! Requests that wait in the router's queue, or may not: what their lines say, and what the log says
//! besides.

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::raw;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::Logged;

impl Logged {
    /// Sends a request of the given number of words and does not wait for its reply. Dropping the
    /// socket cancels the request.
    async fn send(&self, id: &str, words: usize) -> TcpStream {
        let mut socket = TcpStream::connect(self.router.told("http")).await.unwrap();
        let headers = [("x-request-id", id)];
        let body = completion(&prompt(words, id)).to_string();
        let request = raw::request("POST", COMPLETIONS, &headers, body.as_bytes());
        socket.write_all(&request).await.unwrap();
        socket
    }

    /// Waits until so many requests wait, besides one that is served.
    async fn waits(&self, depth: f64) {
        eventually(&format!("{depth} wait"), async || {
            let text = self.admin.get("/metrics").await.text();
            let of = |name: &str| metric_in(&text, name, &[]);
            of("splitrail_queue_depth") == depth
                && of("splitrail_requests_in_flight") == depth + 1.0
        })
        .await;
    }

    /// Waits until no request is in flight.
    async fn waits_for_none(&self) {
        eventually("no request is left", async || {
            let text = self.admin.get("/metrics").await.text();
            metric_in(&text, "splitrail_requests_in_flight", &[]) == 0.0
        })
        .await;
    }

    /// The lines of the log with this message.
    fn said(&self, message: &str) -> Vec<Value> {
        let log = self.router.log();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["fields"]["message"] == message).collect()
    }
}

#[tokio::test]
async fn a_request_whose_client_leaves_the_queue_is_recorded_with_its_wait() {
    let logged = Logged::start(Spec::queued(""), "").await;
    let first = logged.send("first", 3000).await;
    logged.waits(0.0).await;
    let waiting = logged.send("gone", 50).await;
    logged.waits(1.0).await;
    drop(waiting);
    let line = logged.line("gone").await;
    assert_eq!((&line["outcome"], &line["status"]), (&json!("cancelled"), &json!(499)), "{line}");
    let wait_ms = line["queue_ms"].as_f64().unwrap_or_else(|| panic!("no wait: {line}"));
    assert!(wait_ms > 0.0 && wait_ms <= line["total_ms"].as_f64().unwrap(), "{line}");
    assert_eq!(line["prefill_ms"], Value::Null, "it reached no engine: {line}");
    // The record of the decision has the same wait.
    let path = "/admin/decisions?request_id=gone";
    let decision = logged.admin.get(path).await.json()["decisions"][0].clone();
    let recorded_ms = decision["stages_ms"]["admit"].as_f64();
    let recorded_ms = recorded_ms.unwrap_or_else(|| panic!("no wait: {decision}"));
    assert!((recorded_ms - wait_ms).abs() < 0.01, "{line}: {decision}");
    drop(first);
}

#[tokio::test]
async fn a_refusal_because_of_load_is_no_warning_and_a_failure_names_its_model() {
    let logged = Logged::start(Spec::queued("max_waiting: 1"), "").await;
    let first = logged.send("first", 3000).await;
    logged.waits(0.0).await;
    let second = logged.send("second", 50).await;
    logged.waits(1.0).await;
    let headers = [("x-request-id", "refused"), ("content-type", "application/json")];
    let body = completion(&prompt(20, "refused")).to_string();
    let refused = logged.http.post_with(COMPLETIONS, &headers, body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert_eq!(logged.line("refused").await["outcome"], "busy");
    drop((first, second));
    logged.waits_for_none().await;
    // Lines are in the order in which they were written: one of the refusal would be first.
    logged.fault(FaultKind::Status { status: 500 });
    let body = completion(&prompt(20, "failed"));
    assert_eq!(logged.http.post(COMPLETIONS, &body).await.status, 502);
    eventually("the failure is logged", async || !logged.said("request failed").is_empty()).await;
    let failures = logged.said("request failed");
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert_eq!(failures[0]["level"], "WARN");
    assert_eq!(failures[0]["fields"]["model"], "sim", "{failures:?}");
    assert!(failures[0]["fields"]["error"].as_str().unwrap().starts_with("engine_failed"));
}
