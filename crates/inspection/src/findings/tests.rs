//! Findings of an inspection: each fault has exactly one, with a remedy, and a sound cluster has
//! none.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::ErrorKind;

use serde_json::{Value, json};
use splitrail_engine::EngineKind;
use splitrail_engine::identity::{EngineModel, EventSource};
use splitrail_prompt::compare::Difference;

use super::*;
use crate::facts::{
    BootstrapFact, EngineReport, EventsFact, FetchOutcome, FetchedFact, Reachability, ReplayFact,
    ShimFact, ShimStatus, SourceFact, SourcesFact, StagedFact, TokenDifference, TokensFact,
    TrialFact,
};
use crate::finding::Severity;
use crate::subject::Origin;

/// A P/D model with a tokenizer; `more` replaces members.
fn model(more: &Value) -> Model {
    let mut model = json!({
        "name": "m", "flow": "prefill_first", "connector": "nixl", "block_size": 32,
        "tokenizer": {"kind": "huggingface", "path": "/models/m"},
    });
    for (key, value) in more.as_object().unwrap() {
        model[key] = value.clone();
    }
    serde_json::from_value(model).unwrap()
}

/// The facts about a worker with which all is well.
fn worker(id: &str, role: &str) -> WorkerFacts {
    let config = serde_json::from_value(json!({
        "id": id, "role": role, "url": "http://10.0.0.1:8000",
        "kv_events": "tcp://10.0.0.1:5557", "kv_replay": "tcp://10.0.0.1:5558",
    }));
    let mut facts = WorkerFacts::new(config.unwrap(), Origin::Listed);
    let source = EventSource {
        rank: 0,
        events: "tcp://10.0.0.1:5557".parse().unwrap(),
        replay: Some("tcp://10.0.0.1:5558".parse().unwrap()),
    };
    facts.reach = Reachability::Answers;
    facts.engine = EngineReport {
        kind: EngineKind::Vllm,
        health: Some(200),
        version: Some("0.32.0".to_owned()),
        models: vec![served("m")],
        block_size: Some(32),
        ranks: Some(1),
        kv_dtype: Some("auto".into()),
        kv_layout: None,
        has_nixl: Some(true),
        sources: SourcesFact::Listed(vec![source]),
    };
    facts.clock_ahead_s = Some(-1);
    facts.events = EventsFact::Arrived;
    facts.replay = ReplayFact::Answers;
    facts.chat_tokens = TokensFact::Agree(20);
    facts.text_tokens = TokensFact::Agree(90);
    facts.trial = TrialFact::Served { reports_cached_tokens: true };
    if role != "decode" {
        facts.staged = StagedFact::Usable;
    } else {
        facts.fetched = vec![FetchedFact { from: "p0".into(), outcome: FetchOutcome::Transferred }];
    }
    facts
}

fn served(name: &str) -> EngineModel {
    EngineModel {
        name: name.to_owned(),
        context_tokens: Some(2048),
        is_adapter: false,
        root: None,
        owner: None,
    }
}

fn differ(shape: Difference) -> TokensFact {
    TokensFact::Differ(TokenDifference {
        shape,
        router_count: 20,
        engine_count: 21,
        at: 3,
        router_token: Some(7),
        engine_token: None,
        router_text: Some("<|im_end|>\nab".into()),
        engine_text: Some("<|im_end|>cd".into()),
    })
}

fn found(model: &Model, workers: Vec<WorkerFacts>) -> Vec<Finding> {
    findings(model, &ModelFacts { workers, sources: Vec::new() })
}

/// One fault in an otherwise sound pair.
struct Case {
    /// Members of the model that differ.
    model: Value,
    /// Changes the prefill worker.
    prefill: fn(&mut WorkerFacts),
    /// Changes the decode worker.
    decode: fn(&mut WorkerFacts),
    kind: FindingKind,
    /// What the finding, or its remedy, names.
    names: &'static str,
}

impl Case {
    fn prefill(kind: FindingKind, names: &'static str, change: fn(&mut WorkerFacts)) -> Self {
        Self { model: json!({}), prefill: change, decode: |_| {}, kind, names }
    }

    fn decode(kind: FindingKind, names: &'static str, change: fn(&mut WorkerFacts)) -> Self {
        Self { prefill: |_| {}, decode: change, ..Self::prefill(kind, names, |_| {}) }
    }

    fn but_prefill(self, prefill: fn(&mut WorkerFacts)) -> Self {
        Self { prefill, ..self }
    }

    fn with(self, model: Value) -> Self {
        Self { model, ..self }
    }

