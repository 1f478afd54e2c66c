//! Thousands of random requests: four witnesses, one truth.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use futures_util::StreamExt;
use futures_util::stream;
use serde_json::Value;
use splitrail_sim::{DecodeUsage, KvConnector, SimConfig, UsageReport};
use splitrail_tests::accounting::{Scrape, ledger_lines};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Spec};

use crate::asking::{Seen, Wild, ask};

/// The tokens of the prompt by which an engine is asked who it is (`nixl_push`): a byte each.
const IDENTITY_QUESTION_TOKENS: u64 = "splitrail".len() as u64;

/// Requests at a time.
const CLIENTS: usize = 12;

/// Faults of which everybody knows what the engine has done before.
const CLEAR: Wild =
    Wild { faults: 25, unclear: false, batches: 0, samples: 0, leaving: 0, flows: &[] };
/// No faults: every count can be checked to the token.
const CALM: Wild = Wild { faults: 0, batches: 15, ..CLEAR };
/// Everything.
const WILD: Wild =
    Wild { faults: 25, unclear: true, batches: 15, samples: 15, leaving: 20, flows: &[] };
/// All ways to serve a request.
const FLOWS: [&str; 5] = ["aggregated", "prefill_first", "decode_first", "decode_only", "auto"];

/// Figures of one leg, from the ledger file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tokens {
    prompt: u64,
    hit: u64,
    transferred: u64,
    computed: u64,
}

/// A cluster, and all that its clients saw.
struct Auditor {
    cluster: Cluster,
    fallback: &'static str,
    ledger: PathBuf,
    seen: Vec<Seen>,
}

impl Auditor {
    async fn start(spec: Spec, fallback: &'static str, timeout: &str) -> Self {
        let timeouts =
            format!("{{ prefill: {timeout}, first_token: {timeout}, reply: {timeout} }}");
        let keys = spec.model;
        let model = format!("cached_tokens_fallback: {fallback}\ntimeouts: {timeouts}\n{keys}");
        let top =
            "ledger: { path: ledger.jsonl, rotate: { size_max: 65536, files_max: 500 } }".into();
        let policy = "{ kind: kv_overlap, temperature: 4 }";
        let cluster = Cluster::start(Spec { model, top, policy, ..spec }).await;
        let ledger = cluster.files.path().join("ledger.jsonl");
        Self { cluster, fallback, ledger, seen: Vec::new() }
    }

    /// Sends so many random requests, then compares all witnesses.
    async fn round(&mut self, requests: u64, wild: Wild) {
        let first = self.seen.len() as u64;
        let cluster = &self.cluster;
        let seen: Vec<Seen> = stream::iter(first..first + requests)
            .map(|number| ask(cluster, number, wild))
            .buffer_unordered(CLIENTS)
            .collect()
            .await;
        for (_, engine) in &self.cluster.engines {
            engine.clear_faults();
        }
        self.seen.extend(seen);
        self.cluster.quiet().await;
        let all = self.seen.len() as f64;
        eventually("every request that came in is in the file", async || {
            let written = self.scrape().await.sum("splitrail_ledger_records_total");
            // Of a client that left, the request may never have come in.
            let ended = self.scrape().await.sum("splitrail_requests_total");
            written == ended && (wild.leaving > 0 || written == all)
        })
        .await;
        self.compare().await;
    }

    async fn scrape(&self) -> Scrape {
        Scrape::parse(&self.cluster.admin.get("/metrics").await.text())
    }

    /// Ledger file against replies, metrics, and itself.
    async fn compare(&self) {
        let lines = ledger_lines(&self.ledger);
        let scrape = self.scrape().await;
        assert_eq!(
            scrape.by("splitrail_ledger_records_total", &["result"]),
            series([("written", lines.len())])
        );
        let by_id: HashMap<&str, &Value> =
            lines.iter().map(|line| (line["request_id"].as_str().unwrap(), line)).collect();
        assert_eq!(by_id.len(), lines.len(), "one line per request");
        for seen in &self.seen {
            match (by_id.get(seen.request_id.as_str()), &seen.outcome) {
                (Some(line), _) => self.compare_reply(seen, line),
                (None, outcome) => assert_eq!(*outcome, None, "{seen:?} is not in the file"),
            }
        }
        for line in &lines {
            check_sums(line);
        }
        compare_metrics(&lines, &scrape);
    }

