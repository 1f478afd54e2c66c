//! The router as a process of its own, before engines that do what the test says.

use splitrail_sim::write_tokenizer;
use tempfile::TempDir;

use crate::binary::RouterProcess;
use crate::client::Client;
use crate::cluster::{eventually, metric_in};

/// The router and clients of both listeners.
pub struct Front {
    /// The router.
    pub router: RouterProcess,
    /// A client of the front door.
    pub http: Client,
    /// A client of the admin listener.
    pub admin: Client,
    files: TempDir,
}

impl Front {
    /// Starts it, with `limits` as a YAML flow mapping and further keys of the model as lines.
    pub async fn start(limits: &str, model: &str, workers: &[String]) -> Self {
        let workers: Vec<_> = workers.iter().map(|url| ("both", url.clone())).collect();
        Self::with_flow(limits, "flow: aggregated", model, &workers).await
    }

    /// The same with workers of these roles.
    pub async fn with_flow(
        limits: &str,
        flow: &str,
        model: &str,
        workers: &[(&str, String)],
    ) -> Self {
        Self::serve(limits, flow, model, workers, &[]).await
    }

    /// As [`Front::start`], with an allocator that returns what is freed to the system at once: the
    /// peak of resident memory is then what was held at a time. Usually what is freed stays resident
    /// for a moment.
    pub async fn measured(limits: &str, model: &str, workers: &[String]) -> Self {
        let workers: Vec<_> = workers.iter().map(|url| ("both", url.clone())).collect();
        let env = [("MIMALLOC_PURGE_DELAY", "0")];
        Self::serve(limits, "flow: aggregated", model, &workers, &env).await
    }

    async fn serve(
        limits: &str,
        flow: &str,
        model: &str,
        workers: &[(&str, String)],
        env: &[(&str, &str)],
    ) -> Self {
        let files = tempfile::tempdir().expect("a temporary folder");
        write_tokenizer(files.path()).expect("tokenizer files");
        let workers = (0..).zip(workers).map(|(at, (role, url))| {
            format!("      - {{ id: w{at}, role: {role}, url: \"{url}\" }}\n")
        });
        let workers: String = workers.collect();
        let model: String = model.lines().map(|line| format!("    {line}\n")).collect();
        let yaml = format!(
            "listen: {{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}
limits: {limits}
models:
  - name: sim
    block_size: 16
    tokenizer: {{ kind: huggingface, path: . }}
    {flow}
    policy: {{ kind: round_robin }}
    canary: {{ enabled: false }}
{model}    workers:
{workers}"
        );
        let log = files.path().join("router.log");
        let router = RouterProcess::serve(files.path(), &yaml, env, &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        let front = Self { router, http, admin, files };
        eventually("the router is ready", async || front.http.get("/ready").await.status == 200)
            .await;
        front
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.files.path().join("router.log")).expect("a log")
    }

    /// The sum of a metric's series whose labels contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        metric_in(&self.admin.get("/metrics").await.text(), name, labels)
    }
}
