//! Engines that answer, and are not what the configuration says: one respect each.

use splitrail_sim::{Fault, FaultKind, PromptDialect, SimConfig, SimEngine, UsageReport};

use super::support::{Checked, Pair, checked, checked_with, config, decode, prefill, worker};

/// Checks a pair whose prefill engine has other settings.
async fn with(change: impl FnOnce(SimConfig) -> SimConfig) -> (Checked, Pair) {
    let pair = Pair::of(change(prefill()), decode()).await;
    (checked(&pair.yaml()).await, pair)
}

fn fault(kind: FaultKind) -> Fault {
    Fault { kind, times: None }
}

#[tokio::test]
async fn a_sound_pair_has_no_findings_and_all_facts() {
    let pair = Pair::sound().await;
    let result = checked(&pair.yaml()).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    assert_eq!(result.json["ok"], true);
    for id in ["p0", "d0"] {
        let facts = result.facts(id);
        assert_eq!(facts["version"], "0.32.0");
        assert_eq!(facts["block_size"], 16);
        for fact in [
            "reached",
            "kv_events_arrive",
            "kv_events_replayed",
            "reports_cached_tokens",
            "chat_tokens_agree",
            "text_tokens_agree",
        ] {
            assert_eq!(facts[fact], true, "{fact}");
        }
    }
    assert_eq!(result.facts("d0")["hand_offs"][0]["from"], "p0");
    assert_eq!(result.facts("d0")["hand_offs"][0]["works"], true);
    // Nothing stays pinned, and each question can be recognised.
    assert_eq!(pair.prefill.state().staged_hand_offs, 0);
    for request in pair.prefill.requests().iter().chain(&pair.decode.requests()) {
        let id = request.header("x-request-id").unwrap_or_default();
        assert!(id.starts_with("splitrail-check-"), "{request:?}");
    }
}

#[tokio::test]
async fn engines_are_asked_for_keys_that_a_file_omits() {
    let pair = Pair::sound().await;
    let (prefill, decode) = (pair.prefill.url(), pair.decode.url());
    let yaml = format!(
        "listen: {{ http: 127.0.0.1:0, admin: 127.0.0.1:0 }}
models:
  - name: sim
    tokenizer: .
    prefill: [\"{prefill}\"]
    decode: [\"{decode}\"]
"
    );
    let result = checked(&yaml).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]), "{:#}", result.json);
    for (id, engine) in [("p0", &pair.prefill), ("d0", &pair.decode)] {
        let facts = result.facts(id);
        assert_eq!(facts["kv_events_arrive"], true);
        assert_eq!(facts["kv_events_replayed"], true);
        assert_eq!(facts["kv_events"].as_str(), engine.kv_events_endpoint());
        assert_eq!(facts["kv_replay"].as_str(), engine.kv_replay_endpoint());
        assert_eq!(facts["connector"], "nixl");
    }
    let off = SimConfig { kv_events_port: None, kv_replay_port: None, ..super::support::prefill() };
    let off = SimEngine::start(off).await.unwrap();
    let result = checked(&yaml.replace(&prefill, &off.url())).await;
    assert!(result.only("p0", "kv_events_unused").contains("--kv-events-config"));
    assert_eq!(result.facts("p0")["kv_events"], serde_json::Value::Null);
}

