//! Who decides: the engine, the shim or the router's index.

use serde_json::json;
use splitrail_kv::{HashSeed, Namespace, chain_hashes};
use splitrail_sim::cache::GroupKind;
use splitrail_sim::{FaultKind, OddEvent, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::trial::{COMPLETIONS, Reference};
use splitrail_tests::{Spec, Trial};

use super::support::*;

/// The four requests of the threshold proposal: shared and all tokens, threshold, and
/// whether it is served. The shares are 0, 0.28, 0.34 and 0.41; the last one has the
/// model's default of 0.8.
const FOUR: [(usize, usize, Option<f64>, bool); 4] = [
    (160, 160, Some(0.0), true),
    (48, 171, Some(0.33), false),
    (64, 190, Some(0.33), true),
    (80, 195, None, false),
];

/// Sends the four; gives who decided and what came of each.
async fn the_four(trial: &mut Trial) -> Vec<(String, String)> {
    let reference = Reference::start().await;
    let mut seen = Vec::new();
    for (shared, total, threshold, served) in FOUR {
        trial.cluster.settle().await;
        let body = body(shared, total, threshold);
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let text = reference.text(COMPLETIONS, &body).await;
        assert_eq!(whole_text(&reply.json(), 0), text);
        assert_eq!(reply.route("flow"), Some("decode_first"));
        assert_eq!(reply.route("prefill").is_none(), served, "{:?}", reply.headers);
        let (gate, outcome) = tried(&reply);
        seen.push((gate.to_owned(), outcome.to_owned()));
        let record = &trial.cluster.decisions(reply.header("x-request-id")).await[0];
        assert_eq!(record["gate"], gate);
        assert_eq!(record["decode_try"], outcome);
        assert_eq!(record["cache_hit_threshold"], json!(threshold.unwrap_or(0.8)));
    }
    seen
}

fn pairs(seen: &[(String, String)]) -> Vec<(&str, &str)> {
    seen.iter().map(|(gate, outcome)| (gate.as_str(), outcome.as_str())).collect()
}

#[tokio::test]
async fn an_engine_that_honours_the_field_is_asked_and_may_turn_a_request_away() {
    let mut trial = Trial::start(asking()).await;
    let seen = the_four(&mut trial).await;
    let expected =
        [("none", "served"), ("engine", "rejected"), ("engine", "served"), ("engine", "rejected")];
    assert_eq!(pairs(&seen), expected);
    // Real attempts: the engine itself has turned two away.
    let state = trial.cluster.engine("d0").state();
    assert_eq!(state.totals.finished_cache_threshold, 2);
    assert_eq!(trial.counts(["p0", "d0"]), [2, 6]);
    // What is not to be gated says so: an engine may have a threshold of its own.
    for name in ["p0", "d0"] {
        for request in trial.asked(name) {
            assert!(request.body["cache_hit_threshold"].is_number(), "{}", request.body);
        }
    }
    assert_eq!(counted(&trial, "engine", "rejected").await, 2.0);
    assert_eq!(counted(&trial, "engine", "served").await, 1.0);
    assert_eq!(counted(&trial, "none", "served").await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn the_index_gates_if_no_engine_supports_the_threshold() {
    let spec = Spec { engine: ignoring, ..with_model("") };
    let mut trial = Trial::start(spec).await;
    let seen = the_four(&mut trial).await;
    let expected =
        [("none", "served"), ("router", "skipped"), ("router", "served"), ("router", "skipped")];
    assert_eq!(pairs(&seen), expected);
    for request in trial.asked("d0").iter().skip(1) {
        let probe = request.body["prompt"] == "splitrail";
        assert!(probe || request.body.get("cache_hit_threshold").is_none(), "{}", request.body);
    }
    trial.finish().await;
}

#[tokio::test]
async fn engines_are_asked_once_whether_they_honour_the_field() {
    let spec = Spec {
        prefill: 1,
        decode: 2,
        engine: |name, config| config.honour_threshold = name == "d0",
        ..with_model("")
    };
    let trial = Trial::start(spec).await;
    let workers = trial.cluster.admin.get("/admin/workers").await.json();
    for worker in workers["workers"].as_array().unwrap() {
        assert_eq!(worker["supports_cache_hit_threshold"], json!(worker["id"] == "d0"), "{worker}");
        let probes = trial.asked(worker["id"].as_str().unwrap());
        assert_eq!(probes.len(), 1, "asked once");
        assert_eq!(probes[0].body["max_tokens"], 1);
    }
    // It is no request of a client's.
    assert_eq!(trial.cluster.metric("splitrail_requests_total", &[]).await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn the_index_spares_the_question_where_a_worker_surely_holds_too_little() {
    let mut trial = Trial::start(with_model("gate: { index_margin_blocks: 2 }")).await;
    let probes = trial.counts(["d0"])[0];
    trial.post("ok", COMPLETIONS, &body(160, 160, Some(0.0))).await;
    trial.cluster.settle().await;
    // 4 of 12 blocks are needed of the first, and 3 are there: too near to tell.
    let near = trial.post("ok", COMPLETIONS, &body(48, 190, Some(0.33))).await;
    assert_eq!(tried(&near), ("engine", "rejected"));
    let far = trial.post("ok", COMPLETIONS, &body(16, 191, Some(0.33))).await;
    assert_eq!(tried(&far), ("router", "skipped"));
    let skipped = trial.asked("d0");
    // Served; rejected, and decoded; decoded.
    assert_eq!(skipped.len() - probes, 4);
    trial.finish().await;
}

#[tokio::test]
async fn a_shim_gets_the_required_blocks_and_decides() {
    let spec = Spec {
        prefill: 1,
        decode: 1,
        worker: |name| if name == "d0" { ", shim: true" } else { "" },
        engine: |name, config| {
            config.honour_threshold = false;
            config.honour_gate_header = name == "d0";
        },
        ..with_model("gate: { index_first: false }")
    };
    let mut trial = Trial::start(spec).await;
    let seen = the_four(&mut trial).await;
    let expected =
        [("none", "served"), ("shim", "rejected"), ("shim", "served"), ("shim", "rejected")];
    assert_eq!(pairs(&seen), expected);
    let namespace = Namespace { salt: None, model: "sim", adapter: None, block_size: 16 };
    let headers: Vec<_> = trial
        .asked("d0")
        .iter()
        .filter_map(|request| request.header("x-splitrail-gate").map(str::to_owned))
        .collect();
    assert_eq!(headers.len(), 3, "the threshold 0 asks for nothing, and no leg after a prefill");
    for (header, (shared, total, threshold, _)) in headers.iter().zip(&FOUR[1..]) {
        let mut hashes = Vec::new();
        chain_hashes(&namespace, HashSeed(7), &tokens(*shared, *total), &mut hashes);
        let blocks = (threshold.unwrap_or(0.8) * *total as f64 / 16.0).ceil() as usize;
        let root = namespace.root(HashSeed(7)).0;
        let hash = hashes[blocks - 1].0;
        assert_eq!(*header, format!("{root:016x}:0:{blocks}:{hash:016x}"));
    }
    for request in trial.asked("d0") {
        let probe = request.body["prompt"] == "splitrail";
        assert!(probe || request.body.get("cache_hit_threshold").is_none(), "{}", request.body);
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_client_cannot_speak_for_the_router_to_a_shim() {
    let spec = Spec { worker: |_| ", shim: true", engine: ignoring, ..with_model("") };
    let trial = Trial::start(spec).await;
    let headers = [("x-splitrail-gate", "0:0:0:0")];
    let body = body(0, 100, Some(0.0)).to_string();
    let reply = trial.cluster.http.post_with(COMPLETIONS, &headers, body).await;
    assert_eq!(reply.status, 200);
    assert!(trial.asked("d0").iter().all(|seen| seen.header("x-splitrail-gate").is_none()));
}

#[tokio::test]
async fn unconfirmed_blocks_open_no_gate() {
    fn mute(name: &str, config: &mut SimConfig) {
        config.honour_threshold = false;
        if name == "d0" {
            (config.kv_events_port, config.kv_replay_port) = (None, None);
        }
    }
    let spec = Spec { engine: mute, ..with_model("") };
    let mut trial = Trial::start(spec).await;
    // The router itself has sent this prompt there before; that proves nothing.
    trial.post("ok", COMPLETIONS, &body(160, 160, Some(0.0))).await;
    let again = trial.post("ok", COMPLETIONS, &body(160, 160, Some(0.5))).await;
    assert_eq!(tried(&again), ("none", "unsupported"));
    assert_eq!(again.route("prefill"), Some("p0"));
    trial.finish().await;
}

#[tokio::test]
async fn the_decode_worker_that_holds_most_is_tried() {
    let policy = "{ kind: least_loaded }";
    let spec = Spec { decode: 3, policy, ..with_model("gate: { kind: router }") };
    let mut trial = Trial::start(spec).await;
    let first = trial.post("ok", COMPLETIONS, &body(320, 320, Some(0.0))).await;
    let holder = first.route("decode").unwrap().to_owned();
    trial.cluster.settle().await;
    for total in 330..336 {
        let reply = trial.post("ok", COMPLETIONS, &body(320, total, Some(0.9))).await;
        assert_eq!(tried(&reply), ("router", "served"));
        assert_eq!(reply.route("decode"), Some(holder.as_str()));
    }
    trial.finish().await;
}

#[tokio::test]
async fn the_routers_gate_opens_on_a_hybrid_model_by_what_its_engine_will_use() {
    fn hybrid(_: &str, config: &mut SimConfig) {
        config.cache_groups = vec![GroupKind::SlidingWindow { tokens: 40 }];
    }
    let spec = Spec { engine: hybrid, ..with_model("gate: { kind: router }") };
    let mut trial = Trial::start(spec).await;
    trial.post("ok", COMPLETIONS, &body(320, 345, Some(0.0))).await;
    trial.cluster.settle().await;
    let same = trial.post("ok", COMPLETIONS, &body(320, 345, Some(0.9))).await;
    assert_eq!(tried(&same), ("router", "served"));
    let other = trial.post("ok", COMPLETIONS, &body(320, 350, Some(0.9))).await;
    assert_eq!(tried(&other), ("router", "skipped"), "full attention alone holds the prefix");
    trial.cluster.settle().await;
    let third = trial.post("ok", COMPLETIONS, &body(320, 352, Some(0.9))).await;
    assert_eq!(tried(&third), ("router", "served"), "the second prompt has stored the junction");
    trial.finish().await;
}

#[tokio::test]
async fn the_routers_gate_is_shut_while_an_overlap_is_an_upper_bound() {
    let mut trial = Trial::start(with_model("gate: { kind: router }")).await;
    trial.post("ok", COMPLETIONS, &body(320, 320, Some(0.0))).await;
    trial.cluster.settle().await;
    let warm = trial.post("ok", COMPLETIONS, &body(320, 330, Some(0.9))).await;
    assert_eq!(tried(&warm), ("router", "served"));
    let event = OddEvent::SlidingWindow;
    trial.fault("d0", FaultKind::OddEvents { event }, None);
    trial.post("ok", COMPLETIONS, &body(320, 400, Some(0.0))).await;
    trial.cluster.settle().await;
    let unsure = trial.post("ok", COMPLETIONS, &body(320, 331, Some(0.9))).await;
    assert_eq!(tried(&unsure), ("none", "unsupported"));
    assert_eq!(unsure.route("prefill"), Some("p0"));
    let cold = trial.post("ok", COMPLETIONS, &body(0, 200, Some(0.9))).await;
    assert_eq!(tried(&cold), ("router", "skipped"), "it certainly holds too little");
    trial.finish().await;
}
