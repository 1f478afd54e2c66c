//! Usage is right for every flow, endpoint, dialect of engines and option of clients, compared with
//! the counters of the simulated engines.

use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use splitrail_sim::{DecodeUsage, Fault, FaultKind, SimConfig, UsageReport};
use splitrail_tests::{Cluster, Spec};

const BLOCK: u64 = 16;
const ANSWER_TOKENS: u64 = 6;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Chat,
    Completion,
    Batch,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Delivery {
    Asked,
    NotAsked,
    Continuous,
    Whole,
}

/// What a cluster is like.
#[derive(Clone, Copy, Debug)]
struct Setting {
    flow: &'static str,
    report: UsageReport,
    decode_usage: DecodeUsage,
    fallback: &'static str,
}

impl Setting {
    /// Whether no engine says how much of a prompt was cached. A hand-off with the
    /// prefill's figure is an engine's word, too.
    fn is_silent(self) -> bool {
        let by_hand_off =
            self.flow == "prefill_first" && self.decode_usage == DecodeUsage::RemotePrefill;
        self.report != UsageReport::Details && !by_hand_off
    }

    fn engine(self) -> fn(&str, &mut SimConfig) {
        macro_rules! engines {
            ($($report:ident $decode:ident),+) => {
                match (self.report, self.decode_usage) {
                    $((UsageReport::$report, DecodeUsage::$decode) => |_, config| {
                        config.usage_report = UsageReport::$report;
                        config.decode_usage = DecodeUsage::$decode;
                    }),+
                }
            };
        }
        engines!(
            Details RemotePrefill,
            Details WholePrompt,
            Null RemotePrefill,
            Null WholePrompt,
            Absent RemotePrefill,
            Absent WholePrompt
        )
    }

    async fn start(self) -> Cluster {
        let spec = if self.flow == "aggregated" { Spec::aggregated(2) } else { Spec::default() };
        Cluster::start(Spec {
            model: format!("cached_tokens_fallback: {}", self.fallback),
            engine: self.engine(),
            ..spec
        })
        .await
    }

    /// What the client must be told, by what the engine that did the prompt's work
    /// counted and by what the router could know.
    fn told(self, truth: u64, estimate: u64) -> Option<u64> {
        match (self.is_silent(), self.fallback) {
            (false, _) => Some(truth),
            (true, "estimate") => Some(estimate),
            (true, "zero") => Some(0),
            (true, _) => None,
        }
    }
}

/// Sums of engines' own counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counted {
    prompt: u64,
    hit: u64,
    transferred: u64,
}

impl Counted {
    /// Of the engines whose names begin with one of `prefixes`.
    fn of(cluster: &Cluster, prefixes: &[char]) -> Self {
        let mut sum = Self::default();
        let engines = cluster.engines.iter();
        for (_, engine) in engines.filter(|(name, _)| name.starts_with(prefixes)) {
            let totals = engine.state().totals;
            sum.prompt += totals.prompt_tokens;
            sum.hit += totals.local_cache_hit_tokens;
            sum.transferred += totals.external_kv_transfer_tokens;
        }
        sum
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            prompt: self.prompt - earlier.prompt,
            hit: self.hit - earlier.hit,
            transferred: self.transferred - earlier.transferred,
        }
    }
}

/// The engines that do the prompts' work: prefill engines, or those that do all.
const WORK: [char; 2] = ['p', 'w'];

