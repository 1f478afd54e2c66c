//! Which prefixes prefill legs take in one shot, and what is reported of them.

use futures_util::future::join_all;
use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::client::whole_text;
use splitrail_tests::dialect::{MESSAGES, RESPONSES};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, GENERATE, Reference, chat, completion, generate, prompt, token_ids,
};
use splitrail_tests::{Spec, Trial};

use super::super::{cached, drain, ended, prompt_tokens, steps, undrain};
use super::*;

#[tokio::test]
async fn a_prefill_leg_takes_the_prefix_itself_and_computes_the_rest() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    let [first, second] = turns("a");
    let pair = held(&mut trial, &first).await;
    let before = trial.cluster.engine("p1").state().totals;
    let asked = (steps(&trial, &pair.holder).len(), steps(&trial, "p1").len());
    let reply = served(&mut trial, &second).await;
    let tokens = prefix_tokens("a");
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    assert_eq!((reply.route("prefill"), cached(&reply)), (Some("p1"), tokens));
    assert!(reply.header("server-timing").contains("peer_fetch"));

    // One request to the source, and none to the worker before its leg.
    let asked_now = (steps(&trial, &pair.holder).len(), steps(&trial, "p1").len());
    assert_eq!(asked_now, (asked.0 + 1, asked.1));
    let params = &takes(&trial, "p1")[0]["kv_transfer_params"];
    assert_eq!(params["remote_num_tokens"], tokens);
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len() as u64, tokens / BLOCK);

    // Record, ledger, metrics and the engine agree.
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["way"], &fetch["outcome"]), (&json!("one_shot"), &json!("fetched")));
    assert_eq!(fetch["blocks"], tokens / BLOCK);
    assert_eq!((&fetch["source"], &fetch["worker"]), (&json!(pair.holder), &json!("p1")));
    let leg = prefill_leg(&trial, &reply).await;
    assert_eq!((&leg["local_cache_hit"], &leg["fetched"]), (&json!(0), &json!(tokens)), "{leg}");
    assert_eq!((&leg["peer_fetched"], &leg["external_kv_transfer"]), (&json!(tokens), &json!(0)));
    assert_eq!(leg["local_compute"], prompt_tokens(&reply) - tokens);
    let totals = trial.cluster.engine("p1").state().totals;
    let taken = totals.external_kv_transfer_tokens - before.external_kv_transfer_tokens;
    assert_eq!(taken, tokens);
    assert_eq!(totals.local_cache_hit_tokens, before.local_cache_hit_tokens);
    assert_eq!(
        (went(&trial, "two_step", "fetched").await, went(&trial, "one_shot", "fetched").await),
        (1.0, 1.0)
    );
    let brought = (prefix_tokens("learn") + tokens) as f64;
    assert_eq!(trial.cluster.metric("splitrail_peer_fetched_tokens_total", &[]).await, brought);
    let of_prefill = [("leg", "prefill"), ("source", "fetched")];
    let counted = trial.cluster.metric("splitrail_prompt_tokens_total", &of_prefill).await;
    assert_eq!(counted, tokens as f64);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_takes_only_what_its_worker_lacks() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    // p1 computes the beginning of the prefix.
    drain(&trial, "p0").await;
    let begins = completion(&prompt(10, "own"));
    served(&mut trial, &begins).await;
    undrain(&trial, "p0").await;
    trial.cluster.settle().await;
    let [first, second] = turns("own");
    held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    let own = prompt(10, "own").len() as u64 / BLOCK * BLOCK;
    let leg = prefill_leg(&trial, &reply).await;
    assert_eq!(leg["local_cache_hit"], own, "{leg}");
    assert_eq!(leg["fetched"], prefix_tokens("own") - own);
    assert_eq!(cached(&reply), prefix_tokens("own"), "what was not computed");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn endpoints_that_report_the_prompt_s_tokens_take_one_shot_and_others_two_steps() {
    let ids = token_ids(200, 3);
    let longer = [ids.clone(), token_ids(40, 5)].concat();
    let text = prompt(40, "e");
    let both = format!("{text} {text}");
    let responses = |text: &str| json!({"model": "sim", "input": text, "max_output_tokens": 5});
    let messages = |text: &str| {
        let message = json!({"role": "user", "content": text});
        json!({"model": "sim", "max_tokens": 5, "messages": [message]})
    };
    for (path, first, second, way) in [
        (CHAT, chat(&text), chat(&both), "one_shot"),
        (GENERATE, generate(&ids), generate(&longer), "one_shot"),
        (
            COMPLETIONS,
            json!({"model": "sim", "prompt": ids, "max_tokens": 5}),
            json!({"model": "sim", "prompt": longer, "max_tokens": 5}),
            "one_shot",
        ),
        (RESPONSES, responses(&text), responses(&both), "two_step"),
        (MESSAGES, messages(&text), messages(&both), "two_step"),
    ] {
        let mut trial = Trial::start(one_shot(2, 1)).await;
        learned(&mut trial).await;
        let before = went(&trial, way, "fetched").await;
        drain(&trial, "p1").await;
        trial.post("ok", path, &first).await;
        trial.cluster.settle().await;
        undrain(&trial, "p1").await;
        drain(&trial, "p0").await;
        let reply = trial.post("ok", path, &second).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        assert_eq!(went(&trial, way, "fetched").await, before + 1.0, "{path}");
        let alone = Trial::start(Spec::aggregated(1)).await;
        let right = alone.cluster.http.post(path, &second).await.json();
        for answer in ["choices", "content"] {
            assert_eq!(reply.json()[answer], right[answer], "{path}");
        }
        trial.finish().await;
    }
}

