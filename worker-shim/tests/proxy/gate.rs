//! The gate: which requests it answers, in which form, and what reaches the engine.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::{EngineUsage, UsageError};
use splitrail_kv::BlockHash;
use splitrail_proto::v1::Capabilities;
use splitrail_shim::proxy::GateRequirement;
use splitrail_sim::{SimConfig, SimEngine};

use crate::support::*;

const GATE: &str = "x-splitrail-gate";

fn gate(rank: u16, blocks: u32) -> String {
    format!("{:016x}:{rank}:{blocks}:{:016x}", 0xab, 0xcd)
}

async fn start() -> (SimEngine, ProxyUnderTest) {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let proxy = ProxyUnderTest::in_front_of(engine.http_addr()).await;
    (engine, proxy)
}

/// Requests for each endpoint, which an empty engine would refuse because of the threshold.
fn requests(stream: bool, n: u32) -> Vec<(&'static str, Value)> {
    let mut chat = json!({"messages": [{"role": "user", "content": "hello"}], "n": n});
    let mut text = json!({"prompt": "one two three", "n": n});
    let mut batch = json!({"prompt": ["one", [1, 2, 3]], "n": n});
    let mut ids = json!({"token_ids": [1, 2, 3], "sampling_params": {"n": n, "max_tokens": 2}});
    for body in [&mut chat, &mut text, &mut batch, &mut ids] {
        body["model"] = json!("sim");
        body["stream"] = json!(stream);
        body["cache_hit_threshold"] = json!(1.0);
    }
    vec![
        ("/v1/chat/completions", chat),
        ("/v1/completions", text),
        ("/v1/completions", batch),
        ("/inference/v1/generate", ids),
    ]
}

/// Removes what differs between replies, and what only the engine knows.
fn without_particulars(mut reply: Value) -> Value {
    for key in ["created", "system_fingerprint", "usage"] {
        if let Some(value) = reply.get_mut(key) {
            *value = Value::Null;
        }
    }
    // The engine repeats the prompt as token ids; the shim does not tokenise.
    for choice in reply["choices"].as_array_mut().unwrap() {
        if let Some(ids) = choice.get_mut("prompt_token_ids") {
            *ids = Value::Null;
        }
    }
    reply
}

#[tokio::test]
async fn a_miss_is_answered_in_the_engines_format() {
    let (engine, proxy) = start().await;
    let headers = [("x-request-id", "abc")];
    let gated = [headers[0], (GATE, &gate(0, 1))];
    for (stream, n) in [(false, 1), (true, 1), (false, 3), (true, 3)] {
        for (path, body) in requests(stream, n) {
            let theirs = post(engine.http_addr(), path, &headers, &body).await;
            let before = engine.requests().len();
            let ours = post(proxy.address, path, &gated, &body).await;
            assert_eq!(engine.requests().len(), before, "the engine was asked");
            assert_eq!((ours.status, theirs.status), (200, 200));
            assert_eq!(ours.headers["content-type"], theirs.headers["content-type"]);
            let all = |reply: &Reply| match stream {
                true => reply.chunks(),
                false => vec![reply.json()],
            };
            let sorted = |reply: &Reply| {
                let mut all: Vec<_> = all(reply).into_iter().map(without_particulars).collect();
                all.sort_by_key(|chunk| chunk["choices"][0]["index"].as_u64());
                all
            };
            assert_eq!(sorted(&ours), sorted(&theirs), "{path} {body}");
            for reply in all(&ours) {
                let id = reply.get("id").or(reply.get("request_id")).unwrap();
                assert!(id.as_str().unwrap().ends_with("-abc"), "{id}");
                assert_eq!(reply["choices"][0]["finish_reason"], "cache_threshold");
            }
        }
    }
    assert_eq!(proxy.outcomes("gate_miss"), 16);
    assert_eq!(proxy.counts(), (0, 0));
}

#[tokio::test]
async fn a_miss_reports_no_usage() {
    let (_engine, proxy) = start().await;
    let gate = gate(0, 1);
    for (path, mut body) in requests(false, 1) {
        let reply = post(proxy.address, path, &[(GATE, &gate)], &body).await.json();
        assert_eq!(
            EngineUsage::parse(Dialect::Chunks, &reply["usage"].to_string()),
            Err(UsageError::Absent)
        );
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = post(proxy.address, path, &[(GATE, &gate)], &body).await.chunks();
        assert!(chunks.iter().all(|chunk| chunk["choices"].as_array().unwrap().len() == 1));
    }
}

