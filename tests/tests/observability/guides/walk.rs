//! A cluster with a fault, the shipped router in front of it, Prometheus, and a guide that is
//! followed step by step.

use std::process::Command;

use serde_json::Value;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::binary::{RouterProcess, built};
use splitrail_tests::cluster::{Engines, eventually};
use splitrail_tests::page::Page;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Spec};
use tokio::task::JoinSet;

use crate::files::rules_at_once;
use crate::runbook::follow;
use crate::server::Prometheus;

/// The values of a query: the labels of each series, and its number.
pub(crate) type Values = Vec<(Value, f64)>;

/// A person who follows a page.
pub(crate) struct Walk {
    pub(crate) page: Page,
    pub(crate) engines: Engines,
    pub(crate) router: RouterProcess,
    pub(crate) http: Client,
    pub(crate) admin: Client,
    prometheus: Prometheus,
    clients: JoinSet<()>,
}

impl Walk {
    /// Starts everything; the page is a guide's name.
    pub(crate) async fn start(page: &'static str, spec: Spec) -> Self {
        Self::start_with(page, spec, str::to_owned).await
    }

    /// The same, with a change to the router's configuration.
    pub(crate) async fn start_with(
        page: &'static str,
        spec: Spec,
        change: impl Fn(&str) -> String,
    ) -> Self {
        let mut engines = Engines::start(&spec).await;
        engines.yaml = change(&engines.yaml);
        let folder = engines.files.path();
        let log = folder.join("router.log");
        let router = RouterProcess::serve(folder, &engines.yaml, &[], &log).await;
        let (http, admin) = (Client::new(router.http), Client::new(router.admin));
        eventually("the router is ready", async || http.get("/ready").await.status == 200).await;
        let prometheus = Prometheus::start(folder, &[router.admin], &rules_at_once(folder)).await;
        prometheus.has_scraped(1).await;
        let clients = JoinSet::new();
        Self { page: Page::read(page), engines, router, http, admin, prometheus, clients }
    }

    /// Lets clients send requests until the walk ends. `body` makes the request of a client's turn.
    pub(crate) fn load(&mut self, clients: usize, body: fn(usize, usize) -> Value) {
        self.load_at(COMPLETIONS, clients, body);
    }

    /// The same, at another endpoint.
    pub(crate) fn load_at(
        &mut self,
        path: &'static str,
        clients: usize,
        body: fn(usize, usize) -> Value,
    ) {
        for client in 0..clients {
            let http = self.http.clone();
            self.clients.spawn(async move {
                for turn in 0.. {
                    let body = body(client, turn);
                    if body["stream"] == true {
                        http.stream(path, &body).await.rest().await;
                    } else {
                        http.post(path, &body).await;
                    }
                }
            });
        }
    }

    /// Ends the clients of [`load`](Self::load).
    pub(crate) async fn unload(&mut self) {
        self.clients.shutdown().await;
    }

    pub(crate) fn fault(&self, engine: &str, kind: FaultKind) {
        self.engines.engine(engine).set_fault(Fault { kind, times: None });
    }

    /// The values of the only query of a step that has `part`, as the page has it.
    pub(crate) async fn ask(&self, step: u32, part: &str) -> Values {
        self.values(&self.page.line(step, part).replace("MODEL", "sim")).await
    }

    async fn values(&self, query: &str) -> Values {
        let values = self.prometheus.query(query).await.into_iter();
        let values = values.map(|(labels, value)| (labels, value.parse().unwrap_or(f64::NAN)));
        values.filter(|(_, value)| !value.is_nan()).collect()
    }

    /// Asks a query of the page until its values meet a condition.
    pub(crate) async fn until(
        &self,
        step: u32,
        part: &str,
        condition: impl Fn(&Values) -> bool,
    ) -> Values {
        let mut values = Vec::new();
        let what = format!("step {step}: {} shows it", self.page.line(step, part));
        eventually(&what, async || {
            values = self.ask(step, part).await;
            condition(&values)
        })
        .await;
        values
    }

