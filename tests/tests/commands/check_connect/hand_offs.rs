//! Hand-offs between engines: whether each prefill and each decode worker takes part, and what is said
//! if one cannot.

use serde_json::json;
use splitrail_sim::{Fault, FaultKind, KvConnector, Role, SimConfig, SimEngine};
use splitrail_tests::cluster::eventually;

use super::support::{Pair, checked, config, decode, prefill, worker};

#[tokio::test]
async fn a_prefill_engine_without_a_connector_hands_nothing_over() {
    let pair = Pair::of(SimConfig { connector: KvConnector::None, ..prefill() }, decode()).await;
    let result = checked(&pair.yaml()).await;
    assert!(result.only("p0", "no_hand_off").contains("--kv-transfer-config"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn a_decode_engine_without_a_connector_computes_what_it_gets() {
    let pair = Pair::of(prefill(), SimConfig { connector: KvConnector::None, ..decode() }).await;
    let result = checked(&pair.yaml()).await;
    assert!(result.only("d0", "hand_off_ignored").contains("p0"));
    assert_eq!(result.facts("d0")["hand_offs"][0]["works"], false);
}

#[tokio::test]
async fn a_hand_off_that_is_refused_is_reported_with_both_workers() {
    let pair = Pair::sound().await;
    pair.prefill.set_fault(Fault { kind: FaultKind::RefusePulls, times: None });
    let result = checked(&pair.yaml()).await;
    assert!(result.only("d0", "hand_off_fails").contains("from p0"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn every_worker_takes_part_in_a_hand_off() {
    let mut engines = Vec::new();
    for config in [prefill(), prefill(), prefill(), decode(), decode()] {
        engines.push(SimEngine::start(config).await.unwrap());
    }
    let ids = ["p0", "p1", "p2", "d0", "d1"];
    let role = |id: &str| if id.starts_with('p') { "prefill" } else { "decode" };
    let workers: Vec<String> =
        ids.iter().zip(&engines).map(|(id, engine)| worker(id, role(id), engine)).collect();
    let result = checked(&config("block_size: 16", &workers)).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    let from = |id: &str| -> Vec<String> {
        let hand_offs = result.facts(id)["hand_offs"].as_array().unwrap().iter();
        hand_offs.map(|one| one["from"].as_str().unwrap().to_owned()).collect()
    };
    let mut all = [from("d0"), from("d1")].concat();
    all.sort();
    assert_eq!(all, ["p0", "p1", "p2"]);
    assert!(!from("d0").is_empty() && !from("d1").is_empty());
    for engine in &engines {
        assert_eq!(engine.state().staged_hand_offs, 0);
    }
}

#[tokio::test]
async fn one_prefill_worker_hands_over_to_all_decode_workers() {
    let one = SimEngine::start(prefill()).await.unwrap();
    let first = SimEngine::start(decode()).await.unwrap();
    let second = SimEngine::start(decode()).await.unwrap();
    let workers = [
        worker("p0", "prefill", &one),
        worker("d0", "decode", &first),
        worker("d1", "decode", &second),
    ];
    let result = checked(&config("block_size: 16", &workers)).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    for id in ["d0", "d1"] {
        assert_eq!(result.facts(id)["hand_offs"][0]["works"], true);
    }
}

#[tokio::test]
async fn hand_offs_are_tried_between_workers_that_store_kv_alike() {
    let mut engines = Vec::new();
    let stored =
        |dtype: &str, config: SimConfig| SimConfig { kv_dtype: dtype.to_owned(), ..config };
    for (id, dtype, config) in [
        ("p0", "auto", prefill()),
        ("p1", "fp8", prefill()),
        ("p2", "fp8_e5m2", prefill()),
        ("d0", "fp8", decode()),
        ("d1", "auto", decode()),
        ("d2", "auto", decode()),
    ] {
        engines.push((id, SimEngine::start(stored(dtype, config)).await.unwrap()));
    }
    let role = |id: &str| if id.starts_with('p') { "prefill" } else { "decode" };
    let workers: Vec<String> =
        engines.iter().map(|(id, engine)| worker(id, role(id), engine)).collect();
    let result = checked(&config("block_size: 16", &workers)).await;
    let kinds = [(Some("p2"), "hand_off_untested"), (None, "kv_formats_differ")];
    assert_eq!(result.kinds(), kinds, "{:#}", result.json);
    assert!(result.words("hand_off_untested").contains("no decode worker (d0, d1, d2)"));
    for (id, from) in [("d0", "p1"), ("d1", "p0"), ("d2", "p0")] {
        let tried = json!([{ "from": from, "works": true }]);
        assert_eq!(result.facts(id)["hand_offs"], tried, "{:#}", result.json);
    }
}

#[tokio::test]
async fn a_connector_that_the_configuration_does_not_use_is_a_warning() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let keys = "block_size: 16\nflow: aggregated\nconnector: none";
    let result = checked(&config(keys, &[worker("w0", "both", &engine)])).await;
    result.only("w0", "connector_unused");
    assert_eq!(result.code, Some(0));
}

fn pushing(config: SimConfig) -> SimConfig {
    SimConfig { connector: KvConnector::NixlPush, ..config }
}

#[tokio::test]
async fn engines_that_push_are_tried_and_distinguished_from_engines_that_pull() {
    // The decode engine was asked who it is, as the prefill leg of a hand-off that nobody takes.
    let lease_ms = 1_000;
    let decode = SimConfig { lease_ms, ..decode() };
    let pair = Pair::of(pushing(prefill()), pushing(decode)).await;
    let yaml = |connector: &str| {
        let keys = format!("block_size: 16\nconnector: {connector}");
        let prefill = worker("p0", "prefill", &pair.prefill);
        config(&keys, &[prefill, worker("d0", "decode", &pair.decode)])
    };
    let result = checked(&yaml("nixl_push")).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    assert_eq!(result.facts("d0")["hand_offs"][0]["works"], true);
    eventually("decode keeps no block", async || pair.decode.state().blocks_used == 0).await;
    let result = checked(&yaml("nixl")).await;
    assert!(result.only("p0", "other_connector").contains("`connector: nixl_push`"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn an_engine_that_is_pulled_from_does_not_push() {
    let pair = Pair::of(prefill(), pushing(decode())).await;
    let keys = "block_size: 16\nconnector: nixl_push";
    let workers = [worker("p0", "prefill", &pair.prefill), worker("d0", "decode", &pair.decode)];
    let result = checked(&config(keys, &workers)).await;
    assert!(result.only("p0", "other_connector").contains("`connector: nixl`"));
    assert_eq!(result.code, Some(69));
    // The decode leg of a push would end an engine that pulls.
    let pulls = SimConfig { role: Role::Both, ..decode() };
    let pair = Pair::of(pushing(prefill()), pulls).await;
    let workers = [worker("p0", "prefill", &pair.prefill), worker("d0", "decode", &pair.decode)];
    let result = checked(&config(keys, &workers)).await;
    assert!(result.only("d0", "other_connector").contains("`connector: nixl`"));
    assert!(!pair.decode.state().dead);
}

#[tokio::test]
async fn the_bootstrap_server_of_mooncake_is_asked() {
    let mooncake = |config: SimConfig| SimConfig { connector: KvConnector::Mooncake, ..config };
    let pair = Pair::of(mooncake(prefill()), mooncake(decode())).await;
    let keys = "block_size: 16\nconnector: mooncake";
    let yaml = |bootstrap: &str| {
        let prefill = worker("p0", "prefill", &pair.prefill);
        let prefill = prefill.replace(" }", &format!(", bootstrap: \"{bootstrap}\" }}"));
        config(keys, &[prefill, worker("d0", "decode", &pair.decode)])
    };
    let result = checked(&yaml(&pair.prefill.bootstrap_url())).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    let result = checked(&yaml(&pair.prefill.url())).await;
    assert!(result.only("p0", "bootstrap_fails").contains(&pair.prefill.url()));
}
