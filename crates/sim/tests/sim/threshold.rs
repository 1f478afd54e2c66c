//! `cache_hit_threshold`.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;

use crate::support::*;

/// A request whose prompt has `total` tokens, of which the first `shared` are common to all.
fn body(shared: usize, total: usize, threshold: f64) -> Value {
    let own = prompt(total as u32, total - shared);
    let tokens = [prompt(1, 160)[..shared].to_vec(), own].concat();
    json!({"prompt": tokens, "max_tokens": 4, "cache_hit_threshold": threshold})
}

fn is_rejection(reply: &Value) -> bool {
    let choice = &reply["choices"][0];
    let rejected = choice["finish_reason"] == "cache_threshold";
    let tokens = reply["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(tokens == 0, rejected);
    assert_eq!(choice["text"] == "", rejected);
    rejected
}

#[tokio::test]
async fn requests_below_their_threshold_are_refused() {
    let engine = start(SimConfig::default()).await;
    let mut results = Vec::new();
    // The cached tokens: 0; 48 of 171 (0.28); 64 of 190 (0.337); 80 of 195 (0.41).
    for (shared, total, threshold) in
        [(160, 160, 0.0), (48, 171, 0.33), (64, 190, 0.33), (80, 195, 0.8)]
    {
        let reply = post(&engine, "/v1/completions", body(shared, total, threshold)).await;
        assert_eq!(reply.status, 200);
        results.push(is_rejection(&reply.json()));
    }
    assert_eq!(results, [false, true, false, true]);
    let state = engine.state();
    assert_eq!(state.totals.finished_cache_threshold, 2);
    assert_eq!(state.blocks_used, 0);
}

#[tokio::test]
async fn a_rejected_stream_is_one_chunk_and_usage() {
    let engine = start(SimConfig::default()).await;
    let mut body = body(0, 50, 0.5);
    body["stream"] = json!(true);
    let chunks = post(&engine, "/v1/completions", body.clone()).await.chunks();
    assert_eq!(chunks.len(), 1);
    assert_eq!(chunks[0]["choices"][0]["finish_reason"], "cache_threshold");
    body["stream_options"] = json!({"include_usage": true});
    let chunks = post(&engine, "/v1/completions", body).await.chunks();
    assert_eq!(chunks.len(), 2);
    assert_eq!(chunks[1]["usage"]["completion_tokens"], 0);
    assert_eq!(chunks[1]["usage"]["prompt_tokens"], 50);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true, "cache_hit_threshold": 1});
    let chunks = post(&engine, "/v1/chat/completions", chat).await.chunks();
    assert_eq!(chunks.len(), 1);
    assert_eq!(chunks[0]["choices"][0]["finish_reason"], "cache_threshold");
}

#[tokio::test]
async fn thresholds_are_validated_or_ignored() {
    let engine = start(SimConfig::default()).await;
    for wrong in [json!(-0.1), json!(1.1), json!("high")] {
        let body = json!({"prompt": "x", "cache_hit_threshold": wrong});
        assert_eq!(post(&engine, "/v1/completions", body).await.status, 400);
    }
    let config = SimConfig { honour_threshold: false, ..SimConfig::default() };
    let ignoring = start(config).await;
    for ignored in [json!(1.0), json!(7)] {
        let body = json!({"prompt": "x", "max_tokens": 3, "cache_hit_threshold": ignored});
        let reply = post(&ignoring, "/v1/completions", body).await.json();
        assert_eq!(reply["usage"]["completion_tokens"], 3);
    }
}
