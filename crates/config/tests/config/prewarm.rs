//! Rules about prewarming.

use std::time::Duration;

use crate::support::{only_problem, parse};

/// A configuration with a prefill and a decode worker and these keys.
fn with(keys: &str) -> String {
    format!(
        "models:\n  - name: m\n    tokenizer: {{ kind: huggingface, path: tokenizer }}\n    {keys}\n    \
         prefill: ['http://10.0.0.1:8000']\n    decode: ['http://10.0.1.1:8000']\n"
    )
}

#[test]
fn prewarming_is_off_until_it_is_switched_on() {
    let prewarm = parse(&with("peer_fetch: two_step")).unwrap().config.models[0].prewarm;
    assert!(!prewarm.enabled);
    let loaded =
        parse(&with("peer_fetch: two_step\n    prewarm: { enabled: true, memory_max: 1MiB }"))
            .unwrap();
    let prewarm = loaded.config.models[0].prewarm;
    assert!(prewarm.enabled && loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    assert_eq!((prewarm.tokens_max, prewarm.time_max), (262_144, Duration::from_secs(60)));
    assert_eq!((prewarm.fetches_max, prewarm.memory_max_bytes), (2, 1 << 20));
}

#[test]
fn a_missing_requirement_of_prewarming_is_reported_at_its_place() {
    for (keys, place, part) in [
        ("peer_fetch: off\n    prewarm: { enabled: true }", (5, 25), "needs `peer_fetch`"),
        ("connector: mooncake\n    prewarm: { enabled: true }", (5, 25), "needs `peer_fetch`"),
        (
            "peer_fetch: two_step\n    peer_fetch_max_per_worker: 2\n    prewarm: { enabled: true }",
            (6, 14),
            ".fetches_max` must be less than `peer_fetch_max_per_worker`",
        ),
    ] {
        let (line, column, told) = only_problem(&with(keys));
        assert_eq!((line, column), place, "{told}");
        assert!(told.contains("`models[0].prewarm") && told.contains(part), "{told}");
    }
}

#[test]
fn prompts_of_tenants_are_not_remembered_which_is_said() {
    let keys = "peer_fetch: two_step\n    prewarm: { enabled: true }";
    let auth = "auth: [{ kind: jwt, issuer: https://id.example, audience: a, jwks: jwks.json }]\n\
                tenants: [{ name: a }]\n";
    let loaded = parse(&format!("{auth}{}", with(keys))).unwrap();
    let warned = format!("{:?}", loaded.warnings);
    assert!(warned.contains("`models[0].prewarm` has no effect"), "{warned}");
}

#[test]
fn memory_for_what_is_remembered_leaves_room_for_requests_which_is_said() {
    let models = |memory_max: &str| {
        let model = with(&format!(
            "peer_fetch: two_step\n    prewarm: {{ enabled: true, memory_max: {memory_max} }}"
        ));
        let second = model.replace("models:\n", "").replace("name: m", "name: n");
        format!("limits: {{ request_memory_max: 64MiB }}\n{model}{second}")
    };
    assert!(parse(&models("16MiB")).unwrap().warnings.is_empty());
    let warned = format!("{:?}", parse(&models("17MiB")).unwrap().warnings);
    assert!(warned.contains("34MiB together") && warned.contains("(64MiB)"), "{warned}");
}
