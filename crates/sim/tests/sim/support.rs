//! A client and helpers.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use splitrail_sim::{SimConfig, SimEngine};

/// Only an engine with a defect takes so long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) async fn start(config: SimConfig) -> SimEngine {
    SimEngine::start(config).await.unwrap()
}

pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) bytes: Bytes,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.bytes.to_vec()).unwrap()
    }

    /// Chunks of a stream that ended with `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        assert!(self.text().ends_with("data: [DONE]\n\n"), "{}", self.text());
        let text = self.text();
        let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

/// Sends a request; the error names the step that failed.
pub(crate) async fn send(
    engine: &SimEngine,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> Result<Reply, String> {
    let client =
        Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http::<Full<Bytes>>();
    let mut request = Request::builder().method(method).uri(format!("{}{path}", engine.url()));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let exchange = async {
        let request = request.body(Full::from(body)).unwrap();
        let reply = client.request(request).await.map_err(|error| format!("no reply: {error}"))?;
        let (head, body) = reply.into_parts();
        let body = body.collect().await.map_err(|error| format!("cut: {error}"))?;
        Ok(Reply { status: head.status.as_u16(), headers: head.headers, bytes: body.to_bytes() })
    };
    tokio::time::timeout(PATIENCE, exchange).await.unwrap()
}

/// Posts and reads the reply's body; the flag is whether the body ended as HTTP requires.
pub(crate) async fn read_to_cut(engine: &SimEngine, path: &str, body: Value) -> (String, bool) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = Request::post(format!("{}{path}", engine.url()));
    let request = request.body(Full::from(body.to_string())).unwrap();
    let mut reply = client.request(request).await.unwrap();
    let mut text = String::new();
    let reading = async {
        while let Some(frame) = reply.body_mut().frame().await {
            let Ok(frame) = frame else { return false };
            text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
        true
    };
    let orderly = tokio::time::timeout(PATIENCE, reading).await.unwrap();
    (text, orderly)
}

pub(crate) async fn try_post(engine: &SimEngine, path: &str, body: Value) -> Result<Reply, String> {
    send(engine, Method::POST, path, &[], body.to_string()).await
}

pub(crate) async fn post(engine: &SimEngine, path: &str, body: Value) -> Reply {
    try_post(engine, path, body).await.unwrap()
}

pub(crate) async fn get(engine: &SimEngine, path: &str) -> Reply {
    send(engine, Method::GET, path, &[], String::new()).await.unwrap()
}

/// A completion of token ids that must succeed.
pub(crate) async fn complete(engine: &SimEngine, prompt: &[u32], max_tokens: usize) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens});
    let reply = post(engine, "/v1/completions", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

pub(crate) fn text_of(body: &Value) -> &str {
    body["choices"][0]["text"].as_str().unwrap()
}

pub(crate) fn cached_tokens(body: &Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// Different seeds give prompts without a common prefix.
pub(crate) fn prompt(seed: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|index| 3 + (seed * 31 + index * 7) % 256).collect()
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// The value of a metric whose labels are spelled as given.
pub(crate) fn metric(page: &str, name: &str, label: &str) -> f64 {
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))
        .unwrap_or_else(|| panic!("{name} {label} is missing in {page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
