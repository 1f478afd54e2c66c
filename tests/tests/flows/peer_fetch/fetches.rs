//! Which prefixes are fetched, and what is reported of the fetches.

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, Reference, chat, completion, generate, prompt, token_ids,
};
use splitrail_tests::{Spec, Trial};

use super::{
    BLOCK, EAGER, Sent, cached, drain, ended, held, prompt_tokens, recorded, served, spec, steps,
    turns, undrain,
};

#[tokio::test]
async fn a_worker_takes_a_prefix_from_the_one_that_holds_it_and_hits() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(spec(2, 1)).await;
    let [first, second] = turns("a");
    let pair = held(&mut trial, &first).await;
    let whole_blocks = prompt(60, "a").len() as u64 / BLOCK;
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    assert_eq!(reply.route("prefill"), Some(pair.other));
    assert_eq!(cached(&reply), whole_blocks * BLOCK, "fetched tokens were not computed");
    assert!(reply.header("server-timing").contains("peer_fetch"));

    // The source computed one token, and the worker got that prompt with the hand-off.
    let ([asked], [taken]) = (&steps(&trial, &pair.holder)[..], &steps(&trial, pair.other)[..])
    else {
        panic!("one request for each step");
    };
    assert_eq!(asked["prompt"].as_array().unwrap().len() as u64, whole_blocks * BLOCK + 1);
    assert_eq!((&asked["prompt"], &asked["max_tokens"]), (&taken["prompt"], &taken["max_tokens"]));
    assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], true);
    let params = &taken["kv_transfer_params"];
    assert_eq!(params["remote_num_tokens"], whole_blocks * BLOCK + 1);
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len() as u64, whole_blocks + 1);

    // Record, ledger, metrics and the engine agree.
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["outcome"], &fetch["blocks"]), (&json!("fetched"), &json!(whole_blocks)));
    assert_eq!((&fetch["source"], &fetch["worker"]), (&json!(pair.holder), &json!(pair.other)));
    assert!(fetch["predicted_ms"].as_f64().unwrap() > 0.0 && fetch["took_ms"].as_f64().is_some());
    let decision = &trial.cluster.decisions(reply.header("x-request-id")).await[0];
    let leg = &decision["ledger"]["legs"][0];
    assert_eq!(
        (&leg["local_cache_hit"], &leg["peer_fetched"]),
        (&json!(whole_blocks * BLOCK), &json!(whole_blocks * BLOCK))
    );
    let chosen = decision["candidates"].as_array().unwrap().iter();
    let chosen: Vec<&Value> =
        chosen.filter(|one| one["leg"] == "prefill" && one["chosen"] == true).collect();
    assert_eq!(chosen[0]["fetch"]["source"], json!(pair.holder), "{chosen:?}");
    assert_eq!(ended(&trial, "fetched").await, 1.0);
    let fetched = trial.cluster.metric("splitrail_peer_fetched_tokens_total", &[]).await;
    assert_eq!(fetched, (whole_blocks * BLOCK) as f64);
    let totals = trial.cluster.engine(pair.other).state().totals;
    assert_eq!(totals.local_cache_hit_tokens, whole_blocks * BLOCK);
    assert_eq!(totals.external_kv_transfer_tokens, whole_blocks * BLOCK + 1);
    // The index learns of the blocks from the worker's events.
    trial.cluster.settle().await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn every_endpoint_whose_tokens_are_known_fetches_the_same_prefix() {
    let ids = token_ids(200, 3);
    let longer = [ids.clone(), token_ids(40, 5)].concat();
    let text = prompt(40, "e");
    for (path, first, second) in [
        (CHAT, chat(&text), chat(&format!("{text} {text}"))),
        (GENERATE, generate(&ids), generate(&longer)),
        (
            COMPLETIONS,
            json!({"model": "sim", "prompt": ids, "max_tokens": 5}),
            json!({"model": "sim", "prompt": longer, "max_tokens": 5}),
        ),
    ] {
        let reference = Trial::start(Spec::aggregated(1)).await;
        let mut trial = Trial::start(spec(2, 1)).await;
        drain(&trial, "p1").await;
        trial.post("ok", path, &first).await;
        trial.cluster.settle().await;
        undrain(&trial, "p1").await;
        drain(&trial, "p0").await;
        let reply = trial.post("ok", path, &second).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        let right = reference.cluster.http.post(path, &second).await.json();
        assert_eq!(reply.json()["choices"], right["choices"], "{path}");
        assert_eq!(ended(&trial, "fetched").await, 1.0, "{path}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn the_steps_carry_the_salt_and_adapter_of_the_request() {
    let keys = format!("{EAGER}\nadapters: [my-lora]");
    let engine = |_: &str, config: &mut SimConfig| {
        config.adapters = vec!["my-lora".into()];
    };
    let mut trial = Trial::start(Spec { model: keys, engine, ..spec(2, 1) }).await;
    let [mut first, mut second] = turns("s");
    for body in [&mut first, &mut second] {
        body["cache_salt"] = "tenant-1".into();
        body["model"] = "my-lora".into();
    }
    let pair = held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert!(cached(&reply) > 0);
    for engine in [&*pair.holder, pair.other] {
        let step = &steps(&trial, engine)[0];
        assert_eq!((&step["cache_salt"], &step["model"]), (&json!("tenant-1"), &json!("my-lora")));
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_worker_is_a_source_of_what_it_generated() {
    // Only the decode worker publishes events.
    let engine = |name: &str, config: &mut SimConfig| {
        if name.starts_with('p') {
            (config.kv_events_port, config.kv_replay_port) = (None, None);
        }
    };
    let mut trial = Trial::start(Spec { engine, ..spec(1, 1) }).await;
    let text = prompt(60, "turn");
    let mut first = completion(&text);
    first["max_tokens"] = 64.into();
    let reply = trial.post("ok", COMPLETIONS, &first).await.json();
    trial.cluster.settle().await;
    let next = completion(&format!("{text}{}{}", whole_text(&reply, 0), prompt(8, "next")));
    let reply = trial.post("ok", COMPLETIONS, &next).await;
    assert_eq!(recorded(&trial, &reply).await["source"], "d0");
    // The last generated token has no KV.
    let known = text.len() as u64 + 63;
    assert_eq!(cached(&reply), known / BLOCK * BLOCK);
    assert!(cached(&reply) > text.len() as u64, "more than the first prompt");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_saturated_prefill_worker_is_relieved_by_one_that_fetches_from_it() {
    // Only prefill workers publish events.
    let engine = |name: &str, config: &mut SimConfig| {
        if name.starts_with('d') {
            (config.kv_events_port, config.kv_replay_port) = (None, None);
        }
    };
    let keys = format!("{EAGER}\nqueue: none\nsaturation: {{ requests: 1 }}");
    let mut trial = Trial::start(Spec { model: keys, engine, ..spec(2, 2) }).await;
    let [first, second] = turns("busy");
    let holder = served(&mut trial, &first).await.route("prefill").unwrap().to_owned();
    trial.cluster.settle().await;
    trial.fault(&holder, FaultKind::SlowFirstByte { delay_ms: 4000 }, Some(1));
    trial.expect("ok");
    let blocking = Sent::new(&trial, &first);
    eventually("the holder is busy", async || trial.asked(&holder).len() == 2).await;
    let reply = served(&mut trial, &second).await;
    assert_ne!(reply.route("prefill"), Some(holder.as_str()), "{:?}", reply.headers);
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["outcome"], &fetch["source"]), (&json!("fetched"), &json!(holder)));
    assert_eq!(blocking.reply().await.status, 200);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn twelve_requests_at_once_fetch_each_prefix_once_and_are_all_right() {
    let reference = Reference::start().await;
    let engine = |_: &str, config: &mut SimConfig| {
        config.transfer_us_per_block = 2000;
    };
    let keys = format!("{EAGER}\nqueue: none\npeer_fetch_max_per_worker: 8");
    let mut trial = Trial::start(Spec { model: keys, engine, ..spec(2, 2) }).await;
    let prefixes = ["x", "y", "z"].map(turns);
    for [first, _] in &prefixes {
        undrain(&trial, "p0").await;
        held(&mut trial, first).await;
    }
    let bodies: Vec<Value> = (0..12)
        .map(|at| {
            let mut body = prefixes[at % 3][1].clone();
            body["prompt"] = format!("{} {at}", body["prompt"].as_str().unwrap()).into();
            body
        })
        .collect();
    let http = trial.cluster.http.clone();
    let replies = join_all(bodies.iter().map(|body| http.post(COMPLETIONS, body))).await;
    for (reply, body) in replies.iter().zip(&bodies) {
        trial.expect("ok");
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, body).await);
        assert!(cached(reply) > 0 && cached(reply) < prompt_tokens(reply));
    }
    // Who comes later shares the fetch, or finds the blocks in the worker's cache.
    assert_eq!(ended(&trial, "fetched").await, 3.0);
    assert_eq!(steps(&trial, "p1").len(), 3);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn an_explanation_shows_the_fetch_that_would_be_made() {
    let mut trial = Trial::start(spec(2, 1)).await;
    let [first, second] = turns("dry");
    let pair = held(&mut trial, &first).await;
    let reply = trial.cluster.admin.post("/admin/explain", &second).await;
    let step = &reply.json()["explanation"]["prompts"][0]["steps"][0];
    let candidates = step["candidates"].as_array().unwrap();
    let of = |worker: &str| candidates.iter().find(|one| one["worker"] == worker).unwrap();
    assert_eq!(of(pair.other)["fetch"]["source"], json!(pair.holder), "{step}");
    assert_eq!(of("p0")["fetch"], Value::Null, "{step}");
    assert!(of(pair.other)["terms"]["fetch_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(steps(&trial, &pair.holder).len(), 0, "nothing was sent");
    trial.finish().await;
}

#[tokio::test]
async fn the_access_log_names_the_way_of_a_fetch() {
    let top = "access_log: { enabled: true, path: access.jsonl }".to_owned();
    let mut trial = Trial::start(Spec { top, ..spec(2, 1) }).await;
    let [first, second] = turns("logged");
    let pair = held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(reply.route("prefill"), Some(pair.other));
    let file = trial.cluster.files.path().join("access.jsonl");
    let mut lines: Vec<Value> = Vec::new();
    eventually("both lines are written", async || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        lines = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        lines.len() == 2
    })
    .await;
    assert_eq!(
        (&lines[0]["peer_fetch"], &lines[1]["peer_fetch"]),
        (&Value::Null, &json!("two_step"))
    );
    trial.finish().await;
}
