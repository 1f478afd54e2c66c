//! Pins that will not be read are released, and are bounded.

use serde_json::{Value, json};
use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::Client;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

use super::tokens::{drain, undrain};
use super::{bidirectional, complete, ends, ids_of, of_ids, prompt_ids, reading, reads};

#[tokio::test]
async fn a_decode_worker_keeps_at_most_its_share_of_blocks_and_frees_the_oldest() {
    // One percent of 4,096 blocks; each conversation keeps ten.
    let mut trial = Trial::start(reading(1, 1, "read_back_pinned_percent_max: 1")).await;
    let mut last = (Vec::new(), Vec::new());
    for salt in 0..12 {
        let first = prompt_ids(100, salt);
        let reply = complete(&mut trial, &first, 50).await;
        last = (first, ids_of(&reply));
        eventually("the bound holds", async || {
            let state = trial.cluster.engine("d0").state();
            state.read_back_pins <= 4 && state.blocks_pinned <= 40
        })
        .await;
    }
    assert_eq!(ends(&trial, "bound").await, 8.0);
    let totals = trial.cluster.engine("d0").state().totals;
    assert_eq!((totals.pins_made, totals.pins_released), (12, 8));
    let next = [last.0, last.1, prompt_ids(9, 99)].concat();
    complete(&mut trial, &next, 4).await;
    // 149 tokens were kept, of which the prefill worker holds 96: too few are new.
    assert_eq!(trial.cluster.engine("d0").state().totals.pins_read, 0);
    trial.finish().await;
}

#[tokio::test]
async fn the_next_turn_s_pin_supersedes_the_one_before() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let mut history = prompt_ids(100, 1);
    // Short answers: nothing is worth reading.
    for _ in 0..5 {
        let reply = complete(&mut trial, &history, 20).await;
        history.extend(ids_of(&reply));
        history.extend(prompt_ids(10, history.len() as u64));
        trial.cluster.settle().await;
    }
    eventually("one pin is left", async || trial.cluster.engine("d0").state().read_back_pins == 1)
        .await;
    assert_eq!(ends(&trial, "superseded").await, 4.0);
    trial.finish().await;
}

#[tokio::test]
async fn switching_read_back_off_frees_all_pins() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    for salt in 0..3 {
        complete(&mut trial, &prompt_ids(100, salt), 50).await;
    }
    assert_eq!(trial.cluster.engine("d0").state().read_back_pins, 3);
    let yaml = trial.cluster.yaml.replace("read_back: true", "read_back: false");
    assert_eq!(trial.cluster.reload(&yaml).await.status, 200);
    eventually("decode has all of its blocks again", async || {
        let state = trial.cluster.engine("d0").state();
        (state.read_back_pins, state.blocks_used) == (0, 0)
    })
    .await;
    assert_eq!(ends(&trial, "stopped").await, 3.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_router_that_stops_frees_all_pins() {
    let mut trial = Trial::start(reading(1, 2, "")).await;
    for salt in 0..3 {
        complete(&mut trial, &prompt_ids(100, salt), 50).await;
    }
    let cluster = trial.cluster;
    cluster.running.drain().await;
    for name in ["d0", "d1"] {
        let state = cluster.engines.iter().find(|(other, _)| other == name).unwrap().1.state();
        assert_eq!((state.read_back_pins, state.blocks_used), (0, 0), "{name}");
    }
}

/// The engine would still give it out, since its own time is longer than the configured one.
#[tokio::test]
async fn a_pin_is_not_read_after_the_end_of_the_configured_time() {
    let mut trial = Trial::start(reading(1, 1, "read_back_pin: 10s")).await;
    let first = prompt_ids(100, 1);
    let reply = complete(&mut trial, &first, 90).await;
    let next = [first, ids_of(&reply), prompt_ids(20, 2)].concat();
    eventually("the pin has ended", async || ends(&trial, "expired").await == 1.0).await;
    let before = trial.cluster.engine("p0").state().totals;
    complete(&mut trial, &next, 4).await;
    let totals = trial.cluster.engine("p0").state().totals;
    let computed = totals.local_compute_tokens - before.local_compute_tokens;
    assert_eq!(computed, 190 + 20 - 96, "the answer is computed");
    assert_eq!(trial.cluster.engine("d0").state().totals.pins_read, 0);
    trial.finish().await;
}

/// A reply that ends after its pool was replaced leaves a pin that no later request can find.
#[tokio::test]
async fn pins_of_the_last_replies_of_a_replaced_pool_are_freed() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    complete(&mut trial, &prompt_ids(100, 1), 50).await;
    trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 2000 }, Some(1));
    trial.expect("ok");
    let http = trial.cluster.http.clone();
    let mut late = tokio::task::JoinSet::new();
    late.spawn(async move { http.post(COMPLETIONS, &of_ids(&prompt_ids(100, 2), 50)).await });
    eventually("the late request is with its decode worker", async || trial.asked("d0").len() == 2)
        .await;
    let yaml = &trial.cluster.yaml;
    let limits = "limits: { index_blocks_per_worker_max: 5000, ";
    let changed = yaml.replacen("limits: { ", limits, 1);
    assert_ne!(&changed, yaml);
    assert_eq!(trial.cluster.reload(&changed).await.status, 200);
    eventually("the pin of the old pool is freed", async || ends(&trial, "stopped").await == 1.0)
        .await;
    assert_eq!(late.join_next().await.unwrap().unwrap().status, 200);
    eventually("decode has all of its blocks again", async || {
        let state = trial.cluster.engine("d0").state();
        (state.read_back_pins, state.blocks_used) == (0, 0)
    })
    .await;
    assert_eq!(ends(&trial, "stopped").await, 2.0);
    trial.finish().await;
}