    /// What a client was told is what the ledger says.
    fn compare_reply(&self, seen: &Seen, line: &Value) {
        let what = format!("{seen:?}\n{line}");
        let prompts = line["prompts"].as_array().unwrap().iter();
        // Samples that are sent apart have entries of their own.
        let own = prompts.filter(|prompt| prompt["further_sample"] != true);
        assert_eq!(own.count() as u64, seen.prompts, "{what}");
        if let Some(outcome) = &seen.outcome {
            assert_eq!(line["outcome"], outcome.as_str(), "{what}");
        }
        if let Some(usage) = &seen.usage {
            let told = &line["told"];
            assert_eq!(told["prompt_tokens"], usage["prompt_tokens"], "{what}");
            assert_eq!(told["completion_tokens"], usage["completion_tokens"], "{what}");
            let cached = usage["prompt_tokens_details"]["cached_tokens"].clone();
            assert_eq!(told["cached_tokens"], cached, "{what}");
        }
        if seen.outcome.as_deref() != Some("ok") {
            return;
        }
        assert_eq!(line["told"].is_object(), seen.usage.is_some(), "{what}");
        let Some(usage) = &seen.usage else { return };
        assert_eq!(line["prompt_tokens"], usage["prompt_tokens"], "{what}");
        assert_eq!(line["completion_tokens"], usage["completion_tokens"], "{what}");
        let prompts = line["prompts"].as_array().unwrap();
        let spoken = prompts.iter().all(|prompt| prompt["cached_source"] != "estimate");
        if spoken || self.fallback == "estimate" {
            let told = &usage["prompt_tokens_details"]["cached_tokens"];
            assert_eq!(line["cached_tokens"], *told, "{what}");
        }
    }

    /// What each engine has counted of prompts, against the legs that the ledger has on it.
    fn compare_engines(&self, exact: bool) {
        let lines = ledger_lines(&self.ledger);
        let samples: HashMap<&str, u64> =
            self.seen.iter().map(|seen| (seen.request_id.as_str(), seen.samples)).collect();
        for (name, engine) in &self.cluster.engines {
            let totals = engine.state().totals;
            let mut all = Tokens::default();
            // Of legs whose engine said what it had cached, and of those where nobody did.
            let mut spoken = Tokens::default();
            for (line, leg) in legs(&lines).filter(|(_, leg)| leg["worker"] == name.as_str()) {
                let samples = samples[line["request_id"].as_str().unwrap()];
                let connector = engine.config().connector;
                let times = match fetches(leg, samples) {
                    _ if leg["leg"] == "prefill" || connector == KvConnector::Sglang => 1,
                    true if connector == KvConnector::SharedStorage => samples,
                    true => samples + 1,
                    // An engine counts a prompt once per sample.
                    false => samples,
                };
                let tokens = tokens(leg);
                all.prompt += tokens.prompt * times;
                let source = leg["sources"]["local_cache_hit"].as_str().unwrap();
                if source.starts_with("engine") && times == 1 {
                    spoken.prompt += tokens.prompt;
                    spoken.hit += tokens.hit;
                    spoken.computed += tokens.computed;
                }
            }
            let what = format!("{name}: {totals:?}, ledger {all:?} of which said {spoken:?}");
            // What a prefill engine finds in a storage it reports as cached, as what it has itself.
            let stored = match engine.config().connector {
                KvConnector::SharedStorage => totals.external_kv_transfer_tokens,
                _ => 0,
            };
            let hits = totals.local_cache_hit_tokens + stored;
            if exact {
                // The question who an engine is that pushes, or is pushed to; it is in no ledger.
                let asked = match engine.config().connector {
                    KvConnector::NixlPush => IDENTITY_QUESTION_TOKENS,
                    _ => 0,
                };
                assert_eq!(totals.prompt_tokens, all.prompt + asked, "{what}");
            }
            assert!(totals.prompt_tokens >= all.prompt, "{what}");
            assert!(hits >= spoken.hit, "{what}");
            assert!(totals.local_compute_tokens >= spoken.computed, "{what}");
            // What is left is not more than the rest of the prompts.
            let rest = totals.prompt_tokens - spoken.prompt;
            assert!(hits - spoken.hit <= rest, "{what}");
            assert!(totals.local_compute_tokens - spoken.computed <= rest, "{what}");
        }
    }

