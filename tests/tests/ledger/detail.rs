//! `usage.splitrail`: the prompt tokens by source, for clients that ask for them.

use serde_json::{Value, json};
use splitrail_sim::{DecodeUsage, UsageReport};
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

const DETAIL: [(&str, &str); 1] = [("x-splitrail-usage", "detail")];

/// The usage of a reply, with details asked for.
async fn usage(cluster: &Cluster, body: &Value) -> Value {
    if body["stream"] == true {
        let chunks = cluster.http.stream_with(COMPLETIONS, &DETAIL, body).await.chunks().await;
        return chunks.last().unwrap()["usage"].clone();
    }
    let reply = cluster.http.post_with(COMPLETIONS, &DETAIL, body.to_string()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["usage"].clone()
}

fn with_usage(body: &Value) -> Value {
    let mut body = streamed(body);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// What one leg must say.
fn leg(kind: &str, hit: u64, moved: u64, computed: u64, sources: [&str; 2]) -> Value {
    let [length, parts] = sources;
    let mut tiers = json!({});
    if hit > 0 {
        tiers["device"] = hit.into();
    }
    json!({
        "leg": kind, "prompt_tokens": hit + moved + computed, "local_cache_hit": hit,
        "local_cache_hit_by_tier": tiers, "external_kv_transfer": moved, "local_compute": computed,
        "sources": {
            "prompt_tokens": length, "local_cache_hit": parts,
            "external_kv_transfer": parts, "local_compute": parts,
        },
    })
}

#[tokio::test]
async fn a_pd_prompt_is_reported_leg_by_leg() {
    let cluster = Cluster::start(Spec { prefill: 1, decode: 1, ..Spec::default() }).await;
    let text = "x".repeat(100);
    let body = completion(&text);
    for (body, cached) in [(&body, 0), (&body, 96), (&with_usage(&body), 96)] {
        let usage = usage(&cluster, body).await;
        let expected = json!({"prompts": [{
            "prompt_tokens": 100, "cached_tokens": cached, "cached_source": "engine_prefill",
            "completion_tokens": 12,
            "legs": [
                leg("prefill", cached, 0, 100 - cached, ["engine_prefill"; 2]),
                leg("decode", cached, 100 - cached, 0, ["engine_decode", "estimate"]),
            ],
        }]});
        assert_eq!(usage["splitrail"], expected, "{usage}");
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], cached);
        cluster.settle().await;
    }
}

#[tokio::test]
async fn a_prefill_engine_that_reports_too_many_cached_tokens_still_says_how_long_the_prompt_is() {
    // The hand-off is not used, so that the leg is discarded.
    let reply = json!({
        "id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 20},
        },
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]],
            "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.0.0.1",
            "remote_port": 9, "remote_num_tokens": 9,
        },
    });
    let prefill =
        Canned::start(Canned::reply("application/json", &reply.to_string()), Then::Close).await;
    let extra_workers = vec![prefill.worker("x0", "prefill")];
    let spec = Spec { prefill: 0, decode: 1, extra_workers, ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let usage = usage(&cluster, &completion(&"z".repeat(50))).await;
    let discarded = &usage["splitrail"]["prompts"][0]["discarded"][0];
    assert_eq!((&discarded["leg"], &discarded["prompt_tokens"]), (&json!("prefill"), &json!(9)));
    let sources = &discarded["sources"];
    assert_eq!(
        (&sources["prompt_tokens"], &sources["local_cache_hit"]),
        (&json!("engine_prefill"), &json!("estimate"))
    );
}

#[tokio::test]
async fn a_decode_worker_that_does_it_all_speaks_for_itself() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let body = completion(&"y".repeat(50));
    usage(&cluster, &body).await;
    let usage = usage(&cluster, &with_usage(&body)).await;
    let legs = &usage["splitrail"]["prompts"][0]["legs"];
    assert_eq!(*legs, json!([leg("decode", 48, 0, 2, ["engine_decode"; 2])]), "{usage}");
}

#[tokio::test]
async fn each_prompt_of_a_batch_has_its_own_detail_and_only_on_request() {
    let cluster = Cluster::start(Spec::default()).await;
    let mut body = completion("");
    body["prompt"] = json!([prompt(20, "a"), prompt(30, "b"), prompt(40, "c")]);
    for body in [body.clone(), with_usage(&body)] {
        let told = usage(&cluster, &body).await;
        let prompts = told["splitrail"]["prompts"].as_array().unwrap();
        assert_eq!(prompts.len(), 3);
        for key in ["prompt_tokens", "completion_tokens"] {
            let sum: u64 = prompts.iter().map(|prompt| prompt[key].as_u64().unwrap()).sum();
            assert_eq!(told[key], sum, "{told}");
        }
        let text = told.to_string();
        assert!(
            ["p0", "p1", "d0", "d1", "worker"].iter().all(|name| !text.contains(name)),
            "{text}"
        );
    }
    let plain = cluster.http.post(COMPLETIONS, &body).await.json();
    assert!(plain["usage"].get("splitrail").is_none(), "{plain}");
    let wrong = [("x-splitrail-usage", "everything")];
    let refused = cluster.http.post_with(COMPLETIONS, &wrong, body.to_string()).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "x-splitrail-usage");
    // A stream without usage has no place for details, and gets no usage for them.
    let chunks =
        cluster.http.stream_with(COMPLETIONS, &DETAIL, &streamed(&body)).await.chunks().await;
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "{chunks:?}");
}

#[tokio::test]
async fn no_estimate_is_reported_that_the_fallback_hides() {
    for (fallback, told) in [("zero", json!(0)), ("omit", Value::Null)] {
        let cluster = Cluster::start(Spec {
            model: format!("cached_tokens_fallback: {fallback}"),
            engine: |_, config| {
                config.usage_report = UsageReport::Null;
                config.decode_usage = DecodeUsage::WholePrompt;
            },
            ..Spec::default()
        })
        .await;
        let body = completion(&prompt(30, "hush"));
        usage(&cluster, &body).await;
        cluster.settle().await;
        let usage = usage(&cluster, &body).await;
        let prompt = &usage["splitrail"]["prompts"][0];
        assert_eq!((&prompt["cached_tokens"], &prompt["cached_source"]), (&told, &Value::Null));
        assert_eq!(prompt["legs"], json!([{"leg": "prefill"}, {"leg": "decode"}]), "{usage}");
    }
}
