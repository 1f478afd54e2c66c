//! All combinations of flow, hand-off, gate, endpoint and form of request: the text is that of one
//! engine alone, the usage adds up, and no state is left behind.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, KvConnector, SimConfig};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::dialect::{self, MESSAGES, RESPONSES};
use splitrail_tests::trial::{CHAT, COMPLETIONS, GENERATE, Trial, generated_ids, token_ids};
use splitrail_tests::{Client, Cluster, Spec};

const FLOWS: [&str; 4] = ["aggregated", "prefill_first", "decode_first", "auto"];

/// A hand-off costs as much as 100 tokens computed on a decode worker.
const COSTS: &str = "costs: { prefill_us_per_token: 50, hand_off_base_ms: 20 }";

/// What a request says of its threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Threshold {
    None,
    Hit,
    Miss,
    Invalid,
}

const THRESHOLDS: [Threshold; 4] =
    [Threshold::None, Threshold::Hit, Threshold::Miss, Threshold::Invalid];

/// One way to ask.
#[derive(Clone, Copy, Debug)]
struct Case {
    path: &'static str,
    stream: bool,
    n: u64,
    threshold: Threshold,
}

/// All ways to ask engines of this connector.
fn cases(connector: KvConnector) -> Vec<Case> {
    let mut cases = Vec::new();
    for path in [CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES] {
        let named = dialect::BOTH.contains(&path);
        if path == GENERATE && connector == KvConnector::Sglang {
            continue;
        }
        for stream in [false, true] {
            for n in [1, 3] {
                if named && n > 1 {
                    continue;
                }
                for threshold in THRESHOLDS {
                    cases.push(Case { path, stream, n, threshold });
                }
            }
        }
    }
    cases
}

impl Case {
    /// A request of its own, but for a beginning that all share.
    fn body(self, own: usize) -> Value {
        let text = format!("{}{own}", "what they all begin with ".repeat(12));
        let mut body = json!({"model": "sim", "max_tokens": 5, "temperature": 0, "n": self.n});
        match self.path {
            RESPONSES | MESSAGES => body = dialect::request(self.path, &text, 5),
            CHAT => body["messages"] = json!([{"role": "user", "content": text}]),
            COMPLETIONS => body["prompt"] = text.into(),
            _ => {
                let ids = [token_ids(200, 0), token_ids(40, own as u32 + 1)].concat();
                let sampling_params = json!({"max_tokens": 5, "temperature": 0, "n": self.n});
                body =
                    json!({"model": "sim", "token_ids": ids, "sampling_params": sampling_params});
            }
        }
        if self.stream {
            body["stream"] = true.into();
        }
        if self.stream && !dialect::BOTH.contains(&self.path) {
            body["stream_options"] = json!({"include_usage": true});
        }
        match self.threshold {
            Threshold::None => {}
            Threshold::Hit => body["cache_hit_threshold"] = json!(0.1),
            Threshold::Miss => body["cache_hit_threshold"] = json!(1.0),
            Threshold::Invalid => body["cache_hit_threshold"] = json!(1.5),
        }
        body
    }
}

/// Texts of all choices, and the usage.
async fn ask(http: &Client, case: Case, body: &Value) -> (Vec<String>, Value) {
    if dialect::BOTH.contains(&case.path) {
        let (text, usage) = dialect::ask(http, case.path, body).await;
        return (vec![text], usage);
    }
    if case.stream {
        let mut events = http.stream(case.path, body).await;
        assert_eq!(events.status, 200, "{case:?}");
        let chunks = events.chunks().await;
        assert!(!format!("{chunks:?}").contains("cache_threshold"), "{case:?}");
        let usage = chunks.last().unwrap()["usage"].clone();
        let said = |index| match case.path {
            GENERATE => format!("{:?}", generated_ids(&chunks, index)),
            _ => streamed_text(&chunks, index),
        };
        return ((0..case.n).map(said).collect(), usage);
    }
    let reply = http.post(case.path, body).await;
    assert_eq!(reply.status, 200, "{case:?}: {}", reply.text());
    assert!(!reply.text().contains("cache_threshold"), "{case:?}");
    let reply = reply.json();
    let said = |index| match case.path {
        GENERATE => format!("{:?}", generated_ids(std::slice::from_ref(&reply), index)),
        _ => whole_text(&reply, index as usize),
    };
    ((0..case.n).map(said).collect(), reply["usage"].clone())
}

