//! A prefill engine reads what a decode engine keeps pinned. Whatever the real engine would do wrong
//! without a word is an error here.

use serde_json::{Value, json};
use splitrail_sim::{Role, SimConfig, SimEngine};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
/// The default block size.
const BLOCK: usize = 16;

struct Pair {
    prefill: SimEngine,
    decode: SimEngine,
}

impl Pair {
    async fn start(ttl_ms: u64) -> Self {
        let config =
            |role| SimConfig { role, bidirectional_ttl_ms: Some(ttl_ms), ..SimConfig::default() };
        Self {
            prefill: start(config(Role::Prefill)).await,
            decode: start(config(Role::Decode)).await,
        }
    }

    async fn prefill(&self, prompt: &[u32], params: &Value) -> Reply {
        let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params});
        post(&self.prefill, COMPLETIONS, body).await
    }

    /// A first turn: its tokens, and what the decode engine says of what it keeps.
    async fn turn(&self, prompt: &[u32]) -> (Vec<u32>, Value) {
        let plain = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let prefilled = self.prefill(prompt, &plain).await.json();
        let body = json!({
            "prompt": prompt, "max_tokens": 90, "return_token_ids": true,
            "kv_transfer_params": prefilled["kv_transfer_params"],
        });
        let reply = post(&self.decode, COMPLETIONS, body).await.json();
        let ids: Vec<u32> =
            serde_json::from_value(reply["choices"][0]["token_ids"].clone()).unwrap();
        ([prompt, &ids].concat(), reply["kv_transfer_params"].clone())
    }
}

/// The parameters cut to this many ids and tokens.
fn cut(params: &Value, ids: usize, tokens: usize) -> Value {
    let mut params = params.clone();
    params["remote_block_ids"][0].as_array_mut().unwrap().truncate(ids);
    params["remote_num_tokens"] = json!(tokens);
    params
}

fn code(reply: &Reply) -> String {
    reply.json()["error"]["code"].as_str().unwrap_or("none").to_owned()
}

#[tokio::test]
async fn whole_blocks_of_equal_tokens_are_read_once_and_freed() {
    let pair = Pair::start(600_000).await;
    let (history, params) = pair.turn(&prompt(1, 100)).await;
    assert_eq!(
        (&params["do_remote_decode"], params["remote_num_tokens"].as_u64()),
        (&json!(true), Some(189))
    );
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 12);
    assert!(params["remote_blocks_expiry_time"].is_number());
    assert_eq!(pair.decode.state().read_back_pins, 1);
    let next = [&history[..], &prompt(2, 20)].concat();
    let read = cut(&params, 11, 11 * BLOCK);
    let reply = pair.prefill(&next, &read).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(cached_tokens(&reply.json()), 176);
    assert_eq!(reply.json()["kv_transfer_params"]["do_remote_prefill"], true);
    let totals = pair.prefill.state().totals;
    assert_eq!(totals.external_kv_transfer_tokens, 176 - 96);
    let state = pair.decode.state();
    assert_eq!((state.read_back_pins, state.blocks_used, state.totals.pins_read), (0, 0, 1));
    // Another prompt that would have to read the same.
    let again = pair.prefill(&[&history[..], &prompt(3, 20)].concat(), &read).await;
    assert_eq!(code(&again), "hand_off_reused");
}

