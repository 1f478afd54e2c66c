//! Prefill on one engine, decode on another: equal text, strict pairing.

use serde_json::{Value, json};
use splitrail_sim::{DecodeUsage, Fault, FaultKind, Role, SimConfig, SimEngine};

use crate::support::*;

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

    /// The prefill leg of a body; returns the reply.
    async fn prefill(&self, path: &str, body: &Value) -> Value {
        let mut leg = body.clone();
        leg["max_tokens"] = json!(1);
        leg["stream"] = json!(false);
        leg["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let reply = post(&self.prefill, path, leg).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    async fn decode(&self, path: &str, body: &Value, params: &Value) -> Reply {
        let mut leg = body.clone();
        leg["kv_transfer_params"] = params.clone();
        post(&self.decode, path, leg).await
    }

    /// Both legs; returns both replies.
    async fn both(&self, path: &str, body: &Value) -> (Value, Value) {
        let prefilled = self.prefill(path, body).await;
        let decoded = self.decode(path, body, &prefilled["kv_transfer_params"]).await;
        assert_eq!(decoded.status, 200, "{}", decoded.text());
        (prefilled, decoded.json())
    }

    fn nothing_held(&self) {
        for engine in [&self.prefill, &self.decode] {
            let state = engine.state();
            assert_eq!((state.blocks_used, state.staged_hand_offs), (0, 0), "{state:?}");
        }
    }
}

const COMPLETIONS: &str = "/v1/completions";

fn ask(tokens: &[u32]) -> Value {
    json!({"prompt": tokens, "max_tokens": 24})
}

fn code(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn disaggregated_text_equals_aggregated_text() {
    let pair = Pair::start(SimConfig::default()).await;
    let alone = start(SimConfig::default()).await;
    // Lengths at, below and above a multiple of the block size; in the second round, both caches
    // hold the prompts.
    for round in 0..2 {
        for tokens in [1, 15, 16, 17, 64, 100] {
            let body = ask(&prompt(tokens, tokens as usize));
            let expected = post(&alone, COMPLETIONS, body.clone()).await.json();
            let (_, decoded) = pair.both(COMPLETIONS, &body).await;
            assert_eq!(text_of(&decoded), text_of(&expected), "{tokens} tokens, round {round}");
        }
    }
    let body = json!({"messages": [{"role": "user", "content": "of ships"}], "max_tokens": 24});
    let expected = post(&alone, "/v1/chat/completions", body.clone()).await.json();
    let (_, decoded) = pair.both("/v1/chat/completions", &body).await;
    assert_eq!(decoded["choices"][0]["message"], expected["choices"][0]["message"]);
    pair.nothing_held();
}

#[tokio::test]
async fn a_streamed_decode_leg_returns_the_same_text() {
    let pair = Pair::start(SimConfig { early_stream_headers: true, ..SimConfig::default() }).await;
    let mut body = ask(&prompt(1, 50));
    let prefilled = pair.prefill(COMPLETIONS, &body).await;
    let expected = complete(&pair.decode, &prompt(1, 50), 24).await;
    body["stream"] = json!(true);
    let reply = pair.decode(COMPLETIONS, &body, &prefilled["kv_transfer_params"]).await;
    let text: String = reply.chunks().iter().map(text_of).collect();
    assert_eq!(text, text_of(&expected));
}

#[tokio::test]
async fn hand_offs_have_the_recorded_fields() {
    let recorded: Value =
        serde_json::from_str(include_str!("../fixtures/http-vllm-0.32.0.json")).unwrap();
    let pair = Pair::start(SimConfig::default()).await;
    let (prefilled, decoded) = pair.both(COMPLETIONS, &ask(&prompt(1, 100))).await;
    let keys = |params: &Value| params.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let params = &prefilled["kv_transfer_params"];
    assert_eq!(keys(params), keys(&recorded["prefill"]["kv_transfer_params"]));
    assert_eq!(params["remote_block_ids"], json!([[1, 2, 3, 4, 5, 6, 7]]));
    assert_eq!(params["remote_num_tokens"], 100);
    assert_eq!(params["remote_engine_id"], pair.prefill.state().engine_id);
    assert_eq!(decoded["kv_transfer_params"], Value::Null);
}

#[tokio::test]
async fn transferred_tokens_are_not_counted_as_cache_hits() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    let (_, cold) = pair.both(COMPLETIONS, &body).await;
    assert_eq!(cached_tokens(&cold), 0);
    let totals = pair.decode.state().totals;
    assert_eq!(totals.external_kv_transfer_tokens, 100);
    assert_eq!((totals.local_compute_tokens, totals.local_cache_hit_tokens), (0, 0));
    let (prefilled, warm) = pair.both(COMPLETIONS, &body).await;
    assert_eq!(prefilled["kv_transfer_params"]["remote_prefill_cached_tokens"], 96);
    assert_eq!(cached_tokens(&warm), 96);
    let page = get(&pair.decode, "/metrics").await.text();
    let by_source = "vllm:prompt_tokens_by_source_total";
    assert_eq!(metric(&page, by_source, "external_kv_transfer"), 104.0);
    assert_eq!(metric(&page, by_source, "local_cache_hit"), 96.0);
}

