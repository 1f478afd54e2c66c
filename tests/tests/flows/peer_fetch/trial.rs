//! `peer_fetch: auto`: workers fetch for clients after a trial.

use serde_json::{Value, json};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::COMPLETIONS;
use splitrail_tests::{Spec, Trial};

use super::{BLOCK, EAGER, cached, ended, held, recorded, served, spec, turns, undrain};

/// Why the prefill worker of a prompt would fetch nothing.
async fn no_fetch(trial: &Trial, body: &Value) -> Value {
    let explained = trial.cluster.admin.post("/admin/explain", body).await.json();
    let steps = explained["explanation"]["prompts"][0]["steps"].as_array().unwrap().clone();
    steps.into_iter().find(|step| step["step"] == "prefill").unwrap()["no_fetch"].clone()
}

fn automatic() -> Spec {
    let model = EAGER.replace("two_step", "auto") + "\ncanary: { enabled: true }";
    Spec { model, ..spec(2, 1) }
}

#[tokio::test]
async fn workers_that_pass_a_trial_fetch_by_default() {
    let mut trial = Trial::start(automatic()).await;
    let [first, second] = turns("auto");
    let pair = held(&mut trial, &first).await;
    eventually("trials have succeeded", async || no_fetch(&trial, &second).await.is_null()).await;
    let reply = served(&mut trial, &second).await;
    let fetch = recorded(&trial, &reply).await;
    assert_eq!((&fetch["outcome"], &fetch["way"]), (&json!("fetched"), &json!("two_step")));
    assert_eq!(reply.route("prefill"), Some(pair.other));
    assert!(cached(&reply) >= BLOCK);
    assert_eq!(ended(&trial, "fetched").await, 1.0, "trials are not counted");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn workers_whose_trials_fail_serve_without_fetches() {
    // These engines take nothing.
    let engine = |_: &str, config: &mut splitrail_sim::SimConfig| config.peer_fetch = false;
    let mut trial = Trial::start(Spec { engine, ..automatic() }).await;
    let [first, second] = turns("unable");
    held(&mut trial, &first).await;
    assert_eq!(no_fetch(&trial, &second).await, "untried");
    let reply = trial.post("ok", COMPLETIONS, &second).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(recorded(&trial, &reply).await, Value::Null);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn engines_that_drop_the_last_block_of_a_hit_fetch_by_default() {
    let engine = |_: &str, config: &mut splitrail_sim::SimConfig| config.drops_last_block = true;
    let mut trial = Trial::start(Spec { engine, ..automatic() }).await;
    for turn in 0..10 {
        let [first, second] = turns(&format!("eagle{turn}"));
        let pair = held(&mut trial, &first).await;
        let is_planned = async || no_fetch(&trial, &second).await.is_null();
        eventually("trials have succeeded", is_planned).await;
        let before = computed(&trial, &pair.holder);
        let reply = served(&mut trial, &second).await;
        let fetch = recorded(&trial, &reply).await;
        assert_eq!(fetch["outcome"], "recomputed", "turn {turn}");
        assert_eq!(computed(&trial, &pair.holder) - before, BLOCK + 1, "the last block");
        // The worker that has taken the prefix drops its last block as well.
        let leg =
            &trial.cluster.decisions(reply.header("x-request-id")).await[0]["ledger"]["legs"][0];
        assert_eq!(leg["local_cache_hit"].as_u64(), Some(cached(&reply)), "turn {turn}");
        assert_eq!(cached(&reply), fetch["tokens"].as_u64().unwrap() - BLOCK, "turn {turn}");
        undrain(&trial, "p0").await;
    }
    let workers = trial.cluster.admin.get("/admin/workers").await.json();
    let holder = &workers["workers"].as_array().unwrap()[2];
    assert_eq!((&holder["id"], &holder["drops_last_block"]), (&json!("d0"), &json!(true)));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

/// The number of prompt tokens that an engine has computed.
fn computed(trial: &Trial, engine: &str) -> u64 {
    trial.cluster.engine(engine).state().totals.local_compute_tokens
}