    /// Without faults nothing is discarded, and engines generate what is billed, and one
    /// token in every prefill and for every hand-off that is fetched for several samples.
    fn compare_generated(&self) {
        let lines = ledger_lines(&self.ledger);
        let refused = lines.iter().filter(|line| line["outcome"] != "ok");
        for line in refused {
            assert_eq!(
                (&line["outcome"], &line["wasted_prompt_tokens"]),
                (&"engine_rejected".into(), &0.into())
            );
        }
        let samples: HashMap<&str, u64> =
            self.seen.iter().map(|seen| (seen.request_id.as_str(), seen.samples)).collect();
        let one_token = |(line, leg): &(&Value, &Value)| {
            let samples = samples[line["request_id"].as_str().unwrap()];
            leg["leg"] == "prefill" || fetches(leg, samples)
        };
        let prefills = legs(&lines).filter(one_token).count() as u64;
        let billed: u64 = lines.iter().filter_map(|line| line["completion_tokens"].as_u64()).sum();
        let engines = self.cluster.engines.iter();
        let generated: u64 =
            engines.map(|(_, engine)| engine.state().totals.generation_tokens).sum();
        // Each engine that pushes, or is pushed to, was asked who it is.
        let asked = self.cluster.engines.iter();
        let asked = asked.filter(|(_, engine)| engine.config().connector == KvConnector::NixlPush);
        assert_eq!(generated, billed + prefills + asked.count() as u64);
    }
}

/// A series with one label.
fn series<'a>(values: impl IntoIterator<Item = (&'a str, usize)>) -> BTreeMap<Vec<String>, u64> {
    values.into_iter().map(|(label, value)| (vec![label.to_owned()], value as u64)).collect()
}

/// All legs with figures, of answers and of discarded attempts.
fn legs(lines: &[Value]) -> impl Iterator<Item = (&Value, &Value)> {
    let prompts = lines.iter().flat_map(|line| {
        line["prompts"].as_array().unwrap().iter().map(move |prompt| (line, prompt))
    });
    prompts.flat_map(|(line, prompt)| {
        let parts = ["legs", "discarded"].map(|key| prompt[key].as_array().into_iter().flatten());
        let legs = parts.into_iter().flatten();
        legs.filter(|leg| leg["prompt_tokens"].is_u64()).map(move |leg| (line, leg))
    })
}

/// Whether a leg's hand-off was fetched by a request of its own, for several samples.
fn fetches(leg: &Value, samples: u64) -> bool {
    samples > 1 && leg["external_kv_transfer"].as_u64().is_some_and(|tokens| tokens > 0)
}

fn tokens(leg: &Value) -> Tokens {
    let count = |key: &str| leg[key].as_u64().unwrap_or_else(|| panic!("no {key} in {leg}"));
    Tokens {
        prompt: count("prompt_tokens"),
        hit: count("local_cache_hit"),
        transferred: count("external_kv_transfer"),
        computed: count("local_compute"),
    }
}

/// Whatever happened, the parts of every leg sum, and waste is counted once.
fn check_sums(line: &Value) {
    for (_, leg) in legs(std::slice::from_ref(line)) {
        let Tokens { prompt, hit, transferred, computed } = tokens(leg);
        assert_eq!(hit + transferred + computed, prompt, "{line}");
        let tiers = leg["local_cache_hit_by_tier"].as_object().unwrap();
        assert_eq!(
            tiers.values().map(|tokens| tokens.as_u64().unwrap()).sum::<u64>(),
            hit,
            "{line}"
        );
        for part in ["prompt_tokens", "local_cache_hit", "external_kv_transfer", "local_compute"] {
            let source = leg["sources"][part].as_str().unwrap();
            let sources = ["engine_prefill", "engine_decode", "estimate", "earlier_attempt"];
            assert!(sources.contains(&source), "{line}");
        }
        assert!(leg["leg"] == "decode" || transferred == 0, "{line}");
    }
    let mut wasted = 0;
    for prompt in line["prompts"].as_array().unwrap() {
        if let (Some(cached), Some(all)) =
            (prompt["cached_tokens"].as_u64(), prompt["prompt_tokens"].as_u64())
        {
            assert!(cached <= all, "{line}");
        }
        let legs = prompt["legs"].as_array().unwrap();
        // What is not cached enough for `decode_only` is told so, and served by nobody.
        let told_only = line["flow"] == "decode_only" && prompt["completion_tokens"] == 0;
        match line["outcome"].as_str().unwrap() {
            "ok" => assert_eq!(legs.is_empty(), told_only, "{line}"),
            // Of a client that has left, what engines had begun counts.
            "cancelled" => {
                assert_eq!(legs.is_empty(), !prompt["completion_tokens"].is_u64(), "{line}")
            }
            _ => assert!(legs.is_empty(), "{line}"),
        }
        for leg in prompt["discarded"].as_array().into_iter().flatten() {
            let waste = leg["wasted_prompt_tokens"].as_u64().unwrap();
            // A leg that received its prompt has not wasted it.
            assert!(waste == 0 || leg["external_kv_transfer"] == 0, "{line}");
            wasted += waste;
        }
    }
    assert_eq!(line["wasted_prompt_tokens"], wasted, "{line}");
}

