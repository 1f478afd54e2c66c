//! NIXL in push mode: how legs find each other, how long decode waits, and what is refused.

use http::Method;
use serde_json::{Value, json};
use splitrail_sim::{KvConnector, Role, SimConfig, SimEngine};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";

struct Pair {
    prefill: SimEngine,
    decode: SimEngine,
}

impl Pair {
    async fn start(lease_ms: u64) -> Self {
        let config =
            SimConfig { connector: KvConnector::NixlPush, lease_ms, ..SimConfig::default() };
        let prefill = start(SimConfig { role: Role::Prefill, ..config.clone() }).await;
        let decode = start(SimConfig { role: Role::Decode, ..config }).await;
        Self { prefill, decode }
    }

    async fn send_prefill(&self, tokens: &[u32], id: &str) -> Reply {
        let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let body = json!({"prompt": tokens, "max_tokens": 1, "kv_transfer_params": params});
        let headers = [("x-request-id", id)];
        send(&self.prefill, Method::POST, COMPLETIONS, &headers, body.to_string()).await.unwrap()
    }

    fn decode_params(&self) -> Value {
        let url = self.prefill.bootstrap_url();
        let port: u16 = url.rsplit_once(':').unwrap().1.parse().unwrap();
        json!({
            "do_remote_decode": false, "do_remote_prefill": true, "remote_request_id": "any",
            "remote_engine_id": self.prefill.state().engine_id, "remote_host": "127.0.0.1",
            "remote_port": port, "tp_size": 1, "pp_size": 1,
        })
    }

    async fn decode_with(&self, tokens: &[u32], id: &str, params: Value) -> Reply {
        let body = json!({"prompt": tokens, "max_tokens": 24, "kv_transfer_params": params});
        let headers = [("x-request-id", id)];
        send(&self.decode, Method::POST, COMPLETIONS, &headers, body.to_string()).await.unwrap()
    }

    async fn send_decode(&self, tokens: &[u32], id: &str) -> Reply {
        self.decode_with(tokens, id, self.decode_params()).await
    }

    /// A decode leg whose client leaves as soon as the prefill engine knows of the leg.
    async fn leave(&self, tokens: &[u32], id: &str) {
        tokio::select! {
            _ = self.send_decode(tokens, id) => panic!("answered without its prefill"),
            () = until("decode is registered", || self.prefill.state().registered == 1) => {}
        }
    }

    async fn nothing_held(&self) {
        for engine in [&self.prefill, &self.decode] {
            until("nothing is held", || {
                let state = engine.state();
                (state.blocks_used, state.staged_hand_offs, state.orphans, state.waiting)
                    == (0, 0, 0, 0)
            })
            .await;
        }
    }
}