#[tokio::test]
async fn both_requests_carry_the_salt_and_adapter_of_the_request() {
    let model = format!("{EAGER}\nadapters: [my-lora]");
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        config.adapters = vec!["my-lora".into()];
    };
    let mut trial = Trial::start(Spec { model, engine, ..one_shot(2, 1) }).await;
    learned(&mut trial).await;
    let [mut first, mut second] = turns("s");
    for body in [&mut first, &mut second] {
        body["cache_salt"] = "tenant-1".into();
        body["model"] = "my-lora".into();
    }
    let pair = held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(cached(&reply), prefix_tokens("s"));
    for body in [steps(&trial, &pair.holder).last().unwrap(), &takes(&trial, "p1")[0]] {
        assert_eq!((&body["cache_salt"], &body["model"]), (&json!("tenant-1"), &json!("my-lora")));
    }
    trial.finish().await;
}

#[tokio::test]
async fn twelve_requests_at_once_are_all_right_and_transfer_each_prefix_once() {
    let reference = Reference::start().await;
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        config.transfer_us_per_block = 2000;
    };
    let model = format!("{EAGER}\nqueue: none\npeer_fetch_max_per_worker: 8");
    let mut trial = Trial::start(Spec { model, engine, ..one_shot(2, 2) }).await;
    learned(&mut trial).await;
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
    assert_eq!(went(&trial, "one_shot", "fetched").await, 3.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn an_explanation_shows_the_way_as_far_as_it_is_known() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    let [first, second] = turns("dry");
    let way = async |trial: &Trial| {
        let reply = trial.cluster.admin.post("/admin/explain", &second).await;
        let step = &reply.json()["explanation"]["prompts"][0]["steps"][0];
        let candidates = step["candidates"].as_array().unwrap();
        candidates.iter().find(|one| one["worker"] == "p1").unwrap()["fetch"]["way"].clone()
    };
    held(&mut trial, &first).await;
    assert_eq!(way(&trial).await, "two_step", "the engine's flag is not known yet");
    undrain(&trial, "p0").await;
    learned(&mut trial).await;
    drain(&trial, "p0").await;
    assert_eq!(way(&trial).await, "one_shot");
    trial.finish().await;
}

/// Prefill legs read back what decode engines keep, or take prefixes from other prefill engines.
#[tokio::test]
async fn conversations_that_move_between_workers_are_exact_with_read_back_as_well() {
    let reference = Reference::start().await;
    let engine = |name: &str, config: &mut SimConfig| {
        flagged("p", config);
        config.bidirectional_ttl_ms = (name != "d0").then_some(60_000);
        if name == "d1" {
            // It publishes no events, so that nothing is fetched from it.
            (config.kv_events_port, config.kv_replay_port) = (None, None);
        }
    };
    let model = format!("{EAGER}\nread_back: true\nread_back_pinned_percent_max: 90");
    let mut trial = Trial::start(Spec { engine, model, ..one_shot(3, 2) }).await;
    let mut talks: Vec<Value> =
        (0..4).map(|talk| chat(&prompt(20, &format!("talk{talk}")))).collect();
    for turn in 0..5 {
        // Only one prefill worker is in service, and never that of the turn before. One decode worker
        // keeps KV for read-back, and from the other one it is fetched.
        let serving = format!("p{}", turn % 3);
        undrain(&trial, &serving).await;
        for other in ["p0", "p1", "p2"].into_iter().filter(|other| *other != serving) {
            drain(&trial, other).await;
        }
        let http = trial.cluster.http.clone();
        let replies = join_all(talks.iter().map(|talk| http.post(CHAT, talk))).await;
        for (talk, reply) in talks.iter_mut().zip(&replies) {
            trial.expect("ok");
            assert_eq!(reply.status, 200, "{}", reply.text());
            let answer = whole_text(&reply.json(), 0);
            assert_eq!(answer, reference.text(CHAT, talk).await, "turn {turn}");
            let messages = talk["messages"].as_array_mut().unwrap();
            messages.push(json!({"role": "assistant", "content": answer}));
            messages.push(json!({"role": "user", "content": prompt(6, &format!("then{turn}"))}));
        }
        trial.cluster.settle().await;
    }
    let failed = [("outcome", "failed")];
    assert_eq!(trial.cluster.metric("splitrail_read_backs_total", &failed).await, 0.0);
    for outcome in ["failed", "timed_out", "mismatch"] {
        assert_eq!(ended(&trial, outcome).await, 0.0, "{outcome}");
    }
    assert!(trial.cluster.metric("splitrail_read_backs_total", &[("outcome", "read")]).await > 0.0);
    assert!(
        trial.cluster.metric("splitrail_peer_fetches_total", &[("outcome", "fetched")]).await > 0.0
    );
    trial.finish().await;
}
