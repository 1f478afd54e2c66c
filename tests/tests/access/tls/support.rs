//! A router with TLS before one engine that does what the test says.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use splitrail_router::assemble::assemble;
use splitrail_router::run::{Running, wait_ready};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::raw::request;
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use splitrail_tests::tls::{Exchanged, fixture};

pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Maximum time until the router is ready.
const PATIENCE: Duration = Duration::from_secs(60);

/// The `tls` of a listener with the router's certificate.
pub(crate) const ROUTER: &str = "cert: router.pem, key: router.key";

/// A router whose listeners have TLS, and its scripted engine.
pub(crate) struct SecureCluster {
    pub(crate) running: Running,
    pub(crate) post: ScriptedServer,
    /// A client of the admin listener, which has no TLS unless the test says so.
    admin: Client,
}

impl SecureCluster {
    /// Starts a router whose HTTP and gRPC listeners have this `tls`, with an engine that answers
    /// `ok`.
    pub(crate) async fn start(tls: &str) -> Self {
        Self::start_with(tls, "{}", "", whole_or_events).await
    }

    /// The same with these `limits` and further keys of the configuration, as lines, and with an
    /// engine that answers as `script` says.
    pub(crate) async fn start_with(
        tls: &str,
        limits: &str,
        top: &str,
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        let post = ScriptedServer::start(move |heard| match heard.is_inference() {
            true => script(heard),
            false => ScriptedReply::json(200, "{}"),
        })
        .await;
        let listener = format!("{{ address: 127.0.0.1:0, tls: {{ {tls} }} }}");
        let listen = format!("{{ http: {listener}, grpc: {listener}, admin: 127.0.0.1:0 }}");
        let yaml = yaml(&listen, limits, top, &post.url());
        let running = run(&yaml).await;
        let admin = Client::new(running.addresses.admin);
        Self { running, post, admin }
    }

    /// Sends a request for a completion on a connection of its own, as `client`.
    pub(crate) async fn complete(&self, client: splitrail_tests::tls::TlsClient<'_>) -> Exchanged {
        client.exchange(self.running.addresses.http, &completion(false)).await
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }

    /// Waits until so many connections of the HTTP listener were closed for this reason.
    pub(crate) async fn until_cut(&self, reason: &str, count: usize) {
        let labels = [("listener", "http"), ("reason", reason)];
        eventually(&format!("{count} connections are closed: {reason}"), async || {
            self.metric("splitrail_connections_cut_total", &labels).await == count as f64
        })
        .await;
    }

    /// The number of connections that were closed, for any reason.
    pub(crate) async fn cut(&self) -> f64 {
        self.metric("splitrail_connections_cut_total", &[]).await
    }
}

/// A configuration; relative paths are those of the certificates.
pub(crate) fn yaml(listen: &str, limits: &str, top: &str, engine: &str) -> String {
    format!(
        "listen: {listen}
limits: {limits}
{top}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: none }}
    flow: aggregated
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
    timeouts: {{ stream_idle: 600s, first_token: 600s, reply: 600s }}
    workers: [{{ id: w0, role: both, url: \"{engine}\" }}]
"
    )
}

/// Starts a router in this process.
pub(crate) async fn run(yaml: &str) -> Running {
    let loaded = splitrail_config::parse("x.yaml", yaml, &fixture(""));
    let loaded = loaded.unwrap_or_else(|problems| panic!("{problems}\n{yaml}"));
    let listen = loaded.config.listen.clone();
    let core = assemble(loaded.config, None).unwrap();
    let running = Running::start(core, &listen).await.unwrap();
    assert_eq!(wait_ready(&running.core, PATIENCE).await, None, "ready in time");
    running
}

/// A request for a completion, on a connection that is closed after it.
pub(crate) fn completion(stream: bool) -> Vec<u8> {
    completion_of("a", stream)
}

/// The same of this prompt.
pub(crate) fn completion_of(prompt: &str, stream: bool) -> Vec<u8> {
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": prompt, "stream": stream});
    request("POST", COMPLETIONS, &[], body.to_string().as_bytes())
}

/// An engine's answer `ok`, streamed if the request says so.
pub(crate) fn whole_or_events(heard: &ReceivedRequest) -> ScriptedReply {
    if !heard.text().contains("\"stream\":true") {
        return whole_reply();
    }
    let text = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
    });
    let usage = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim", "choices": [],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    ScriptedReply::events(&format!("data: {text}\n\ndata: {usage}\n\ndata: [DONE]\n\n"))
}

/// Puts a certificate and its key where a router reads them.
pub(crate) fn put(folder: &Path, name: &str) {
    for kind in ["key", "pem"] {
        std::fs::copy(fixture(&format!("{name}.{kind}")), folder.join(format!("tls.{kind}")))
            .unwrap();
    }
}

/// The `tls` of a listener whose files are in this folder.
pub(crate) fn tls_in(folder: &Path) -> String {
    let path = |name: &str| folder.join(name).display().to_string();
    format!("cert: {:?}, key: {:?}", path("tls.pem"), path("tls.key"))
}