/// The metrics are what the lines of the file add up to, series by series.
fn compare_metrics(lines: &[Value], scrape: &Scrape) {
    let mut sums: BTreeMap<&str, BTreeMap<Vec<String>, u64>> = BTreeMap::new();
    let mut add = |name: &'static str, labels: &[&str], count: u64| {
        if count > 0 {
            let labels = labels.iter().map(|label| (*label).to_owned()).collect();
            *sums.entry(name).or_default().entry(labels).or_insert(0) += count;
        }
    };
    for line in lines {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        add(
            "requests_total",
            &[line["outcome"].as_str().unwrap(), line["flow"].as_str().unwrap()],
            1,
        );
        if let Some(cached) = line["cached_tokens"].as_u64() {
            add("prefix_cache_requests_total", &[if cached > 0 { "hit" } else { "miss" }], 1);
        }
        for prompt in line["prompts"].as_array().unwrap() {
            add("generation_tokens_total", &["sim"], count(&prompt["completion_tokens"]));
            // Of samples that are sent apart, the prompt is the first one's.
            let own = prompt["further_sample"] != true;
            if own {
                add("usage_prompt_tokens_total", &["sim"], count(&prompt["prompt_tokens"]));
            }
            if let Some(source) = prompt["cached_source"].as_str().filter(|_| own) {
                let source = if source == "estimate" { "estimate" } else { "engine" };
                add("cached_tokens_total", &[source], count(&prompt["cached_tokens"]));
            }
            for leg in prompt["legs"].as_array().unwrap() {
                let kind = leg["leg"].as_str().unwrap();
                for (tier, hit) in leg["local_cache_hit_by_tier"].as_object().unwrap() {
                    add("prompt_tokens_total", &[kind, "local_cache_hit", tier], count(hit));
                }
                for source in ["external_kv_transfer", "local_compute"] {
                    add("prompt_tokens_total", &[kind, source, "none"], count(&leg[source]));
                }
            }
            for leg in prompt["discarded"].as_array().into_iter().flatten() {
                let wasted = count(&leg["wasted_prompt_tokens"]);
                add("wasted_prompt_tokens_total", &[leg["reason"].as_str().unwrap()], wasted);
            }
        }
    }
    for (name, labels) in [
        ("requests_total", &["outcome", "flow"][..]),
        ("prefix_cache_requests_total", &["result"]),
        ("usage_prompt_tokens_total", &["model"]),
        ("generation_tokens_total", &["model"]),
        ("cached_tokens_total", &["source"]),
        ("prompt_tokens_total", &["leg", "source", "tier"]),
        ("wasted_prompt_tokens_total", &["reason"]),
    ] {
        let told = scrape.by(&format!("splitrail_{name}"), labels);
        assert_eq!(told, sums.remove(name).unwrap_or_default(), "{name}");
    }
}

fn small_caches(_: &str, config: &mut SimConfig) {
    // Small enough that much is evicted, although hand-offs that nobody fetches pin a part.
    config.kv_blocks = 1600;
    config.lease_ms = 10_000;
}

fn old_silent(name: &str, config: &mut SimConfig) {
    small_caches(name, config);
    config.usage_report = UsageReport::Null;
    config.decode_usage = DecodeUsage::WholePrompt;
}

