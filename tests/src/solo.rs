//! The router as a process of its own, before one engine that does what the test says: for
//! what its clients do to its memory and its files.

use serde_json::json;
use splitrail_sim::write_tokenizer;
use tempfile::TempDir;

use crate::binary::RouterProcess;
use crate::client::Client;
use crate::cluster::{eventually, metric_in};
use crate::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};

/// The router, its engine and clients of both listeners.
pub struct Solo {
    /// The engine.
    pub post: ScriptedServer,
    /// The router.
    pub router: RouterProcess,
    /// A client of the front door.
    pub http: Client,
    /// A client of the admin listener.
    pub admin: Client,
    _files: TempDir,
}

/// An engine's answer to a completion that is not streamed.
pub fn whole_reply() -> ScriptedReply {
    answer_of("ok")
}

/// The same with this text.
pub fn answer_of(text: &str) -> ScriptedReply {
    let answer = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    });
    ScriptedReply::json(200, &answer.to_string())
}

impl Solo {
    /// Starts both; `limits` is a YAML flow mapping. Requests for inference are answered by
    /// `script`.
    pub async fn start(
        limits: &str,
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        Self::start_from("", limits, ("", None), script).await
    }

    /// The same with further lines for the model, each indented by four spaces.
    pub async fn start_with(
        limits: &str,
        model: &str,
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        Self::start_from("", limits, (model, None), script).await
    }

    /// The same with further members of `listen`.
    pub async fn start_listening(
        listen: &str,
        limits: &str,
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        Self::start_from(listen, limits, ("", None), script).await
    }

    /// The same with another chat template.
    pub async fn with_template(
        limits: &str,
        template: &str,
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        Self::start_from("", limits, ("", Some(template)), script).await
    }

    async fn start_from(
        listen: &str,
        limits: &str,
        (model, template): (&str, Option<&str>),
        script: impl Fn(&ReceivedRequest) -> ScriptedReply + Send + Sync + 'static,
    ) -> Self {
        let post = ScriptedServer::start(move |heard| match heard.is_inference() {
            true => script(heard),
            false => ScriptedReply::json(200, "{}"),
        })
        .await;
        let files = tempfile::tempdir().expect("a temporary folder");
        write_tokenizer(files.path()).expect("tokenizer files");
        if let Some(template) = template {
            let path = files.path().join("tokenizer_config.json");
            let config = std::fs::read(&path).expect("a tokenizer's configuration");
            let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
            config["chat_template"] = template.into();
            std::fs::write(&path, config.to_string()).expect("a template");
        }
        let tokenizer = match model.contains("tokenizer:") {
            true => "",
            false => "    tokenizer: { kind: huggingface, path: . }\n",
        };
        let timeouts = match model.contains("timeouts:") {
            true => "",
            false => "    timeouts: { stream_idle: 600s, first_token: 600s, reply: 600s }\n",
        };
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0, {listen} }}
limits: {limits}
models:
  - name: sim
    block_size: 16
{tokenizer}    flow: aggregated
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
{timeouts}{model}    workers:
      - {{ id: w0, role: both, url: \"{}\" }}
",
            post.url()
        );
        let log = files.path().join("router.log");
        let router = RouterProcess::serve(files.path(), &yaml, &[], &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        let solo = Self { post, router, http, admin, _files: files };
        eventually("the router is ready", async || solo.http.get("/ready").await.status == 200)
            .await;
        solo
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }
}
