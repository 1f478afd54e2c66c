//! The Helm chart: what it makes of its example values (deploy/helm/golden, deploy/kubernetes) is run
//! as processes, because a cluster cannot be had in a test. `deploy/helm/render --check` compares these
//! files with the chart.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use splitrail_sim::{Role, SimConfig, SimEngine, write_tokenizer};
use splitrail_tests::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::process::Process;
use splitrail_tests::tls;
use splitrail_tests::trial::prompt;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// The lines of a block scalar of a rendered file, without their indentation.
fn block(rendered: &str, key: &str) -> String {
    let mut lines = rendered.lines().skip_while(|line| line.trim() != format!("{key}: |"));
    let key_line = lines.next().unwrap_or_else(|| panic!("no {key}"));
    let indent = key_line.len() - key_line.trim_start().len() + 2;
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with(&" ".repeat(indent)));
    lines.map(|line| format!("{}\n", line.get(indent..).unwrap_or_default())).collect()
}

/// A folder in place of what pods mount: tokenizer, tokens, certificate, keys and salt.
struct Mounts(tempfile::TempDir);

impl Mounts {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path()).unwrap();
        for (name, text) in [
            ("prefill", "the-token-of-the-prefill-pool".to_owned()),
            ("decode", "the-token-of-the-decode-pool".to_owned()),
            ("salt.key", "a-secret-of-at-least-32-characters".to_owned()),
            ("keys.yaml", "keys: []\n".to_owned()),
            ("tls.crt", fs::read_to_string(tls::fixture("router.pem")).unwrap()),
            ("tls.key", fs::read_to_string(tls::fixture("router.key")).unwrap()),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A configuration with the paths of this folder.
    fn in_place(&self, config: &str) -> String {
        let here = self.path().display().to_string();
        [
            "/models/qwen3-8b",
            "/run/secrets/splitrail-fleet",
            "/run/secrets/access",
            "/run/secrets/tls",
        ]
        .iter()
        .fold(config.to_owned(), |config, mounted| config.replace(mounted, &here))
    }
}

#[test]
fn the_configuration_of_every_release_is_valid() {
    let mut files: Vec<_> = fs::read_dir(deploy().join("helm/golden")).unwrap().collect();
    files.extend(fs::read_dir(deploy().join("kubernetes")).unwrap());
    let mut checked = 0;
    for file in files {
        let file = file.unwrap().path();
        let rendered = fs::read_to_string(&file).unwrap();
        if !rendered.contains("splitrail.yaml: |") {
            continue;
        }
        let mounts = Mounts::new();
        let config = mounts.in_place(&block(&rendered, "splitrail.yaml"));
        if let Err(problems) = splitrail_config::parse("splitrail.yaml", &config, mounts.path()) {
            panic!("{}: {problems}\n{config}", file.display());
        }
        checked += 1;
    }
    assert_eq!(checked, 5, "releases");
}

/// The arguments of the shims of a pool, in a pod that is this host.
fn shim_args(rendered: &str, role: &str, engine: &str, fleet: &str) -> Vec<String> {
    let of_role = |document: &&str| {
        document.contains("kind: StatefulSet") && document.contains(&format!("--role={role}"))
    };
    let document = rendered.split("\n---\n").find(of_role).unwrap();
    let args = document.lines().map(str::trim).skip_while(|line| *line != "args:").skip(1);
    let args = args.map_while(|line| line.strip_prefix("- "));
    let args = args.map(|arg| {
        arg.replace("http://127.0.0.1:8000", engine)
            .replace("0.0.0.0:8001", "127.0.0.1:0")
            .replace("splitrail-fleet:8002", fleet)
            .replace("$(POD_NAME)", &format!("splitrail-{role}-0"))
    });
    // A pod advertises its own address; here, that of the listener is known only later.
    args.filter(|arg| !arg.starts_with("--advertise=")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_chart_deploys_serves_from_decode_caches_drains_and_is_scraped() {
    let rendered = fs::read_to_string(deploy().join("kubernetes/splitrail.yaml")).unwrap();
    let mounts = Mounts::new();
    let config = mounts.in_place(&block(&rendered, "splitrail.yaml"));
    let config = ["0.0.0.0:8000", "0.0.0.0:8002", "0.0.0.0:9091", "127.0.0.1:9090"]
        .iter()
        .fold(config, |config, address| config.replace(address, "127.0.0.1:0"))
        // Pods are in this network; here, everything is on this host.
        .replace("10.0.0.0/8", "127.0.0.0/8")
        .replace("drain_delay: 5s", "drain_delay: 100ms");
    let file = mounts.path().join("splitrail.yaml");
    fs::write(&file, config).unwrap();
    let args = ["serve", "--config", &file.display().to_string()].map(str::to_owned);
    let mut router = Process::start("router", mounts.path(), &args).await;
    let mut pods = Vec::new();
    for (role, name) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
        let config = SimConfig { role, model: "qwen3-8b".into(), ..SimConfig::default() };
        let engine = SimEngine::start(config).await.unwrap();
        let args = shim_args(&rendered, name, &engine.url(), router.told("fleet"));
        let token = fs::read_to_string(mounts.path().join(name)).unwrap();
        let env = [("SPLITRAIL_FLEET_TOKEN", token.as_str())];
        let shim = Process::shim_with(name, mounts.path(), &args, &env).await;
        pods.push((engine, shim));
    }
    let http: Client = router.client("http");
    eventually("the router is ready", async || http.get("/ready").await.status == 200).await;

    let body = json!({
        "model": "qwen3-8b", "prompt": prompt(200, "chart"), "max_tokens": 4, "temperature": 0,
    });
    let first = http.post("/v1/completions", &body).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(first.route("prefill"), Some("splitrail-prefill-0"));
    // Once the decode engine's events have arrived, it serves the prompt from its own cache.
    let mut last = first;
    eventually("a decode-first hit", async || {
        last = http.post("/v1/completions", &body).await;
        last.route("try") == Some("served")
    })
    .await;
    assert_eq!(last.route("decode"), Some("splitrail-decode-0"));
    assert!(last.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));

    let scraped = router.client("metrics").get("/metrics").await.text();
    let outcome = [("model", "qwen3-8b"), ("outcome", "served")];
    assert!(metric_in(&scraped, "splitrail_decode_first_total", &outcome) >= 1.0);

    router.terminate();
    assert!(router.ended().await.success(), "{}", router.log());
    for (_engine, mut shim) in pods {
        shim.terminate();
        assert!(shim.ended().await.success(), "{}", shim.log());
    }
}