/// The second step of a peer fetch leaves its prompt pinned, as any leg that takes a hand-off does.
#[tokio::test]
async fn a_pin_that_a_fetch_leaves_on_the_only_prefill_worker_is_freed_by_a_decode_worker() {
    let engine = bidirectional;
    let fetching = "peer_fetch: two_step\npeer_fetch_min_tokens: 16";
    let costs = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }";
    let model = format!("read_back: true\n{fetching}\n{costs}");
    let policy = "{ kind: predicted_ttft }";
    let spec = Spec { prefill: 1, decode: 1, policy, model, engine, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let prefix = prompt_ids(160, 1);
    let decode = trial.cluster.engine("d0").url();
    let decode = Client::new(decode.strip_prefix("http://").unwrap().parse().unwrap());
    assert_eq!(decode.post(COMPLETIONS, &of_ids(&prefix, 1)).await.status, 200);
    trial.cluster.settle().await;
    let next = [prefix, prompt_ids(20, 2)].concat();
    complete(&mut trial, &next, 1).await;
    let fetched = [("outcome", "fetched")];
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &fetched).await, 1.0);
    eventually("its blocks are free", async || trial.cluster.engine("p0").state().blocks_used == 0)
        .await;
    let totals = trial.cluster.engine("p0").state().totals;
    assert_eq!((totals.pins_made, totals.pins_released), (1, 1));
    let released = [("outcome", "released")];
    let releases = "splitrail_read_back_releases_total";
    assert_eq!(trial.cluster.metric(releases, &released).await, 1.0);
    trial.finish().await;
}

