//! What must not be fetched is not, and what a source has lost is noticed.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::client::whole_text;
use splitrail_tests::trial::{COMPLETIONS, Reference, SHORT_LEASE, chat, completion, prompt};
use splitrail_tests::{Spec, Trial};

use super::{
    BLOCK, EAGER, Sent, cached, drain, ended, held, recorded, served, spec, steps, turns, undrain,
};

/// Checks that the next request of a prefix is served without a fetch.
async fn fetches_nothing(trial: &mut Trial, body: &Value) {
    let reply = served(trial, body).await;
    assert_eq!(reply.route("prefill"), Some("p1"));
    assert_eq!(recorded(trial, &reply).await, Value::Null);
    for engine in ["d0", "p1"] {
        assert_eq!(steps(trial, engine), Vec::<Value>::new());
    }
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &[]).await, 0.0);
}

#[tokio::test]
async fn peer_fetch_is_off_by_default() {
    let mut trial = Trial::start(Spec { model: String::new(), ..spec(2, 1) }).await;
    let [first, second] = turns("off");
    held(&mut trial, &first).await;
    fetches_nothing(&mut trial, &second).await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prefix_is_fetched_from_its_own_namespace_alone() {
    let mut trial = Trial::start(spec(2, 1)).await;
    let [mut first, mut second] = turns("ns");
    first["cache_salt"] = "one".into();
    second["cache_salt"] = "two".into();
    held(&mut trial, &first).await;
    fetches_nothing(&mut trial, &second).await;
    second["cache_salt"] = "one".into();
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "fetched", "from its own");
    trial.finish().await;
}

#[tokio::test]
async fn a_prefix_below_the_minimum_is_computed() {
    let model = EAGER.replace("min_tokens: 16", "min_tokens: 4000");
    let mut trial = Trial::start(Spec { model, ..spec(2, 1) }).await;
    let [first, second] = turns("min");
    held(&mut trial, &first).await;
    fetches_nothing(&mut trial, &second).await;
    trial.finish().await;
}

#[tokio::test]
async fn a_prefix_that_is_faster_to_compute_is_not_fetched() {
    let model = EAGER.replace("fetch_base_ms: 0", "fetch_base_ms: 1000000");
    let mut trial = Trial::start(Spec { model, ..spec(2, 1) }).await;
    let [first, second] = turns("slow");
    held(&mut trial, &first).await;
    fetches_nothing(&mut trial, &second).await;
    trial.finish().await;
}

#[tokio::test]
async fn prompts_whose_tokens_are_not_known_or_must_be_computed_fetch_nothing() {
    let mut trial = Trial::start(spec(2, 1)).await;
    let [first, second] = turns("opaque");
    held(&mut trial, &first).await;
    let mut whole = second.clone();
    whole["prompt_logprobs"] = 1.into();
    let reply = trial.post("ok", COMPLETIONS, &whole).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let mut cut = second.clone();
    cut["truncate_prompt_tokens"] = 300.into();
    trial.post("ok", COMPLETIONS, &cut).await;
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let mut seen = chat(&prompt(40, "seen"));
    seen["messages"][1]["content"] = json!([{"type": "text", "text": prompt(40, "seen")}, image]);
    for _ in 0..2 {
        trial.post("ok", splitrail_tests::trial::CHAT, &seen).await;
    }
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &[]).await, 0.0);
    assert!(steps(&trial, "d0").is_empty() && steps(&trial, "p1").is_empty());
    trial.finish().await;
}

/// A cluster whose decode worker loses what it does not announce, with few blocks.
fn forgetful(model: String, worker: fn(&str) -> &'static str) -> Spec {
    let engine = |name: &str, config: &mut SimConfig| {
        if name == "d0" {
            config.kv_blocks = 64;
        }
    };
    Spec { model, worker, engine, ..spec(2, 1) }
}

/// Has the decode worker evict a prompt without saying so.
pub(super) async fn evict(trial: &mut Trial) {
    trial.fault("d0", FaultKind::HideRemovals { in_replay: true }, None);
    undrain(trial, "p0").await;
    drain(trial, "p1").await;
    for turn in 0..4 {
        served(trial, &completion(&prompt(60, &format!("other{turn}x")))).await;
    }
    undrain(trial, "p1").await;
    drain(trial, "p0").await;
}