    /// Runs the only command of a step that has `part`, as the page has it, until its output meets
    /// a condition.
    pub(crate) async fn run(
        &self,
        step: u32,
        part: &str,
        condition: impl Fn(&str) -> bool,
    ) -> String {
        self.run_with(step, part, &[], condition).await
    }

    /// The same, with names in capitals replaced.
    pub(crate) async fn run_with(
        &self,
        step: u32,
        part: &str,
        names: &[(&str, &str)],
        condition: impl Fn(&str) -> bool,
    ) -> String {
        let mut command = self.page.line(step, part).to_owned();
        command = command.replace("127.0.0.1:9090", &self.router.admin.to_string());
        for (name, value) in names {
            command = command.replace(name, value);
        }
        let mut output = String::new();
        eventually(&format!("step {step}: {command} shows it"), async || {
            output = self.shell(&command);
            condition(&output)
        })
        .await;
        output
    }

    /// Waits until exactly these alerts fire, which wait for no time here, and follows their sections
    /// in the guide.
    pub(crate) async fn fires(&self, alerts: &[&str]) {
        // What has happened so far is scraped and evaluated first: both happen every second.
        let scraped = "min(timestamp(splitrail_build_info))";
        let before = only(&self.values(scraped).await);
        eventually("the rules are evaluated", async || {
            only(&self.values(scraped).await) > before + 1.5
        })
        .await;
        self.prometheus.fires(alerts).await;
        for alert in alerts {
            follow(&self.prometheus, self.router.admin, alert).await;
        }
    }

    /// What `splitrail explain` says of a request.
    pub(crate) async fn explained(&self, request_id: &str) -> String {
        self.shell(&format!("splitrail explain --request-id {request_id}"))
    }

    /// The output of a command, for which `splitrail` is the built program.
    fn shell(&self, command: &str) -> String {
        let program = built("splitrail");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = program.parent().unwrap().to_owned();
        let path = std::env::join_paths(std::iter::once(own).chain(std::env::split_paths(&path)));
        let ran = Command::new("sh")
            .args(["-c", command])
            .env("PATH", path.unwrap())
            .env("SPLITRAIL_ADMIN", format!("http://{}", self.router.admin))
            .output()
            .unwrap();
        assert!(ran.status.success(), "{command}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).into_owned()
    }

    /// What the command about workers of a step says of a worker, once that meets a condition.
    pub(crate) async fn worker(
        &self,
        step: u32,
        id: &str,
        condition: impl Fn(&Value) -> bool,
    ) -> Value {
        let output =
            self.run(step, "/admin/workers", |output| condition(&worker_in(output, id))).await;
        worker_in(&output, id)
    }
}

/// A worker in the output of `jq`, which is one object after the other.
fn worker_in(output: &str, id: &str) -> Value {
    let workers = serde_json::Deserializer::from_str(output).into_iter::<Value>();
    let mut workers = workers.filter_map(Result::ok);
    workers.find(|worker| worker["id"] == id).unwrap_or(Value::Null)
}

/// The value of the series with a label; 0 if there is none.
pub(crate) fn value(values: &Values, labels: &[(&str, &str)]) -> f64 {
    let matches = |of: &Value| labels.iter().all(|(name, value)| of[*name] == **value);
    values.iter().find(|(of, _)| matches(of)).map_or(0.0, |(_, value)| *value)
}

/// The value of a query with one series; 0 if there is none.
pub(crate) fn only(values: &Values) -> f64 {
    value(values, &[])
}

/// A stream whose prompt is new, of so many words.
pub(crate) fn fresh(words: usize, client: usize, turn: usize) -> Value {
    let mut body = completion(&prompt(words, &format!("c{client}t{turn}w")));
    body["stream"] = true.into();
    body
}
