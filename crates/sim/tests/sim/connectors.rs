//! Connectors other than NIXL: the parameters of legs, how legs meet, and what is refused.

use serde_json::{Value, json};
use splitrail_sim::{KvConnector, Role, SimConfig, SimEngine};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";

struct Pair {
    prefill: SimEngine,
    decode: SimEngine,
}

impl Pair {
    async fn start(config: SimConfig) -> Self {
        let prefill = start(SimConfig { role: Role::Prefill, ..config.clone() }).await;
        let decode = start(SimConfig { role: Role::Decode, ..config }).await;
        Self { prefill, decode }
    }

    async fn of(connector: KvConnector) -> Self {
        Self::start(SimConfig { connector, ..SimConfig::default() }).await
    }

    fn mooncake_prefill(&self, tokens: &[u32], transfer_id: &str) -> Value {
        let params = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id,
        });
        json!({"prompt": tokens, "max_tokens": 1, "kv_transfer_params": params})
    }

    fn mooncake_decode(&self, tokens: &[u32], transfer_id: &str) -> Value {
        let params = json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer_id,
            "remote_bootstrap_addr": self.prefill.bootstrap_url(),
            "remote_engine_id": self.prefill.state().engine_id,
        });
        json!({"prompt": tokens, "max_tokens": 24, "kv_transfer_params": params})
    }

    fn room(&self, tokens: &[u32], room: Value) -> Value {
        let url = self.prefill.bootstrap_url();
        let port: u16 = url.rsplit_once(':').unwrap().1.parse().unwrap();
        json!({
            "prompt": tokens, "max_tokens": 24,
            "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room,
        })
    }

    async fn nothing_held(&self) {
        for engine in [&self.prefill, &self.decode] {
            until("nothing is held", || {
                let state = engine.state();
                (state.blocks_used, state.staged_hand_offs, state.running, state.waiting)
                    == (0, 0, 0, 0)
            })
            .await;
        }
    }
}

async fn alone(tokens: &[u32]) -> String {
    let engine = start(SimConfig::default()).await;
    text_of(&complete(&engine, tokens, 24).await).to_owned()
}

fn code(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap().to_owned())
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn shared_storage_serves_what_another_engine_computed() {
    let pair = Pair::of(KvConnector::SharedStorage).await;
    let tokens = prompt(1, 100);
    let first = complete(&pair.prefill, &tokens, 1).await;
    assert_eq!(cached_tokens(&first), 0);
    let second = complete(&pair.decode, &tokens, 24).await;
    assert_eq!(text_of(&second), alone(&tokens).await);
    let totals = pair.decode.state().totals;
    assert_eq!((totals.external_kv_transfer_tokens, totals.local_compute_tokens), (96, 4));
    assert_eq!(cached_tokens(&second), 96);
    complete(&pair.decode, &tokens, 1).await;
    assert_eq!(pair.decode.state().totals.local_cache_hit_tokens, 96);
    let params = json!({"do_remote_decode": true});
    let strange = json!({"prompt": tokens, "kv_transfer_params": params});
    let reply = post(&pair.prefill, COMPLETIONS, strange).await;
    assert_eq!(code(&reply), refused(400, "hand_off_mismatch"));
    pair.nothing_held().await;
}

