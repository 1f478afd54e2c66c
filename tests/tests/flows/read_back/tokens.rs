//! Engines whose tokens are not those of the router.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw_engine::{Asked, RawEngine, Turn, reply};
use splitrail_tests::trial::{SHORT_LEASE, Trial};

use super::{BLOCK, complete, ends, ids_of, of_ids, prompt_ids, reading, reads};

const ANSWER: usize = 90;

/// A completion's reply with these tokens; `pins` says that its blocks stay pinned.
pub(super) fn completion(
    prompt: &Value,
    ids: &[u64],
    cached: impl Into<Option<u64>>,
    params: &Value,
) -> Turn {
    let tokens = prompt.as_array().map_or(0, Vec::len);
    let choice = json!({
        "index": 0, "text": "", "finish_reason": "length", "token_ids": ids,
        "prompt_token_ids": prompt,
    });
    let usage = json!({
        "prompt_tokens": tokens, "completion_tokens": ids.len(),
        "total_tokens": tokens + ids.len(), "prompt_tokens_details": {"cached_tokens": cached.into()},
    });
    let body = json!({"choices": [choice], "usage": usage, "kv_transfer_params": params});
    Turn::answer(reply(200, "application/json", &body.to_string()))
}

fn params(prefills: bool, tokens: usize) -> Value {
    let ids: Vec<usize> = (1..=tokens.div_ceil(BLOCK)).collect();
    json!({
        "do_remote_prefill": prefills, "do_remote_decode": !prefills, "remote_block_ids": [ids],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 1, "remote_num_tokens": tokens, "transfer_mode": "pull",
    })
}

/// A prefill engine that reads. `counts` is the prompt as it reports it where it has read.
pub(super) fn prefill(asked: &Asked, counts: fn(Value) -> Value) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let read = body["kv_transfer_params"]["remote_num_tokens"].as_u64();
    let prompt = body["prompt"].clone();
    let told = if read.is_some() { counts(prompt.clone()) } else { prompt.clone() };
    let tokens = prompt.as_array().map_or(0, Vec::len);
    completion(&told, &[9], read.unwrap_or(0), &params(true, tokens))
}

/// A decode engine that keeps its blocks pinned. `counts` is the prompt as it reports it.
pub(super) fn decode(asked: &Asked, counts: fn(Value) -> Value) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let prompt = counts(body["prompt"].clone());
    let tokens = body["prompt"].as_array().map_or(0, Vec::len);
    let pins = body["kv_transfer_params"].is_object();
    let params = if pins { params(false, tokens + ANSWER - 1) } else { Value::Null };
    completion(&prompt, &prompt_ids(ANSWER, 77), 0, &params)
}

pub(super) fn same(prompt: Value) -> Value {
    prompt
}

fn other(mut prompt: Value) -> Value {
    prompt[3] = 1.into();
    prompt
}

/// A worker as an item of YAML.
pub(super) fn worker(id: &str, role: &str, engine: &RawEngine) -> String {
    format!("{{ id: {id}, role: {role}, url: \"{}\", kv_events: none }}", engine.url())
}

async fn cluster(p: &RawEngine, d: &RawEngine) -> Trial {
    let extra_workers = vec![worker("p0", "prefill", p), worker("d0", "decode", d)];
    Trial::start(Spec { extra_workers, ..reading(0, 0, "") }).await
}

async fn next_turn(trial: &mut Trial, salt: u64) {
    let first = prompt_ids(100, salt);
    let reply = complete(trial, &first, ANSWER as u32).await;
    let next = [first, ids_of(&reply), prompt_ids(20, salt + 500)].concat();
    complete(trial, &next, ANSWER as u32).await;
}

