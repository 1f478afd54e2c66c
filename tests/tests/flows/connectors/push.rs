//! Engines that push KV: the ids and identities of their legs, and the repair of legs that were given
//! up. A simulated decode engine keeps the blocks of such a leg until a prefill leg with its id has
//! finished, for ever if none does.

use std::collections::HashSet;
use std::future::Future;

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, KvConnector, RecordedRequest, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::client::{Reply, streamed_text, whole_text};
use splitrail_tests::cluster::eventually;
use splitrail_tests::dialect::{self, MESSAGES, RESPONSES};
use splitrail_tests::trial::{COMPLETIONS, Reference, Trial, completion, prompt, streamed};

use super::{pd, replace, requests, restart};

const MINE: &str = "chosen-by-the-client";

pub(super) fn push(prefill: usize, decode: usize) -> Spec {
    pd(KvConnector::NixlPush, prefill, decode)
}

fn id(request: &RecordedRequest) -> String {
    request.header("x-request-id").unwrap().to_owned()
}

async fn repairs(trial: &Trial, outcome: &str) -> f64 {
    trial.cluster.metric("splitrail_unused_hand_offs_total", &[("outcome", outcome)]).await
}

/// Waits until decode has registered its blocks with prefill.
async fn registered(trial: &Trial) {
    eventually("a decode leg waits for its KV", async || {
        trial.cluster.engine("p0").state().registered == 1
    })
    .await;
}

/// Lets the client of a request leave as soon as a condition holds.
async fn leave(reply: impl Future<Output = Reply>, when: impl Future<Output = ()>) {
    tokio::select! {
        reply = reply => panic!("answered too early: {reply:?}"),
        () = when => {}
    }
}

fn slow_prefill(name: &str, config: &mut SimConfig) {
    if name.starts_with('p') {
        config.prefill_us_per_token = 2_000;
    }
}

#[tokio::test]
async fn both_legs_carry_one_id_of_the_router_that_never_comes_again() {
    let mut trial = Trial::start(push(1, 1)).await;
    let mut sent = 0;
    for salt in 0..8 {
        let named = dialect::BOTH
            .map(|path| (path, dialect::request(path, &prompt(30, &format!("n{salt}{path}")), 5)));
        for (path, mut body) in requests(KvConnector::NixlPush, salt).into_iter().chain(named) {
            body["kv_transfer_params"] = json!({
                "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": MINE,
                "remote_request_id": MINE, "remote_block_ids": [[1]], "remote_host": MINE,
            });
            body["request_id"] = MINE.into();
            trial.expect("ok");
            let headers = [("x-request-id", MINE), ("content-type", "application/json")];
            let reply = trial.cluster.http.post_with(path, &headers, body.to_string()).await;
            assert_eq!(reply.status, 200, "{path}: {}", reply.text());
            assert_eq!(reply.header("x-request-id"), MINE);
            assert!(!reply.text().contains(MINE), "{}", reply.text());
            sent += 1;
        }
    }
    let (prefill, decode) = (trial.asked("p0"), trial.asked("d0"));
    assert_eq!((prefill.len(), decode.len()), (sent, sent));
    let engine = trial.cluster.engine("p0").state().engine_id;
    let mut ids = HashSet::new();
    for decode in &decode {
        assert!(ids.insert(id(decode)), "an id came again");
        let prefill = prefill.iter().find(|prefill| id(prefill) == id(decode));
        let prefill = prefill.expect("both legs carry the same id");
        assert_eq!(prefill.path, decode.path);
        let staging = json!({"do_remote_decode": true, "do_remote_prefill": false});
        assert_eq!(prefill.body["kv_transfer_params"], staging);
        let params = decode.body["kv_transfer_params"].as_object().unwrap();
        assert_eq!(params["remote_engine_id"], engine);
        assert_eq!(params["remote_request_id"], id(decode));
        assert_eq!((&params["tp_size"], &params["pp_size"]), (&json!(1), &json!(1)));
        assert!(params["remote_host"].is_string() && params["remote_port"].is_u64());
        assert!(!params.contains_key("remote_block_ids"));
        // Engines take the id of a response from its body.
        let own = &decode.body["request_id"];
        assert_eq!(*own, prefill.body["request_id"]);
        assert_eq!(own.is_string(), decode.path == RESPONSES, "{}", decode.path);
        assert!(own.is_null() || ids.insert(own.to_string()));
        for leg in [prefill, decode] {
            assert!(!leg.body.to_string().contains(MINE), "{}", leg.body);
            assert!(leg.headers.iter().all(|(_, value)| !value.contains(MINE)));
        }
    }
    assert!(decode.iter().any(|leg| leg.path == MESSAGES));
    let ids: Vec<String> = decode.iter().map(id).collect();
    assert!(ids.len() >= 40, "{} ids", ids.len());
    let bits = cannot_be_guessed(&ids);
    assert_eq!(bits.iter().fold(0, |any, id| any | id), u128::MAX, "{ids:?}");
    assert_eq!(bits.iter().fold(u128::MAX, |all, id| all & id), 0, "{ids:?}");
    let own = decode.iter().filter_map(|leg| leg.body["request_id"].as_str());
    let own: Vec<String> = own.map(|id| id.strip_prefix("resp_").unwrap().to_owned()).collect();
    assert_eq!(cannot_be_guessed(&own).len(), 8);
    trial.finish().await;
}