    fn findings(&self) -> Vec<Finding> {
        let mut workers = [worker("p0", "prefill"), worker("d0", "decode")];
        (self.prefill)(&mut workers[0]);
        (self.decode)(&mut workers[1]);
        found(&model(&self.model), workers.to_vec())
    }
}

fn reach_cases() -> Vec<Case> {
    vec![
        Case::prefill(FindingKind::Refused, "http://10.0.0.1:8000", |w| {
            let cause = "Connection refused".into();
            w.reach = Reachability::Connect { kind: ErrorKind::ConnectionRefused, cause };
        }),
        Case::prefill(FindingKind::Late, "in time", |w| w.reach = Reachability::Late),
        Case::prefill(FindingKind::Late, "no connection", |w| {
            w.reach =
                Reachability::Connect { kind: ErrorKind::TimedOut, cause: "timed out".into() };
        }),
        Case::prefill(FindingKind::Unreachable, "No route to host", |w| {
            let cause = "No route to host".into();
            w.reach = Reachability::Connect { kind: ErrorKind::HostUnreachable, cause };
        }),
        Case::prefill(FindingKind::UnknownHost, "not known", |w| {
            w.reach = Reachability::Name("Name or service not known".into());
        }),
        Case::prefill(FindingKind::OutsideNetworks, "fleet.networks", |w| {
            w.reach = Reachability::Outside
        }),
        Case::prefill(FindingKind::TlsFailed, "engine_tls", |w| {
            w.reach = Reachability::Tls("its certificate has expired".into());
        }),
        Case::prefill(FindingKind::NotHttp, "https://", |w| {
            w.reach = Reachability::NotHttp("the peer sent a head that is not HTTP".into());
        }),
        Case::prefill(FindingKind::Forbidden, "403", |w| w.reach = Reachability::Forbidden),
        Case::prefill(FindingKind::KeyRefused, "engine_api_key", |w| {
            w.reach = Reachability::KeyRefused(401)
        }),
        Case::prefill(FindingKind::NotAnEngine, "404", |w| {
            w.reach = Reachability::NotAnEngine(404)
        }),
        Case::prefill(FindingKind::NotAsked, "--timeout", |w| w.reach = Reachability::TimeOver),
    ]
}

fn identity_cases() -> Vec<Case> {
    vec![
        Case::prefill(FindingKind::Unhealthy, "503", |w| w.engine.health = Some(503)),
        Case::prefill(FindingKind::WrongModel, "`a`, `b`, not `m`", |w| {
            w.engine.models = vec![served("a"), served("b")];
        }),
        Case::prefill(FindingKind::WrongModel, "2 more", |w| {
            w.engine.models = ["a", "b", "c", "d", "e", "f", "g"].map(served).to_vec();
        }),
        Case::prefill(FindingKind::WrongModel, "no model", |w| w.engine.models = Vec::new()),
        Case::prefill(FindingKind::OtherEngine, "sglang's, and is asked as vllm", |w| {
            w.engine.models[0].owner = Some(EngineKind::Sglang);
        }),
        Case::decode(FindingKind::AdapterMissing, "lora-a", |_| {})
            .with(json!({"adapters": ["lora-a"]}))
            .but_prefill(|w| w.engine.models.push(served("lora-a"))),
        Case::prefill(FindingKind::TooOld, "0.8.5", |w| w.engine.version = Some("0.8.5".into())),
        Case::prefill(FindingKind::ClockOff, "90 s ahead", |w| w.clock_ahead_s = Some(90)),
        Case::prefill(FindingKind::ClockOff, "6 s behind", |w| w.clock_ahead_s = Some(-6)),
        Case::prefill(FindingKind::RanksDiffer, "2 data-parallel", |w| {
            w.engine.ranks = Some(2);
            w.config.data_parallel_ranks = Some(4);
        }),
        Case::prefill(FindingKind::BootstrapFails, "http://10.0.0.1:8998", |w| {
            let (url, cause) = ("http://10.0.0.1:8998".into(), "it cannot be reached".into());
            w.bootstrap = BootstrapFact::Fails { url, cause };
        })
        .with(json!({"connector": "mooncake"})),
        Case::prefill(FindingKind::BlockSizeDiffers, "block_size: 16", |w| {
            w.engine.block_size = Some(16);
        }),
        Case::prefill(FindingKind::BlockSizesDiffer, "16 (p0), 32 (d0)", |w| {
            w.engine.block_size = Some(16);
        })
        .with(json!({"block_size": "auto"})),
        Case::prefill(FindingKind::KvFormatsDiffer, "auto (d0), fp8 (p0)", |w| {
            w.engine.kv_dtype = Some("fp8".into());
        }),
        Case::prefill(FindingKind::ContextsDiffer, "1024 (p0), 2048 (d0)", |w| {
            w.engine.models[0].context_tokens = Some(1024);
        }),
        Case::prefill(FindingKind::VersionsDiffer, "0.30.1 (p0), 0.32.0 (d0)", |w| {
            w.engine.version = Some("0.30.1".into());
        }),
    ]
}

