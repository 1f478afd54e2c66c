//! Workers that restart, join, fail and leave.

use serde_json::json;
use splitrail_sim::SimConfig;
use splitrail_tests::client::whole_text;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Reference};
use splitrail_tests::{Spec, Trial};

use super::{
    BLOCK, GREETING, KEYS, LEASE_MS, blocks, both, cached, drain, eager, fetched, heat, heat_both,
    prewarmed, serve, spec, steps, turn, undrain, until_ended,
};

/// A cluster whose transfers take more than half a second.
fn slow() -> Spec {
    let engine = |_: &str, config: &mut SimConfig| {
        config.transfer_us_per_block = 60_000;
        config.lease_ms = 3000;
    };
    Spec { engine, ..eager() }
}

#[tokio::test]
async fn a_worker_that_restarts_has_hot_prefixes_again_before_a_request_needs_them() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(eager()).await;
    heat(&mut trial, &["a"]).await;
    assert_eq!(prewarmed(&trial, "p1").await, json!(null), "nothing has restarted");
    trial.cluster.restart("p1").await;
    until_ended(&trial, "done").await;
    let tokens = blocks("a") * BLOCK;
    let expected = json!({"running": false, "prefixes": 1, "tokens": tokens});
    assert_eq!(prewarmed(&trial, "p1").await, expected);
    assert_eq!(trial.cluster.metric("splitrail_prewarmed_tokens_total", &[]).await, tokens as f64);

    // It got the prefix and one more token, with a hand-off, and nothing else.
    let asked = &steps(&trial, "p1")[..];
    let [step] = asked else { panic!("one request: {asked:?}") };
    assert_eq!(step["prompt"].as_array().unwrap().len() as u64, tokens + 1);
    assert_eq!((&step["model"], &step["max_tokens"]), (&json!("sim"), &json!(1)));
    assert_eq!(step["kv_transfer_params"]["do_remote_prefill"], true);
    let totals = trial.cluster.engine("p1").state().totals;
    assert_eq!(
        (totals.external_kv_transfer_tokens, totals.local_cache_hit_tokens),
        (tokens + 1, 0)
    );

    // The next request hits there, and fetches nothing itself.
    trial.cluster.settle().await;
    drain(&trial, "p0").await;
    let third = turn("a", "third");
    let reply = serve(&mut trial, &third).await;
    assert_eq!((reply.route("prefill"), cached(&reply)), (Some("p1"), tokens));
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &third).await);
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &[]).await, 0.0);
    // Nobody's tokens: the ledger has the prompts of clients.
    let ends = ["first", "second", "third"];
    let tokens = ends.map(|end| turn("a", end)["prompt"].as_str().unwrap().len() as f64);
    let tokens = tokens.iter().sum::<f64>() + GREETING.len() as f64;
    let counted = trial.cluster.metric("splitrail_usage_prompt_tokens_total", &[]).await;
    assert_eq!(counted, tokens);
    let leg = [("leg", "prefill")];
    assert_eq!(trial.cluster.metric("splitrail_prompt_tokens_total", &leg).await, tokens);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_joins_takes_over_the_most_used_prefixes_of_all_namespaces() {
    let engine = |_: &str, config: &mut SimConfig| {
        config.adapters = vec!["my-lora".into()];
    };
    let base = eager();
    let model = format!("{}\nadapters: [my-lora]", base.model);
    let mut trial = Trial::start(Spec { engine, model, ..base }).await;
    let whole = trial.cluster.yaml.clone();
    let without: String = whole
        .lines()
        .filter(|line| !line.contains("id: p1,"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(trial.cluster.reload(&without).await.status, 200);
    for end in ["first", "second"] {
        serve(&mut trial, &turn("a", end)).await;
        let mut adapted = turn("a", end);
        adapted["model"] = "my-lora".into();
        serve(&mut trial, &adapted).await;
    }
    eventually("the ids of both prompts are known", async || {
        super::remembered(&trial).await >= 2.0 * (4 * blocks("a") * BLOCK) as f64 + 1000.0
    })
    .await;
    trial.cluster.settle().await;
    assert_eq!(trial.cluster.reload(&whole).await.status, 200);
    until_ended(&trial, "done").await;
    let mut models: Vec<String> =
        steps(&trial, "p1").iter().map(|step| step["model"].to_string()).collect();
    models.sort_unstable();
    models.dedup();
    assert_eq!(models, ["\"my-lora\"", "\"sim\""]);
    trial.cluster.settle().await;
    drain(&trial, "p0").await;
    let mut adapted = turn("a", "third");
    adapted["model"] = "my-lora".into();
    let reply = serve(&mut trial, &adapted).await;
    assert_eq!(reply.route("prefill"), Some("p1"));
    assert!(cached(&reply) >= blocks("a") * BLOCK, "{}", cached(&reply));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn prewarming_takes_two_steps_and_shows_which_engines_could_take_one_shot() {
    let engine = |name: &str, config: &mut SimConfig| {
        config.lease_ms = LEASE_MS;
        if name.starts_with('p') {
            config.bidirectional_ttl_ms = Some(LEASE_MS);
        }
    };
    let base = eager();
    let model = base.model.replace("two_step", "one_shot\nkv_load_failure_policy: fail");
    let mut trial = Trial::start(Spec { engine, model, ..base }).await;
    heat(&mut trial, &["a"]).await;
    trial.cluster.restart("p1").await;
    until_ended(&trial, "done").await;
    let asked = steps(&trial, "p1");
    let [step] = &asked[..] else { panic!("one request: {asked:?}") };
    assert_eq!(step["kv_transfer_params"]["do_remote_prefill"], true);
    let serving = trial.cluster.running.core.serving();
    let worker = serving.models[0].pool.roster().named("p1").cloned().unwrap();
    assert_eq!(worker.transfer.read_back.keeps_for_read_back(), Some(true));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn workers_that_do_both_are_prewarmed() {
    let mut trial = Trial::start(both(2, "")).await;
    heat_both(&mut trial, &["w1"], "a").await;
    undrain(&trial, "w1").await;
    trial.cluster.restart("w1").await;
    until_ended(&trial, "done").await;
    assert_eq!(prewarmed(&trial, "w1").await["tokens"], blocks("a") * BLOCK);
    trial.cluster.settle().await;
    drain(&trial, "w0").await;
    let reply = serve(&mut trial, &turn("a", "third")).await;
    assert_eq!((reply.route("decode"), cached(&reply)), (Some("w1"), blocks("a") * BLOCK));
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn without_prewarming_a_worker_that_restarts_gets_nothing() {
    for keys in ["{ enabled: false }", "{ tokens_max: 1000 }"] {
        let mut trial = Trial::start(spec(keys)).await;
        super::greet(&mut trial).await;
        drain(&trial, "p1").await;
        serve(&mut trial, &turn("a", "first")).await;
        serve(&mut trial, &turn("a", "second")).await;
        assert_eq!(super::remembered(&trial).await, 0.0);
        undrain(&trial, "p1").await;
        trial.cluster.restart("p1").await;
        eventually("the restart is noticed", async || {
            trial.cluster.metric("splitrail_index_resyncs_total", &[("worker", "p1")]).await > 0.0
                && trial.cluster.metric("splitrail_worker_up", &[("worker", "p1")]).await == 1.0
        })
        .await;
        trial.cluster.settle().await;
        assert_eq!(steps(&trial, "p1").len(), 0);
        assert_eq!(prewarmed(&trial, "p1").await, json!(null));
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_source_that_dies_in_between_costs_that_fetch_alone() {
    let mut trial = Trial::start(Spec { decode: 2, ..slow() }).await;
    heat(&mut trial, &["a"]).await;
    trial.cluster.restart("p1").await;
    eventually("the hand-off is being taken", async || steps(&trial, "p1").len() == 1).await;
    let source = ["p0", "d0", "d1"].into_iter().find(|engine| !steps(&trial, engine).is_empty());
    trial.cluster.engine(source.unwrap()).die();
    eventually("the fetch has failed", async || fetched(&trial, "failed").await >= 1.0).await;
    let third = turn("a", "third");
    let reply = serve(&mut trial, &third).await;
    let reference = Reference::start().await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &third).await);
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_leaves_or_drains_in_between_ends_its_prewarming() {
    for drains in [true, false] {
        let mut trial = Trial::start(slow()).await;
        heat(&mut trial, &["a"]).await;
        trial.cluster.restart("p1").await;
        eventually("the hand-off is being taken", async || steps(&trial, "p1").len() == 1).await;
        if drains {
            drain(&trial, "p1").await;
        } else {
            let yaml = trial.cluster.yaml.lines().filter(|line| !line.contains("id: p1,"));
            let yaml: String = yaml.map(|line| format!("{line}\n")).collect();
            assert_eq!(trial.cluster.reload(&yaml).await.status, 200);
        }
        until_ended(&trial, "stopped").await;
        eventually("the fetch is cancelled", async || fetched(&trial, "cancelled").await == 1.0)
            .await;
        trial.staged_blocks_are_freed().await;
        serve(&mut trial, &turn("a", "third")).await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_reload_that_switches_it_off_ends_it_and_forgets_all_prefixes() {
    let mut trial = Trial::start(slow()).await;
    heat(&mut trial, &["a"]).await;
    assert!(super::remembered(&trial).await > 0.0);
    trial.cluster.restart("p1").await;
    eventually("the hand-off is being taken", async || steps(&trial, "p1").len() == 1).await;
    let off = trial.cluster.yaml.replace("enabled: true", "enabled: false");
    assert!(off.contains(KEYS.lines().next().unwrap()));
    assert_eq!(trial.cluster.reload(&off).await.status, 200);
    until_ended(&trial, "stopped").await;
    assert_eq!(super::remembered(&trial).await, 0.0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
