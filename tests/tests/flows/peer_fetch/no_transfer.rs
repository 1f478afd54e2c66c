//! A dry run says why a leg moves no KV, or moves it in two steps.

use std::time::Instant;

use serde_json::{Value, json};
use splitrail_kv::BlockHash;
use splitrail_sim::SimConfig;
use splitrail_tests::client::Client;
use splitrail_tests::trial::{COMPLETIONS, SHORT_LEASE};
use splitrail_tests::{Spec, Trial};
use splitrail_workload::fetches::{FetchBooking, Prefix};

use super::{EAGER, drain, held, served, spec, turns, undrain};

/// The explanation of a prompt.
async fn told(trial: &Trial, body: &Value) -> Value {
    let reply = trial.cluster.admin.post("/admin/explain", body).await;
    reply.json()["explanation"]["prompts"][0].clone()
}

async fn no_fetch(trial: &Trial, body: &Value) -> Value {
    told(trial, body).await["steps"][0]["no_fetch"].clone()
}

async fn no_one_shot(trial: &Trial, body: &Value) -> Value {
    told(trial, body).await["steps"][0]["no_one_shot"].clone()
}

#[tokio::test]
async fn a_dry_run_says_why_nothing_is_fetched() {
    for (model, reason) in [
        (EAGER.replace("two_step", "off"), Value::Null),
        (EAGER.to_owned(), Value::Null),
        (EAGER.replace("min_tokens: 16", "min_tokens: 4000"), json!("min_tokens")),
        (EAGER.replace("fetch_base_ms: 0", "fetch_base_ms: 1000000"), json!("dearer")),
    ] {
        let mut trial = Trial::start(Spec { model, ..spec(2, 1) }).await;
        let [first, second] = turns("why");
        held(&mut trial, &first).await;
        assert_eq!(no_fetch(&trial, &second).await, reason);
        trial.finish().await;
    }
    // The other decode worker stays when the holder is drained.
    let mut trial = Trial::start(spec(2, 2)).await;
    let [first, mut second] = turns("why");
    assert_eq!(no_fetch(&trial, &second).await, "no_source");
    let pair = held(&mut trial, &first).await;
    assert_eq!(told(&trial, &second).await["steps"][0]["no_one_shot"], Value::Null);
    drain(&trial, &pair.holder).await;
    let reason = no_fetch(&trial, &second).await;
    undrain(&trial, &pair.holder).await;
    assert_eq!(reason, "source_unavailable");
    second["prompt_logprobs"] = 1.into();
    assert_eq!(no_fetch(&trial, &second).await, "bypasses_cache");
    trial.finish().await;
}