fn events_cases() -> Vec<Case> {
    vec![
        Case::prefill(FindingKind::KvEventsUnused, "--kv-events-config", |w| {
            w.config.kv_events = None;
            w.config.kv_replay = None;
            w.engine.sources = SourcesFact::None;
        }),
        Case::prefill(FindingKind::KvEventsOff, "--kv-events-config", |w| {
            w.engine.sources = SourcesFact::None;
            w.events = EventsFact::Unreachable("network: connection refused".into());
        }),
        Case::prefill(FindingKind::KvEventsOff, "not TCP", |w| {
            w.engine.sources = SourcesFact::NotTcp;
            w.events = EventsFact::Silent;
        }),
        Case::prefill(
            FindingKind::KvEventsUnreachable,
            "set `kv_events: \"tcp://10.0.0.1:5557\"`",
            |w| {
                w.config.kv_events = Some("tcp://10.0.0.1:5999".into());
                w.events = EventsFact::Unreachable("network: connection refused".into());
            },
        ),
        Case::prefill(FindingKind::KvEventsUnreachable, "bound to all interfaces", |w| {
            w.events = EventsFact::Unreachable("no reply in time".into());
        }),
        Case::prefill(FindingKind::KvEventsSilent, "tcp://10.0.0.1:5557", |w| {
            w.events = EventsFact::Silent;
        }),
        Case::prefill(FindingKind::KvEventsOfAnother, "same engine", |w| {
            w.events = EventsFact::OfAnother;
        }),
        Case::prefill(FindingKind::KvEventsUnreadable, "not a KV event", |w| {
            w.events = EventsFact::Undecodable("not a KV event message: 1 frames".into());
        }),
        Case::prefill(FindingKind::KvReplayOff, "kv_replay: \"tcp://10.0.0.1:5558\"", |w| {
            w.config.kv_replay = None;
            w.replay = ReplayFact::Untested;
        }),
        Case::prefill(FindingKind::KvReplayFails, "kv_replay: \"tcp://10.0.0.1:5558\"", |w| {
            w.config.kv_replay = Some("tcp://10.0.0.1:5999".into());
            w.replay = ReplayFact::Fails("network: connection refused".into());
        }),
        Case::prefill(FindingKind::KvReplayFails, "replay_endpoint", |w| {
            let SourcesFact::Listed(sources) = &mut w.engine.sources else { unreachable!() };
            sources[0].replay = None;
            w.replay = ReplayFact::Fails("no reply to a replay request".into());
        }),
    ]
}

fn prompt_cases() -> Vec<Case> {
    vec![
        Case::prefill(
            FindingKind::ChatDiffers,
            "token 7 of the router; around it, the engine has `<|im_end|>cd`",
            |w| {
                w.chat_tokens = differ(Difference::Other);
            },
        ),
        Case::prefill(FindingKind::ChatDiffers, "BOS", |w| {
            w.chat_tokens = differ(Difference::Ends)
        }),
        Case::prefill(FindingKind::TextDiffers, "tokenizer.path", |w| {
            w.text_tokens = differ(Difference::Other);
            w.chat_tokens = differ(Difference::Other);
        }),
        Case::prefill(FindingKind::TokensUnknown, "404", |w| {
            w.text_tokens = TokensFact::Unavailable(Some(404));
            w.chat_tokens = TokensFact::Unavailable(Some(404));
        }),
        Case::prefill(FindingKind::NoTokens, "404", |w| {
            w.text_tokens = TokensFact::Missing(Some(404));
            w.chat_tokens = TokensFact::Missing(Some(404));
        }),
        Case::prefill(FindingKind::TokenizerInexact, "no chat template", |w| {
            w.chat_tokens = TokensFact::Inexact("the model has no chat template".into());
        }),
        Case::prefill(FindingKind::DetailsOff, "--enable-prompt-tokens-details", |w| {
            w.trial = TrialFact::Served { reports_cached_tokens: false };
        }),
        Case::prefill(FindingKind::TrialFailed, "500: EngineCore died", |w| {
            w.trial = TrialFact::Refused { status: 500, message: "EngineCore died".into() };
        }),
        Case::prefill(FindingKind::TrialLate, "no reply in time", |w| {
            w.trial = TrialFact::NoReply("no reply in time".into());
        }),
    ]
}