#[tokio::test]
async fn a_hit_is_forwarded_to_the_engine() {
    let (engine, proxy) = start().await;
    proxy.holding.blocks.store(3, Ordering::Relaxed);
    for (blocks, served) in [(3, true), (4, false), (1, true)] {
        for (path, mut body) in requests(false, 1) {
            body.as_object_mut().unwrap().remove("cache_hit_threshold");
            let before = engine.requests().len();
            let reply = post(proxy.address, path, &[(GATE, &gate(0, blocks))], &body).await;
            let seen = engine.requests();
            assert_eq!(seen.len() - before, usize::from(served));
            let reason = &reply.json()["choices"][0]["finish_reason"];
            assert_eq!(*reason == "cache_threshold", !served, "{reason}");
            if let Some(seen) = seen.last().filter(|_| served) {
                assert_eq!(seen.body, body);
                assert_eq!(seen.header(GATE), None);
                assert_eq!(seen.header("x-data-parallel-rank"), None);
            }
        }
    }
    assert_eq!((proxy.outcomes("gate_hit"), proxy.outcomes("gate_miss")), (8, 4));
    let asked = proxy.holding.asked.lock().unwrap();
    let expected =
        GateRequirement { namespace: BlockHash(0xab), rank: 0, blocks: 3, last: BlockHash(0xcd) };
    assert_eq!(asked[0], expected);
}

#[tokio::test]
async fn a_hit_is_pinned_to_the_rank_that_holds_the_blocks() {
    let (engine, proxy) = start().await;
    proxy.holding.blocks.store(9, Ordering::Relaxed);
    let body = json!({"prompt": "a b c", "max_tokens": 1});
    for (ranks, takes_rank_header, rank, pinned) in [
        (None, None, 0, Some(None)),
        (Some(1), Some(true), 0, Some(None)),
        (Some(1), None, 0, Some(None)),
        (Some(4), Some(true), 0, Some(Some("0"))),
        (Some(4), Some(true), 3, Some(Some("3"))),
        (None, Some(true), 2, Some(Some("2"))),
        (Some(4), Some(false), 0, None),
        (Some(4), None, 3, None),
        (None, None, 1, None),
    ] {
        let known = Capabilities { ranks, takes_rank_header, ..Capabilities::default() };
        proxy.capabilities.send_replace(known);
        let headers = [(GATE, &*gate(rank, 1)), ("x-data-parallel-rank", "7")];
        let before = engine.requests().len();
        let reply = post(proxy.address, "/v1/completions", &headers, &body).await.json();
        let seen = engine.requests();
        let missed = reply["choices"][0]["finish_reason"] == "cache_threshold";
        assert_eq!((missed, seen.len() - before), (pinned.is_none(), usize::from(!missed)));
        if let Some(pinned) = pinned {
            // If the shim does not pin the request, the client's own header stays.
            let expected = pinned.or(Some("7"));
            assert_eq!(seen.last().unwrap().header("x-data-parallel-rank"), expected);
        }
    }
}

#[tokio::test]
async fn a_malformed_gate_header_is_refused_and_named() {
    let (engine, proxy) = start().await;
    proxy.holding.blocks.store(9, Ordering::Relaxed);
    let malformed = (400, "gate_malformed".to_owned(), json!(GATE));
    for (path, body) in requests(false, 1) {
        for wrong in ["", "x", "0:0:0:0", "00000000000000ab:0:0:00000000000000cd"] {
            let reply = post(proxy.address, path, &[(GATE, wrong)], &body).await;
            assert_eq!(reply.error(), malformed, "{wrong}");
        }
        let twice = [(GATE, &*gate(0, 1)), (GATE, &*gate(0, 1))];
        assert_eq!(post(proxy.address, path, &twice, &body).await.error(), malformed);
    }
    // Replies of these endpoints cannot express a miss.
    for path in ["/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"] {
        let reply = post(proxy.address, path, &[(GATE, &gate(0, 1))], &json!({})).await;
        assert_eq!(reply.error(), malformed, "{path}");
    }
    assert_eq!(engine.requests(), []);
    assert!(proxy.holding.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_miss_with_an_invalid_body_is_refused() {
    let (engine, proxy) = start().await;
    let gate = gate(0, 1);
    for body in [json!([]), json!({"stream": "yes"}), json!({"n": 0}), json!({"n": "x"})] {
        let reply = post(proxy.address, "/v1/completions", &[(GATE, &gate)], &body).await;
        assert_eq!(reply.error(), (400, "body_malformed".to_owned(), Value::Null), "{body}");
    }
    // A body that cannot be read is refused with status 412, which routers understand as well.
    let headers = [(GATE, gate.as_str()), ("content-encoding", "gzip")];
    let reply = post(proxy.address, "/v1/completions", &headers, &json!({})).await;
    assert_eq!(reply.error(), (412, "cache_threshold".to_owned(), json!(GATE)));
    assert_eq!(engine.requests(), []);
}