fn code(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn legs_find_each_other_by_their_request_id_in_either_order() {
    let pair = Pair::start(30_000).await;
    let alone = start(SimConfig::default()).await;
    for (seed, decode_first) in [(1, false), (2, true)] {
        let (tokens, id) = (prompt(seed, 100), format!("id{seed}"));
        let prefill = pair.send_prefill(&tokens, &id);
        let decode = pair.send_decode(&tokens, &id);
        let (prefilled, decoded) = if decode_first {
            let mut decode = Box::pin(decode);
            tokio::select! {
                _ = &mut decode => panic!("answered without its prefill"),
                () = until("decode waits", || pair.prefill.state().registered == 1) => {}
            }
            tokio::join!(prefill, decode)
        } else {
            (prefill.await, decode.await)
        };
        let params = &prefilled.json()["kv_transfer_params"];
        assert_eq!(params["transfer_mode"], "push");
        assert_eq!(params["remote_engine_id"], pair.prefill.state().engine_id);
        let expected = complete(&alone, &tokens, 24).await;
        assert_eq!(text_of(&decoded.json()), text_of(&expected));
        // Nothing was cached anywhere.
        assert_eq!(cached_tokens(&decoded.json()), 100);
        assert_eq!(cached_tokens(&prefilled.json()), 0);
    }
    assert_eq!(pair.decode.state().totals.external_kv_transfer_tokens, 200);
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_leg_whose_client_left_keeps_its_blocks_until_a_prefill_with_its_id_ends() {
    let pair = Pair::start(30_000).await;
    let tokens = prompt(1, 100);
    pair.leave(&tokens, "gone").await;
    until("the client has left", || pair.decode.state().orphans == 1).await;
    assert_eq!(pair.send_prefill(&prompt(2, 100), "other").await.status, 200);
    assert_eq!((pair.decode.state().orphans, pair.decode.state().blocks_used), (1, 7));
    assert_eq!(pair.send_prefill(&tokens, "gone").await.status, 200);
    until("it is freed", || pair.decode.state().blocks_used == 0).await;
    assert_eq!(pair.decode.state().orphans, 0);
}

#[tokio::test]
async fn a_prefill_without_a_decode_keeps_its_blocks_for_the_lease_and_decode_then_waits() {
    let pair = Pair::start(30).await;
    let tokens = prompt(1, 100);
    assert_eq!(pair.send_prefill(&tokens, "late").await.status, 200);
    until("the lease ends", || pair.prefill.state().staged_hand_offs == 0).await;
    pair.leave(&tokens, "late").await;
    until("the client has left", || pair.decode.state().orphans == 1).await;
    assert_eq!(pair.send_prefill(&tokens, "late").await.status, 200);
    pair.nothing_held().await;
}

#[tokio::test]
async fn pushes_that_a_real_engine_would_get_wrong_are_refused() {
    let pair = Pair::start(30_000).await;
    let tokens = prompt(1, 100);
    assert_eq!(pair.send_prefill(&tokens, "one").await.status, 200);
    // The KV of another prompt.
    let reply = pair.send_decode(&prompt(2, 100), "one").await;
    assert_eq!(code(&reply), (400, "hand_off_mismatch".to_owned()));
    let reply = pair.send_prefill(&prompt(2, 100), "one").await;
    assert_eq!(code(&reply), (400, "hand_off_reused".to_owned()));
    assert_eq!(pair.send_decode(&tokens, "one").await.status, 200);
    // A second use of the id.
    let reply = pair.send_decode(&tokens, "one").await;
    assert_eq!(code(&reply), (400, "hand_off_reused".to_owned()));
    let mut params = pair.decode_params();
    params["remote_engine_id"] = json!("of-a-former-life");
    let reply = pair.decode_with(&tokens, "two", params).await;
    assert_eq!(code(&reply), (500, "hand_off_unknown".to_owned()));
    pair.nothing_held().await;
}

#[tokio::test]
async fn a_decode_leg_without_a_remote_request_id_kills_its_engine() {
    let pair = Pair::start(30_000).await;
    let mut params = pair.decode_params();
    params.as_object_mut().unwrap().remove("remote_request_id");
    assert_eq!(pair.decode_with(&prompt(1, 100), "deadly", params).await.status, 500);
    assert!(pair.decode.state().dead);
}

#[tokio::test]
async fn decode_does_not_notice_that_the_engine_it_has_registered_with_dies() {
    let pair = Pair::start(30_000).await;
    let tokens = prompt(1, 100);
    pair.leave(&tokens, "dead").await;
    let Pair { prefill, decode } = pair;
    prefill.shutdown().await;
    until("the client has left", || decode.state().orphans == 1).await;
    assert_eq!(complete(&decode, &prompt(3, 20), 4).await["usage"]["completion_tokens"], 4);
    assert_eq!((decode.state().orphans, decode.state().blocks_used), (1, 7));
}

#[tokio::test]
async fn the_id_of_a_response_is_that_in_its_body() {
    let pair = Pair::start(30_000).await;
    let body = |params: Value| {
        json!({
            "input": "what a long sentence this is, for a block or two of the cache",
            "max_output_tokens": 4, "ignore_eos": true, "request_id": "resp_1",
            "kv_transfer_params": params,
        })
    };
    let prefill = body(json!({"do_remote_decode": true, "do_remote_prefill": false}));
    let reply = post(&pair.prefill, "/v1/responses", prefill).await;
    assert_eq!(reply.json()["id"], "resp_1");
    let reply = post(&pair.decode, "/v1/responses", body(pair.decode_params())).await;
    assert_eq!((reply.status, &reply.json()["id"]), (200, &json!("resp_1")));
    pair.nothing_held().await;
}