/// What the clients of one cluster were told so far.
#[derive(Default)]
struct Ledger {
    requests: u64,
    prompt: u64,
    completion: u64,
    cached: u64,
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A prompt that shares no block with any other. Its length is the number's own.
fn fresh() -> String {
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let words = 20 + number % 13;
    let rest: String = (0..words).map(|i| format!(" word{i}")).collect();
    format!("{number:06}{rest}")
}

fn request(shape: Shape, delivery: Delivery) -> (&'static str, Value) {
    let (path, mut body) = match shape {
        Shape::Chat => {
            let messages = json!([{"role": "user", "content": fresh()}]);
            ("/v1/chat/completions", json!({"messages": messages}))
        }
        Shape::Completion => ("/v1/completions", json!({"prompt": fresh()})),
        Shape::Batch => ("/v1/completions", json!({"prompt": [fresh(), fresh()]})),
    };
    body["model"] = "sim".into();
    body["max_tokens"] = ANSWER_TOKENS.into();
    body["temperature"] = 0.into();
    if delivery != Delivery::Whole {
        body["stream"] = true.into();
    }
    match delivery {
        Delivery::Asked => body["stream_options"] = json!({"include_usage": true}),
        Delivery::Continuous => {
            body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
        }
        Delivery::NotAsked | Delivery::Whole => {}
    }
    (path, body)
}

/// An answer: its usage, if one was told, and its headers.
struct Answer {
    usage: Option<Value>,
    request_id: String,
    route_cached: Option<u64>,
}

async fn ask(cluster: &Cluster, path: &str, body: &Value, delivery: Delivery) -> Answer {
    if delivery == Delivery::Whole {
        let reply = cluster.http.post(path, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        return Answer {
            usage: Some(reply.json()["usage"].clone()),
            request_id: reply.header("x-request-id").to_owned(),
            route_cached: reply.route("cached_tokens").map(|text| text.parse().unwrap()),
        };
    }
    let mut events = cluster.http.stream(path, body).await;
    assert_eq!(events.status, 200);
    let request_id = events.headers["x-request-id"].to_str().unwrap().to_owned();
    let mut chunks = events.chunks().await;
    let usage = match delivery {
        Delivery::NotAsked => None,
        _ => {
            let last = chunks.pop().unwrap();
            assert_eq!(last["choices"], json!([]), "usage comes last, by itself");
            Some(last["usage"].clone())
        }
    };
    for chunk in &chunks {
        assert_ne!(chunk["choices"], json!([]), "one usage chunk at most");
        if delivery == Delivery::Continuous {
            assert!(chunk["usage"]["completion_tokens"].is_u64(), "{chunk}");
        } else {
            assert!(chunk["usage"].is_null(), "{chunk}");
        }
    }
    Answer { usage, request_id, route_cached: None }
}

/// The router's estimates for a request's prompts, from what it wrote down before
/// any engine had answered.
async fn estimate(cluster: &Cluster, request_id: &str) -> u64 {
    let decisions = cluster.decisions(request_id).await;
    assert!(!decisions.is_empty());
    let estimates = decisions.iter().map(|decision| {
        let prompt_tokens = decision["prompt_tokens"].as_u64().unwrap();
        let overlap = decision["overlap_blocks"].as_u64().unwrap();
        overlap.min((prompt_tokens - 1) / BLOCK) * BLOCK
    });
    estimates.sum()
}

fn check_usage(usage: &Value, told: Option<u64>, truth: Counted, prompts: u64, what: &str) {
    assert_eq!(usage["prompt_tokens"], truth.prompt, "{what}");
    let completion = ANSWER_TOKENS * prompts;
    assert_eq!(usage["completion_tokens"], completion, "{what}");
    assert_eq!(usage["total_tokens"], truth.prompt + completion, "{what}");
    let details = &usage["prompt_tokens_details"];
    match told {
        Some(cached) => assert_eq!(details["cached_tokens"], cached, "{what}: {usage}"),
        None => assert!(details.get("cached_tokens").is_none(), "{what}: {usage}"),
    }
}

/// What the engine wrote beside the figures is still there.
fn check_survivors(
    usage: &Value,
    setting: Setting,
    shape: Shape,
    delivery: Delivery,
    told: Option<u64>,
) {
    let details = &usage["prompt_tokens_details"];
    if setting.report == UsageReport::Details {
        let created = &details["created_cache_tokens"];
        assert_eq!(created.is_u64(), shape == Shape::Chat, "{usage}");
    }
    if delivery == Delivery::Whole {
        let usage_members = usage.as_object().unwrap();
        assert!(usage_members.contains_key("completion_tokens_details"), "{usage}");
        if setting.report == UsageReport::Details {
            let details = details.as_object().unwrap();
            assert!(details.contains_key("multimodal_tokens"), "{usage}");
        }
    }
    if setting.report == UsageReport::Absent && told.is_none() {
        assert!(details.is_null(), "nothing is invented: {usage}");
    }
}

async fn check_one(
    cluster: &Cluster,
    setting: Setting,
    ledger: &mut Ledger,
    (shape, delivery): (Shape, Delivery),
) {
    let (path, body) = request(shape, delivery);
    for temperature in ["cold", "warm"] {
        let what = format!("{setting:?} {shape:?} {delivery:?} {temperature}");
        cluster.settle().await;
        let before = Counted::of(cluster, &WORK);
        let answer = ask(cluster, path, &body, delivery).await;
        let truth = Counted::of(cluster, &WORK).since(before);
        assert_eq!(truth.hit > 0, temperature == "warm", "{what}");
        let estimate = estimate(cluster, &answer.request_id).await;
        assert_eq!(estimate, truth.hit, "the index was in step: {what}");
        let told = setting.told(truth.hit, estimate);
        let prompts = if shape == Shape::Batch { 2 } else { 1 };
        if let Some(usage) = &answer.usage {
            check_usage(usage, told, truth, prompts, &what);
            check_survivors(usage, setting, shape, delivery, told);
        }
        // What the header says where the fallback hides the estimate, and for
        // several prompts at once, are tests of their own.
        if delivery == Delivery::Whole && shape != Shape::Batch && told == Some(truth.hit) {
            assert_eq!(answer.route_cached, told, "{what}");
        }
        ledger.requests += 1;
        ledger.prompt += truth.prompt;
        ledger.completion += ANSWER_TOKENS * prompts;
        ledger.cached += truth.hit;
    }
}

/// Engines were asked for usage in every stream, and prefill legs never streamed.
fn check_engines_were_asked(cluster: &Cluster) {
    for (name, engine) in &cluster.engines {
        for request in engine.requests() {
            let body = &request.body;
            if name.starts_with('p') {
                assert_ne!(body["stream"], true, "{name}");
                assert!(body.get("stream_options").is_none(), "{name}");
            } else if body["stream"] == true {
                assert_eq!(body["stream_options"]["include_usage"], true, "{name}");
            }
        }
    }
}

async fn check_metrics(cluster: &Cluster, setting: Setting, ledger: &Ledger) {
    let metric = async |name: &str, labels: &[(&str, &str)]| {
        cluster.metric(&format!("splitrail_{name}"), labels).await as u64
    };
    let flow = ("flow", setting.flow);
    let ended = metric("requests_total", &[flow, ("outcome", "ok")]).await;
    assert_eq!(ended, ledger.requests);
    assert_eq!(metric("requests_total", &[]).await, ledger.requests);
    let (spoken, other) = match setting.is_silent() {
        true => ("estimate", "engine"),
        false => ("engine", "estimate"),
    };
    let cached = async |source| metric("cached_tokens_total", &[("source", source)]).await;
    assert_eq!(cached(spoken).await, ledger.cached, "{setting:?}");
    assert_eq!(cached(other).await, 0, "{setting:?}");
    assert_eq!(metric("generation_tokens_total", &[]).await, ledger.completion);
    let tokens = async |leg, source| {
        let labels = [("leg", leg), ("source", source)];
        metric("prompt_tokens_total", &labels).await
    };
    let sources = ["local_compute", "local_cache_hit", "external_kv_transfer"];
    let mut legs = vec!["decode"];
    if setting.flow == "prefill_first" {
        legs.push("prefill");
    }
    for leg in &legs {
        let mut sum = 0;
        for source in sources {
            sum += tokens(leg, source).await;
        }
        assert_eq!(sum, ledger.prompt, "{leg} leg of {setting:?}");
    }
    let work = legs.last().copied().unwrap();
    assert_eq!(tokens(work, "local_cache_hit").await, ledger.cached);
    assert_eq!(tokens(work, "external_kv_transfer").await, 0);
    if setting.flow == "prefill_first" {
        let counted = Counted::of(cluster, &['d']);
        assert_eq!(tokens("decode", "external_kv_transfer").await, counted.transferred);
        assert_eq!(tokens("decode", "local_cache_hit").await, counted.hit);
        assert_eq!(tokens("decode", "local_compute").await, 0);
    } else {
        assert_eq!(metric("prompt_tokens_total", &[("leg", "prefill")]).await, 0);
    }
}

async fn check_all(flow: &'static str, report: UsageReport) {
    for decode_usage in [DecodeUsage::RemotePrefill, DecodeUsage::WholePrompt] {
        for fallback in ["estimate", "zero", "omit"] {
            let setting = Setting { flow, report, decode_usage, fallback };
            let cluster = setting.start().await;
            let mut ledger = Ledger::default();
            for shape in [Shape::Chat, Shape::Completion, Shape::Batch] {
                for delivery in
                    [Delivery::Asked, Delivery::NotAsked, Delivery::Continuous, Delivery::Whole]
                {
                    check_one(&cluster, setting, &mut ledger, (shape, delivery)).await;
                }
            }
            cluster.quiet().await;
            check_engines_were_asked(&cluster);
            check_metrics(&cluster, setting, &ledger).await;
        }
    }
}

macro_rules! matrix {
    ($($name:ident: $flow:literal $report:ident;)+) => {
        $(#[tokio::test]
        async fn $name() {
            check_all($flow, UsageReport::$report).await;
        })+
    };
}

matrix! {
    usage_is_true_aggregated_with_details: "aggregated" Details;
    usage_is_true_aggregated_where_engines_say_null: "aggregated" Null;
    usage_is_true_aggregated_where_engines_say_nothing: "aggregated" Absent;
    usage_is_true_in_pd_with_details: "prefill_first" Details;
    usage_is_true_in_pd_where_engines_say_null: "prefill_first" Null;
    usage_is_true_in_pd_where_engines_say_nothing: "prefill_first" Absent;
}

const SILENT: Setting = Setting {
    flow: "aggregated",
    report: UsageReport::Null,
    decode_usage: DecodeUsage::RemotePrefill,
    fallback: "estimate",
};

const SPOKEN: Setting = Setting { flow: "prefill_first", report: UsageReport::Details, ..SILENT };

#[tokio::test]
async fn the_route_header_shows_no_estimate_that_the_fallback_keeps_from_clients() {
    for (fallback, shown) in [("zero", Some(0)), ("omit", None)] {
        let cluster = Setting { fallback, ..SILENT }.start().await;
        let (path, body) = request(Shape::Completion, Delivery::Whole);
        ask(&cluster, path, &body, Delivery::Whole).await;
        cluster.settle().await;
        let warm = ask(&cluster, path, &body, Delivery::Whole).await;
        assert_eq!(warm.route_cached, shown, "{fallback}");
    }
}

#[tokio::test]
async fn the_route_header_of_a_batch_agrees_with_its_usage() {
    let cluster = SPOKEN.start().await;
    let (path, body) = request(Shape::Batch, Delivery::Whole);
    ask(&cluster, path, &body, Delivery::Whole).await;
    cluster.settle().await;
    let warm = ask(&cluster, path, &body, Delivery::Whole).await;
    let told = warm.usage.unwrap()["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(told > Some(0));
    if warm.route_cached.is_some() {
        assert_eq!(warm.route_cached, told);
    }
}

#[tokio::test]
async fn a_pd_streams_route_header_has_the_prefills_figure_which_is_known_by_then() {
    let cluster = SPOKEN.start().await;
    let (path, body) = request(Shape::Chat, Delivery::Asked);
    ask(&cluster, path, &body, Delivery::Asked).await;
    cluster.settle().await;
    let mut events = cluster.http.stream(path, &body).await;
    let route = events.headers["x-splitrail-route"].to_str().unwrap();
    let cached = route
        .split("; ")
        .find_map(|entry| entry.strip_prefix("cached_tokens="))
        .map(|text| text.parse::<u64>().unwrap());
    let chunks = events.chunks().await;
    let told = chunks.last().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(told > Some(0));
    assert_eq!(cached, told);
}

#[tokio::test]
async fn running_totals_without_final_usage_are_no_way_to_get_usage() {
    // Engines count running totals only for streams that ask for usage; that the
    // router asks for all of them is not the client's doing.
    let cluster = SPOKEN.start().await;
    for options in [
        json!({"continuous_usage_stats": true}),
        json!({"include_usage": false, "continuous_usage_stats": true}),
    ] {
        let (path, mut body) = request(Shape::Chat, Delivery::NotAsked);
        body["stream_options"] = options.clone();
        let chunks = cluster.http.stream(path, &body).await.chunks().await;
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "{options}: {chunks:?}");
    }
}

#[tokio::test]
async fn what_a_failed_attempt_has_computed_is_not_told_as_cached() {
    let policy = "{ kind: round_robin }";
    let cluster = Cluster::start(Spec { prefill: 1, policy, ..Spec::default() }).await;
    // In turn, the first request goes to this engine.
    let fails = Fault { kind: FaultKind::Status { status: 500 }, times: Some(1) };
    cluster.engine("d0").set_fault(fails);
    let body = json!({"model": "sim", "prompt": fresh(), "max_tokens": ANSWER_TOKENS});
    let reply = cluster.http.post("/v1/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let id = reply.header("x-request-id").to_owned();
    let ledger = cluster.decisions(&id).await[0]["ledger"].clone();
    assert_eq!(ledger["cached_source"], "earlier_attempt", "{ledger}");
    assert_eq!(cluster.engine("p0").state().totals.hand_offs_staged, 2, "it was computed again");
    // The next request finds what the failed attempt has left.
    let again = cluster.http.post("/v1/completions", &body).await.json();
    assert_ne!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}
