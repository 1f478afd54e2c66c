//! Peer fetches in every flow: the worker that computes a prompt may fetch a part of it, and `auto`
//! takes account of that.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::{Reply, whole_text};
use splitrail_tests::trial::{COMPLETIONS, Reference, SHORT_LEASE, completion, prompt};
use splitrail_tests::{Spec, Trial};

use super::{
    BLOCK, Sent, cached, drain, ended, held, recorded, served, spec, steps, turns, undrain,
};

/// Computing takes a millisecond for each token, hand-offs take `$base`, and fetches nearly nothing.
macro_rules! costs {
    ($base:literal, $prefill_us:literal) => {
        concat!(
            "costs: { prefill_us_per_token: ",
            $prefill_us,
            ", prefill_base_ms: 0, prefill_ns_per_token_pair: 0, hand_off_base_ms: ",
            $base,
            ", fetch_base_ms: 0, kv_bytes_per_token: 1, step_base_ms: 1, step_us_per_request: 0 }"
        )
    };
}

const FETCHES: &str = "peer_fetch: two_step\npeer_fetch_min_tokens: 16\nauto: { tbt_goal: 10s }";

fn auto(prefill: usize, decode: usize, keys: &str) -> Spec {
    Spec { flow: "auto", model: format!("{FETCHES}\n{keys}"), ..spec(prefill, decode) }
}

/// Checks a reply against an engine that computes the prompt alone.
async fn right(reply: &Reply, body: &Value) {
    let reference = Reference::start().await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, body).await);
}

async fn record(trial: &Trial, reply: &Reply) -> Value {
    trial.cluster.decisions(reply.header("x-request-id")).await[0].clone()
}

/// A cluster with `auto` whose hand-offs take long. `p0` and `d0` hold the prompt, `d1` does not and
/// is the only decode worker in service.
async fn local(first: &Value) -> Trial {
    let mut trial = Trial::start(auto(1, 2, costs!("20000", "1000"))).await;
    hold(&mut trial, first).await;
    trial
}

/// Has `p0` and `d0` compute a prompt, and leaves `d1` alone in service.
async fn hold(trial: &mut Trial, first: &Value) {
    // Remote, since the client says so.
    undrain(trial, "d0").await;
    drain(trial, "d1").await;
    let mut remote = first.clone();
    remote["cache_hit_threshold"] = 1.0.into();
    served(trial, &remote).await;
    trial.cluster.settle().await;
    undrain(trial, "d1").await;
    drain(trial, "d0").await;
}

/// The cluster of a specification, with one shot configured and on engines that can.
fn in_one_shot(spec: Spec) -> Spec {
    let model = spec.model.replace("two_step", "one_shot\nkv_load_failure_policy: fail");
    let engine = |_: &str, config: &mut SimConfig| {
        config.bidirectional_ttl_ms = Some(SHORT_LEASE.as_millis() as u64);
        config.lease_ms = 4 * SHORT_LEASE.as_millis() as u64;
    };
    Spec { model, engine, ..spec }
}