fn hand_off_cases() -> Vec<Case> {
    vec![
        Case::prefill(FindingKind::NoHandOff, "--kv-transfer-config", |w| {
            w.staged = StagedFact::Absent
        }),
        Case::prefill(FindingKind::OtherConnector, "pull mode", |w| {
            w.staged = StagedFact::Foreign("the hand-off is not in pull mode".into());
        }),
        Case::prefill(FindingKind::HandOffHost, "`10.9.9.9`", |w| {
            w.staged = StagedFact::ForbiddenHost("10.9.9.9".into());
        }),
        Case::decode(FindingKind::HandOffFails, "from p0 fails: status 500", |w| {
            let message = "KV load failed".into();
            w.fetched[0].outcome = FetchOutcome::Refused { status: 500, message };
        }),
        Case::decode(FindingKind::HandOffFails, "no reply in time", |w| {
            w.fetched[0].outcome = FetchOutcome::NoReply("no reply in time".into());
        }),
        Case::decode(FindingKind::HandOffIgnored, "computed", |w| {
            w.fetched[0].outcome = FetchOutcome::Computed;
        }),
        Case::decode(FindingKind::HandOffUntested, "the time was over", |w| {
            w.fetched[0].outcome = FetchOutcome::Untested("the time was over");
        }),
        Case::decode(FindingKind::HandOffUntested, "no prefill worker (p0, p1)", |w| {
            w.without_source = vec!["p0".into(), "p1".into()];
        }),
        Case::prefill(
            FindingKind::HandOffUntested,
            "no decode worker (a, b, c, d and 1 more)",
            |w| {
                w.without_taker = ["a", "b", "c", "d", "e"].map(String::from).to_vec();
            },
        ),
        Case::decode(FindingKind::ConnectorUnused, "connector: nixl", |_| {})
            .but_prefill(|w| w.engine.has_nixl = Some(false))
            .with(json!({"flow": "aggregated", "connector": "none"})),
        Case::decode(FindingKind::ThresholdIgnored, "no released vLLM", |w| {
            w.supports_cache_hit_threshold = Some(false);
        })
        .with(json!({"flow": "decode_first", "gate": {"kind": "engine"}})),
        Case::decode(FindingKind::ThresholdIgnored, "supports_cache_hit_threshold", |w| {
            w.supports_cache_hit_threshold = Some(false);
            w.config.supports_cache_hit_threshold = Some(true);
        })
        .with(json!({"flow": "decode_first"})),
        Case::decode(FindingKind::NoGate, "decode-first never", |w| {
            w.supports_cache_hit_threshold = Some(false);
            w.config.kv_events = None;
            w.config.kv_replay = None;
        })
        .with(json!({"flow": "decode_first"})),
    ]
}

fn shim_cases() -> Vec<Case> {
    fn shim(w: &mut WorkerFacts, change: impl FnOnce(&mut ShimStatus)) {
        let mut status = ShimStatus {
            id: "p0".into(),
            role: "prefill".into(),
            current_ranks: 1,
            ranks: 1,
            live_routers: 2,
            routers: 2,
            ..ShimStatus::default()
        };
        change(&mut status);
        w.config.shim = true;
        w.shim = ShimFact::Reports(status);
    }
    vec![
        Case::prefill(FindingKind::NotAShim, "shim: true", |w| {
            w.config.shim = true;
            w.shim = ShimFact::Absent;
        }),
        Case::prefill(FindingKind::ShimUnready, "draining", |w| {
            shim(w, |status| status.unready = Some("draining".into()));
        }),
        Case::prefill(FindingKind::ShimMismatch, "`p1`", |w| {
            shim(w, |status| status.id = "p1".into())
        }),
        Case::prefill(FindingKind::ShimMirrorStale, "0 of 1 ranks", |w| {
            shim(w, |status| status.current_ranks = 0);
        }),
        Case::prefill(FindingKind::ShimDetached, "1 of 2 routers: wrong token", |w| {
            shim(w, |status| {
                status.live_routers = 1;
                status.router_error = Some("wrong token".into());
            });
        }),
    ]
}

fn cases() -> Vec<Case> {
    let groups = [
        reach_cases(),
        identity_cases(),
        events_cases(),
        prompt_cases(),
        hand_off_cases(),
        shim_cases(),
    ];
    groups.into_iter().flatten().collect()
}

