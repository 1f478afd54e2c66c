//! Each way to disagree has its name.

use splitrail_sim::{EventForm, FaultKind, HashForm, PromptDialect, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Spec};

use super::support::{ask, faulty, one, overlap, settled, text, worker};

/// A worker is found to disagree for this reason: it is served by load, and everybody can see
/// why.
async fn check(engine: fn(&str, &mut SimConfig), cause: &str) {
    check_in(one(engine), cause).await;
}

async fn check_in(spec: Spec, cause: &str) {
    let cluster = Cluster::start(spec).await;
    assert_eq!(settled(&cluster, "w0").await, cause);
    let seen = worker(&cluster, "w0").await;
    assert_eq!((&seen["parity"], &seen["kv_routing"]), (&"mismatch".into(), &false.into()));
    assert!(seen["parity_advice"].as_str().is_some_and(|advice| advice.len() > 20), "{seen}");
    let gauge = async |result: &str| {
        let labels = [("worker", "w0"), ("result", result)];
        cluster.metric("splitrail_worker_parity", &labels).await
    };
    assert_eq!((gauge("mismatch").await, gauge("ok").await), (1.0, 0.0));
    let asked = [("model", "sim"), ("result", "mismatch"), ("cause", cause)];
    assert_eq!(cluster.metric("splitrail_canaries_total", &asked).await, 1.0);
    assert_eq!(
        cluster.metric("splitrail_worker_kv_routing_enabled", &[("worker", "w0")]).await,
        0.0
    );
    let prompt = text(30, "served");
    ask(&cluster, &prompt).await;
    let again = ask(&cluster, &prompt).await;
    assert_eq!(overlap(&cluster, &again).await, (0, 0.0), "nothing is believed");
}

/// The canary of a worker gives no clear result for this reason: the worker's overlap counts, and
/// `/admin/workers` and the metrics show the cause.
async fn check_unclear(engine: fn(&str, &mut SimConfig), cause: &str) {
    let model = "canary: { timeout: 500ms, interval: 10m }";
    let cluster = Cluster::start(Spec { model: model.into(), ..one(engine) }).await;
    eventually("a canary has ended", async || worker(&cluster, "w0").await["parity"] != "pending")
        .await;
    let seen = worker(&cluster, "w0").await;
    assert_eq!((&seen["parity"], &seen["kv_routing"]), (&"unknown".into(), &true.into()));
    assert_eq!(seen["parity_cause"], cause);
    assert!(seen["parity_advice"].as_str().is_some_and(|advice| advice.len() > 20), "{seen}");
    let asked = [("model", "sim"), ("result", "unknown"), ("cause", cause)];
    assert!(cluster.metric("splitrail_canaries_total", &asked).await >= 1.0);
}

#[tokio::test]
async fn a_canary_that_is_rejected_shows_that_the_worker_is_untested() {
    check_unclear(|_, config| faulty(config, FaultKind::Status { status: 400 }), "refused").await;
}

#[tokio::test]
async fn a_canary_that_fails_shows_that_the_worker_is_untested() {
    check_unclear(|_, config| faulty(config, FaultKind::Status { status: 500 }), "no_reply").await;
}

#[tokio::test]
async fn a_canary_without_a_reply_shows_that_the_worker_is_untested() {
    check_unclear(|_, config| faulty(config, FaultKind::Hang), "no_reply_in_time").await;
}

macro_rules! causes {
    ($($name:ident: $cause:literal, $engine:expr;)+) => {
        $(#[tokio::test]
        async fn $name() {
            check(|_, config: &mut SimConfig| $engine(config), $cause).await;
        })+
    };
}

