//! A cluster whose requests are counted: at the end every one must have ended as
//! the test says, nothing may be held, and no hand-off may have been used twice.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, RecordedRequest};

use crate::client::{Events, Reply, whole_text};
use crate::cluster::{Cluster, Spec, eventually};
use crate::dialect::{MESSAGES, RESPONSES};

/// The chat endpoint.
pub const CHAT: &str = "/v1/chat/completions";
/// The completions endpoint.
pub const COMPLETIONS: &str = "/v1/completions";

/// The endpoint of token ids.
pub const GENERATE: &str = "/inference/v1/generate";

/// A prompt of so many words (several tokens each) that shares no block with one of
/// another salt.
pub fn prompt(words: usize, salt: &str) -> String {
    (0..words).map(|i| format!("{salt}{i} ")).collect()
}

/// A completions request of 12 tokens.
pub fn completion(text: &str) -> Value {
    json!({"model": "sim", "max_tokens": 12, "temperature": 0, "prompt": text})
}

/// A chat request of 12 tokens.
pub fn chat(text: &str) -> Value {
    json!({
        "model": "sim", "max_tokens": 12, "temperature": 0,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
    })
}

/// A request on its endpoint, chat or completions in turn.
pub fn either(turn: usize, text: &str) -> (&'static str, Value) {
    if turn.is_multiple_of(2) { (CHAT, chat(text)) } else { (COMPLETIONS, completion(text)) }
}

/// Token ids of a prompt that shares no block with one of another salt.
pub fn token_ids(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 3 + (salt * 31 + i * 7) % 256).collect()
}

/// A generate request of 12 tokens.
pub fn generate(ids: &[u32]) -> Value {
    let sampling_params = json!({"max_tokens": 12, "temperature": 0});
    json!({"model": "sim", "token_ids": ids, "sampling_params": sampling_params})
}

/// The token ids of a choice in a whole reply of the generate endpoint, or in a
/// stream's chunks.
pub fn generated_ids(replies: &[Value], index: u64) -> Vec<u64> {
    let choices =
        replies.iter().flat_map(|reply| reply["choices"].as_array().into_iter().flatten());
    let of_index = choices.filter(|choice| choice["index"] == index);
    of_index
        .flat_map(|choice| choice["token_ids"].as_array().into_iter().flatten())
        .filter_map(Value::as_u64)
        .collect()
}

/// The same request, streamed.
pub fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = true.into();
    body
}

/// What an undisturbed aggregated cluster answers: the text that every way of
/// serving a request must give.
pub struct Reference(Cluster);

impl Reference {
    /// Starts it.
    pub async fn start() -> Self {
        Self(Cluster::start(Spec::aggregated(1)).await)
    }

    /// The chunks of a streamed request.
    pub async fn chunks(&self, path: &str, body: &Value) -> Vec<Value> {
        self.0.http.stream(path, &streamed(body)).await.chunks().await
    }

    /// The right text of a request with one prompt.
    pub async fn text(&self, path: &str, body: &Value) -> String {
        whole_text(&self.0.http.post(path, body).await.json(), 0)
    }
}

/// Whether a request asks an engine who it is.
fn is_question(request: &RecordedRequest) -> bool {
    // Also for one token of an engine that gives no sign of work.
    let trial = splitrail_fleet::work_trial::PROMPT;
    if [&request.body["messages"][0]["content"], &request.body["prompt"]]
        .iter()
        .any(|it| **it == trial)
    {
        return true;
    }
    let stages = request.body["kv_transfer_params"]["do_remote_decode"] == true;
    stages && request.body["prompt"] == "splitrail"
}

/// A cluster whose requests are counted.
pub struct Trial {
    /// The cluster.
    pub cluster: Cluster,
    outcomes: BTreeMap<&'static str, u32>,
}

impl Trial {
    /// Starts a cluster.
    pub async fn start(spec: Spec) -> Self {
        Self { cluster: Cluster::start(spec).await, outcomes: BTreeMap::new() }
    }

