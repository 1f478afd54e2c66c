//! Legs that an engine could not serve exactly, or not at all, take nothing: two steps fetch the prefix
//! instead.

use serde_json::json;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::raw_engine::{Asked, RawEngine, Turn, reply};
use splitrail_tests::trial::{COMPLETIONS, Reference, completion};

use super::super::guards::evict;
use super::super::{cached, drain, undrain};
use super::*;

/// Checks that the next request of a prefix fetches it in two steps.
async fn takes_two_steps(trial: &mut Trial, salt: &str) {
    let [first, second] = turns(salt);
    held(trial, &first).await;
    let taken = takes(trial, "p1").len();
    let reply = served(trial, &second).await;
    fetched_by(trial, &reply, "two_step", "fetched").await;
    assert_eq!(cached(&reply), prefix_tokens(salt));
    assert_eq!(takes(trial, "p1").len(), taken);
}

#[tokio::test]
async fn an_engine_without_the_flag_gets_two_steps() {
    let engine = |_: &str, _: &mut SimConfig| {};
    let mut trial = Trial::start(Spec { engine, ..one_shot(2, 1) }).await;
    for salt in ["n", "m"] {
        takes_two_steps(&mut trial, salt).await;
        undrain(&trial, "p0").await;
    }
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_flag_is_that_of_one_process() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    let serving = trial.cluster.running.core.serving();
    let worker = serving.models[0].pool.roster().named("p1").cloned().unwrap();
    assert_eq!(worker.transfer.read_back.keeps_for_read_back(), Some(true));
    worker.becomes_another();
    assert_eq!(
        worker.transfer.read_back.keeps_for_read_back(),
        None,
        "another process may lack it"
    );
    takes_two_steps(&mut trial, "again").await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn with_two_step_a_leg_takes_nothing_itself_whatever_its_engine_can() {
    let model = EAGER.replace("one_shot", "two_step");
    let mut trial = Trial::start(Spec { model, ..one_shot(2, 1) }).await;
    takes_two_steps(&mut trial, "on").await;
    undrain(&trial, "p0").await;
    takes_two_steps(&mut trial, "off").await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prefix_that_the_engine_would_compute_takes_two_steps() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    // 48 tokens: engines read none below 64.
    let text = "forty-eight tokens and a few more of this prompt....";
    let [first, second] = [completion(text), completion(&format!("{text} and another end"))];
    held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    fetched_by(&trial, &reply, "two_step", "fetched").await;
    assert_eq!(cached(&reply), 48);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_leg_that_is_predicted_to_take_a_good_part_of_the_lease_takes_two_steps() {
    // However fast the engine is: what is learned stays within a factor of a hundred.
    let model = format!("{EAGER}\nlease: 1s").replace(": 20000", ": 5000000");
    let mut trial = Trial::start(Spec { model, ..one_shot(2, 1) }).await;
    learned(&mut trial).await;
    takes_two_steps(&mut trial, "long").await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prefix_is_taken_from_its_own_namespace_alone() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    let [mut first, mut second] = turns("ns");
    first["cache_salt"] = "one".into();
    second["cache_salt"] = "two".into();
    held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!((recorded(&trial, &reply).await, cached(&reply)), (Value::Null, 0));
    trial.finish().await;
}

#[tokio::test]
async fn a_client_s_own_parameters_reach_no_engine() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    let [first, mut second] = turns("own");
    held(&mut trial, &first).await;
    second["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_block_ids": [[1, 2]],
        "remote_engine_id": "mine", "remote_request_id": "mine", "remote_host": "192.0.2.1",
        "remote_port": 1, "remote_num_tokens": 32,
    });
    let reply = served(&mut trial, &second).await;
    assert_eq!(cached(&reply), prefix_tokens("own"));
    for engine in ["p0", "p1", "d0"] {
        for request in trial.asked(engine) {
            assert!(!request.body.to_string().contains("mine"), "{engine}");
        }
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_does_not_fit_or_is_foreign_is_carried_by_no_leg() {
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    };
    for (fault, outcome) in [
        (FaultKind::NoHandOff, "unusable"),
        (FaultKind::ShortHandOff, "unusable"),
        (FaultKind::ForeignHandOff, "foreign_hand_off"),
    ] {
        let mut trial = Trial::start(Spec { engine, ..one_shot(2, 1) }).await;
        learned(&mut trial).await;
        let [first, second] = turns("none");
        let pair = held(&mut trial, &first).await;
        let taken = takes(&trial, "p1").len();
        trial.fault(&pair.holder, fault, Some(1));
        let reply = served(&mut trial, &second).await;
        fetched_by(&trial, &reply, "one_shot", outcome).await;
        assert_eq!((cached(&reply), takes(&trial, "p1").len()), (0, taken));
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn blocks_that_a_source_lost_and_computes_again_are_not_reported_as_cached() {
    let reference = Reference::start().await;
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        if name == "d0" {
            config.kv_blocks = 64;
        }
    };
    let model = format!("{EAGER}\ndrift: {{ enabled: false }}");
    let mut trial = Trial::start(Spec { engine, model, ..one_shot(2, 1) }).await;
    learned(&mut trial).await;
    let [first, second] = turns("lost");
    held(&mut trial, &first).await;
    evict(&mut trial).await;
    let computed = |trial: &Trial| trial.cluster.engine("d0").state().totals.local_compute_tokens;
    let before = computed(&trial);
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    fetched_by(&trial, &reply, "one_shot", "recomputed").await;
    let recomputed = computed(&trial) - before - 1;
    let leg = prefill_leg(&trial, &reply).await;
    assert!(recomputed > 0);
    assert_eq!(
        (&leg["recomputed"], &leg["fetched"]),
        (&json!(recomputed), &json!(prefix_tokens("lost")))
    );
    assert_eq!(cached(&reply) + recomputed, prefix_tokens("lost"));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_model_whose_engines_count_other_tokens_takes_two_steps() {
    let mut trial = Trial::start(one_shot(2, 1)).await;
    learned(&mut trial).await;
    let serving = trial.cluster.running.core.serving();
    serving.models[0].pool.read_back.distrust();
    takes_two_steps(&mut trial, "distrusted").await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

/// A completion's reply, whose engine counts these tokens as the prompt.
fn completed(prompt: &Value, params: &Value) -> Turn {
    let tokens = prompt.as_array().map_or(0, Vec::len);
    let choice = json!({
        "index": 0, "text": "", "finish_reason": "length", "token_ids": [9],
        "prompt_token_ids": prompt,
    });
    let usage = json!({
        "prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    });
    let body = json!({"choices": [choice], "usage": usage, "kv_transfer_params": params});
    Turn::answer(reply(200, "application/json", &body.to_string()))
}

/// An engine that has the flag, and computes another prompt than the router knows.
fn other_tokens(asked: &Asked) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let params = &body["kv_transfer_params"];
    if params["do_remote_prefill"] == true {
        let mut pinned = params.clone();
        (pinned["do_remote_prefill"], pinned["do_remote_decode"]) = (json!(false), json!(true));
        return completed(&body["prompt"], &pinned);
    }
    match params["remote_block_ids"].is_array() {
        true => completed(&json!([3, 4, 5]), params),
        false => Turn::answer(reply(500, "application/json", r#"{"error":{"message":"no"}}"#)),
    }
}

#[tokio::test]
async fn an_engine_that_counts_other_tokens_ends_one_shot_fetches_for_the_model() {
    let reference = Reference::start().await;
    let other = RawEngine::start(other_tokens).await;
    let url = other.url();
    let extra = format!("{{ id: p1, role: prefill, url: \"{url}\", kv_events: none }}");
    let engine = |name: &str, config: &mut SimConfig| {
        flagged(name, config);
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    };
    let spec = Spec { extra_workers: vec![extra], engine, ..one_shot(1, 1) };
    let mut trial = Trial::start(spec).await;
    learned(&mut trial).await;
    let [first, second] = turns("count");
    held(&mut trial, &first).await;
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    assert_eq!(recorded(&trial, &reply).await["outcome"], "mismatch");
    assert_eq!(went(&trial, "one_shot", "mismatch").await, 1.0);
    let serving = trial.cluster.running.core.serving();
    assert!(serving.models[0].pool.read_back.is_distrusted());
    drain(&trial, "p1").await;
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