#[tokio::test]
async fn an_older_decode_engine_reports_the_whole_prompt() {
    let config = SimConfig { decode_usage: DecodeUsage::WholePrompt, ..SimConfig::default() };
    let pair = Pair::start(config).await;
    let (prefilled, decoded) = pair.both(COMPLETIONS, &ask(&prompt(1, 100))).await;
    assert!(prefilled["kv_transfer_params"].get("remote_prefill_cached_tokens").is_none());
    assert_eq!(cached_tokens(&decoded), 100);
}

#[tokio::test]
async fn blocks_stay_pinned_until_they_are_pulled() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    let prefilled = pair.prefill(COMPLETIONS, &body).await;
    let state = pair.prefill.state();
    assert_eq!((state.blocks_pinned, state.blocks_used, state.staged_hand_offs), (7, 7, 1));
    pair.decode(COMPLETIONS, &body, &prefilled["kv_transfer_params"]).await;
    pair.nothing_held();
    assert_eq!(pair.prefill.state().totals.hand_offs_pulled, 1);
}

#[tokio::test]
async fn a_hand_off_can_be_used_once() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    let (prefilled, _) = pair.both(COMPLETIONS, &body).await;
    let params = &prefilled["kv_transfer_params"];
    let again = pair.decode(COMPLETIONS, &body, params).await;
    assert_eq!(code(&again), (400, "hand_off_reused".to_owned()));
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let again = pair.decode(COMPLETIONS, &streamed, params).await;
    assert_eq!(code(&again), (400, "hand_off_reused".to_owned()));
    pair.nothing_held();
}

#[tokio::test]
async fn an_expired_hand_off_is_refused() {
    let pair = Pair::start(SimConfig { lease_ms: 20, ..SimConfig::default() }).await;
    let body = ask(&prompt(1, 100));
    let prefilled = pair.prefill(COMPLETIONS, &body).await;
    until("the lease ends", || pair.prefill.state().totals.hand_offs_expired == 1).await;
    pair.nothing_held();
    let late = pair.decode(COMPLETIONS, &body, &prefilled["kv_transfer_params"]).await;
    assert_eq!(code(&late), (500, "hand_off_expired".to_owned()));
}

#[tokio::test]
async fn a_hand_off_that_does_not_match_is_refused() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    let good = pair.prefill(COMPLETIONS, &body).await["kv_transfer_params"].clone();
    let changed = |field: &str, value: Value| {
        let mut params = good.clone();
        params[field] = value;
        params
    };
    let free_port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dead_port = free_port.local_addr().unwrap().port();
    drop(free_port);
    for (params, expected) in [
        (changed("remote_engine_id", json!("beef")), (500, "hand_off_unknown")),
        (changed("remote_request_id", json!("cmpl-other")), (500, "hand_off_unknown")),
        (changed("remote_block_ids", json!([[7, 6, 5, 4, 3, 2, 1]])), (400, "hand_off_mismatch")),
        (changed("remote_port", json!(dead_port)), (500, "hand_off_unreachable")),
        (changed("remote_host", Value::Null), (500, "hand_off_unknown")),
    ] {
        let reply = pair.decode(COMPLETIONS, &body, &params).await;
        assert_eq!(code(&reply), (expected.0, expected.1.to_owned()), "{params}");
    }
    let other_prompt = pair.decode(COMPLETIONS, &ask(&prompt(2, 100)), &good).await;
    assert_eq!(code(&other_prompt), (400, "hand_off_mismatch".to_owned()));
    // The real engine would have generated from the KV of other tokens.
    assert_eq!(pair.decode.state().totals.hand_offs_misused, 2);
    // The hand-off can still be used after a refusal.
    assert_eq!(pair.decode(COMPLETIONS, &body, &good).await.status, 200);
    pair.nothing_held();
}

