//! A prefill engine takes a prefix from the hand-off of any engine, by the leg that computes the rest.
//! Whatever the real engine would do wrong without a word, or would wait for without an end, is an
//! error here.

use serde_json::{Value, json};
use splitrail_sim::{LoadFailure, Role, SimConfig, SimEngine};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
/// The default block size.
const BLOCK: usize = 16;
/// The length of the prefix: ten blocks.
const PREFIX: usize = 10 * BLOCK;

struct Pair {
    owner: SimEngine,
    fetcher: SimEngine,
}

impl Pair {
    async fn start(change: fn(&mut SimConfig)) -> Self {
        let mut fetcher = SimConfig {
            role: Role::Prefill,
            bidirectional_ttl_ms: Some(600_000),
            ..SimConfig::default()
        };
        change(&mut fetcher);
        let owner = SimConfig { role: Role::Decode, ..SimConfig::default() };
        Self { owner: start(owner).await, fetcher: start(fetcher).await }
    }

    /// Has the owner hand over a prefix and one more token.
    async fn given(&self, prefix: &[u32], salt: Option<&str>) -> Value {
        let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let prompt = [prefix, &[9]].concat();
        let mut body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params});
        body["cache_salt"] = json!(salt);
        post(&self.owner, COMPLETIONS, body).await.json()["kv_transfer_params"].clone()
    }

    async fn take(&self, prompt: &[u32], params: &Value) -> Reply {
        let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params});
        post(&self.fetcher, COMPLETIONS, body).await
    }
}

/// The parameters of the leg that takes a prefix.
fn cut(params: &Value, ids: usize, tokens: usize) -> Value {
    let mut params = params.clone();
    params["do_remote_decode"] = true.into();
    params["do_remote_prefill"] = false.into();
    params["remote_block_ids"][0].as_array_mut().unwrap().truncate(ids);
    params["remote_num_tokens"] = json!(tokens);
    params
}

fn code(reply: &Reply) -> String {
    reply.json()["error"]["code"].as_str().unwrap_or("none").to_owned()
}

#[tokio::test]
async fn the_leg_takes_what_it_lacks_and_hands_the_whole_prompt_over() {
    let pair = Pair::start(|_| {}).await;
    let prefix = prompt(1, PREFIX);
    let next = [&prefix[..], &prompt(2, 40)].concat();
    // The first two blocks are held already.
    complete(&pair.fetcher, &prefix[..2 * BLOCK], 1).await;
    let given = pair.given(&prefix, None).await;
    let reply = pair.take(&next, &cut(&given, 10, PREFIX)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(cached_tokens(&reply.json()), PREFIX as u64);
    let handed = &reply.json()["kv_transfer_params"];
    assert_eq!(
        (&handed["do_remote_prefill"], &handed["remote_num_tokens"]),
        (&json!(true), &json!(next.len()))
    );
    let totals = pair.fetcher.state().totals;
    assert_eq!(totals.external_kv_transfer_tokens, (PREFIX - 2 * BLOCK) as u64);
    let state = pair.owner.state();
    assert_eq!((state.staged_hand_offs, state.blocks_used), (0, 0));
    let again = pair.take(&next, &cut(&given, 10, PREFIX)).await;
    assert_eq!(code(&again), "hand_off_reused");
}

#[tokio::test]
async fn wrong_counts_other_tokens_and_another_salt_are_refused() {
    for (ids, tokens, edit, salt) in [
        (11, PREFIX, None, None),
        (9, PREFIX, None, None),
        (11, PREFIX + 1, None, None),
        (10, PREFIX, Some(PREFIX - 1), None),
        (10, PREFIX, None, Some("other")),
    ] {
        let pair = Pair::start(|_| {}).await;
        let prefix = prompt(1, PREFIX);
        let given = pair.given(&prefix, salt).await;
        let mut next = [&prefix[..], &prompt(2, 40)].concat();
        if let Some(at) = edit {
            next[at] = 2;
        }
        let reply = pair.take(&next, &cut(&given, ids, tokens)).await;
        let case = format!("{ids} ids, {tokens} tokens, {edit:?}, {salt:?}");
        assert_eq!(code(&reply), "hand_off_mismatch", "{case}: {}", reply.text());
    }
}

#[tokio::test]
async fn a_one_shot_leg_that_would_wait_forever_is_refused() {
    for change in [
        |fetcher: &mut SimConfig| fetcher.bidirectional_ttl_ms = None,
        |fetcher: &mut SimConfig| fetcher.load_failure = LoadFailure::Recompute,
    ] {
        let pair = Pair::start(change).await;
        let prefix = prompt(1, PREFIX);
        let given = pair.given(&prefix, None).await;
        let next = [&prefix[..], &prompt(2, 40)].concat();
        let reply = pair.take(&next, &cut(&given, 10, PREFIX)).await;
        assert_eq!((reply.status, code(&reply).as_str()), (500, "hand_off_refused"));
    }
}