#[tokio::test]
async fn a_source_that_has_lost_the_prefix_computes_it_once_and_is_left_alone() {
    let reference = Reference::start().await;
    let model = format!("{EAGER}\ndrift: {{ enabled: false }}");
    let mut trial = Trial::start(forgetful(model, |_| "")).await;
    let [first, second] = turns("lost");
    held(&mut trial, &first).await;
    evict(&mut trial).await;
    let computed = |trial: &Trial| trial.cluster.engine("d0").state().totals.local_compute_tokens;
    let before = computed(&trial);
    let reply = served(&mut trial, &second).await;
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &second).await);
    assert_eq!(recorded(&trial, &reply).await["outcome"], "recomputed");
    // Its work was used. What it has computed for this request, the client is not told as cached.
    let recomputed = computed(&trial) - before - 1;
    let decision = &trial.cluster.decisions(reply.header("x-request-id")).await[0];
    let leg = &decision["ledger"]["legs"][0];
    assert_eq!(leg["recomputed"], recomputed);
    assert_eq!(leg["local_cache_hit"].as_u64().unwrap(), cached(&reply) + recomputed);
    assert!(recomputed > 0);
    let over = [("direction", "over")];
    let errors = trial.cluster.metric("splitrail_cached_tokens_error_blocks_count", &over).await;
    assert!(errors >= 1.0, "the index is blamed");
    // It is asked for nothing for a while.
    let asked = steps(&trial, "d0").len();
    let other = completion(&format!("{}{}", prompt(60, "other3x"), prompt(9, "again")));
    let reply = served(&mut trial, &other).await;
    assert_eq!(recorded(&trial, &reply).await, Value::Null);
    assert_eq!(steps(&trial, "d0").len(), asked);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_source_that_knows_the_threshold_computes_nothing_that_it_has_lost() {
    let worker = |_: &str| ", supports_cache_hit_threshold: true";
    let model = format!("{EAGER}\ndrift: {{ enabled: false }}");
    let mut trial = Trial::start(forgetful(model, worker)).await;
    let [first, second] = turns("gate");
    held(&mut trial, &first).await;
    evict(&mut trial).await;
    let computed = || trial.cluster.engine("d0").state().totals.local_compute_tokens;
    let before = computed();
    let reply = trial.cluster.http.post(COMPLETIONS, &second).await;
    assert_eq!(computed(), before);
    trial.expect("ok");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(recorded(&trial, &reply).await["outcome"], "lost");
    assert_eq!(ended(&trial, "lost").await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_that_does_not_fit_is_not_used() {
    // What the engine has staged it keeps until the lease ends.
    let engine = |_: &str, config: &mut SimConfig| {
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    };
    for (fault, expected) in [(FaultKind::NoHandOff, 0.0), (FaultKind::ShortHandOff, 1.0)] {
        let mut trial = Trial::start(Spec { engine, ..spec(2, 1) }).await;
        let [first, second] = turns("none");
        held(&mut trial, &first).await;
        trial.fault("d0", fault, Some(1));
        let reply = served(&mut trial, &second).await;
        assert_eq!(recorded(&trial, &reply).await["outcome"], "unusable");
        assert_eq!(cached(&reply), 0);
        // Not even to release it: p1 would die of it, or keep the KV of other tokens.
        assert_eq!(steps(&trial, "p1").len(), 0);
        let left = [("outcome", "left")];
        let left = trial.cluster.metric("splitrail_unused_hand_offs_total", &left).await;
        assert_eq!(left, expected);
        trial.staged_blocks_are_freed().await;
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_worker_takes_part_in_no_more_fetches_than_it_may() {
    let keys = "peer_fetch_max_per_worker: 1\nqueue: none\ntimeouts: { peer_fetch: 60s }";
    let mut trial = Trial::start(Spec { model: format!("{EAGER}\n{keys}"), ..spec(2, 1) }).await;
    let [first, second] = turns("one");
    let [further, last] = turns("two");
    held(&mut trial, &first).await;
    undrain(&trial, "p0").await;
    held(&mut trial, &further).await;
    trial.fault("p1", FaultKind::SlowFirstByte { delay_ms: 3000 }, Some(1));
    trial.expect("ok");
    let fetching = Sent::new(&trial, &second);
    splitrail_tests::cluster::eventually("it fetches", async || steps(&trial, "p1").len() == 1)
        .await;
    let reply = served(&mut trial, &last).await;
    assert_eq!((cached(&reply), recorded(&trial, &reply).await), (0, Value::Null));
    let reply = fetching.reply().await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "fetched");
    assert_eq!(cached(&reply) % BLOCK, 0);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_hand_off_from_a_host_outside_the_fleet_is_sent_to_no_engine() {
    let engine = |_: &str, config: &mut SimConfig| {
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    };
    let mut trial = Trial::start(Spec { engine, ..spec(2, 1) }).await;
    let [first, second] = turns("host");
    held(&mut trial, &first).await;
    trial.fault("d0", FaultKind::ForeignHandOff, Some(1));
    let reply = served(&mut trial, &second).await;
    assert_eq!(recorded(&trial, &reply).await["outcome"], "foreign_hand_off");
    assert_eq!((reply.route("prefill"), steps(&trial, "p1").len()), (Some("p1"), 0));
    let left = [("outcome", "left")];
    let left = trial.cluster.metric("splitrail_unused_hand_offs_total", &left).await;
    assert_eq!(left, 1.0, "what the source has staged stays so until the lease ends");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