/// Prefill legs that engines got so far.
fn prefills(trial: &Trial) -> usize {
    let prefill = trial.cluster.engines.iter().filter(|(name, _)| name.starts_with('p'));
    // Each engine was asked once whether it honours thresholds.
    let asked = prefill.flat_map(|(name, _)| trial.asked(name));
    asked.filter(|seen| seen.body["prompt"] != "splitrail").count()
}

fn spec(flow: &'static str, connector: KvConnector, engine: fn(&str, &mut SimConfig)) -> Spec {
    match flow {
        "aggregated" => Spec { engine, ..Spec::aggregated(2) },
        // So that some prompts are handed over, and some are not.
        "auto" => Spec { flow, connector, engine, model: COSTS.into(), ..Spec::default() },
        _ => Spec { flow, connector, engine, ..Spec::default() },
    }
}

fn supporting(_: &str, _: &mut SimConfig) {}

fn ignoring(_: &str, config: &mut SimConfig) {
    config.honour_threshold = false;
}

/// What the router counted of prompts, by leg, against what it told: each leg of a
/// completed prompt sums to it.
async fn sums_add_up(trial: &Trial, told: &Told, connector: KvConnector) {
    let metric = "splitrail_prompt_tokens_total";
    let decode = trial.cluster.metric(metric, &[("leg", "decode")]).await;
    let prompts = trial.cluster.metric("splitrail_usage_prompt_tokens_total", &[]).await;
    assert_eq!(prompts, told.prompt_tokens as f64);
    if connector != KvConnector::Sglang {
        assert_eq!(decode, prompts, "every prompt is on a decode leg");
    }
    assert!(decode >= prompts, "each sample of SGLang's has legs of its own");
    let transferred = [("leg", "decode"), ("source", "external_kv_transfer")];
    let prefill = trial.cluster.metric(metric, &[("leg", "prefill")]).await;
    assert!(trial.cluster.metric(metric, &transferred).await <= prefill);
    let cached = trial.cluster.metric("splitrail_cached_tokens_total", &[]).await;
    assert_eq!(cached, told.cached_tokens as f64);
    let generated = trial.cluster.metric("splitrail_generation_tokens_total", &[]).await;
    assert_eq!(generated, told.completion_tokens as f64);
}

#[derive(Default)]
struct Told {
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}

impl Told {
    fn add(&mut self, usage: &Value, case: Case) {
        let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{case:?}: {usage}"));
        let prompt = count(&usage["prompt_tokens"]);
        let cached = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        let completion = count(&usage["completion_tokens"]);
        assert!(cached < prompt, "{case:?}: {usage}");
        assert_eq!(count(&usage["total_tokens"]), prompt + completion);
        assert_eq!(completion, 5 * case.n, "{case:?}: {usage}");
        self.prompt_tokens += prompt;
        self.cached_tokens += cached;
        self.completion_tokens += completion;
    }
}