#[tokio::test]
async fn reads_that_a_real_engine_would_get_wrong_are_refused() {
    for (ids, tokens, edit, expected) in [
        (12, 189, None, "hand_off_mismatch"),
        (12, 176, None, "hand_off_mismatch"),
        (10, 176, None, "hand_off_mismatch"),
        (11, 176, Some(150), "hand_off_mismatch"),
        (11, 176, Some(3), "hand_off_mismatch"),
        (11, 176, Some(180), "none"),
    ] {
        let pair = Pair::start(600_000).await;
        let (mut history, params) = pair.turn(&prompt(1, 100)).await;
        if let Some(at) = edit {
            history[at] = 2;
        }
        let next = [&history[..], &prompt(2, 20)].concat();
        let reply = pair.prefill(&next, &cut(&params, ids, tokens)).await;
        assert_eq!(code(&reply), expected, "{ids} ids, {tokens} tokens, edited at {edit:?}");
    }
    let pair = Pair::start(1).await;
    let (history, params) = pair.turn(&prompt(1, 100)).await;
    until("the pin has ended", || pair.decode.state().read_back_pins == 0).await;
    let next = [&history[..], &prompt(2, 20)].concat();
    let late = pair.prefill(&next, &cut(&params, 11, 176)).await;
    assert_eq!((late.status, code(&late).as_str()), (500, "hand_off_expired"));
    let alone = start(SimConfig { role: Role::Prefill, ..SimConfig::default() }).await;
    let body =
        json!({"prompt": next, "max_tokens": 1, "kv_transfer_params": cut(&params, 11, 176)});
    let reply = post(&alone, COMPLETIONS, body).await;
    assert_eq!(code(&reply), "hand_off_refused", "without the flag");
}

#[tokio::test]
async fn parameters_that_ask_for_no_leg_would_pin_blocks_for_ever_and_are_refused() {
    let config = SimConfig { bidirectional_ttl_ms: Some(600_000), ..SimConfig::default() };
    let engine = start(config).await;
    let ask = async |params: Value| {
        let body = json!({"prompt": prompt(1, 40), "max_tokens": 2, "kv_transfer_params": params});
        post(&engine, COMPLETIONS, body).await
    };
    let both_false = json!({"do_remote_prefill": false, "do_remote_decode": false});
    for params in [json!({"anything": 1}), both_false] {
        let reply = ask(params).await;
        assert_eq!((reply.status, code(&reply)), (400, "hand_off_mismatch".to_owned()));
    }
    for params in [json!({}), Value::Null] {
        assert_eq!(ask(params).await.status, 200);
    }
    assert_eq!(engine.state().blocks_used, 0);
}

#[tokio::test]
async fn one_token_releases_a_pin_and_does_so_twice_without_harm() {
    let pair = Pair::start(600_000).await;
    let (history, params) = pair.turn(&prompt(1, 100)).await;
    for _ in 0..2 {
        let reply = pair.prefill(&history[..1], &cut(&params, 12, 1)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let state = pair.decode.state();
    assert_eq!((state.read_back_pins, state.blocks_used, state.totals.pins_released), (0, 0, 1));
}

#[tokio::test]
async fn a_short_remainder_is_computed_and_the_pin_freed() {
    let pair = Pair::start(600_000).await;
    let (history, params) = pair.turn(&prompt(1, 100)).await;
    let next = [&history[..], &prompt(2, 20)].concat();
    // 96 tokens are held here already.
    let reply = pair.prefill(&next, &cut(&params, 9, 144)).await;
    assert_eq!(cached_tokens(&reply.json()), 96);
    assert_eq!(pair.decode.state().totals.pins_released, 1);
}

#[tokio::test]
async fn a_reply_that_a_stop_string_ends_leaves_nothing_pinned() {
    let pair = Pair::start(600_000).await;
    let plain = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let mut stop = Value::Null;
    for stops in [false, true] {
        let tokens = prompt(1, 100);
        let prefilled = pair.prefill(&tokens, &plain).await.json();
        let body = json!({
            "prompt": tokens, "max_tokens": 40, "stop": stop,
            "kv_transfer_params": prefilled["kv_transfer_params"],
        });
        let reply = post(&pair.decode, COMPLETIONS, body).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"] == "stop", stops, "{reply}");
        assert_eq!(reply["kv_transfer_params"].is_null(), stops, "{reply}");
        assert_eq!(pair.decode.state().totals.pins_made, 1, "by the first reply");
        stop = choice["text"].as_str().unwrap().get(10..13).into();
    }
}