    /// Notes a request that is to end with `outcome` in the router's metrics.
    pub fn expect(&mut self, outcome: &'static str) {
        *self.outcomes.entry(outcome).or_default() += 1;
    }

    /// Sends a request that is to end with `outcome`.
    pub async fn post(&mut self, outcome: &'static str, path: &str, body: &Value) -> Reply {
        self.expect(outcome);
        self.cluster.http.post(path, body).await
    }

    /// Sends a request to be streamed that is to end with `outcome`.
    pub async fn stream(&mut self, outcome: &'static str, path: &str, body: &Value) -> Events {
        self.expect(outcome);
        self.cluster.http.stream(path, &streamed(body)).await
    }

    /// Has an engine misbehave so many times; without a number, from now on.
    pub fn fault(&self, engine: &str, kind: FaultKind, times: Option<u32>) {
        self.cluster.engine(engine).set_fault(Fault { kind, times });
    }

    /// The inference requests that an engine got, oldest first, without the questions who it is.
    pub fn asked(&self, engine: &str) -> Vec<RecordedRequest> {
        let requests = self.cluster.engine(engine).requests();
        let paths = [CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES];
        let inference =
            |request: &RecordedRequest| paths.contains(&&*request.path) && !is_question(request);
        requests.into_iter().filter(inference).collect()
    }

    /// How often an engine was asked who it is, so that KV can be pushed from it or to it.
    pub fn questions(&self, engine: &str) -> usize {
        self.cluster.engine(engine).requests().iter().filter(|seen| is_question(seen)).count()
    }

    /// How many inference requests each of these engines got.
    pub fn counts<const N: usize>(&self, engines: [&str; N]) -> [usize; N] {
        engines.map(|engine| self.asked(engine).len())
    }

    /// Further attempts so far, by leg.
    pub async fn retries(&self, leg: &str) -> f64 {
        let labels = [("model", "sim"), ("leg", leg)];
        self.cluster.metric("splitrail_retries_total", &labels).await
    }

    /// Prompts computed on decode workers because no prefill worker did.
    pub async fn local_prefills(&self) -> f64 {
        let labels = [("model", "sim"), ("reason", "no_prefill")];
        self.cluster.metric("splitrail_local_prefills_total", &labels).await
    }

    /// Waits until nothing is held, then checks the books: each request has ended
    /// with its outcome and none besides, and each hand-off was sent at most once.
    pub async fn finish(self) {
        self.check().await;
    }

    /// As [`Trial::finish`], in between.
    pub async fn check(&self) {
        self.cluster.quiet().await;
        self.nothing_is_held().await;
        self.every_request_has_its_outcome().await;
        self.hand_offs_were_used_once();
        self.no_hand_off_was_misused();
    }

    /// Waits until no request holds a permit or a booking.
    pub async fn nothing_is_held(&self) {
        let core = &self.cluster.running.core;
        eventually("every permit and booking is back", async || {
            let serving = core.serving();
            let pools = serving.models.iter().map(|served| &served.pool);
            core.in_flight.free() == serving.limits.in_flight_max
                && pools.flat_map(|pool| pool.roster().iter().cloned().collect::<Vec<_>>()).all(
                    |worker| {
                        let ranks = worker.ranks.all();
                        let ranks = ranks.iter().map(|rank| &rank.booked);
                        ranks.chain([&worker.load.booked]).all(|booked| {
                            (booked.requests(), booked.prefill_tokens(), booked.active_tokens())
                                == (0, 0, 0)
                        })
                    },
                )
        })
        .await;
    }