#[tokio::test]
async fn mooncake_legs_may_arrive_in_either_order() {
    let pair = Pair::of(KvConnector::Mooncake).await;
    for (seed, decode_first) in [(1, false), (2, true)] {
        let (tokens, id) = (prompt(seed, 100), format!("t{seed}"));
        let prefill = post(&pair.prefill, COMPLETIONS, pair.mooncake_prefill(&tokens, &id));
        let decode = post(&pair.decode, COMPLETIONS, pair.mooncake_decode(&tokens, &id));
        let (prefilled, decoded) = if decode_first {
            let mut decode = Box::pin(decode);
            tokio::select! {
                _ = &mut decode => panic!("answered without its prefill"),
                () = until("decode waits", || pair.decode.state().waiting == 1) => {}
            }
            tokio::join!(prefill, decode)
        } else {
            (prefill.await, decode.await)
        };
        assert_eq!(prefilled.json()["kv_transfer_params"], Value::Null);
        assert_eq!(text_of(&decoded.json()), alone(&tokens).await);
        // As with older engines, the decode leg reports the whole prompt as cached.
        assert_eq!(cached_tokens(&decoded.json()), 100);
    }
    assert_eq!(pair.decode.state().totals.external_kv_transfer_tokens, 200);
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_mooncake_transfer_is_refused_for_another_prompt_or_engine_or_a_second_time() {
    let pair = Pair::of(KvConnector::Mooncake).await;
    let tokens = prompt(1, 100);
    let prefill = || post(&pair.prefill, COMPLETIONS, pair.mooncake_prefill(&tokens, "t"));
    assert_eq!(prefill().await.status, 200);
    assert_eq!(code(&prefill().await), refused(400, "hand_off_reused"));
    let other = pair.mooncake_decode(&prompt(2, 100), "t");
    let reply = post(&pair.decode, COMPLETIONS, other).await;
    assert_eq!(code(&reply), refused(400, "hand_off_mismatch"));
    let mut stale = pair.mooncake_decode(&tokens, "t");
    stale["kv_transfer_params"]["remote_engine_id"] = json!("of-a-former-life");
    let reply = post(&pair.decode, COMPLETIONS, stale).await;
    assert_eq!(code(&reply), refused(500, "hand_off_unknown"));
    let decode = || post(&pair.decode, COMPLETIONS, pair.mooncake_decode(&tokens, "t"));
    assert_eq!(decode().await.status, 200);
    assert_eq!(code(&decode().await), refused(400, "hand_off_reused"));
    // One id for several samples counts as several uses.
    let mut several = pair.mooncake_prefill(&tokens, "u");
    several["n"] = json!(2);
    let reply = post(&pair.prefill, COMPLETIONS, several).await;
    assert_eq!(code(&reply), refused(400, "hand_off_reused"));
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_mooncake_bootstrap_server_returns_its_engine_id() {
    let pair = Pair::of(KvConnector::Mooncake).await;
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .build_http::<http_body_util::Full<bytes::Bytes>>();
    let uri = format!("{}/query", pair.prefill.bootstrap_url()).parse().unwrap();
    let reply = client.get(uri).await.unwrap();
    let body = http_body_util::BodyExt::collect(reply.into_body()).await.unwrap().to_bytes();
    let told: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(told["0"]["engine_id"], pair.prefill.state().engine_id);
}

#[tokio::test]
async fn sglang_legs_wait_for_each_other() {
    let pair = Pair::of(KvConnector::Sglang).await;
    let tokens = prompt(1, 100);
    let both = |room: u64| {
        let body = pair.room(&tokens, json!(room));
        let prefill = post(&pair.prefill, COMPLETIONS, body.clone());
        let decode = post(&pair.decode, COMPLETIONS, body);
        async { tokio::join!(prefill, decode) }
    };
    let (prefilled, decoded) = both(i64::MAX as u64).await;
    assert_eq!(prefilled.json()["usage"]["completion_tokens"], 1);
    assert_eq!(prefilled.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(text_of(&decoded.json()), alone(&tokens).await);
    // Even if they are sent one after the other, no leg ends before the other has arrived.
    let mut prefill = Box::pin(post(&pair.prefill, COMPLETIONS, pair.room(&tokens, json!(5))));
    tokio::select! {
        _ = &mut prefill => panic!("answered without its decode"),
        () = until("it is staged", || pair.prefill.state().staged_hand_offs == 1) => {}
    }
    drop(prefill);
    pair.nothing_held().await;
    let (again, _) =
        tokio::join!(post(&pair.prefill, COMPLETIONS, pair.room(&tokens, json!(5))), async {});
    assert_eq!(code(&again), refused(400, "hand_off_reused"));
}

#[tokio::test]
async fn an_sglang_engine_refuses_requests_without_a_valid_room() {
    let pair = Pair::of(KvConnector::Sglang).await;
    let plain = json!({"prompt": prompt(1, 20), "max_tokens": 2});
    for engine in [&pair.prefill, &pair.decode] {
        let reply = post(engine, COMPLETIONS, plain.clone()).await;
        assert_eq!(code(&reply), refused(400, "room_missing"));
        for room in [json!("7"), json!(-1), json!(1.5), json!(u64::MAX)] {
            let reply = post(engine, COMPLETIONS, pair.room(&prompt(1, 20), room)).await;
            assert_eq!(code(&reply), refused(400, "room_wrong"));
        }
        let params = json!({"do_remote_decode": true});
        let mut strange = pair.room(&prompt(1, 20), json!(1));
        strange["kv_transfer_params"] = params;
        let reply = post(engine, COMPLETIONS, strange).await;
        assert_eq!(code(&reply), refused(400, "hand_off_mismatch"));
    }
}

#[tokio::test]
async fn sglang_legs_must_have_equal_sampling_parameters() {
    let pair = Pair::of(KvConnector::Sglang).await;
    let body = pair.room(&prompt(1, 40), json!(9));
    let mut other = body.clone();
    other["min_tokens"] = json!(3);
    let decode = async {
        let mut prefill = Box::pin(post(&pair.prefill, COMPLETIONS, body));
        tokio::select! {
            _ = &mut prefill => panic!("answered without its decode"),
            reply = post(&pair.decode, COMPLETIONS, other) => reply,
        }
    };
    assert_eq!(code(&decode.await), refused(400, "hand_off_mismatch"));
    pair.nothing_held().await;
}

/// Sends a decode leg and cancels it while the engine waits for its prefill leg.
async fn cancel_waiting(pair: &Pair, body: Value) {
    let aborted = pair.decode.state().totals.aborted;
    let mut decode = Box::pin(post(&pair.decode, COMPLETIONS, body));
    tokio::select! {
        _ = &mut decode => panic!("answered without its prefill"),
        () = until("decode holds blocks", || pair.decode.state().blocks_used > 0) => {}
    }
    drop(decode);
    until("decode is cancelled", || pair.decode.state().totals.aborted == aborted + 1).await;
}

#[tokio::test]
async fn a_decode_leg_that_waits_in_a_room_is_freed_when_it_is_cancelled() {
    let pair = Pair::of(KvConnector::Sglang).await;
    cancel_waiting(&pair, pair.room(&prompt(1, 100), json!(3))).await;
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_mooncake_decode_leg_keeps_its_blocks_until_a_prefill_leg_of_its_name_has_ended() {
    let pair = Pair::of(KvConnector::Mooncake).await;
    let tokens = prompt(1, 100);
    cancel_waiting(&pair, pair.mooncake_decode(&tokens, "t")).await;
    let state = pair.decode.state();
    assert_eq!((state.orphans, state.waiting), (1, 0));
    assert!(state.blocks_used > 0);
    let prefill = post(&pair.prefill, COMPLETIONS, pair.mooncake_prefill(&tokens, "t")).await;
    assert_eq!(prefill.status, 200);
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_mooncake_prefill_leg_that_is_cancelled_leaves_its_decode_leg_waiting_for_good() {
    let config = SimConfig {
        connector: KvConnector::Mooncake,
        rendezvous_timeout_ms: 1_500,
        // Slow enough to be cancelled.
        prefill_us_per_token: 20_000,
        ..SimConfig::default()
    };
    let pair = Pair::start(config).await;
    let tokens = prompt(1, 100);
    let prefill = || post(&pair.prefill, COMPLETIONS, pair.mooncake_prefill(&tokens, "t"));
    let mut decode = Box::pin(post(&pair.decode, COMPLETIONS, pair.mooncake_decode(&tokens, "t")));
    let mut cancelled = Box::pin(prefill());
    tokio::select! {
        _ = &mut decode => panic!("answered without its prefill"),
        _ = &mut cancelled => panic!("answered at once"),
        () = until("both legs are under way", || {
            pair.prefill.state().running == 1 && pair.decode.state().blocks_used > 0
        }) => {}
    }
    drop(cancelled);
    // A further prefill leg of the same name does not find the decode leg any more.
    let (again, decoded) = tokio::join!(prefill(), decode);
    assert_eq!(again.status, 200);
    assert_eq!(code(&decoded), refused(500, "hand_off_unmet"));
    assert_eq!(pair.prefill.state().staged_hand_offs, 1);
}

#[tokio::test]
async fn do_remote_prefill_ends_a_mooncake_prefill_engine() {
    let pair = Pair::of(KvConnector::Mooncake).await;
    let reply = post(&pair.prefill, COMPLETIONS, pair.mooncake_decode(&prompt(1, 40), "t")).await;
    assert_eq!(reply.status, 500);
    let plain = json!({"prompt": prompt(1, 40), "max_tokens": 1});
    assert_eq!(post(&pair.prefill, COMPLETIONS, plain).await.status, 500);
}

#[tokio::test]
async fn legs_wait_for_each_other_for_a_limited_time() {
    for connector in [KvConnector::Mooncake, KvConnector::Sglang] {
        let config = SimConfig { connector, rendezvous_timeout_ms: 20, ..SimConfig::default() };
        let pair = Pair::start(config).await;
        let body = match connector {
            KvConnector::Mooncake => pair.mooncake_decode(&prompt(1, 100), "never"),
            _ => pair.room(&prompt(1, 100), json!(3)),
        };
        let reply = post(&pair.decode, COMPLETIONS, body).await;
        assert_eq!(code(&reply), refused(500, "hand_off_unmet"));
        pair.nothing_held().await;
    }
    let config = SimConfig {
        connector: KvConnector::Sglang,
        rendezvous_timeout_ms: 20,
        ..SimConfig::default()
    };
    let pair = Pair::start(config).await;
    let reply = post(&pair.prefill, COMPLETIONS, pair.room(&prompt(1, 100), json!(4))).await;
    assert_eq!(code(&reply), refused(500, "hand_off_unmet"));
    pair.nothing_held().await;
}