/// Two prefill engines that reply to a request to free a pin only once both have got one.
#[tokio::test]
async fn a_router_that_stops_frees_the_pins_of_all_models_at_the_same_time() {
    use super::tokens::{completion as reply_of, decode, prefill, same, worker};
    use splitrail_tests::raw_engine::{Asked, RawEngine, Then, Turn};

    let together = std::sync::Arc::new(tokio::sync::Barrier::new(2));
    let patient = move |asked: &Asked| {
        let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
        if body["kv_transfer_params"]["remote_num_tokens"] != 1 {
            return prefill(asked, same);
        }
        let reply = reply_of(&body["prompt"], &[9], 0, &Value::Null);
        Turn { bytes: Vec::new(), then: Then::Together(together.clone(), reply.bytes) }
    };
    let p = [RawEngine::start(patient.clone()).await, RawEngine::start(patient).await];
    let d = [
        RawEngine::start(|asked| decode(asked, same)).await,
        RawEngine::start(|asked| decode(asked, same)).await,
    ];
    let extra_workers = vec![worker("p0", "prefill", &p[0]), worker("d0", "decode", &d[0])];
    let trial = Trial::start(Spec { extra_workers, ..reading(0, 0, "") }).await;
    let yaml = &trial.cluster.yaml;
    let model = &yaml[yaml.find("  - name: sim").unwrap()..];
    let other = model.replace("name: sim", "name: other").replace("[default]", "[]");
    let other = other.replace(&p[0].url(), &p[1].url()).replace(&d[0].url(), &d[1].url());
    assert_eq!(trial.cluster.reload(&format!("{yaml}{other}")).await.status, 200);
    for model in ["sim", "other"] {
        let mut body = of_ids(&prompt_ids(100, 1), 90);
        body["model"] = json!(model);
        let reply = trial.cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let cluster = trial.cluster;
    let metrics = std::sync::Arc::clone(&cluster.running.core.metrics);
    cluster.running.drain().await;
    let released = [("outcome", "released")];
    let metrics = metrics.encode();
    assert_eq!(metric_in(&metrics, "splitrail_read_back_releases_total", &released), 2.0);
}

/// A leg that only fetches the hand-off for several samples leaves a pin that nobody can use.
#[tokio::test]
async fn a_leg_that_only_fetches_leaves_nothing_pinned() {
    let spec = Spec { engine: bidirectional, ..reading(1, 1, "") };
    let mut trial = Trial::start(spec).await;
    let mut body = completion(&prompt(20, "samples"));
    body["n"] = 3.into();
    body["temperature"] = 1.into();
    trial.post("ok", COMPLETIONS, &body).await;
    eventually("the pin of the fetch is freed", async || {
        trial.cluster.engine("d0").state().read_back_pins == 0
    })
    .await;
    assert_eq!(ends(&trial, "unusable").await, 1.0);
    // The samples' own reply, which has no hand-off, says nothing of the engine.
    let core = trial.cluster.running.core.serving();
    let roster = core.models[0].pool.roster();
    let keeper = roster.iter().find(|worker| worker.id() == "d0").unwrap();
    assert_eq!(keeper.transfer.read_back.keeps_for_read_back(), Some(true));
    trial.finish().await;
}

/// A first turn, and the prompt of the next one.
async fn next_of(trial: &mut Trial, salt: u64) -> Vec<u64> {
    let first = prompt_ids(100, salt);
    let reply = complete(trial, &first, 90).await;
    [first, ids_of(&reply), prompt_ids(20, salt + 500)].concat()
}

#[tokio::test]
async fn pins_of_a_worker_that_drains_are_released_and_not_read() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let next = next_of(&mut trial, 1).await;
    drain(&trial, "d0").await;
    eventually("its engine may be stopped", async || {
        let state = trial.cluster.engine("d0").state();
        (state.read_back_pins, state.blocks_used) == (0, 0) && ends(&trial, "holder").await == 1.0
    })
    .await;
    undrain(&trial, "d0").await;
    complete(&mut trial, &next, 4).await;
    assert_eq!(reads(&trial, "read").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_worker_that_was_only_out_of_reach_keeps_its_pins_and_a_new_process_has_none() {
    let mut trial = Trial::start(reading(1, 1, "")).await;
    let next = next_of(&mut trial, 1).await;
    let up = async |trial: &Trial| {
        trial.cluster.metric("splitrail_worker_up", &[("worker", "d0")]).await == 1.0
    };
    let serving = trial.cluster.running.core.serving();
    let keeper = serving.models[0].pool.roster().named("d0").cloned().unwrap();
    keeper.set_up(false, "a connection to it failed");
    eventually("it is back", async || up(&trial).await).await;
    complete(&mut trial, &next, 4).await;
    assert_eq!((reads(&trial, "read").await, ends(&trial, "holder").await), (1.0, 0.0));
    // The pin of the turn that has read.
    trial.cluster.restart("d0").await;
    eventually("its pin is forgotten", async || ends(&trial, "holder").await == 1.0).await;
    assert_eq!(serving.models[0].pool.read_back.pinned_blocks(keeper.index), 0);
}

/// Nothing else ends the leg.
#[tokio::test]
async fn a_leg_that_reads_ends_before_the_engine_frees_the_pin() {
    let model = "read_back_pin: 10s\ntimeouts: { prefill: 1h }";
    let mut trial = Trial::start(reading(1, 1, model)).await;
    let next = next_of(&mut trial, 1).await;
    trial.fault("p0", FaultKind::SlowFirstByte { delay_ms: 3_600_000 }, Some(1));
    complete(&mut trial, &next, 4).await;
    assert_eq!((reads(&trial, "failed").await, trial.retries("prefill").await), (1.0, 1.0));
    trial.finish().await;
}
