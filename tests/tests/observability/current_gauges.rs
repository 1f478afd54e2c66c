//! A gauge shows how things are now. Where the router does not know it any more, there is no series:
//! an old value would look like the present one.

use std::path::Path;

use serde_json::json;
use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use splitrail_tests::{Cluster, Spec};

/// The series of a metric of the router, with their values.
async fn series(cluster: &Cluster, metric: &str) -> Vec<String> {
    let text = cluster.admin.get("/metrics").await.text();
    let name = format!("splitrail_{metric}{{");
    text.lines().filter(|line| line.starts_with(&name)).map(str::to_owned).collect()
}

/// Those of `metrics` of which the router has series.
async fn shown<'m>(cluster: &Cluster, metrics: &[&'m str]) -> Vec<&'m str> {
    let mut shown = Vec::new();
    for metric in metrics {
        if !series(cluster, metric).await.is_empty() {
            shown.push(*metric);
        }
    }
    shown
}

async fn reload(cluster: &Cluster, yaml: &str) {
    let reloaded = cluster.reload(yaml).await;
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
}

#[tokio::test]
async fn the_kv_blocks_of_a_worker_that_reports_no_more_are_not_shown() {
    let mut cluster = Cluster::start(Spec::aggregated(2)).await;
    let of = async |cluster: &Cluster, worker: &str| {
        let all = series(cluster, "worker_kv_blocks").await;
        all.iter().filter(|line| line.contains(&format!("worker=\"{worker}\""))).count()
    };
    eventually("both report", async || {
        of(&cluster, "w0").await == 2 && of(&cluster, "w1").await == 2
    })
    .await;
    cluster.engines.retain(|(name, _)| name != "w0");
    eventually("the last report is too old", async || of(&cluster, "w0").await == 0).await;
    assert_eq!(of(&cluster, "w1").await, 2);
    assert_eq!(series(&cluster, "worker_up").await.len(), 2, "the worker is still known");
}

#[tokio::test]
async fn the_gauges_of_features_leave_when_a_reload_switches_them_off() {
    const METRICS: [&str; 4] =
        ["queue_max_waiting", "cache_loss_blocks", "cache_hit_blocks", "read_back_pinned_blocks"];
    let model = "queue: { max_waiting: 7 }\ncache_loss_tracking: {}\nread_back: true".to_owned();
    let cluster = Cluster::start(Spec { model, ..Spec::default() }).await;
    assert_eq!(shown(&cluster, &METRICS).await, METRICS);
    let off = [
        ("queue: { max_waiting: 7 }", "queue: none"),
        ("cache_loss_tracking: {}", "cache_loss_tracking: none"),
        ("read_back: true", "read_back: false"),
    ];
    let without = off.iter().fold(cluster.yaml.clone(), |yaml, (on, off)| yaml.replace(on, off));
    reload(&cluster, &without).await;
    assert_eq!(shown(&cluster, &METRICS).await, [""; 0]);
    reload(&cluster, &cluster.yaml).await;
    assert_eq!(shown(&cluster, &METRICS).await, METRICS);
}

#[tokio::test]
async fn the_gauges_of_kv_events_leave_with_the_events() {
    const METRICS: [&str; 2] = ["index_events_current", "index_truncated"];
    let cluster = Cluster::start(Spec { policy: "{ kind: round_robin }", ..Spec::default() }).await;
    assert_eq!(shown(&cluster, &METRICS).await, METRICS);
    let without = cluster.yaml.lines().map(|line| match line.split_once(", kv_events:") {
        Some((worker, _)) => format!("{worker}, kv_events: none }}\n"),
        None => format!("{line}\n"),
    });
    reload(&cluster, &without.collect::<String>()).await;
    assert_eq!(shown(&cluster, &METRICS).await, [""; 0]);
}

#[tokio::test]
async fn the_series_of_a_discovery_source_leave_when_a_reload_removes_it() {
    const METRICS: [&str; 3] =
        ["discovery_workers", "discovery_successful", "discovery_errors_total"];
    let cluster = Cluster::start(Spec::default()).await;
    let source =
        |name: &str| format!("      - {{ kind: dns, name: {name}, port: 1, role: decode }}\n");
    let with = |sources: &[String]| {
        let discovery = format!("    discovery:\n{}    workers:\n", sources.concat());
        cluster.yaml.replace("    workers:\n", &discovery)
    };
    reload(&cluster, &with(&[source("one.invalid"), source("two.invalid")])).await;
    for metric in METRICS {
        assert_eq!(series(&cluster, metric).await.len(), 2, "{metric}");
    }
    reload(&cluster, &with(&[source("two.invalid")])).await;
    for metric in METRICS {
        let left = series(&cluster, metric).await;
        assert!(left.len() == 1 && left[0].contains("dns:two.invalid:1"), "{left:?}");
    }
    reload(&cluster, &cluster.yaml).await;
    assert_eq!(shown(&cluster, &METRICS).await, [""; 0]);
}

