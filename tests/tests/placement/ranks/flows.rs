//! A repeated prompt goes to the rank that holds it, in every flow and with every connector.
//! Simulated engines send a request without a rank to the next rank, which does not hold the
//! prompt.

use std::collections::{BTreeMap, BTreeSet};

use splitrail_sim::{KvConnector, SimConfig};
use splitrail_tests::{Spec, Trial};

use super::support::{ask, cached, in_step, known, pinned, served, text, two, whole_hit};

/// Enough that both ranks of some engine are as good as certain to get one.
const PROMPTS: usize = 16;

/// What serves a prompt that comes again.
#[derive(Clone, Copy, PartialEq)]
enum Again {
    /// The same legs.
    Alike,
    /// Its decode worker alone.
    DecodeAlone,
}

async fn check(spec: Spec, again: Again) {
    let mut trial = Trial::start(spec).await;
    known(&trial.cluster, true).await;
    let texts: Vec<_> = (0..PROMPTS).map(text).collect();
    for text in &texts {
        ask(&mut trial, text).await;
    }
    trial.cluster.quiet().await;
    in_step(&trial.cluster).await;
    let places = places(&trial);
    let hits = hit_tokens(&trial);
    for text in &texts {
        let (reply, decision) = ask(&mut trial, text).await;
        let tokens = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
        assert_eq!(cached(&reply), whole_hit(tokens), "{decision}");
        let chosen = decision["candidates"]
            .as_array()
            .unwrap()
            .iter()
            .find(|candidate| candidate["chosen"] == true && candidate["leg"] != "decode");
        let chosen = chosen.unwrap_or_else(|| panic!("{decision}"));
        assert!(chosen["rank"].is_u64(), "{chosen}");
        assert_eq!(chosen["overlap_blocks"], tokens / 16, "confirmed, not guessed: {chosen}");
        assert_eq!(
            decision["prefill_worker"].is_null(),
            again == Again::DecodeAlone || alone(&trial)
        );
    }
    let found = hit_tokens(&trial) - hits;
    let expected: usize = texts.iter().map(|text| whole_hit(text.len())).sum();
    assert!(found >= expected as u64, "{found} of {expected} tokens, by the engines' count");
    if again == Again::Alike {
        assert_eq!(self::places(&trial), places, "every leg goes where it went before");
    }
    let ranks: BTreeSet<u32> =
        places.values().flatten().map(|(_, rank)| rank.expect("every leg is pinned")).collect();
    assert_eq!(ranks, BTreeSet::from([0, 1]));
    trial.finish().await;
}

fn alone(trial: &Trial) -> bool {
    trial.cluster.engines.iter().any(|(name, _)| name == "w0")
}

fn hit_tokens(trial: &Trial) -> u64 {
    let engines = trial.cluster.engines.iter();
    engines.map(|(_, engine)| engine.state().totals.local_cache_hit_tokens).sum()
}

/// An engine, and the rank that it was told.
type Place = (String, Option<u32>);

/// Where each prompt was sent.
fn places(trial: &Trial) -> BTreeMap<String, BTreeSet<Place>> {
    let mut places = BTreeMap::<_, BTreeSet<_>>::new();
    for (name, _) in &trial.cluster.engines {
        for request in served(trial, name) {
            let place = (name.clone(), pinned(&request));
            places.entry(request.body["prompt"].to_string()).or_default().insert(place);
        }
    }
    places
}

fn aggregated() -> Spec {
    Spec { engine: two, ..Spec::aggregated(2) }
}

fn by(connector: KvConnector) -> Spec {
    Spec { connector, engine: two, ..Spec::default() }
}

fn decode_first(model: &str, engine: fn(&str, &mut SimConfig)) -> Spec {
    Spec { flow: "decode_first", model: model.into(), engine, ..Spec::default() }
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_aggregated() {
    check(aggregated(), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_over_nixl() {
    check(by(KvConnector::Nixl), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_over_shared_storage() {
    check(by(KvConnector::SharedStorage), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_over_mooncake() {
    check(by(KvConnector::Mooncake), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_by_push() {
    check(by(KvConnector::NixlPush), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_over_sglang() {
    check(by(KvConnector::Sglang), Again::Alike).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_if_the_engine_gates() {
    check(decode_first("gate: { kind: engine }", two), Again::DecodeAlone).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_if_the_router_gates() {
    let engine = |name: &str, config: &mut SimConfig| {
        two(name, config);
        config.honour_threshold = false;
    };
    check(decode_first("gate: { kind: router }", engine), Again::DecodeAlone).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_if_a_shim_gates_the_pinned_rank() {
    let engine = |name: &str, config: &mut SimConfig| {
        two(name, config);
        config.honour_threshold = false;
        config.honour_gate_header = true;
    };
    let spec = decode_first("gate: { kind: shim }", engine);
    check(Spec { worker: |_| ", shim: true", ..spec }, Again::DecodeAlone).await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_rank_with_auto() {
    // Decode workers are taken to compute slowly, and hand-offs to cost nothing.
    let model = "costs: { hand_off_base_ms: 0, bandwidth_gb_per_second: 1000 }";
    let worker = |name: &str| match name.starts_with('d') {
        true => ", costs: { prefill_us_per_token: 1000, hand_off_base_ms: 0 }",
        false => "",
    };
    let spec = Spec { flow: "auto", model: model.into(), engine: two, worker, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    known(&trial.cluster, true).await;
    let (_, first) = ask(&mut trial, &text(1)).await;
    assert_eq!(first["flow"], "prefill_first", "{first}");
    trial.cluster.quiet().await;
    in_step(&trial.cluster).await;
    let (reply, second) = ask(&mut trial, &text(1)).await;
    let tokens = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(cached(&reply), whole_hit(tokens), "{second}");
    trial.finish().await;
}