#[tokio::test]
async fn a_dry_run_says_why_a_fetch_takes_two_steps() {
    let engine = |name: &str, config: &mut SimConfig| {
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
        if name == "p1" {
            config.bidirectional_ttl_ms = Some(SHORT_LEASE.as_millis() as u64);
        }
    };
    let model = EAGER.replace("two_step", "one_shot\nkv_load_failure_policy: fail");
    let model = model.replace(": 1000000", ": 20000");
    let mut trial = Trial::start(Spec { engine, model, ..spec(2, 1) }).await;
    let [first, second] = turns("one");
    held(&mut trial, &first).await;
    assert_eq!(no_one_shot(&trial, &second).await, "flag_unknown");
    served(&mut trial, &second).await;
    undrain(&trial, "p0").await;
    let [first, second] = turns("two");
    held(&mut trial, &first).await;
    assert_eq!(no_one_shot(&trial, &second).await, Value::Null);
    let serving = trial.cluster.running.core.serving();
    let pool = &serving.models[0].pool;
    let fetcher = pool.roster().named("p1").cloned().unwrap();
    fetcher.transfer.read_back.ended(false, Instant::now());
    assert_eq!(no_one_shot(&trial, &second).await, "cooldown");
    fetcher.transfer.read_back.ended(true, Instant::now());
    fetcher.transfer.read_back.forget();
    fetcher.transfer.read_back.set_keeps_for_read_back(false);
    assert_eq!(no_one_shot(&trial, &second).await, "flag_absent");
    fetcher.transfer.read_back.set_keeps_for_read_back(true);
    pool.read_back.distrust();
    assert_eq!(no_one_shot(&trial, &second).await, "distrusted");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_dry_run_says_why_nothing_is_read_back() {
    let engine = |_: &str, config: &mut SimConfig| config.bidirectional_ttl_ms = Some(480_000);
    let model = "read_back: true".to_owned();
    let spec = Spec { prefill: 1, decode: 1, engine, model, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let [first, other] = [turns("first")[0].clone(), turns("other")[0].clone()];
    let why = async |trial: &Trial, body: &Value| told(trial, body).await["no_read_back"].clone();
    assert_eq!(why(&trial, &first).await, "flag_unknown");
    served(&mut trial, &first).await;
    assert_eq!(why(&trial, &other).await, "nothing_kept");
    let serving = trial.cluster.running.core.serving();
    let pool = &serving.models[0].pool;
    let reader = pool.roster().named("p0").cloned().unwrap();
    reader.transfer.read_back.ended(false, Instant::now());
    assert_eq!(why(&trial, &other).await, "cooldown");
    pool.read_back.distrust();
    assert_eq!(why(&trial, &other).await, "distrusted");
    trial.finish().await;
}

/// Prefill legs that could read more than they take, if reading were not slower than computing.
#[tokio::test]
async fn a_read_that_is_too_dear_is_not_why_a_fetch_takes_two_steps() {
    let engine = |_: &str, config: &mut SimConfig| {
        config.bidirectional_ttl_ms = Some(480_000);
    };
    let model = EAGER.replace("two_step", "one_shot\nkv_load_failure_policy: fail");
    let costs = "costs: { hand_off_base_ms: 1000000,";
    let model = format!("read_back: true\nlease: 1s\n{}", model.replace("costs: {", costs));
    let mut trial = Trial::start(Spec { engine, model, ..spec(2, 2) }).await;
    let first: Vec<u64> = (0..100).map(|i| 3 + (i * 11 + i / 7) % 250).collect();
    let of_ids = |ids: &[u64]| {
        json!({
            "model": "sim", "max_tokens": 90, "temperature": 0, "prompt": ids,
            "return_token_ids": true,
        })
    };
    drain(&trial, "p1").await;
    let reply = served(&mut trial, &of_ids(&first)).await;
    let keeper = reply.route("decode").unwrap().to_owned();
    // The other decode worker holds the prompt alone.
    let source = trial.cluster.engine(if keeper == "d0" { "d1" } else { "d0" }).url();
    let source = Client::new(source.strip_prefix("http://").unwrap().parse().unwrap());
    let mut short = of_ids(&first);
    short["max_tokens"] = 1.into();
    assert_eq!(source.post(COMPLETIONS, &short).await.status, 200);
    trial.cluster.settle().await;
    undrain(&trial, "p1").await;
    drain(&trial, "p0").await;
    let ids = reply.json()["choices"][0]["token_ids"].as_array().unwrap().clone();
    let ids = ids.iter().map(|id| id.as_u64().unwrap());
    let next: Vec<u64> = first.into_iter().chain(ids).chain([7; 20]).collect();
    let serving = trial.cluster.running.core.serving();
    let pool = &serving.models[0].pool;
    let [fetcher, keeper] = ["p1", &keeper].map(|id| pool.roster().named(id).cloned().unwrap());
    fetcher.transfer.read_back.set_keeps_for_read_back(true);
    // The one that keeps more has failed as a source.
    let prefix = Prefix { rank: None, blocks: 1, last: BlockHash(1) };
    let bounds = pool.fetch_bounds().unwrap();
    let booking =
        FetchBooking::begin(&keeper.transfer.fetches, &fetcher.transfer.fetches, prefix, bounds, 0);
    booking.unwrap().source_did(false, Instant::now());
    let told = told(&trial, &of_ids(&next)).await;
    assert_eq!(told["steps"][0]["no_one_shot"], "lease", "{told}");
    trial.finish().await;
}