#[tokio::test]
async fn a_source_that_cannot_be_read_or_whose_workers_cannot_be_added_is_named() {
    let top = "fleet: { networks: [10.0.0.0/8] }\n".to_owned();
    let cluster = Cluster::start(Spec { top, ..Spec::default() }).await;
    let sources = "    discovery:\n      - { kind: dns, name: one.invalid, port: 1, role: decode }\n      \
                   - { kind: dns, name: localhost, port: 1, role: decode, family: ipv4 }\n    workers:\n";
    let yaml = cluster.yaml.replace("    workers:\n", sources);
    reload(&cluster, &yaml).await;
    let named = async |parts: [&str; 2]| {
        let found = cluster.admin.get("/admin/attention").await.json();
        let found = found["needs_attention"].as_array().unwrap().clone();
        let of_sources = found.iter().filter(|one| one["kind"] == "discovery_fails");
        let mut messages = of_sources.map(|one| one["message"].as_str().unwrap().to_owned());
        messages.any(|message| parts.iter().all(|part| message.contains(part)))
    };
    eventually("both are named", async || {
        named(["dns:one.invalid:1", "cannot be read"]).await
            && named(["dns:localhost:1", "outside fleet.networks"]).await
    })
    .await;
}

/// The configuration of an issuer, whose keys are in a file.
fn issuer(name: &str, folder: &Path) -> String {
    let file = folder.join("jwks.json");
    // The public key of RFC 8037, appendix A.2.
    let key = json!({
        "kty": "OKP", "kid": "known", "crv": "Ed25519",
        "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo",
    });
    std::fs::write(&file, json!({ "keys": [key] }).to_string()).unwrap();
    let file = file.display().to_string();
    format!("{{ kind: jwt, issuer: \"https://{name}\", audience: splitrail, jwks: {file:?} }}")
}

#[tokio::test]
async fn issuers_that_are_not_configured_have_no_series() {
    const METRICS: [&str; 3] =
        ["jwks_keys", "jwks_last_success_timestamp_seconds", "jwks_refreshes_total"];
    let folder = tempfile::tempdir().unwrap();
    let [one, two, three] = ["one", "two", "three"].map(|name| issuer(name, folder.path()));
    let auth = |issuers: &[&str]| format!("auth: [ {} ]", issuers.join(", "));
    let both = auth(&[&one, &two]);
    let top = format!("{both}\ntenants: [ {{ name: acme }} ]");
    let cluster = Cluster::start(Spec { top, ..Spec::default() }).await;
    let shows = async |issuers: &[&str]| {
        for metric in METRICS {
            let all = series(&cluster, metric).await;
            for name in ["one", "two", "three"] {
                let label = format!("issuer=\"https://{name}\"");
                let is_shown = all.iter().any(|line| line.contains(&label));
                assert_eq!(is_shown, issuers.contains(&name), "{name}: {all:?}");
            }
        }
    };
    shows(&["one", "two"]).await;
    let alone = cluster.yaml.replace(&both, &auth(&[&two]));
    reload(&cluster, &alone).await;
    shows(&["two"]).await;
    // A reload that is refused although its issuers could be read.
    std::fs::create_dir(folder.path().join("broken")).unwrap();
    std::fs::write(folder.path().join("broken/tokenizer.json"), "{}").unwrap();
    let tokenizer = json!(cluster.files.path().display().to_string()).to_string();
    let broken = json!(folder.path().join("broken").display().to_string()).to_string();
    let refused = cluster.yaml.replace(&both, &auth(&[&two, &three])).replace(&tokenizer, &broken);
    let reply = cluster.reload(&refused).await;
    assert_eq!(reply.status, 422, "{}", reply.text());
    shows(&["two"]).await;
}

/// An engine that was repaired while nobody sent requests is not missing.
#[tokio::test]
async fn a_worker_whose_breaker_allows_a_trial_counts_as_available() {
    let model = "breaker: { failures: 2, cooldown: 300ms }\nretries: { budget_percent: 0 }".into();
    let cluster = Cluster::start(Spec { prefill: 1, decode: 1, model, ..Spec::default() }).await;
    let decode = [("leg", "decode")];
    let is_open = async || {
        let labels = [("worker", "d0"), ("leg", "decode")];
        cluster.metric("splitrail_worker_breaker_open", &labels).await == 1.0
    };
    let kind = FaultKind::Status { status: 500 };
    cluster.engine("d0").set_fault(Fault { kind, times: None });
    eventually("the breaker opens", async || {
        cluster.http.post(COMPLETIONS, &completion(&prompt(40, "fails"))).await;
        is_open().await
    })
    .await;
    eventually("a request would be tried", async || {
        cluster.metric("splitrail_available_workers", &decode).await == 1.0
    })
    .await;
    assert!(is_open().await, "it closes only by a request");
}
