//! Rules about peer fetches.

use std::time::Duration;

use crate::support::{only_problem, parse};
use splitrail_config::model::{KvLoadFailurePolicy, PeerFetch};

/// A configuration with a prefill and a decode worker and these keys.
fn with(keys: &str) -> String {
    format!(
        "models:\n  - name: m\n    tokenizer: {{ kind: huggingface, path: tokenizer }}\n    {keys}\n    \
         prefill: ['http://10.0.0.1:8000']\n    decode: ['http://10.0.1.1:8000']\n"
    )
}

#[test]
fn workers_fetch_by_default_where_they_can() {
    for (keys, fetches) in [
        ("migrate: false", true),
        ("peer_fetch: off", false),
        ("connector: mooncake", false),
        ("policy: { kind: kv_overlap }", false),
        ("flow: aggregated", false),
    ] {
        let loaded = parse(&with(keys)).unwrap();
        assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
        assert_eq!(loaded.config.models[0].fetches_prefixes(), fetches, "{keys}");
    }
    let loaded = parse(&with("peer_fetch: two_step")).unwrap();
    let model = &loaded.config.models[0];
    assert_eq!(model.peer_fetch, PeerFetch::TwoStep);
    assert_eq!((model.peer_fetch_min_tokens, model.peer_fetch_max_per_worker), (256, 4));
    assert_eq!(model.timeouts.peer_fetch, Duration::from_secs(5));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let aggregated = "peer_fetch: two_step\n    flow: aggregated\n    connector: nixl";
    assert_eq!(parse(&with(aggregated)).unwrap().config.models[0].peer_fetch, PeerFetch::TwoStep);
}

#[test]
fn one_shot_needs_the_engines_policy_on_failures_written_down() {
    let model = &parse(&with("peer_fetch: two_step")).unwrap().config.models[0];
    assert_eq!(model.kv_load_failure_policy, None);
    let loaded = parse(&with("peer_fetch: one_shot\n    kv_load_failure_policy: fail")).unwrap();
    let model = &loaded.config.models[0];
    assert_eq!(model.peer_fetch, PeerFetch::OneShot);
    assert_eq!(model.kv_load_failure_policy, Some(KvLoadFailurePolicy::Fail));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
}

#[test]
fn a_missing_requirement_of_peer_fetch_is_reported_at_its_place() {
    for (keys, part) in [
        ("connector: mooncake", "needs `connector: nixl`"),
        ("policy: { kind: kv_overlap }", "needs `policy: { kind: predicted_ttft }`"),
        ("flow: aggregated", "needs `connector: nixl`"),
    ] {
        let text = with(&format!("peer_fetch: two_step\n    {keys}"));
        let (line, column, told) = only_problem(&text);
        assert_eq!((line, column), (4, 17), "{told}");
        assert!(told.contains(&format!("`models[0].peer_fetch` {part}")), "{told}");
    }
    for declared in ["", "\n    kv_load_failure_policy: recompute"] {
        let (line, column, told) = only_problem(&with(&format!("peer_fetch: one_shot{declared}")));
        assert_eq!((line, column), (4, 17), "{told}");
        assert!(told.contains("which needs `kv_load_failure_policy: fail`"), "{told}");
    }
}