causes! {
    another_template: "template",
        |config: &mut SimConfig| config.dialect = PromptDialect::OtherTemplate;
    a_special_token_too_many: "special_tokens",
        |config: &mut SimConfig| config.dialect = PromptDialect::Bos;
    another_vocabulary: "vocabulary",
        |config: &mut SimConfig| config.dialect = PromptDialect::OtherVocabulary;
    another_block_size: "block_size",
        |config: &mut SimConfig| config.block_size = 32;
    events_without_salts: "salt",
        |config: &mut SimConfig| faulty(config, FaultKind::DropSalts);
    events_that_never_come: "events_absent",
        |config: &mut SimConfig| faulty(config, FaultKind::DropEventBatches);
    events_under_a_parent_that_nobody_knows: "unknown_parent",
        |config: &mut SimConfig| faulty(config, FaultKind::StrangeParents);
    events_of_another_rank: "rank",
        |config: &mut SimConfig| {
            config.data_parallel = 2;
            faulty(config, FaultKind::OtherRank);
        };
}

/// The same without `/tokenize`: the blocks and the count tell.
macro_rules! untold {
    ($($name:ident: $cause:literal, $dialect:ident;)+) => {
        $(#[tokio::test]
        async fn $name() {
            let engine = |_: &str, config: &mut SimConfig| {
                config.dialect = PromptDialect::$dialect;
                config.offers_tokenize = false;
            };
            check(engine, $cause).await;
        })+
    };
}

untold! {
    another_template_without_tokenize: "template", OtherTemplate;
    a_special_token_too_many_without_tokenize: "special_tokens", Bos;
    another_vocabulary_without_tokenize: "unmatched", OtherVocabulary;
}

#[tokio::test]
async fn events_that_name_no_adapter() {
    let spec = one(|_, config| {
        config.adapters = vec!["pirate".to_owned()];
        faulty(config, FaultKind::DropAdapters);
    });
    let model = spec.model.clone() + "\nadapters: [pirate]";
    check_in(Spec { model, ..spec }, "adapter").await;
}

#[tokio::test]
async fn healthy_workers_agree_in_every_dialect_of_events() {
    for (form, hash) in [(EventForm::Map, HashForm::U64), (EventForm::Array, HashForm::Bytes32)] {
        let engine: fn(&str, &mut SimConfig) = match form {
            EventForm::Map => |_, config| config.adapters = vec!["pirate".to_owned()],
            EventForm::Array => |_, config| {
                config.adapters = vec!["pirate".to_owned()];
                config.event_form = EventForm::Array;
                config.hash_form = HashForm::Bytes32;
            },
        };
        let model = one(engine).model + "\nadapters: [pirate]";
        let cluster = Cluster::start(Spec { model, engine, ..Spec::default() }).await;
        for id in ["p0", "p1", "d0", "d1"] {
            assert_eq!(settled(&cluster, id).await, "ok", "{form:?} {hash:?} {id}");
            assert_eq!(worker(&cluster, id).await["kv_routing"], true);
        }
        let asked = cluster.metric("splitrail_canaries_total", &[("result", "ok")]).await;
        assert_eq!(asked, 4.0);
    }
}

#[tokio::test]
async fn blocks_of_any_size_are_compared() {
    let spec = one(|_, config| config.block_size = 528);
    let cluster = Cluster::start(Spec { block_size: "auto", ..spec }).await;
    assert_eq!(settled(&cluster, "w0").await, "ok");
}

#[tokio::test]
async fn an_engine_without_events_agrees_by_its_tokens() {
    let silent = |_: &str, config: &mut SimConfig| {
        config.kv_events_port = None;
        config.kv_replay_port = None;
    };
    let cluster = Cluster::start(one(silent)).await;
    assert_eq!(settled(&cluster, "w0").await, "ok");
    let other = Cluster::start(one(|_, config| {
        config.kv_events_port = None;
        config.kv_replay_port = None;
        config.dialect = PromptDialect::OtherTemplate;
    }))
    .await;
    assert_eq!(settled(&other, "w0").await, "template");
}

#[tokio::test]
async fn halves_of_pairs_agree_by_their_tokens() {
    let connector = splitrail_sim::KvConnector::Sglang;
    let model = super::support::ASKED.into();
    let spec = Spec { connector, model, prefill: 1, decode: 1, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    for id in ["p0", "d0"] {
        assert_eq!(settled(&cluster, id).await, "ok");
        let asked = cluster.engine(id).requests();
        assert!(asked.iter().all(|request| request.path == "/tokenize"), "nothing to serve alone");
    }
}