#[tokio::test]
async fn a_prefill_engine_that_counts_other_tokens_ends_read_back_for_the_model() {
    let p = RawEngine::start(|asked| prefill(asked, other)).await;
    let d = RawEngine::start(|asked| decode(asked, same)).await;
    let mut trial = cluster(&p, &d).await;
    for salt in 0..3 {
        next_turn(&mut trial, salt).await;
    }
    assert_eq!((reads(&trial, "mismatch").await, reads(&trial, "read").await), (1.0, 0.0));
    let read = p.heard().into_iter().filter(|heard| {
        let body: Value = serde_json::from_slice(&heard.body).unwrap();
        body["kv_transfer_params"]["remote_num_tokens"].as_u64().is_some_and(|tokens| tokens > 1)
    });
    assert_eq!(read.count(), 1);
    trial.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_counts_other_tokens_has_nothing_to_read() {
    let p = RawEngine::start(|asked| prefill(asked, same)).await;
    let d = RawEngine::start(|asked| decode(asked, other)).await;
    let mut trial = cluster(&p, &d).await;
    next_turn(&mut trial, 1).await;
    assert_eq!((reads(&trial, "read").await, ends(&trial, "unusable").await), (0.0, 2.0));
    trial.finish().await;
    // The same engines with the router's tokens.
    let d = RawEngine::start(|asked| decode(asked, same)).await;
    let mut trial = cluster(&p, &d).await;
    next_turn(&mut trial, 1).await;
    assert_eq!(reads(&trial, "read").await, 1.0);
    trial.finish().await;
}

/// A decode engine that keeps its blocks at this host, and names this number of block ids too many.
fn decode_at(asked: &Asked, host: &str, too_many: usize) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let prompt = body["prompt"].clone();
    let tokens = prompt.as_array().map_or(0, Vec::len);
    let mut kept = Value::Null;
    if body["kv_transfer_params"].is_object() {
        kept = params(false, tokens + ANSWER - 1);
        kept["remote_host"] = host.into();
        let ids = kept["remote_block_ids"][0].as_array_mut().unwrap();
        ids.extend((0..too_many).map(|id| json!(1000 + id)));
    }
    completion(&prompt, &prompt_ids(ANSWER, 77), 0, &kept)
}

/// The parameters of the legs that read what another engine keeps, or release it.
fn carried(p: &RawEngine) -> Vec<Value> {
    let params = p.heard().into_iter().map(|heard| {
        let body: Value = serde_json::from_slice(&heard.body).unwrap();
        body["kv_transfer_params"].clone()
    });
    params.filter(|params| params["remote_block_ids"].is_array()).collect()
}