async fn every_case(flow: &'static str, connector: KvConnector, engine: fn(&str, &mut SimConfig)) {
    let mut trial = Trial::start(spec(flow, connector, engine)).await;
    let reference = Cluster::start(Spec::aggregated(1)).await;
    let mut told = Told::default();
    for (turn, case) in cases(connector).into_iter().enumerate() {
        trial.cluster.settle().await;
        let body = case.body(turn);
        if case.threshold == Threshold::Invalid {
            let reply = trial.post("invalid_request", case.path, &body).await;
            assert_eq!(reply.status, 400, "{flow} {case:?}");
            continue;
        }
        // Each sample of SGLang's is a pair of its own.
        let pairs = if connector == KvConnector::Sglang { case.n as usize } else { 1 };
        let staged = prefills(&trial);
        trial.expect("ok");
        let (texts, usage) = ask(&trial.cluster.http, case, &body).await;
        let mut alone = body.clone();
        alone.as_object_mut().unwrap().remove("cache_hit_threshold");
        let (expected, _) = ask(&reference.http, case, &alone).await;
        assert_eq!(texts, expected, "{flow} {connector:?} {case:?}");
        let staged = prefills(&trial) - staged;
        assert!(staged <= pairs, "{flow} {connector:?} {case:?}: prefilled twice");
        told.add(&usage, case);
    }
    sums_add_up(&trial, &told, connector).await;
    assert_eq!(
        prefills(&trial) > 0,
        flow != "aggregated",
        "{flow} {connector:?}: the way that was meant"
    );
    let wasted = trial.cluster.metric("splitrail_wasted_prompt_tokens_total", &[]).await;
    assert_eq!(wasted, 0.0, "nothing failed");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn every_flow_gives_one_engines_reply_over_nixl() {
    for flow in FLOWS {
        every_case(flow, KvConnector::Nixl, supporting).await;
    }
}

#[tokio::test]
async fn every_flow_gives_one_engines_reply_over_shared_storage() {
    for flow in FLOWS {
        every_case(flow, KvConnector::SharedStorage, supporting).await;
    }
}

#[tokio::test]
async fn every_flow_gives_one_engines_reply_over_mooncake() {
    for flow in FLOWS {
        every_case(flow, KvConnector::Mooncake, supporting).await;
    }
}

#[tokio::test]
async fn every_flow_gives_one_engines_reply_over_nixl_push() {
    for flow in FLOWS {
        every_case(flow, KvConnector::NixlPush, supporting).await;
    }
}

#[tokio::test]
async fn prefill_first_gives_one_engines_reply_over_sglang() {
    every_case("prefill_first", KvConnector::Sglang, ignoring).await;
}

#[tokio::test]
async fn every_flow_gives_one_engines_reply_if_engines_ignore_thresholds() {
    for flow in FLOWS {
        every_case(flow, KvConnector::Nixl, ignoring).await;
    }
}

#[tokio::test]
async fn other_connectors_give_one_engines_reply_if_engines_ignore_thresholds() {
    for connector in [KvConnector::SharedStorage, KvConnector::NixlPush, KvConnector::Mooncake] {
        for flow in ["decode_first", "auto"] {
            every_case(flow, connector, ignoring).await;
        }
    }
}

/// A fault, and the engine that it strikes.
const FAULTS: [(&str, FaultKind); 9] = [
    ("p0", FaultKind::Status { status: 500 }),
    ("p0", FaultKind::Reset),
    ("p0", FaultKind::TruncatedBody),
    ("p0", FaultKind::NoHandOff),
    ("p0", FaultKind::RefusePulls),
    ("d0", FaultKind::Status { status: 503 }),
    ("d0", FaultKind::Reset),
    ("d0", FaultKind::DieMidStream { after_chunks: 0 }),
    ("d0", FaultKind::TruncatedBody),
];

async fn every_fault(flow: &'static str, connector: KvConnector) {
    // Turns make sure that the sick one is met; failing often is what this is about.
    let spec = spec(flow, connector, |_, config| config.lease_ms = 1_000);
    let keys = "breaker: { failures: 0 }\nretries: { prefill: 3, decode: 3 }\n\
                gate: { preemption_guard: 0.001 }\n";
    let policy = "{ kind: round_robin }";
    let mut trial =
        Trial::start(Spec { policy, model: keys.to_owned() + &spec.model, ..spec }).await;
    let reference = Cluster::start(Spec::aggregated(1)).await;
    let all = cases(connector);
    let cases = all.iter().filter(|case| case.threshold != Threshold::Invalid);
    for (turn, case) in cases.cycle().take(6 * FAULTS.len()).enumerate() {
        // Each fault meets other shapes every time.
        let (engine, fault) = &FAULTS[(turn + turn / FAULTS.len()) % FAULTS.len()];
        trial.fault(engine, fault.clone(), Some(1));
        let body = case.body(turn);
        trial.expect("ok");
        let (texts, usage) = ask(&trial.cluster.http, *case, &body).await;
        let mut alone = body.clone();
        alone.as_object_mut().unwrap().remove("cache_hit_threshold");
        let (expected, _) = ask(&reference.http, *case, &alone).await;
        assert_eq!(texts, expected, "{flow} {connector:?} {case:?} {fault:?}");
        Told::default().add(&usage, *case);
        trial.cluster.engine(engine).clear_faults();
    }
    let (prefill, decode) = (trial.retries("prefill").await, trial.retries("decode").await);
    assert!(decode > 0.0, "no fault was met");
    assert!(prefill > 0.0, "no fault was met in a prefill leg");
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}

#[tokio::test]
async fn a_fault_before_the_first_byte_changes_no_reply() {
    for flow in ["prefill_first", "decode_first", "auto"] {
        every_fault(flow, KvConnector::Nixl).await;
    }
}

#[tokio::test]
async fn a_fault_in_one_of_two_legs_changes_no_reply() {
    every_fault("prefill_first", KvConnector::Mooncake).await;
    every_fault("prefill_first", KvConnector::NixlPush).await;
    every_fault("prefill_first", KvConnector::Sglang).await;
    every_fault("prefill_first", KvConnector::SharedStorage).await;
}
