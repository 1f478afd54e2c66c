//! A Prometheus server as a process of its own.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde_json::Value;
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use splitrail_tests::ports::HeldPort;
use splitrail_tests::process::Process;
use tokio::time::sleep;

/// Maximum time in which the alerts of a fault, and no others, fire.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a program of Debian's package `prometheus` is.
///
/// # Panics
/// If it is nowhere.
pub(crate) fn tool(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/bin".into(), "/usr/local/bin".into()]);
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    found.unwrap_or_else(|| {
        panic!("{name} is missing, which these tests need: `apt-get install prometheus`")
    })
}

/// A server that scrapes routers every second.
pub(crate) struct Prometheus {
    client: Client,
    _process: Process,
    _port: HeldPort,
}

impl Prometheus {
    /// Starts a server that scrapes these addresses and evaluates the rules in these files.
    pub(crate) async fn start(
        folder: &Path,
        targets: &[SocketAddr],
        rule_files: &[PathBuf],
    ) -> Self {
        let targets: Vec<String> = targets.iter().map(|target| format!("\"{target}\"")).collect();
        let rules: Vec<String> =
            rule_files.iter().map(|file| format!("  - {}\n", file.display())).collect();
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files:\n{}\
             scrape_configs:\n  - job_name: splitrail\n    static_configs: [{{ targets: [{}] }}]\n",
            rules.concat(),
            targets.join(", ")
        );
        let file = folder.join("prometheus.yaml");
        std::fs::write(&file, config).unwrap();
        let config = format!("--config.file={}", file.display());
        Self::run(folder, &[config, "--enable-feature=exemplar-storage".to_owned()]).await
    }

    /// Starts a server with these arguments, with its data in a folder.
    pub(crate) async fn run(folder: &Path, args: &[String]) -> Self {
        let port = HeldPort::take();
        let address = port.address();
        let own = [
            format!("--storage.tsdb.path={}", folder.join("prometheus.data").display()),
            format!("--web.listen-address={address}"),
        ];
        let args = [args, &own].concat();
        let listens = || TcpStream::connect(address).is_ok();
        let server = tool("prometheus");
        let env = [("TZ", "UTC")];
        let process = Process::of(&server, "prometheus", folder, &args, &env, &listens).await;
        Self { client: Client::new(address), _process: process, _port: port }
    }

    /// The reply of an endpoint of its API.
    pub(crate) async fn api(&self, path: &str) -> Value {
        let reply = self.client.get(&format!("/api/v1/{path}")).await;
        // Not ready yet, or a query that is wrong.
        if reply.status != 200 && reply.status != 400 {
            return Value::Null;
        }
        reply.json()
    }

    /// The values of a query: labels and value of each series.
    pub(crate) async fn query(&self, expr: &str) -> Vec<(Value, String)> {
        let reply = self.api(&format!("query?query={}", encoded(expr))).await;
        assert_ne!(reply["status"], "error", "{expr}: {}", reply["error"]);
        let result = reply["data"]["result"].as_array().cloned().unwrap_or_default();
        let of = |series: &Value| {
            let value = series["value"][1].as_str().unwrap_or_default().to_owned();
            (series["metric"].clone(), value)
        };
        result.iter().map(of).collect()
    }

    /// Waits until so many routers are scraped.
    pub(crate) async fn has_scraped(&self, routers: usize) {
        eventually("the routers are scraped", async || {
            self.query("up == 1").await.len() == routers
        })
        .await;
    }

    /// Waits until all rules have been evaluated with what is scraped now.
    pub(crate) async fn has_evaluated(&self) {
        let scraped = self.query("max(timestamp(up))").await;
        let scraped: f64 = scraped.first().map_or(0.0, |(_, at)| at.parse().unwrap());
        eventually("the rules are evaluated", async || {
            let groups = self.api("rules").await["data"]["groups"].take();
            let groups = groups.as_array().cloned().unwrap_or_default();
            // An evaluation is for a time of up to one interval, which is a second, before it.
            let is_late = |group: &Value| {
                let at = group["lastEvaluation"].as_str().unwrap_or_default();
                let since = humantime::parse_rfc3339(at).ok()?.duration_since(UNIX_EPOCH).ok()?;
                Some(since.as_secs_f64() > scraped + 1.0)
            };
            !groups.is_empty() && groups.iter().all(|group| is_late(group) == Some(true))
        })
        .await;
    }

    /// The labels of an alert that fires.
    #[allow(dead_code)]
    pub(crate) async fn labels(&self, alert: &str) -> Value {
        let reply = self.api("alerts").await;
        let alerts = reply["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let mut labels = alerts.into_iter().map(|alert| alert["labels"].clone());
        labels.find(|labels| labels["alertname"] == alert).unwrap_or_default()
    }

    /// The names of the alerts that fire, without the one that the machine of the tests may cause by
    /// being busy.
    pub(crate) async fn firing(&self) -> BTreeSet<String> {
        let mut all = self.all_firing().await;
        all.remove("SplitrailRuntimeLags");
        all
    }

    async fn all_firing(&self) -> BTreeSet<String> {
        let reply = self.api("alerts").await;
        let alerts = reply["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing
            .filter_map(|alert| alert["labels"]["alertname"].as_str().map(str::to_owned))
            .collect()
    }

    /// Waits until exactly these alerts fire. Those that the machine of the tests may cause by being
    /// busy count only if they are expected. Rules that wait for no time may also fire for a moment,
    /// for example between a reload and the first probe of a worker.
    pub(crate) async fn fires(&self, alerts: &[&str]) {
        const IF_BUSY: [&str; 3] = [
            "SplitrailRuntimeLags",
            "SplitrailTtftBudgetBurnsFast",
            "SplitrailTtftBudgetBurnsSlowly",
        ];
        let expected: BTreeSet<String> = alerts.iter().map(|alert| (*alert).to_owned()).collect();
        let started = Instant::now();
        loop {
            let mut firing = self.all_firing().await;
            firing.retain(|alert| expected.contains(alert) || !IF_BUSY.contains(&&**alert));
            if firing == expected {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{firing:?} fire instead of {expected:?}");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// A query in the form in which a URL carries it.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}
