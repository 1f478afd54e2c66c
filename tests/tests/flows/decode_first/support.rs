//! What the suites of decode-first share.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{CHAT, COMPLETIONS};
use splitrail_tests::{Reply, Spec, Trial};

/// One prefill and one decode engine that honour the field, and are asked every time.
pub(crate) fn asking() -> Spec {
    with_model("gate: { kind: engine, index_first: false }")
}

/// One prefill and one decode engine, with further keys of the model.
pub(crate) fn with_model(keys: &str) -> Spec {
    Spec { prefill: 1, decode: 1, flow: "decode_first", model: keys.into(), ..Spec::default() }
}

/// No engine knows the field.
pub(crate) fn ignoring(_: &str, config: &mut SimConfig) {
    config.honour_threshold = false;
}

/// `shared` tokens that all prompts of a test begin with, then its own, `total` in all.
pub(crate) fn tokens(shared: usize, total: usize) -> Vec<u32> {
    let letter = |i: usize| (97 + i % 26) as u32;
    let common = (0..shared).map(|i| letter(i * 7 + i / 20));
    // Its length tells it from the others.
    let own = [total, total / 26, total / 676].map(letter).into_iter().cycle();
    common.chain(own.take(total - shared)).collect()
}

/// A completion of 6 tokens.
pub(crate) fn body(shared: usize, total: usize, threshold: Option<f64>) -> Value {
    let mut body = json!({
        "model": "sim", "max_tokens": 6, "temperature": 0, "prompt": tokens(shared, total),
    });
    if let Some(threshold) = threshold {
        body["cache_hit_threshold"] = json!(threshold);
    }
    body
}

/// The same prompt as text, in a chat or a completion.
pub(crate) fn text_body(path: &str, words: &str, threshold: f64) -> Value {
    let mut body = json!({"model": "sim", "max_tokens": 6, "temperature": 0, "cache_hit_threshold": threshold});
    if path == CHAT {
        body["messages"] = json!([{"role": "user", "content": words}]);
    } else {
        body["prompt"] = words.into();
    }
    body
}

/// The gate that decided and what came of it, as the route header says.
pub(crate) fn tried(reply: &Reply) -> (&str, &str) {
    (reply.route("gate").unwrap_or("-"), reply.route("try").unwrap_or("-"))
}

/// Sends a request that must be answered, streamed or not; gives its text and its headers.
pub(crate) async fn answered(
    trial: &mut Trial,
    path: &str,
    body: &Value,
    stream: bool,
) -> (String, Reply) {
    if !stream {
        let reply = trial.post("ok", path, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(!reply.text().contains("cache_threshold"), "{}", reply.text());
        return (whole_text(&reply.json(), 0), reply);
    }
    let mut events = trial.stream("ok", path, body).await;
    assert_eq!(events.status, 200);
    let chunks = events.chunks().await;
    assert!(!format!("{chunks:?}").contains("cache_threshold"), "{chunks:?}");
    let headers = events.headers.clone();
    let text = streamed_text(&chunks, 0);
    (text, Reply { status: events.status, headers, body: Default::default() })
}

/// Both endpoints, streamed and not.
pub(crate) fn ways() -> Vec<(&'static str, bool)> {
    vec![(CHAT, false), (CHAT, true), (COMPLETIONS, false), (COMPLETIONS, true)]
}

/// `decode_first_total` by who decided and what came of it.
pub(crate) async fn counted(trial: &Trial, gate: &str, outcome: &str) -> f64 {
    let labels = [("gate", gate), ("outcome", outcome)];
    trial.cluster.metric("splitrail_decode_first_total", &labels).await
}