fn source_findings() -> Vec<Finding> {
    let source = |state| SourceFact { name: "dns:engines:8000".into(), state };
    let states = [
        SourceState::Found(0),
        SourceState::Failed("no reply".into()),
        SourceState::NotAsked,
        SourceState::Found(3),
    ];
    let facts = ModelFacts { workers: Vec::new(), sources: states.map(source).to_vec() };
    findings(&model(&json!({})), &facts)
}

#[test]
fn a_sound_cluster_has_no_findings() {
    for more in [
        json!({}),
        json!({"flow": "decode_first"}),
        json!({"block_size": "auto"}),
        json!({"tokenizer": {"kind": "none"}}),
    ] {
        let workers = vec![worker("p0", "prefill"), worker("d0", "decode")];
        assert_eq!(found(&model(&more), workers), [], "{more}");
    }
}

#[test]
fn each_fault_has_one_finding_that_names_what_matters() {
    for case in cases() {
        let findings = case.findings();
        let of_kind = findings.iter().filter(|finding| finding.kind == case.kind);
        let [finding] = of_kind.collect::<Vec<_>>()[..] else {
            panic!("{:?}: {findings:#?}", case.kind);
        };
        let text = format!("{} {}", finding.what, finding.remedy);
        assert!(text.contains(case.names), "{:?}: {text}", case.kind);
        // One fault may be seen from two sides; what was found must never be more serious.
        let worst = findings.iter().map(|finding| finding.severity).max();
        assert_eq!(worst, Some(case.kind.severity()), "{:?}: {findings:#?}", case.kind);
    }
}

#[test]
fn every_kind_of_finding_occurs_has_a_remedy_and_is_explained_in_the_guide() {
    let guide = include_str!("../../../../docs/guides/check-a-cluster.md");
    let of_cases = cases().into_iter().flat_map(|case| case.findings());
    let all: Vec<Finding> = of_cases.chain(source_findings()).collect();
    let kinds: BTreeSet<FindingKind> = all.iter().map(|finding| finding.kind).collect();
    for kind in FindingKind::ALL {
        assert!(kinds.contains(kind), "{kind:?} does not occur");
        let row = guide.lines().find(|line| line.starts_with(&format!("| `{}` |", kind.name())));
        let row = row.unwrap_or_else(|| panic!("the guide does not explain {}", kind.name()));
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 4, "{row}");
        assert_eq!(cells[1], kind.severity().name(), "{row}");
        assert!(cells[2].len() > 20 && cells[3].len() > 10, "{row}");
    }
    for finding in &all {
        assert!(finding.remedy.len() > 10 && finding.what.len() > 10, "{finding:?}");
        assert!(!finding.remedy.contains('\n'), "{finding:?}");
    }
    let severities = [Severity::Fault, Severity::Warning, Severity::Note];
    let is_row = |line: &&str| {
        severities.iter().any(|severity| line.contains(&format!("` | {} |", severity.name())))
    };
    let rows = guide.lines().filter(is_row).count();
    assert_eq!(rows, FindingKind::ALL.len(), "the guide explains findings that do not exist");
}

#[test]
fn a_worker_that_does_not_answer_has_no_further_findings() {
    for case in reach_cases() {
        assert_eq!(case.findings().len(), 1, "{:?}", case.kind);
    }
}

#[test]
fn without_a_tokenizer_kv_events_are_not_missed() {
    let mut facts = worker("p0", "prefill");
    facts.config.kv_events = None;
    facts.engine.sources = SourcesFact::None;
    let none = model(&json!({"tokenizer": {"kind": "none"}}));
    assert_eq!(found(&none, vec![facts]), []);
}

#[test]
fn kv_events_of_a_decode_engine_that_has_no_cache_are_not_missed() {
    let mut facts = worker("d0", "decode");
    facts.config.kv_events = None;
    facts.config.kv_replay = None;
    facts.engine.sources = SourcesFact::None;
    facts.fetched = Vec::new();
    let sglang = model(&json!({"connector": "sglang", "on_no_prefill": "fail"}));
    assert_eq!(found(&sglang, vec![facts]), []);
}

#[test]
fn the_template_is_not_blamed_for_another_vocabulary() {
    let mut facts = worker("p0", "prefill");
    facts.text_tokens = differ(Difference::Other);
    facts.chat_tokens = differ(Difference::Other);
    let kinds: Vec<FindingKind> =
        found(&model(&json!({})), vec![facts]).iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::TextDiffers]);
}

#[test]
fn findings_are_ordered_by_how_much_they_matter() {
    assert!(Severity::Fault > Severity::Warning && Severity::Warning > Severity::Note);
}