#[tokio::test]
async fn what_is_kept_at_a_host_outside_the_fleet_is_neither_read_nor_released() {
    let p = RawEngine::start(|asked| prefill(asked, same)).await;
    let d = RawEngine::start(|asked| decode_at(asked, "192.0.2.1", 0)).await;
    let mut trial = cluster(&p, &d).await;
    next_turn(&mut trial, 1).await;
    assert_eq!(carried(&p), Vec::<Value>::new());
    assert_eq!(reads(&trial, "read").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_pin_with_a_block_id_too_many_is_released_and_never_read() {
    let p = RawEngine::start(|asked| prefill(asked, same)).await;
    let d = RawEngine::start(|asked| decode_at(asked, "127.0.0.1", 1)).await;
    let mut trial = cluster(&p, &d).await;
    next_turn(&mut trial, 1).await;
    assert!(carried(&p).iter().all(|params| params["remote_num_tokens"] == 1));
    assert_eq!((reads(&trial, "read").await, ends(&trial, "unusable").await), (0.0, 2.0));
    trial.finish().await;
}

/// A prefill engine that reads, and has no count of cached tokens in its usage; with `carries`, it has
/// one in its hand-off.
fn silent(asked: &Asked, carries: bool) -> Turn {
    let body: Value = serde_json::from_slice(&asked.heard.body).unwrap();
    let read = body["kv_transfer_params"]["remote_num_tokens"].as_u64();
    let prompt = body["prompt"].clone();
    let mut staged = params(true, prompt.as_array().map_or(0, Vec::len));
    if carries {
        staged["remote_prefill_cached_tokens"] = read.unwrap_or(0).into();
    }
    completion(&prompt, &[9], None, &staged)
}

#[tokio::test]
async fn what_was_read_is_counted_by_the_usage_or_the_hand_off_and_otherwise_unknown() {
    for (carries, outcome) in [(true, "read"), (false, "unknown")] {
        let p = RawEngine::start(move |asked| silent(asked, carries)).await;
        let d = RawEngine::start(|asked| decode(asked, same)).await;
        let mut trial = cluster(&p, &d).await;
        next_turn(&mut trial, 1).await;
        assert_eq!((reads(&trial, outcome).await, reads(&trial, "not_needed").await), (1.0, 0.0));
        trial.finish().await;
    }
}

pub(super) async fn drain(trial: &Trial, id: &str) {
    let path = format!("/admin/workers/{id}/drain");
    assert_eq!(trial.cluster.admin.post(&path, &json!({})).await.status, 200);
}

pub(super) async fn undrain(trial: &Trial, id: &str) {
    let path = format!("/admin/workers/{id}/drain");
    assert_eq!(trial.cluster.admin.delete(&path).await.status, 200);
}

/// Two prefill engines that read, whose hand-offs do not stay for long.
fn two() -> Spec {
    let engine = |name: &str, config: &mut SimConfig| {
        super::bidirectional(name, config);
        config.lease_ms = SHORT_LEASE.as_millis() as u64;
    };
    Spec { engine, ..reading(2, 1, "") }
}

async fn view(trial: &Trial, id: &str) -> Value {
    let workers = trial.cluster.admin.get("/admin/workers").await.json()["workers"].clone();
    workers.as_array().unwrap().iter().find(|worker| worker["id"] == id).unwrap().clone()
}

/// Has `p0` read KV for a prompt of which it counts other tokens. Returns the next prompt.
async fn misread(trial: &mut Trial, salt: u64) -> Vec<u64> {
    trial.fault("p0", FaultKind::OtherPromptIds, None);
    drain(trial, "p1").await;
    let first = prompt_ids(100, salt);
    let reply = complete(trial, &first, ANSWER as u32).await;
    let next = [first, ids_of(&reply), prompt_ids(20, salt + 500)].concat();
    complete(trial, &next, 5).await;
    undrain(trial, "p1").await;
    assert_eq!(reads(trial, "mismatch").await, 1.0);
    next
}

/// The number of prompts that an engine got, without requests that release pins.
fn prompts(trial: &Trial, engine: &str) -> usize {
    let is_prompt = |body: &Value| body["prompt"].as_array().is_some_and(|ids| ids.len() > 1);
    trial.asked(engine).iter().filter(|request| is_prompt(&request.body)).count()
}

/// What a dry run says against a worker.
async fn vetoes(trial: &Trial, prompt: &[u64], id: &str) -> Value {
    let headers = [("content-type", "application/json")];
    let body = of_ids(prompt, 5).to_string();
    let told = trial.cluster.admin.post_with("/admin/explain", &headers, body).await.json();
    let steps = told["explanation"]["prompts"][0]["steps"].as_array().unwrap().clone();
    let vetoed = steps.iter().flat_map(|step| step["vetoed"].as_array().unwrap().clone());
    vetoed.filter(|veto| veto["worker"] == id).map(|veto| veto["reasons"].clone()).next().unwrap()
}

#[tokio::test]
async fn an_engine_that_has_read_kv_of_other_tokens_gets_no_work_until_it_is_another_process() {
    let mut trial = Trial::start(two()).await;
    let next = misread(&mut trial, 1).await;
    let told = view(&trial, "p0").await;
    assert_eq!((&told["state"], &told["quarantined"]), (&json!("draining"), &json!(true)));
    assert_eq!(told["kv_routing"], false);
    assert!(told["state_why"].as_str().unwrap().contains("reset its prefix cache"), "{told}");
    let why = vetoes(&trial, &next, "p0").await;
    assert!(why.as_array().unwrap().contains(&json!("quarantined")), "{why}");
    let labels = [("worker", "p0"), ("state", "draining")];
    assert_eq!(trial.cluster.metric("splitrail_worker_state", &labels).await, 1.0);
    // Its cache would answer this prompt, and nobody would see that it is wrong.
    let asked = prompts(&trial, "p0");
    for _ in 0..3 {
        complete(&mut trial, &next, 5).await;
    }
    // Not even if there is no other prefill worker.
    drain(&trial, "p1").await;
    complete(&mut trial, &next, 5).await;
    assert_eq!(prompts(&trial, "p0"), asked);
    undrain(&trial, "p1").await;
    trial.cluster.restart("p0").await;
    eventually("the new process is in service", async || {
        let told = view(&trial, "p0").await;
        told["quarantined"] == false && told["draining"] == false
    })
    .await;
}

#[tokio::test]
async fn an_operator_takes_an_engine_back_whose_cache_was_reset() {
    let mut trial = Trial::start(two()).await;
    misread(&mut trial, 2).await;
    assert_eq!(view(&trial, "p0").await["quarantined"], true);
    undrain(&trial, "p0").await;
    let told = view(&trial, "p0").await;
    assert_eq!((&told["quarantined"], &told["draining"]), (&json!(false), &json!(false)));
    assert_eq!(told["kv_routing"], true);
    trial.staged_blocks_are_freed().await;
    trial.finish().await;
}