fn old(name: &str, config: &mut SimConfig) {
    small_caches(name, config);
    config.decode_usage = DecodeUsage::WholePrompt;
}

fn silent(name: &str, config: &mut SimConfig) {
    small_caches(name, config);
    config.usage_report = UsageReport::Absent;
}

async fn audit(spec: impl Fn() -> Spec, fallback: &'static str) {
    audit_flows(spec, fallback, &[]).await;
}

async fn audit_flows(
    spec: impl Fn() -> Spec,
    fallback: &'static str,
    flows: &'static [&'static str],
) {
    let mut auditor = Auditor::start(spec(), fallback, "60s").await;
    auditor.round(250, Wild { flows, ..CALM }).await;
    auditor.compare_engines(true);
    auditor.compare_generated();
    auditor.round(350, Wild { flows, ..CLEAR }).await;
    // Of legs that are sent at once, one may be done when the other has failed, unheard; and a
    // reply that is cut short does not tell whether an engine that gates has done anything.
    let gated = !flows.is_empty() && (spec().worker)("d0").ends_with("true");
    auditor.compare_engines(!spec().connector.is_concurrent() && !gated);
    // Engines that hang need less patience: whatever comes of it, the books are right.
    let mut auditor = Auditor::start(spec(), fallback, "500ms").await;
    auditor.round(400, Wild { flows, ..WILD }).await;
    auditor.compare_engines(false);
}

#[tokio::test]
async fn all_witnesses_agree_on_aggregated_serving() {
    audit(|| Spec { engine: small_caches, ..Spec::aggregated(3) }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_answers_that_go_on_elsewhere() {
    const KEYS: &str = "migrate: true\nbreaker: { failures: 0 }";
    audit(|| Spec { engine: small_caches, model: KEYS.into(), ..Spec::aggregated(3) }, "omit")
        .await;
    audit(|| Spec { engine: small_caches, model: KEYS.into(), ..Spec::default() }, "estimate")
        .await;
}

#[tokio::test]
async fn all_witnesses_agree_on_silent_engines() {
    audit(|| Spec { engine: silent, ..Spec::aggregated(2) }, "zero").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_hand_offs() {
    audit(|| Spec { engine: small_caches, ..Spec::default() }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_hand_offs_of_old_engines() {
    audit(|| Spec { engine: old, ..Spec::default() }, "omit").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_hand_offs_without_reported_cached_tokens() {
    audit(|| Spec { engine: old_silent, ..Spec::default() }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_a_storage_that_engines_share() {
    let connector = KvConnector::SharedStorage;
    audit(move || Spec { engine: small_caches, connector, ..Spec::default() }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_legs_that_are_sent_at_once() {
    let connector = KvConnector::Mooncake;
    audit(move || Spec { engine: small_caches, connector, ..Spec::default() }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_engines_that_push() {
    let connector = KvConnector::NixlPush;
    audit(move || Spec { engine: small_caches, connector, ..Spec::default() }, "estimate").await;
}

#[tokio::test]
async fn all_witnesses_agree_on_engines_that_are_halves_of_pairs() {
    let connector = KvConnector::Sglang;
    audit(move || Spec { engine: small_caches, connector, ..Spec::default() }, "estimate").await;
}

/// Every flow, each for some requests. No engine is asked what it honours: that prompt
/// would be nobody's request.
fn all_flows() -> Spec {
    let model = format!("request_flows: [{}]\ncache_hit_threshold: 0.5", FLOWS.join(", "));
    Spec {
        flow: "decode_first",
        model,
        engine: small_caches,
        worker: |_| ", supports_cache_hit_threshold: true",
        ..Spec::default()
    }
}

fn ignoring(name: &str, config: &mut SimConfig) {
    small_caches(name, config);
    config.honour_threshold = false;
}

#[tokio::test]
async fn all_witnesses_agree_on_all_flows_where_engines_gate() {
    audit_flows(all_flows, "estimate", &FLOWS).await;
}

#[tokio::test]
async fn all_witnesses_agree_on_all_flows_where_the_router_gates() {
    let spec = || Spec {
        engine: ignoring,
        worker: |_| ", supports_cache_hit_threshold: false",
        ..all_flows()
    };
    audit_flows(spec, "zero", &FLOWS).await;
}