    async fn every_request_has_its_outcome(&self) {
        let metric = "splitrail_requests_total";
        let sent: u32 = self.outcomes.values().sum();
        eventually("every request that was sent is counted", async || {
            self.cluster.metric(metric, &[]).await >= f64::from(sent)
        })
        .await;
        let total = self.cluster.metric(metric, &[]).await;
        let mut seen = BTreeMap::new();
        for outcome in self.outcomes.keys() {
            let count = self.cluster.metric(metric, &[("outcome", outcome)]).await;
            seen.insert(*outcome, count as u32);
        }
        assert_eq!(seen, self.outcomes, "outcomes of {total} ended requests");
        assert_eq!(total, f64::from(sent), "requests that ended: {seen:?}");
    }

    /// A hand-off is single-use, whatever failed after it.
    fn hand_offs_were_used_once(&self) {
        let mut seen = HashSet::new();
        for (name, _) in &self.cluster.engines {
            for request in self.asked(name) {
                let params = &request.body["kv_transfer_params"];
                let (of, id) = match &request.body["bootstrap_room"] {
                    // A prefill leg that reads nothing.
                    Value::Null
                        if params["do_remote_prefill"] != true
                            && params["remote_block_ids"].is_null() =>
                    {
                        continue;
                    }
                    Value::Null if params["transfer_id"].is_string() => {
                        (&params["remote_engine_id"], &params["transfer_id"])
                    }
                    Value::Null => (&params["remote_engine_id"], &params["remote_request_id"]),
                    // Both legs carry the room.
                    room => (&json!(name), room),
                };
                assert!(!id.is_null(), "{params}");
                assert!(seen.insert((of.to_string(), id.to_string())), "sent twice: {params}");
            }
        }
    }

    /// No engine was sent a hand-off of other tokens or blocks than those of its prompt: real engines
    /// die of it, or reply with the KV of another prompt and say nothing.
    fn no_hand_off_was_misused(&self) {
        for (name, engine) in &self.cluster.engines {
            assert_eq!(engine.state().totals.hand_offs_misused, 0, "{name}");
        }
    }

    /// Waits until prefill engines keep nothing for anybody: what was never fetched
    /// is freed by its lease.
    pub async fn staged_blocks_are_freed(&self) {
        eventually("leases free what nobody fetched", async || {
            self.cluster.engines.iter().all(|(_, engine)| {
                let state = engine.state();
                (state.staged_hand_offs, state.blocks_pinned, state.blocks_used) == (0, 0, 0)
            })
        })
        .await;
    }

    /// Waits until an engine has work in hand.
    pub async fn until_running(&self, engine: &str) {
        eventually(&format!("{engine} works"), async || {
            self.cluster.engine(engine).state().running > 0
        })
        .await;
    }
}

/// OpenAI's error shape, whole: its members, and nothing but them.
pub fn error_of(reply: &Value) -> &Value {
    let error = &reply["error"];
    let keys: BTreeSet<&str> = error
        .as_object()
        .unwrap_or_else(|| panic!("no error in {reply}"))
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(keys, BTreeSet::from(["message", "type", "param", "code"]), "{reply}");
    for key in ["message", "type", "code"] {
        assert!(error[key].as_str().is_some_and(|text| !text.is_empty()), "{reply}");
    }
    error
}

/// The error that a broken-off stream ends with: its last event, explicit, and no
/// `[DONE]` anywhere. Gives the chunks before it and the error.
pub fn broken_off(events: &[String]) -> (Vec<Value>, Value) {
    assert!(!events.iter().any(|event| event == "[DONE]"), "a silent end: {events:?}");
    let mut chunks: Vec<Value> = events
        .iter()
        .map(|event| serde_json::from_str(event).unwrap_or_else(|e| panic!("{e} in {event}")))
        .collect();
    let last = chunks.pop().expect("an error event");
    let error = error_of(&last).clone();
    assert!(chunks.iter().all(|chunk| chunk["error"].is_null()), "one error: {events:?}");
    (chunks, error)
}

/// How long a lease lasts in tests that wait for its end: long enough for sound hand-offs on a busy
/// machine.
pub const SHORT_LEASE: Duration = Duration::from_secs(2);
