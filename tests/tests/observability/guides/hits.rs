//! [Why are cache hits low?](../../../docs/guides/low-cache-hits.md), without the leaves about KV
//! events.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, PromptDialect, UsageReport};
use splitrail_tests::Spec;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use tokio::task::JoinSet;

use super::walk::{Walk, only, value};

pub(crate) const PAGE: &str = "low-cache-hits";

/// A model whose losses are tracked, with further keys.
pub(crate) fn tracked(spec: Spec) -> Spec {
    Spec { model: format!("cache_loss_tracking: {{}}\n{}", spec.model), ..spec }
}

impl Walk {
    /// Follows the head of the page and step 1: the blocks are lost for this reason, and the page
    /// leads to `next`.
    pub(crate) async fn is_lost_by(&self, reason: &str, next: &str) {
        let share = self.until(0, "splitrail_cached_tokens_total", |now| !now.is_empty()).await;
        assert!(only(&share) < 0.9, "hits are low: {share:?}");
        self.page.says(1, &format!("| `{reason}`"), next);
        eventually(&format!("step 1: blocks are lost by {reason}"), async || {
            let losses = self.ask(1, "splitrail_cache_loss_blocks").await;
            let largest = losses.iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
            largest.is_some_and(|(labels, blocks)| labels["reason"] == reason && *blocks > 0.0)
        })
        .await;
        let hits = self.ask(1, "splitrail_cache_hit_blocks").await;
        let [best, found] = ["best", "found"].map(|of| value(&hits, &[("of", of)]));
        assert!(best > found, "{hits:?}");
    }
}

/// A completion of the prompt of a turn, of some dozens of blocks.
fn of_turn(turn: usize) -> Value {
    completion(&prompt(120, &format!("t{turn}w")))
}

#[tokio::test]
async fn prompts_without_a_common_prefix_allow_no_hits() {
    for salted in [false, true] {
        let mut walk = Walk::start(PAGE, tracked(Spec::aggregated(1))).await;
        match salted {
            false => walk.load(1, |client, turn| of_turn(1000 * client + turn)),
            true => walk.load(1, |_, turn| {
                let mut body = of_turn(0);
                body["cache_salt"] = json!(format!("salt{turn}"));
                body
            }),
        }
        let said = ["`best` itself is small", "prompts have no common prefix"];
        walk.page.says(1, said[0], said[1]);
        walk.page.says(1, "different values of `cache_salt` share nothing", "adapters");
        walk.until(0, "splitrail_cached_tokens_total", |now| !now.is_empty()).await;
        let hits = walk.ask(1, "splitrail_cache_hit_blocks").await;
        assert_eq!(value(&hits, &[("of", "best")]), 0.0, "{hits:?}");
    }
}