/// Under the id of another pair, an engine would be handed the KV of another prompt. So an id has 128
/// bits, and no id says anything of the next one. Returns the bits.
fn cannot_be_guessed(ids: &[String]) -> Vec<u128> {
    let bits = ids.iter().map(|id| {
        assert_eq!(id.len(), 32, "{id}");
        u128::from_str_radix(id, 16).unwrap()
    });
    let bits: Vec<u128> = bits.collect();
    // 64 bits differ on average, and fewer than 20 in one of 10^15 cases.
    for pair in bits.windows(2) {
        assert!((pair[0] ^ pair[1]).count_ones() >= 20, "{ids:?}");
    }
    bits
}

#[tokio::test]
async fn a_retry_has_another_id() {
    let policy = "{ kind: round_robin }";
    let mut trial = Trial::start(Spec { policy, ..push(2, 1) }).await;
    for engine in ["p0", "p1"] {
        // Who they are is known, so that the fault strikes a leg.
        let body = completion(&prompt(30, engine));
        assert_eq!(trial.post("ok", COMPLETIONS, &body).await.status, 200);
    }
    let before = trial.asked("d0").len();
    trial.fault("p0", FaultKind::Status { status: 500 }, Some(1));
    trial.fault("p1", FaultKind::Reset, Some(1));
    for turn in 0..2 {
        let body = completion(&prompt(30, &format!("retry{turn}z")));
        assert_eq!(trial.post("ok", COMPLETIONS, &body).await.status, 200);
    }
    let decode = &trial.asked("d0")[before..];
    assert!(decode.len() > 2, "no leg was sent again");
    let ids: HashSet<String> = decode.iter().map(id).collect();
    assert_eq!(ids.len(), decode.len());
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_is_asked_who_it_is_once_until_it_is_another() {
    let mut trial = Trial::start(push(1, 1)).await;
    let bodies: Vec<Value> =
        (0..12).map(|turn| completion(&prompt(30, &format!("who{turn}z")))).collect();
    let http = &trial.cluster.http;
    let replies = bodies.iter().map(|body| http.post(COMPLETIONS, body));
    for reply in futures_util::future::join_all(replies).await {
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(trial.questions("p0"), 1);
    restart(&mut trial.cluster, "p0").await;
    let body = completion(&prompt(30, "after"));
    let reply = trial.cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.route("prefill"), Some("p0"), "{:?}", reply.headers);
    assert_eq!(trial.questions("p0"), 1);
    let engine = trial.cluster.engine("p0").state().engine_id;
    let last = trial.asked("d0").pop().unwrap();
    assert_eq!(last.body["kv_transfer_params"]["remote_engine_id"], engine);
    trial.cluster.quiet().await;
}

#[tokio::test]
async fn an_engine_that_is_another_before_the_router_knows_is_learned_from_its_reply() {
    // The router is told nothing: no probe comes in this time.
    let model = "health: { probe_interval: 1h }\non_no_prefill: fail".into();
    let mut trial = Trial::start(Spec { model, ..push(1, 1) }).await;
    let body = |turn| completion(&prompt(30, &format!("learn{turn}z")));
    assert_eq!(trial.post("ok", COMPLETIONS, &body(0)).await.status, 200);
    // The same address and port, and no connection to the earlier process is left open.
    replace(&mut trial.cluster, "p0").await;
    let reply = trial.post("ok", COMPLETIONS, &body(1)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let engine = trial.cluster.engine("p0").state().engine_id;
    let last = trial.asked("d0").pop().unwrap();
    assert_eq!(last.body["kv_transfer_params"]["remote_engine_id"], engine);
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_whose_client_left_is_freed_by_its_prefill_leg_which_runs_on() {
    let mut trial = Trial::start(Spec { engine: slow_prefill, ..push(1, 1) }).await;
    for (turn, stream) in [false, true].into_iter().enumerate() {
        let body = completion(&prompt(60, &format!("leaves{stream}")));
        let body = if stream { streamed(&body) } else { body };
        trial.expect("cancelled");
        let before = trial.asked("p0").len();
        leave(trial.cluster.http.post(COMPLETIONS, &body), registered(&trial)).await;
        eventually("it is freed", async || repairs(&trial, "finished").await == (turn + 1) as f64)
            .await;
        trial.cluster.quiet().await;
        let decode = trial.asked("d0").pop().unwrap();
        let prefills = &trial.asked("p0")[before..];
        assert_eq!(prefills.len(), 1, "it runs on");
        for prefill in prefills {
            assert_eq!(id(prefill), id(&decode));
            assert_eq!(prefill.body["prompt"], decode.body["prompt"]);
        }
        assert_eq!(trial.cluster.engine("d0").state().orphans, 0);
    }
    assert_eq!(repairs(&trial, "stranded").await, 0.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_whose_prefill_failed_is_freed_by_a_further_prefill() {
    let reference = Reference::start().await;
    for kind in [FaultKind::Status { status: 500 }, FaultKind::Reset, FaultKind::Hang] {
        let limit = if kind == FaultKind::Hang { "timeouts: { prefill: 4s }" } else { "" };
        let model = format!("breaker: {{ failures: 0 }}\n{limit}");
        let mut trial = Trial::start(Spec { model, ..push(1, 1) }).await;
        let body = |turn| completion(&prompt(30, &format!("failed{turn}z")));
        assert_eq!(trial.post("ok", COMPLETIONS, &body(0)).await.status, 200);
        trial.fault("p0", kind.clone(), Some(1));
        let expected = reference.text(COMPLETIONS, &body(1)).await;
        let reply = trial.post("ok", COMPLETIONS, &body(1)).await;
        assert_eq!(reply.status, 200, "{kind:?}: {}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), expected);
        eventually("it is freed", async || repairs(&trial, "finished").await == 1.0).await;
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

/// A prompt whose decode leg waits as its prefill engine is shut down, and the reply to it.
async fn killed(trial: &mut Trial, stream: bool) -> Reply {
    let body = completion(&prompt(60, "killed"));
    let body = if stream { streamed(&body) } else { body };
    let http = splitrail_tests::Client::new(trial.cluster.running.addresses.http);
    trial.expect("ok");
    let asking = http.post(COMPLETIONS, &body);
    let killing = async {
        registered(trial).await;
        let place = trial.cluster.engines.iter().position(|(name, _)| name == "p0").unwrap();
        trial.cluster.engines.remove(place).1.shutdown().await;
    };
    tokio::join!(asking, killing).0
}

#[tokio::test]
async fn a_leg_whose_prefill_engine_is_gone_is_counted_as_stranded() {
    let model = "timeouts: { prefill: 2s }\nlease: 2s".to_owned();
    for stream in [false, true] {
        let spec = Spec { engine: slow_prefill, model: model.clone(), ..push(1, 1) };
        let mut trial = Trial::start(spec).await;
        let reply = killed(&mut trial, stream).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("local"), Some("no_prefill"));
        eventually("it is stranded", async || repairs(&trial, "stranded").await == 1.0).await;
        assert_eq!(trial.cluster.engine("d0").state().orphans, 1);
        let workers = trial.cluster.admin.get("/admin/workers").await.json();
        let workers = workers["workers"].as_array().unwrap();
        let decode = workers.iter().find(|worker| worker["id"] == "d0").unwrap();
        assert_eq!(decode["stranded_legs"], 1);
        assert!(decode["push_engine"][0]["engine_id"].is_string(), "{decode}");
        assert_eq!(repairs(&trial, "finished").await, 0.0);
        trial.nothing_is_held().await;
        // A new process holds nothing.
        restart(&mut trial.cluster, "d0").await;
        let workers = trial.cluster.admin.get("/admin/workers").await.json();
        let workers = workers["workers"].as_array().unwrap();
        let decode = workers.iter().find(|worker| worker["id"] == "d0").unwrap();
        assert_eq!(decode["stranded_legs"], 0);
    }
}

/// The engine has computed the prompt and replied, but decode registers with it too late.
#[tokio::test]
async fn a_leg_whose_prefill_engine_is_gone_before_it_registers_is_counted_as_stranded() {
    for stream in [false, true] {
        let mut trial = Trial::start(Spec { model: "lease: 5s".into(), ..push(1, 1) }).await;
        // Who they are is known, so that the fault strikes a leg.
        let first = completion(&prompt(30, "first"));
        assert_eq!(trial.post("ok", COMPLETIONS, &first).await.status, 200);
        let before = trial.cluster.engine("p0").state().totals.hand_offs_staged;
        trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 1500 }, Some(1));
        let http = splitrail_tests::Client::new(trial.cluster.running.addresses.http);
        trial.expect("ok");
        let body = completion(&prompt(60, "late"));
        let body = if stream { streamed(&body) } else { body };
        let asking = http.post(COMPLETIONS, &body);
        let killing = async {
            eventually("prefill has replied", async || {
                let worker = [("worker", "p0")];
                let booked = trial.cluster.metric("splitrail_worker_requests", &worker).await;
                trial.cluster.engine("p0").state().totals.hand_offs_staged > before && booked == 0.0
            })
            .await;
            let place = trial.cluster.engines.iter().position(|(name, _)| name == "p0").unwrap();
            trial.cluster.engines.remove(place).1.shutdown().await;
        };
        let (reply, ()) = tokio::join!(asking, killing);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("local"), Some("no_prefill"));
        assert_eq!(trial.cluster.engine("d0").state().orphans, 1);
        eventually("it is stranded", async || repairs(&trial, "stranded").await == 1.0).await;
        trial.nothing_is_held().await;
    }
}

#[tokio::test]
async fn an_engine_that_took_the_place_of_the_one_that_was_registered_with_frees_nothing() {
    let model = "timeouts: { prefill: 20s }".into();
    let mut trial = Trial::start(Spec { engine: slow_prefill, model, ..push(1, 1) }).await;
    let body = completion(&prompt(60, "killed"));
    let http = splitrail_tests::Client::new(trial.cluster.running.addresses.http);
    let asking = http.post(COMPLETIONS, &body);
    let killing = async {
        registered(&trial).await;
        replace(&mut trial.cluster, "p0").await;
    };
    let (reply, ()) = tokio::join!(asking, killing);
    assert_eq!(reply.status, 200, "{}", reply.text());
    eventually("it is stranded", async || repairs(&trial, "stranded").await == 1.0).await;
    assert_eq!(repairs(&trial, "finished").await, 0.0);
    assert_eq!(trial.cluster.engine("d0").state().orphans, 1);
}

#[tokio::test]
async fn a_stream_that_has_not_begun_within_the_lease_gets_a_new_pair() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(Spec { model: "lease: 3s".into(), ..push(1, 1) }).await;
    // Who they are is known, so that the fault strikes a leg.
    let first = completion(&prompt(30, "first"));
    assert_eq!(trial.post("ok", COMPLETIONS, &first).await.status, 200);
    let before = trial.asked("d0").len();
    let late = FaultKind::SlowFirstByte { delay_ms: 3_600_000 };
    trial.fault("d0", late, Some(1));
    let body = completion(&prompt(30, "late"));
    let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
    assert_eq!(streamed_text(&chunks, 0), reference.text(COMPLETIONS, &body).await);
    let labels = [("leg", "decode"), ("reason", "lease_expired")];
    assert_eq!(trial.cluster.metric("splitrail_retries_total", &labels).await, 1.0);
    // It may have registered after the lease had ended.
    eventually("it is freed", async || repairs(&trial, "finished").await == 1.0).await;
    let ids: HashSet<String> = trial.asked("d0")[before..].iter().map(id).collect();
    assert_eq!(ids.len(), 2);
    trial.finish().await;
}

/// With several samples, a leg that only fetches registers, and the one that generates comes later.
#[tokio::test]
async fn samples_that_are_generated_past_the_lease_are_not_cancelled() {
    let spec = Spec {
        model: "lease: 3s".into(),
        engine: |name, config| {
            if name == "d0" {
                config.max_num_seqs = 2;
                config.decode_us_per_step = 100_000;
            }
        },
        ..push(1, 1)
    };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(30, "samples"));
    (body["n"], body["max_tokens"], body["ignore_eos"]) = (2.into(), 60.into(), true.into());
    let engine = splitrail_tests::Client::new(trial.cluster.engine("d0").http_addr());
    trial.expect("ok");
    let waiting = async {
        eventually("both samples run", async || trial.cluster.engine("d0").state().running == 2)
            .await;
        // A request that waits for them, as all reports of the engine's load say.
        engine.post(COMPLETIONS, &completion(&prompt(3, "waits"))).await
    };
    let (reply, _) = tokio::join!(trial.cluster.http.post(COMPLETIONS, &body), waiting);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(trial.retries("decode").await, 0.0);
    assert_eq!(trial.counts(["p0"]), [1]);
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_that_pulls_is_not_used_and_the_error_names_its_connector() {
    let spec = Spec {
        model: "on_no_prefill: fail".into(),
        engine: |_, config| config.connector = KvConnector::Nixl,
        ..push(1, 1)
    };
    let mut trial = Trial::start(spec).await;
    let body = completion(&prompt(30, "pulls"));
    let reply = trial.post("no_worker", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.text().contains("`connector: nixl`"), "{}", reply.text());
    assert!(trial.asked("d0").is_empty());
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_pulls_is_not_ended_by_a_push() {
    let spec = Spec {
        engine: |name, config| {
            if name == "d0" {
                config.connector = KvConnector::Nixl;
            }
        },
        worker: |name| if name == "d0" { ", supports_cache_hit_threshold: false" } else { "" },
        ..push(1, 2)
    };
    let mut trial = Trial::start(Spec { policy: "{ kind: round_robin }", ..spec }).await;
    for turn in 0..4 {
        let body = completion(&prompt(30, &format!("mixed{turn}z")));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.route("decode"), Some("d1"));
    }
    assert!(trial.asked("d0").is_empty());
    assert!(!trial.cluster.engine("d0").state().dead);
    trial.finish().await;
}
