//! What an engine reports about itself, from recorded answers.

use crate::support::{fixture_text, sglang_fixture};
use proptest::prelude::*;
use splitrail_engine::EngineKind::{Sglang, Vllm};
use splitrail_engine::identity::{SourcesError, Trial, TrialOutcome, of_all_ranks};

/// The body of a recorded answer.
fn body(name: &str) -> String {
    let text = fixture_text(name);
    let (_, reply) = text.rsplit_once("HTTP").unwrap();
    reply[reply.find('{').unwrap()..].to_owned()
}

#[test]
fn version_and_model_are_as_the_engine_lists_them() {
    assert_eq!(Vllm.version(&body("identity/version.txt")).as_deref(), Some("0.32.0"));
    let model = Vllm.served_model(&body("identity/v1_models.txt")).unwrap();
    assert_eq!((model.name.as_str(), model.context_tokens), ("tiny", Some(2048)));
    for text in ["", "{}", r#"{"version":""}"#, r#"{"version":"a\nb"}"#, r#"{"version":1}"#] {
        assert_eq!(Vllm.version(text), None, "{text}");
    }
}

#[test]
fn an_adapter_is_not_the_model() {
    let text = r#"{"data":[{"id":"lora","parent":"m"},{"id":"m","parent":null}]}"#;
    assert_eq!(Vllm.served_model(text).unwrap().name, "m");
    assert_eq!(Vllm.served_model(r#"{"data":[]}"#), None);
}

#[test]
fn a_bound_wildcard_address_is_reached_at_the_engines_host() {
    let sources = Vllm.event_sources(&body("identity/kv_event_sources.txt"), "10.0.0.1").unwrap();
    assert_eq!(sources.len(), 1);
    assert_eq!(sources[0].rank, 0);
    assert_eq!(sources[0].events.to_string(), "tcp://10.0.0.1:15557");
    assert_eq!(sources[0].replay.as_ref().unwrap().to_string(), "tcp://10.0.0.1:15558");
    let quiet = r#"{"0":{"enable_kv_cache_events":false,"publisher":"null"}}"#;
    assert_eq!(Vllm.event_sources(quiet, "h").unwrap(), []);
    let local = r#"{"3":{"enable_kv_cache_events":true,"endpoint":"ipc:///x"}}"#;
    assert_eq!(Vllm.event_sources(local, "h"), Err(SourcesError::Endpoint { rank: 3 }));
    assert_eq!(Vllm.event_sources("[]", "h"), Err(SourcesError::Shape));
}

#[test]
fn an_sglang_engine_says_its_version_model_and_publisher() {
    let text = |name: &str| String::from_utf8(sglang_fixture(name)).unwrap();
    let info = text("server_info.json");
    assert_eq!(Sglang.version(&info).as_deref(), Some("0.5.23"));
    let model = Sglang.served_model(&text("v1_models.json")).unwrap();
    assert_eq!((model.name.as_str(), model.context_tokens), ("tiny", Some(8192)));
    assert_eq!(model.owner, Some(Sglang));
    let places = |info: &str| -> Vec<_> {
        let sources = Sglang.event_sources(info, "10.0.0.1").unwrap();
        sources.iter().map(|source| (source.rank, source.events.to_string())).collect()
    };
    assert_eq!(places(&info), [(0, "tcp://10.0.0.1:30000".to_owned())]);
    let ranks = info.replace(r#""dp_size": 1"#, r#""dp_size": 2"#);
    assert_eq!(places(&ranks)[1], (1, "tcp://10.0.0.1:30001".to_owned()));
    // As of an engine that was started with a `replay_endpoint`.
    let replayed =
        ranks.replace(r#""topic": "","#, r#""topic": "", "replay_endpoint_port_base": 30010,"#);
    let sources = Sglang.event_sources(&replayed, "h").unwrap();
    let replays: Vec<_> =
        sources.iter().map(|one| one.replay.as_ref().unwrap().to_string()).collect();
    assert_eq!(replays, ["tcp://h:30010", "tcp://h:30011"]);
    assert_eq!(places(&text("decode_server_info.json")), [], "it has no prefix cache");
    assert_eq!(places("{}"), []);
    let beyond = ranks.replace("30000", "65535");
    for invalid in ["[]", &beyond] {
        assert_eq!(Sglang.event_sources(invalid, "h"), Err(SourcesError::Shape));
    }
}

#[test]
fn ranks_that_are_not_listed_publish_on_the_next_ports() {
    let listed = Vllm.event_sources(&body("identity/kv_event_sources.txt"), "[::1]").unwrap();
    let all = of_all_ranks(&listed, 3);
    let places: Vec<_> =
        all.iter().map(|source| (source.rank, source.events.to_string())).collect();
    let expected = ["tcp://[::1]:15557", "tcp://[::1]:15558", "tcp://[::1]:15559"];
    assert_eq!(places, (0..3).zip(expected.map(str::to_owned)).collect::<Vec<_>>());
    let mut own = all.clone();
    own[1].events = "tcp://other:1".parse().unwrap();
    assert_eq!(of_all_ranks(&own, 3), own, "what is listed counts");
    assert_eq!(of_all_ranks(&[], 3), []);
}

#[test]
fn the_recorded_engine_ignores_a_threshold_and_knows_its_ranks() {
    let ignored = body("identity/cache_hit_threshold.txt");
    let outcome = Trial::Threshold.read(200, ignored.as_bytes()).unwrap();
    assert_eq!(outcome.supports_cache_hit_threshold, Some(false));
    let refused = body("identity/rank_out_of_range.txt");
    let outcome = Trial::Rank.read(400, refused.as_bytes()).unwrap();
    assert_eq!(outcome.takes_rank_header, Some(true));
    let other = Trial::Rank.read(400, br#"{"error":{"message":"no completions here"}}"#).unwrap();
    assert_eq!(other.takes_rank_header, None, "refused for something else");
    let detailed = body("http/completion_cold.txt");
    let outcome = Trial::Usage.read(200, detailed.as_bytes()).unwrap();
    assert_eq!(outcome.reports_cached_tokens, Some(true));
    let bare = body("http/A_cold_nodetailsflag.txt");
    let outcome = Trial::Usage.read(200, bare.as_bytes()).unwrap();
    assert_eq!(outcome.reports_cached_tokens, Some(false));
}

#[test]
fn a_refused_threshold_shows_nothing_about_usage() {
    let reply = br#"{"choices":[{"finish_reason":"cache_threshold"}],"usage":{"prompt_tokens":9}}"#;
    let expected =
        TrialOutcome { supports_cache_hit_threshold: Some(true), ..TrialOutcome::default() };
    assert_eq!(Trial::Threshold.read(200, reply), Some(expected));
    assert_eq!(Trial::Threshold.read(412, b""), Some(expected));
}

#[test]
fn a_trial_is_repeated_if_the_reply_says_nothing_about_the_engine() {
    for trial in [Trial::Threshold, Trial::Usage, Trial::Rank] {
        for status in [401, 429, 500, 503] {
            assert_eq!(trial.read(status, b"{}"), None);
        }
        assert_eq!(trial.read(200, b"no JSON"), None);
    }
}

proptest! {
    #[test]
    fn no_reply_of_an_engine_causes_a_panic(text in any::<String>(), status in 100_u16..600) {
        for engine in [Vllm, Sglang] {
            let _read = (engine.version(&text), engine.served_model(&text));
            let _sources = engine.event_sources(&text, "h");
        }
        for trial in [Trial::Threshold, Trial::Usage, Trial::Rank] {
            let _outcome = trial.read(status, text.as_bytes());
        }
    }
}