#[tokio::test]
async fn requests_that_arrive_together_lose_what_is_not_computed_yet() {
    let spec =
        Spec { engine: |_, config| config.prefill_us_per_token = 300, ..Spec::aggregated(1) };
    let walk = Walk::start(PAGE, tracked(spec)).await;
    let mut turn = 0;
    eventually("step 1: blocks are lost", async || {
        turn += 1;
        let prompt = turn;
        let mut together = JoinSet::new();
        for _ in 0..4 {
            let http = walk.http.clone();
            together.spawn(async move { http.post(COMPLETIONS, &of_turn(prompt)).await.status });
        }
        together.join_all().await;
        let losses = walk.ask(1, "splitrail_cache_loss_blocks").await;
        value(&losses, &[("reason", "cold")]) > 0.0
    })
    .await;
    walk.is_lost_by("cold", "such requests arrive together").await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_small_cache_loses_by_eviction() {
    let spec = Spec { engine: |_, config| config.kv_blocks = 128, ..Spec::aggregated(1) };
    let mut walk = Walk::start(PAGE, tracked(spec)).await;
    walk.load(1, |_, turn| of_turn(turn % 6));
    walk.is_lost_by("evicted", "more KV memory").await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_policy_that_ignores_overlap_diverts() {
    let spec = Spec { policy: "{ kind: round_robin }", ..Spec::aggregated(2) };
    let mut walk = Walk::start(PAGE, tracked(spec)).await;
    // Each prompt comes twice, and goes to both workers.
    walk.load(1, |_, turn| of_turn(turn / 2));
    walk.is_lost_by("diverted", "[step 4]").await;
    walk.page.says(4, "`round_robin`", "do not");
    walk.until(4, "splitrail_overlap_blocks_lost_total", |share| only(share) > 0.5).await;
    let headers = [("x-request-id", "diverted-1"), ("content-type", "application/json")];
    let body = of_turn(0).to_string();
    assert_eq!(walk.http.post_with(COMPLETIONS, &headers, body).await.status, 200);
    let line = "`splitrail explain --request-id ID` shows the overlap and cost of each candidate";
    walk.page.says(4, line, "");
    let told = walk.explained("diverted-1").await;
    assert!(told.contains("w0") && told.contains("w1") && told.contains("overlap"), "{told}");
    walk.fires(&[]).await;
}

#[tokio::test]
async fn another_vocabulary_loses_by_parity_and_the_canary_says_why() {
    let spec = Spec {
        policy: "{ kind: round_robin }",
        model: "canary: { timeout: 5s, interval: 10m }".into(),
        engine: |_, config| config.dialect = PromptDialect::OtherVocabulary,
        ..Spec::aggregated(2)
    };
    let mut walk = Walk::start(PAGE, tracked(spec)).await;
    let mismatch = [("worker", "w0")];
    walk.until(2, "splitrail_worker_parity", |now| value(now, &mismatch) == 1.0).await;
    walk.page.says(2, "`parity: mismatch`", "follow `parity_advice`");
    let worker = walk.worker(2, "w0", |worker| worker["parity"] == "mismatch").await;
    assert_eq!(worker["parity_cause"], "vocabulary", "{worker}");
    assert!(worker["parity_advice"].as_str().is_some_and(|advice| advice.len() > 20), "{worker}");
    walk.load(1, |_, turn| of_turn(turn / 2));
    walk.is_lost_by("parity", "[step 2]").await;
    walk.fires(&["SplitrailParityMismatch"]).await;
}

#[tokio::test]
async fn another_template_shows_in_the_length_of_prompts() {
    let spec = Spec {
        engine: |_, config| config.dialect = PromptDialect::OtherTemplate,
        ..Spec::aggregated(1)
    };
    let walk = Walk::start(PAGE, spec).await;
    let mut turn = 0;
    eventually("step 2: prompts have another length", async || {
        turn += 1;
        walk.http.post(CHAT, &chat(&prompt(20, &format!("l{turn}-")))).await;
        only(&walk.ask(2, "splitrail_prompt_length_mismatches_total").await) > 0.0
    })
    .await;
    walk.fires(&["SplitrailPromptLengthMismatch"]).await;
}

#[tokio::test]
async fn a_model_without_a_tokenizer_is_placed_by_load_alone() {
    let spec = Spec { policy: "{ kind: round_robin }", ..Spec::aggregated(1) };
    let walk = Walk::start_with(PAGE, spec, |yaml| {
        let begin = yaml.find("tokenizer: {").unwrap();
        let end = begin + yaml[begin..].find('\n').unwrap();
        format!("{}tokenizer: {{ kind: none }}{}", &yaml[..begin], &yaml[end..])
    })
    .await;
    walk.page.says(2, "`parity: unknown`", "placed by load alone");
    walk.worker(2, "w0", |worker| worker["parity"] == "unknown").await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn prompts_with_images_have_unknown_tokens() {
    let mut walk = Walk::start(PAGE, Spec::aggregated(1)).await;
    walk.load_at(CHAT, 1, |_, turn| {
        json!({"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": format!("http://x/{turn}.png")}},
            {"type": "text", "text": "what is it?"},
        ]}]})
    });
    walk.page.says(2, "`splitrail_untokenized_prompts_total` grows", "with images");
    walk.until(2, "splitrail_untokenized_prompts_total", |now| {
        now.iter().any(|(labels, rate)| labels["reason"].is_string() && *rate > 0.0)
    })
    .await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn an_engine_that_reports_no_cached_tokens_is_named() {
    let spec =
        Spec { engine: |_, config| config.usage_report = UsageReport::Null, ..Spec::aggregated(1) };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(1, |_, turn| of_turn(turn % 3));
    walk.page.says(
        5,
        "An engine that reports no `cached_tokens`",
        "--enable-prompt-tokens-details",
    );
    let silent = [("worker", "w0"), ("figure", "cached_tokens")];
    walk.until(5, "splitrail_engine_reports_total", |now| value(now, &silent) > 0.0).await;
    // Hits are estimates then.
    let estimate = [("source", "estimate")];
    walk.until(5, "splitrail_cached_tokens_total", |now| value(now, &estimate) > 0.0).await;
    walk.fires(&["SplitrailCachedTokensNotReported"]).await;
}

#[tokio::test]
async fn an_engine_that_evicts_in_silence_is_stale() {
    let spec = Spec { engine: |_, config| config.kv_blocks = 128, ..Spec::aggregated(1) };
    let mut walk = Walk::start(PAGE, tracked(spec)).await;
    walk.fault("w0", FaultKind::HideRemovals { in_replay: true });
    walk.load(1, |_, turn| of_turn(turn % 6));
    walk.is_lost_by("stale", "[step 3]").await;
    walk.page.says(
        3,
        "`splitrail_worker_overlap_discount_ratio`",
        "the engine evicts without saying so",
    );
    let over = [("direction", "over")];
    walk.until(3, "cached_tokens_error_blocks_sum", |now| value(now, &over) > 0.0).await;
    let w0 = [("worker", "w0")];
    walk.until(3, "splitrail_worker_overlap_discount_ratio", |now| value(now, &w0) > 0.0).await;
    walk.fires(&["SplitrailIndexDrifts"]).await;
}

#[tokio::test]
async fn a_prompt_that_is_cached_is_reported_as_less() {
    let model = "canary: { timeout: 5s, interval: 10m }".into();
    let walk = Walk::start(PAGE, Spec { prefill: 1, decode: 1, model, ..Spec::default() }).await;
    walk.page.says(2, "`parity: ok`", "go on");
    for worker in ["p0", "d0"] {
        walk.worker(2, worker, |worker| worker["parity"] == "ok").await;
    }
    let mut body = completion("");
    body["prompt"] = (100..243).collect();
    let mut cached = Value::Null;
    for _ in 0..2 {
        let reply = walk.http.post(COMPLETIONS, &body).await.json();
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    }
    walk.page.says(5, "The last token of a prompt is always computed", "143 tokens");
    walk.page.says(5, "The last token of a prompt is always computed", "at most 128");
    assert_eq!(cached, 128);
    walk.page.says(5, "KV that the decode worker received by a hand-off", "never as cached");
    let metrics = walk.admin.get("/metrics").await.text();
    let transferred = [("source", "external_kv_transfer")];
    assert!(metric_in(&metrics, "splitrail_prompt_tokens_total", &transferred) >= 128.0);
    assert_eq!(metric_in(&metrics, "splitrail_cached_tokens_total", &[]), 128.0);
    walk.fires(&[]).await;
}