#[tokio::test]
async fn a_hand_off_with_fewer_blocks_than_the_prompt_needs_kills_the_engine() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    let mut params = pair.prefill(COMPLETIONS, &body).await["kv_transfer_params"].clone();
    let ids = params["remote_block_ids"][0].as_array_mut().unwrap();
    ids.pop().unwrap();
    let reply = pair.decode(COMPLETIONS, &body, &params).await;
    assert_eq!(code(&reply), (500, "engine_dead".to_owned()));
    assert_eq!(
        code(&pair.decode(COMPLETIONS, &ask(&prompt(3, 10)), &Value::Null).await).1,
        "engine_dead"
    );
    assert_eq!(pair.decode.state().totals.hand_offs_misused, 1);
}

#[tokio::test]
async fn a_batch_gets_one_hand_off_and_its_decode_fails() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = json!({"prompt": [prompt(1, 40), prompt(2, 40)], "max_tokens": 4});
    let prefilled = pair.prefill(COMPLETIONS, &body).await;
    assert_eq!(prefilled["kv_transfer_params"]["remote_block_ids"][0].as_array().unwrap().len(), 3);
    assert_eq!(pair.prefill.state().totals.hand_offs_staged, 2);
    let decoded = pair.decode(COMPLETIONS, &body, &prefilled["kv_transfer_params"]).await;
    assert_eq!(decoded.status, 400, "{}", decoded.text());
    // The second prompt's blocks stay pinned, because no reply contains their hand-off.
    until("the first is pulled", || pair.prefill.state().staged_hand_offs == 1).await;
    assert_eq!(pair.prefill.state().blocks_pinned, 3);
}

#[tokio::test]
async fn a_streamed_prefill_returns_no_hand_off_for_its_pinned_blocks() {
    let pair = Pair::start(SimConfig { lease_ms: 300, ..SimConfig::default() }).await;
    let mut leg = ask(&prompt(1, 100));
    leg["max_tokens"] = json!(1);
    leg["stream"] = json!(true);
    leg["kv_transfer_params"] = json!({"do_remote_decode": true});
    let reply = post(&pair.prefill, COMPLETIONS, leg).await;
    assert!(reply.chunks().iter().all(|chunk| chunk.get("kv_transfer_params").is_none()));
    assert_eq!(pair.prefill.state().totals.hand_offs_staged, 1);
    until("the lease ends", || pair.prefill.state().blocks_pinned == 0).await;
    assert_eq!(pair.prefill.state().totals.hand_offs_expired, 1);
}

#[tokio::test]
async fn a_bare_flag_kills_the_engine() {
    let engine = start(SimConfig { decode_us_per_step: 2_000, ..SimConfig::default() }).await;
    let running =
        async { post(&engine, COMPLETIONS, json!({"prompt": "x", "max_tokens": 10_000})).await };
    let killing = async {
        until("a request runs", || engine.state().running == 1).await;
        let params = json!({"do_remote_prefill": true});
        let body = json!({"prompt": "x", "kv_transfer_params": params});
        post(&engine, COMPLETIONS, body).await
    };
    let (running, killing) = tokio::join!(running, killing);
    assert_eq!((running.status, killing.status), (500, 500));
    assert_eq!(post(&engine, COMPLETIONS, json!({"prompt": "x"})).await.status, 500);
    assert_eq!(get(&engine, "/health").await.status, 503);
    assert!(engine.state().dead);
}

#[tokio::test]
async fn only_legs_must_match_the_role_of_an_engine() {
    let pair = Pair::start(SimConfig::default()).await;
    let mut body = ask(&prompt(1, 20));
    assert_eq!(post(&pair.decode, COMPLETIONS, body.clone()).await.status, 200);
    assert_eq!(post(&pair.prefill, COMPLETIONS, body.clone()).await.status, 200);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let reply = post(&pair.decode, COMPLETIONS, body).await;
    assert_eq!(code(&reply), (400, "wrong_role".to_owned()));
}

#[tokio::test]
async fn faults_can_be_injected_into_pulls_and_hand_offs() {
    let pair = Pair::start(SimConfig::default()).await;
    let body = ask(&prompt(1, 100));
    pair.prefill.set_fault(Fault { kind: FaultKind::RefusePulls, times: Some(1) });
    let good = pair.prefill(COMPLETIONS, &body).await["kv_transfer_params"].clone();
    let refused = pair.decode(COMPLETIONS, &body, &good).await;
    assert_eq!(code(&refused), (500, "hand_off_refused".to_owned()));
    assert_eq!(pair.decode(COMPLETIONS, &body, &good).await.status, 200);
    pair.prefill.set_fault(Fault { kind: FaultKind::NoHandOff, times: Some(1) });
    assert_eq!(pair.prefill(COMPLETIONS, &body).await["kv_transfer_params"], Value::Null);
    assert!(pair.prefill(COMPLETIONS, &body).await["kv_transfer_params"].is_object());
}