#[tokio::test]
async fn a_decode_worker_that_computes_a_prompt_fetches_its_prefix() {
    let [first, second] = turns("local");
    let mut trial = local(&first).await;
    let explained = trial.cluster.admin.post("/admin/explain", &second).await.json();
    let reply = served(&mut trial, &second).await;
    right(&reply, &second).await;
    assert_eq!((reply.route("local"), reply.route("decode")), (Some("cheaper"), Some("d1")));
    let blocks = prompt(60, "local").len() as u64 / BLOCK;
    assert_eq!(cached(&reply), blocks * BLOCK, "fetched tokens were not computed");
    let record = record(&trial, &reply).await;
    let (auto, fetch) = (&record["auto"], &record["fetch"]);
    assert!(auto["local"] == true && auto["local_ms"].as_f64() < auto["remote_ms"].as_f64());
    let planned = &auto["local_fetch"];
    assert_eq!((&planned["source"], &planned["blocks"]), (&json!("p0"), &json!(blocks)));
    assert_eq!(auto["remote_fetch"], Value::Null, "the prefill worker has it");
    assert_eq!((&fetch["worker"], &fetch["source"]), (&json!("d1"), &json!("p0")));
    assert_eq!((&fetch["outcome"], ended(&trial, "fetched").await), (&json!("fetched"), 1.0));
    let leg = &record["ledger"]["legs"][0];
    assert_eq!((&leg["leg"], &leg["peer_fetched"]), (&json!("decode"), &json!(blocks * BLOCK)));
    assert_eq!((steps(&trial, "p0").len(), steps(&trial, "d1").len()), (1, 1));
    // The explanation has said so.
    let told = &explained["explanation"]["prompts"][0];
    assert_eq!(told["local_reason"], "cheaper");
    assert_eq!(told["auto"]["local_fetch"]["source"], "p0");
    let mut candidates = told["steps"][0]["candidates"].as_array().unwrap().iter();
    let chosen = candidates.find(|one| one["chosen"] == true).unwrap();
    assert_eq!((&chosen["worker"], &chosen["fetch"]["source"]), (&json!("d1"), &json!("p0")));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_worker_whose_fetch_fails_computes_the_prompt() {
    for fault in [FaultKind::Status { status: 500 }, FaultKind::NoHandOff] {
        let [first, second] = turns("fails");
        let mut trial = local(&first).await;
        trial.fault("p0", fault, Some(1));
        let reply = served(&mut trial, &second).await;
        right(&reply, &second).await;
        assert_eq!((reply.route("local"), cached(&reply)), (Some("cheaper"), 0));
        assert_ne!(recorded(&trial, &reply).await["outcome"], "fetched");
        assert_eq!(trial.retries("decode").await, 0.0, "no attempt of the request has failed");
        trial.finish().await;
    }
}

/// The decode worker holds the prefix and computes slowly; the prefill worker can fetch it from there.
#[tokio::test]
async fn auto_prefills_remotely_where_only_a_fetch_makes_that_cheaper() {
    for fetches in [true, false] {
        let [first, second] = turns("remote");
        let mut spec = auto(2, 1, costs!("0", "1000"));
        spec.worker = |name| match name {
            "d0" => concat!(", ", costs!("0", "5000")),
            _ => "",
        };
        if !fetches {
            spec.model = spec.model.replace("two_step", "off");
        }
        let mut trial = Trial::start(spec).await;
        held(&mut trial, &first).await;
        let reply = served(&mut trial, &second).await;
        right(&reply, &second).await;
        let record = record(&trial, &reply).await;
        let auto = &record["auto"];
        if fetches {
            assert_eq!((reply.route("prefill"), &auto["local"]), (Some("p1"), &json!(false)));
            assert_eq!(auto["remote_fetch"]["source"], "d0", "{auto}");
            assert_eq!(record["fetch"]["outcome"], "fetched");
        } else {
            assert_eq!((reply.route("local"), &auto["local"]), (Some("cheaper"), &json!(true)));
            assert_eq!(auto["remote_fetch"], Value::Null);
        }
        assert_eq!(auto["local_fetch"], Value::Null, "the decode worker has it");
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn auto_weighs_a_prefill_leg_that_takes_its_prefix_in_one_shot() {
    let mut spec = in_one_shot(auto(2, 1, costs!("0", "1000")));
    spec.worker = |name| match name {
        "d0" => concat!(", ", costs!("0", "5000")),
        _ => "",
    };
    let mut trial = Trial::start(spec).await;
    for (salt, way) in [("shows", "two_step"), ("takes", "one_shot")] {
        let [first, second] = turns(salt);
        held(&mut trial, &first).await;
        let reply = served(&mut trial, &second).await;
        right(&reply, &second).await;
        let record = record(&trial, &reply).await;
        assert_eq!((reply.route("prefill"), &record["auto"]["local"]), (Some("p1"), &json!(false)));
        assert_eq!(record["auto"]["remote_fetch"]["way"], way, "{record}");
        assert_eq!(
            (&record["fetch"]["way"], &record["fetch"]["outcome"]),
            (&json!(way), &json!("fetched"))
        );
        undrain(&trial, "p0").await;
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_that_answers_fetches_in_two_steps_whatever_its_engine_can() {
    let mut trial = Trial::start(in_one_shot(auto(1, 2, costs!("20000", "1000")))).await;
    for salt in ["one", "two"] {
        let [first, second] = turns(salt);
        hold(&mut trial, &first).await;
        let reply = served(&mut trial, &second).await;
        right(&reply, &second).await;
        assert_eq!((reply.route("local"), reply.route("decode")), (Some("cheaper"), Some("d1")));
        let fetch = recorded(&trial, &reply).await;
        assert_eq!((&fetch["way"], &fetch["outcome"]), (&json!("two_step"), &json!("fetched")));
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_worker_that_holds_enough_fetches_the_rest() {
    let keys = concat!("gate: { kind: router }\ncache_hit_threshold: 0.5\n", costs!("0", "1000"));
    let mut trial = Trial::start(Spec { flow: "decode_first", ..auto(1, 2, keys) }).await;
    let short = prompt(40, "most");
    let long = format!("{short}{}", prompt(16, "rest"));
    for (worker, text) in [("d0", &short), ("d1", &long)] {
        // The other decode worker gets the prompt; the one that holds too little gets nothing.
        drain(&trial, worker).await;
        let reply = served(&mut trial, &completion(text)).await;
        assert_eq!(reply.route("try"), Some("skipped"));
        trial.cluster.settle().await;
        undrain(&trial, worker).await;
    }
    drain(&trial, "d0").await;
    let body = completion(&format!("{long}{}", prompt(4, "new")));
    let reply = served(&mut trial, &body).await;
    right(&reply, &body).await;
    assert_eq!((reply.route("try"), reply.route("decode")), (Some("served"), Some("d1")));
    assert_eq!(cached(&reply), long.len() as u64 / BLOCK * BLOCK);
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["worker"], &fetch["source"]), (&json!("d1"), &json!("p0")), "{fetch}");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn workers_that_do_both_fetch_from_each_other() {
    let keys = format!("{FETCHES}\nqueue: none\nsaturation: {{ requests: 1 }}");
    let keys = format!("{keys}\n{}", costs!("0", "1000"));
    let aggregated = Spec { prefill: 0, decode: 0, both: 2, flow: "aggregated", ..spec(0, 0) };
    let mut trial = Trial::start(Spec { model: keys, ..aggregated }).await;
    let [first, second] = turns("both");
    let holder = served(&mut trial, &first).await.route("decode").unwrap().to_owned();
    trial.cluster.settle().await;
    trial.fault(&holder, FaultKind::SlowFirstByte { delay_ms: 4000 }, Some(1));
    trial.expect("ok");
    let blocking = Sent::new(&trial, &first);
    splitrail_tests::cluster::eventually("the holder is busy", async || {
        trial.asked(&holder).len() == 2
    })
    .await;
    let reply = served(&mut trial, &second).await;
    right(&reply, &second).await;
    assert_ne!(reply.route("decode"), Some(holder.as_str()));
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["outcome"], &fetch["source"]), (&json!("fetched"), &json!(holder)));
    assert_eq!(cached(&reply) % BLOCK, 0);
    assert_eq!(blocking.reply().await.status, 200);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
