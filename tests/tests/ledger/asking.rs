//! Random requests, and what came back of each.

use serde_json::{Value, json};
use splitrail_sim::tokenizer::byte_token;
use splitrail_sim::{Fault, FaultKind, KvConnector};
use splitrail_tests::Cluster;
use splitrail_tests::accounting::Dice;
use splitrail_tests::trial::{CHAT, COMPLETIONS, GENERATE};

/// What requests and engines may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wild {
    /// Of a hundred requests, so many set a fault on an engine.
    pub(crate) faults: u64,
    /// Whether a fault may leave it open what the engine has done.
    pub(crate) unclear: bool,
    /// Of a hundred requests, so many are batches.
    pub(crate) batches: u64,
    /// Of a hundred requests, so many ask for several samples.
    pub(crate) samples: u64,
    /// Of a hundred clients, so many leave before they have their answer.
    pub(crate) leaving: u64,
    /// Flows that requests ask for now and then, with thresholds of their own.
    pub(crate) flows: &'static [&'static str],
}

/// What a client saw of one request.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) request_id: String,
    /// How it ended, as the client can tell; `None` if it left.
    pub(crate) outcome: Option<String>,
    /// The usage that it was told.
    pub(crate) usage: Option<Value>,
    pub(crate) prompts: u64,
    pub(crate) samples: u64,
}

/// Words of a prompt: one of a few conversations, at one of a few lengths, so that some
/// begin with what others were.
fn words(dice: &mut Dice) -> String {
    let conversation = dice.below(60);
    let turns = 10 + 7 * dice.below(8);
    let mut text: String = (0..turns).map(|i| format!("c{conversation}-{i} ")).collect();
    if dice.percent(30) {
        text += &format!("and {} besides", dice.below(1_000_000));
    }
    text
}

/// The simulated model's token ids of a text.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(byte_token).collect()
}

/// A request: path, body, prompts, samples.
fn request(dice: &mut Dice, wild: Wild, connector: KvConnector) -> (&'static str, Value, u64, u64) {
    let mut prompts = 1;
    let (path, mut body) = if dice.percent(wild.batches) {
        prompts = 2 + dice.below(3);
        let texts: Vec<String> = (0..prompts).map(|_| words(dice)).collect();
        (COMPLETIONS, json!({"prompt": texts}))
    } else {
        match dice.below(if connector == KvConnector::Sglang { 2 } else { 3 }) {
            0 => (COMPLETIONS, json!({"prompt": words(dice)})),
            1 => (CHAT, json!({"messages": [{"role": "user", "content": words(dice)}]})),
            // Tokens of text that others ask for in words.
            _ => (GENERATE, json!({"token_ids": ids(&words(dice)), "sampling_params": {}})),
        }
    };
    body["model"] = "sim".into();
    let mut samples = 1;
    let sampling = if path == GENERATE { &mut body["sampling_params"] } else { &mut body };
    sampling["temperature"] = 0.into();
    sampling["max_tokens"] = (1 + dice.below(12)).into();
    if dice.percent(wild.samples) {
        samples = 2 + dice.below(2);
        sampling["n"] = samples.into();
    }
    if dice.percent(2) {
        // The engines refuse it.
        sampling["min_tokens"] = 1000.into();
    }
    if dice.percent(55) {
        body["stream"] = true.into();
        match dice.below(3) {
            0 => {}
            1 => body["stream_options"] = json!({"include_usage": true}),
            _ => {
                body["stream_options"] =
                    json!({"include_usage": true, "continuous_usage_stats": true});
            }
        }
    }
    (path, body, prompts, samples)
}

/// Makes some engine misbehave once.
fn disturb(dice: &mut Dice, cluster: &Cluster, unclear: bool) {
    let (_, engine) = dice.one_of(&cluster.engines);
    let mut kinds = vec![
        FaultKind::Status { status: 500 },
        FaultKind::Status { status: 503 },
        FaultKind::Reset,
        FaultKind::NoHandOff,
        FaultKind::RefusePulls,
        FaultKind::DieMidStream { after_chunks: 1 + dice.below(6) as usize },
        FaultKind::TruncatedBody,
        FaultKind::DropEventBatches,
    ];
    if unclear {
        kinds.push(FaultKind::DieMidStream { after_chunks: 0 });
        kinds.push(FaultKind::Hang);
    }
    engine.set_fault(Fault { kind: dice.one_of(&kinds).clone(), times: Some(1) });
}

/// Sends a random request and reads its answer, or a part of it.
pub(crate) async fn ask(cluster: &Cluster, seed: u64, wild: Wild) -> Seen {
    let mut dice = Dice::new(seed);
    if dice.percent(wild.faults) {
        disturb(&mut dice, cluster, wild.unclear);
    }
    let connector = cluster.engines[0].1.config().connector;
    let (path, mut body, prompts, samples) = request(&mut dice, wild, connector);
    let request_id = format!("r-{seed}");
    let mut id = vec![("x-request-id", request_id.as_str())];
    if !wild.flows.is_empty() && dice.percent(60) {
        let flow: &&str = dice.one_of(wild.flows);
        id.push(("x-splitrail-flow", flow));
        body["cache_hit_threshold"] = (dice.below(11) as f64 / 10.0).into();
    }
    let mut seen =
        Seen { request_id: request_id.clone(), outcome: None, usage: None, prompts, samples };
    let leaves = dice.percent(wild.leaving);
    if body["stream"] == true {
        let events = cluster.http.stream_with(path, &id, &body);
        // Long enough for some to get there, and for some not.
        let patience = tokio::time::sleep(std::time::Duration::from_millis(dice.below(15)));
        let mut events = tokio::select! {
            events = events => events,
            () = patience, if leaves => return seen,
        };
        if events.status != 200 {
            let error = events.rest_text().await;
            seen.outcome = Some(code(&serde_json::from_str(&error).unwrap()));
            return seen;
        }
        let enough = if leaves { dice.below(6) } else { u64::MAX };
        read_events(&mut seen, &mut events, enough, &body).await;
    } else {
        let reply = cluster.http.post_with(path, &id, body.to_string());
        let patience = tokio::time::sleep(std::time::Duration::from_millis(dice.below(15)));
        let reply = tokio::select! {
            reply = reply => reply,
            () = patience, if leaves => return seen,
        };
        let json = reply.json();
        if reply.status == 200 {
            seen.outcome = Some("ok".to_owned());
            seen.usage = json.get("usage").cloned();
        } else {
            seen.outcome = Some(code(&json));
        }
    }
    seen
}

async fn read_events(
    seen: &mut Seen,
    events: &mut splitrail_tests::Events,
    enough: u64,
    body: &Value,
) {
    let asked = body["stream_options"]["include_usage"] == true;
    for _ in 0..enough {
        let Some(event) = events.next().await else { panic!("a silent end") };
        if event == "[DONE]" {
            seen.outcome = Some("ok".to_owned());
            return;
        }
        let event: Value = serde_json::from_str(&event).unwrap();
        if event["error"].is_object() {
            seen.outcome = Some(code(&event));
            return;
        }
        if event["choices"] == json!([]) {
            assert!(asked, "usage that was not asked for: {event}");
            seen.usage = Some(event["usage"].clone());
        }
    }
}

/// An error's name: of an engine's refusal it is always the same.
fn code(reply: &Value) -> String {
    reply["error"]["code"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}