#[tokio::test]
async fn a_finding_names_the_other_model_that_an_engine_serves() {
    let (result, _pair) = with(|config| SimConfig { model: "qwen".into(), ..config }).await;
    assert!(result.only("p0", "wrong_model").contains("serves `qwen`, not `sim`"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn an_engine_without_kv_events_is_distinguished_from_a_wrong_address() {
    let (result, pair) = with(|config| config).await;
    assert_eq!(result.code, Some(0));
    let right = pair.prefill.kv_events_endpoint().unwrap().to_owned();
    let replay = pair.prefill.kv_replay_endpoint().unwrap().to_owned();

    // The port of the replay is another kind of socket.
    let mixed = pair.yaml().replacen(&right, &replay, 1);
    let words = checked(&mixed).await.only("p0", "kv_events_unreachable");
    assert!(words.contains(&format!("set `kv_events: \"{right}\"`")), "{words}");

    let off = SimConfig { kv_events_port: None, kv_replay_port: None, ..prefill() };
    let off = SimEngine::start(off).await.unwrap();
    let worker_off = format!(
        "{{ id: p0, role: prefill, url: \"{}\", kv_events: \"{right}\", kv_replay: \"{replay}\" }}",
        off.url()
    );
    let yaml = config("block_size: 16", &[worker_off, worker("d0", "decode", &pair.decode)]);
    let result = checked(&yaml).await;
    assert!(result.words("kv_events_off").contains("--kv-events-config"));
}

#[tokio::test]
async fn missing_and_unreadable_kv_events_are_distinguished() {
    for (kind, finding) in [
        (FaultKind::DropEventBatches, "kv_events_silent"),
        (FaultKind::GarbageEvents, "kv_events_unreadable"),
    ] {
        let faults = vec![fault(kind)];
        let (result, _pair) = with(|config| SimConfig { faults, ..config }).await;
        result.only("p0", finding);
        assert_eq!(result.code, Some(69));
    }
}

#[tokio::test]
async fn a_missing_replay_is_a_warning_and_a_wrong_one_a_fault() {
    let pair = Pair::sound().await;
    let replay = pair.prefill.kv_replay_endpoint().unwrap();
    let without = pair.yaml().replace(&format!(", kv_replay: \"{replay}\""), "");
    let result = checked(&without).await;
    let words = result.only("p0", "kv_replay_off");
    assert!(words.contains(&format!("kv_replay: \"{replay}\"")), "{words}");
    assert_eq!(result.code, Some(0));
    assert_eq!(checked_with(&without, &["--strict"]).await.code, Some(69));

    let events = pair.prefill.kv_events_endpoint().unwrap();
    let wrong = pair.yaml().replacen(
        &format!("kv_replay: \"{replay}\""),
        &format!("kv_replay: \"{events}\""),
        1,
    );
    let result = checked(&wrong).await;
    assert!(result.only("p0", "kv_replay_fails").contains(replay));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn an_engine_that_does_not_report_cached_tokens_is_a_warning() {
    let (result, _pair) =
        with(|config| SimConfig { usage_report: UsageReport::Null, ..config }).await;
    assert!(result.only("p0", "details_off").contains("--enable-prompt-tokens-details"));
    assert_eq!(result.code, Some(0));
    assert_eq!(result.facts("p0")["reports_cached_tokens"], false);
}

#[tokio::test]
async fn an_engine_whose_tokens_the_router_relies_on_must_have_the_endpoint() {
    let pair = Pair::of(SimConfig { offers_tokenize: false, ..prefill() }, decode()).await;
    let result = checked(&pair.yaml_with("tokenizer: engine")).await;
    assert!(result.only("p0", "no_tokens").contains("vLLM always has it"));
    assert_eq!(result.code, Some(69));
}

#[tokio::test]
async fn block_sizes_must_be_the_configured_one_and_equal() {
    let pair = Pair::of(SimConfig { block_size: 32, ..prefill() }, decode()).await;
    let result = checked(&pair.yaml()).await;
    assert!(result.words("block_size_differs").contains("block_size: 32"));
    let kinds = [(Some("p0"), "block_size_differs"), (None, "block_sizes_differ")];
    assert!(kinds.iter().all(|kind| result.kinds().contains(kind)), "{:#}", result.json);
    let result = checked(&pair.yaml_with("block_size: auto")).await;
    assert!(result.words("block_sizes_differ").contains("16 (d0), 32 (p0)"));
    assert_eq!(result.code, Some(69));
    assert!(result.words("hand_off_untested").contains("block size"));
    // A hand-off between them would have ended the decode engine.
    let totals = pair.decode.state().totals;
    assert_eq!(totals.hand_offs_misused, 0);
}

#[tokio::test]
async fn versions_that_differ_between_the_pools_are_a_warning() {
    let (result, _pair) = with(|config| SimConfig { version: "0.30.1".into(), ..config }).await;
    assert_eq!(result.kinds(), [(None, "versions_differ")]);
    assert!(result.words("versions_differ").contains("0.30.1 (p0), 0.32.0 (d0)"));
    let old = || "0.8.5".to_owned();
    let pair = Pair::of(
        SimConfig { version: old(), ..prefill() },
        SimConfig { version: old(), ..decode() },
    );
    let result = checked(&pair.await.yaml()).await;
    assert_eq!(result.kinds(), [(Some("p0"), "too_old"), (Some("d0"), "too_old")]);
}

#[tokio::test]
async fn another_template_vocabulary_or_special_token_is_found() {
    for (dialect, finding, words) in [
        (PromptDialect::OtherTemplate, "chat_differs", "chat template"),
        (PromptDialect::OtherVocabulary, "text_differs", "tokenizer.path"),
        (PromptDialect::Bos, "text_differs", "BOS"),
    ] {
        let (result, _pair) = with(|config| SimConfig { dialect, ..config }).await;
        let said = result.words(finding);
        assert!(said.contains(words) && said.contains("first difference"), "{said}");
        assert_eq!(result.code, Some(69), "{dialect:?}");
    }
}

#[tokio::test]
async fn an_engine_that_does_not_say_its_tokens_is_a_note() {
    let (result, _pair) = with(|config| SimConfig { offers_tokenize: false, ..config }).await;
    result.only("p0", "tokens_unknown");
    assert_eq!(result.code, Some(0));
    let strict = checked_with(&_pair.yaml(), &["--strict"]).await;
    assert_eq!(strict.code, Some(0), "a note is no warning");
}

#[tokio::test]
async fn a_clock_that_is_off_is_a_warning() {
    for (ahead_s, words) in [(120, "ahead of"), (-120, "behind")] {
        let (result, _pair) = with(|config| SimConfig { clock_ahead_s: ahead_s, ..config }).await;
        assert!(result.only("p0", "clock_off").contains(words));
    }
}

#[tokio::test]
async fn a_gate_of_engines_that_ignore_thresholds_is_a_fault() {
    let ignores = |config: SimConfig| SimConfig { honour_threshold: false, ..config };
    let pair = Pair::of(ignores(prefill()), ignores(decode())).await;
    let keys = "block_size: 16\nflow: decode_first\ngate: { kind: engine }";
    let result = checked(&pair.yaml_with(keys)).await;
    assert!(result.only("d0", "threshold_ignored").contains("gate: { kind: auto }"));
    assert_eq!(result.facts("d0")["supports_cache_hit_threshold"], false);
    // The router's own gate needs nothing of the engine.
    let result = checked(&pair.yaml_with("block_size: 16\nflow: decode_first")).await;
    assert_eq!((result.code, result.kinds()), (Some(0), vec![]));
}

#[tokio::test]
async fn an_engine_that_fails_is_reported_with_its_message() {
    let faults = vec![fault(FaultKind::Status { status: 500 })];
    let (result, _pair) = with(|config| SimConfig { faults, ..config }).await;
    let words = result.words("trial_failed");
    assert!(words.contains("status 500: A fault was injected."), "{words}");
    let (result, pair) = with(|config| config).await;
    assert_eq!(result.code, Some(0));
    pair.decode.die();
    let result = checked(&pair.yaml()).await;
    assert!(result.kinds().contains(&(Some("d0"), "unhealthy")), "{:#}", result.json);
}
