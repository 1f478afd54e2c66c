//! Engines that reply with nonsense: bytes that cannot be a reply become an error, and parameters
//! that cannot be a hand-off reach no engine.

use serde_json::json;
use splitrail_tests::Spec;
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, error_of, prompt,
};

/// The nonsensical worker is the first to be asked.
fn before_one_good(worker: &Canned) -> Spec {
    Spec {
        policy: "{ kind: round_robin }",
        limits: "{ engine_reply_size_max: 65536 }",
        extra_workers: vec![worker.worker("x0", "both")],
        ..Spec::aggregated(1)
    }
}

const CHUNK: &str = r#"{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
const LAST: &str = r#"{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"b","finish_reason":"length"}]}"#;

const FAILED: &str = r#"{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"","finish_reason":"error"}]}"#;

#[tokio::test]
async fn a_stream_that_never_began_is_retried() {
    let reference = Reference::start().await;
    let body = completion(&prompt(30, "begun"));
    let expected = reference.text(COMPLETIONS, &body).await;
    for (what, bytes) in [
        ("an empty stream", Canned::events(&[])),
        ("nothing but its end", Canned::events(&["[DONE]"])),
        ("an error", Canned::events(&[r#"{"error":{"message":"no","code":500}}"#, "[DONE]"])),
        ("a flat error", Canned::events(&[r#"{"object":"error","message":"no"}"#, "[DONE]"])),
        ("an error as a reason", Canned::events(&[FAILED, "[DONE]"])),
        ("a web page", Canned::reply("text/html", "<html><body>It works!</body></html>")),
        ("no HTTP", "SSH-2.0-OpenSSH_9.9\r\n".to_owned()),
        ("nothing", String::new()),
        ("half a head", "HTTP/1.1 200 OK\r\ncontent-".to_owned()),
        (
            "a redirect",
            "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
                .into(),
        ),
    ] {
        let nonsense = Canned::start(bytes, Then::Close).await;
        let mut trial = Trial::start(before_one_good(&nonsense)).await;
        let mut events = trial.stream("ok", COMPLETIONS, &body).await;
        assert_eq!(events.status, 200, "{what}");
        let chunks = events.chunks().await;
        assert_eq!(streamed_text(&chunks, 0), expected, "{what}");
        assert_eq!(nonsense.asked(), 1, "{what}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_invalid_reply_is_retried() {
    let reference = Reference::start().await;
    let body = chat(&prompt(30, "reply"));
    let expected = reference.text(CHAT, &body).await;
    for (what, bytes) in [
        ("nothing in it", Canned::reply("application/json", "")),
        ("a web page", Canned::reply("text/html", "<html><body>It works!</body></html>")),
        ("a list", Canned::reply("application/json", "[]")),
        ("a flat error", Canned::reply("application/json", r#"{"object":"error","message":"no"}"#)),
        ("an error as a reason", Canned::reply("application/json", FAILED)),
        ("two replies", Canned::reply("application/json", "{} {}")),
        ("no HTTP", "SSH-2.0-OpenSSH_9.9\r\n".to_owned()),
    ] {
        let nonsense = Canned::start(bytes, Then::Close).await;
        let mut trial = Trial::start(before_one_good(&nonsense)).await;
        let reply = trial.post("ok", CHAT, &body).await;
        assert_eq!(reply.status, 200, "{what}: {}", reply.text());
        assert_eq!(whole_text(&reply.json(), 0), expected, "{what}");
        assert_eq!(nonsense.asked(), 1, "{what}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_stream_that_ends_early_or_is_invalid_is_reported_as_broken() {
    let long = "x".repeat(70_000);
    for (what, events, code) in [
        ("an orderly end in the middle", vec![CHUNK], "decode_lost"),
        ("an event too long", vec![CHUNK, &long, "[DONE]"], "reply_too_large"),
        ("an error", vec![CHUNK, r#"{"error":{"message":"no"}}"#, "[DONE]"], "decode_lost"),
        ("a flat error", vec![CHUNK, r#"{"object":"error","message":"no"}"#], "decode_lost"),
        ("an error as a reason", vec![CHUNK, FAILED, "[DONE]"], "decode_lost"),
    ] {
        let nonsense = Canned::start(Canned::events(&events), Then::Close).await;
        let mut trial = Trial::start(before_one_good(&nonsense)).await;
        let body = completion(&prompt(30, "broken"));
        let mut events = trial.stream(code, COMPLETIONS, &body).await;
        assert_eq!(events.status, 200, "{what}");
        let events = events.rest().await;
        assert!(events.last().is_some_and(|last| last != "[DONE]"), "{what}: {events:?}");
        let (chunks, error) = broken_off(&events);
        assert_eq!(chunks[0]["choices"][0]["text"], "a", "{what}");
        assert_eq!(error["code"], code, "{what}");
        trial.finish().await;
    }
}

/// JSON leaves white space and the order of members free.
const ERRORS: [&str; 2] = [
    r#"{ "error" : {"message": "no", "code": 500}}"#,
    r#"{"id":"x","error":{"message":"no","code":500}}"#,
];

#[tokio::test]
async fn an_error_event_is_recognised_in_every_spelling() {
    let reference = Reference::start().await;
    let body = completion(&prompt(30, "spelt"));
    let expected = reference.text(COMPLETIONS, &body).await;
    for error in ERRORS {
        let nonsense = Canned::start(Canned::events(&[error, "[DONE]"]), Then::Close).await;
        let mut trial = Trial::start(before_one_good(&nonsense)).await;
        let mut events = trial.stream("ok", COMPLETIONS, &body).await;
        let chunks = events.chunks().await;
        assert_eq!(streamed_text(&chunks, 0), expected, "begun elsewhere");
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_error_event_during_the_stream_is_recognised_in_every_spelling() {
    for error in ERRORS {
        let events = Canned::events(&[CHUNK, error, "[DONE]"]);
        let nonsense = Canned::start(events, Then::Close).await;
        let mut trial = Trial::start(before_one_good(&nonsense)).await;
        let body = completion(&prompt(30, "spelt"));
        let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
        broken_off(&events.rest().await);
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_event_that_is_no_json_is_not_relayed() {
    let events = Canned::events(&[CHUNK, r#"{"id":"x","choices":[{"ind"#, "[DONE]"]);
    let nonsense = Canned::start(events, Then::Close).await;
    let mut trial = Trial::start(before_one_good(&nonsense)).await;
    let body = completion(&prompt(30, "json"));
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    let events = events.rest().await;
    assert!(events.last().is_some_and(|last| last != "[DONE]"), "{events:?}");
    broken_off(&events);
    trial.finish().await;
}

#[tokio::test]
async fn an_event_of_a_batch_that_is_no_json_is_an_error() {
    let half = r#"{"id":"x","choices":[{"index":0,"text":"los"#;
    let events = Canned::events(&[CHUNK, half, LAST, "[DONE]"]);
    let nonsense = Canned::start(events, Then::Close).await;
    let spec = Spec {
        policy: "{ kind: least_loaded }",
        extra_workers: vec![nonsense.worker("x0", "both")],
        ..Spec::aggregated(0)
    };
    let mut trial = Trial::start(spec).await;
    let mut body = completion("");
    body["prompt"] = json!(["one", "two"]);
    let mut events = trial.stream("decode_lost", COMPLETIONS, &body).await;
    broken_off(&events.rest().await);
    trial.finish().await;
}

#[tokio::test]
async fn an_invalid_hand_off_does_not_reach_decode() {
    let reference = Reference::start().await;
    let good = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 1, "remote_num_tokens": 32, "tp_size": 1,
    });
    let without = |key: &str| {
        let mut params = good.clone();
        params.as_object_mut().unwrap().remove(key);
        params
    };
    let with = |key: &str, value: serde_json::Value| {
        let mut params = good.clone();
        params[key] = value;
        params
    };
    for params in [
        json!(null),
        json!("x"),
        json!([]),
        json!({}),
        // This ends a decode engine.
        json!({"do_remote_prefill": true}),
        without("remote_block_ids"),
        with("remote_block_ids", json!([])),
        with("remote_block_ids", json!([[]])),
        with("remote_block_ids", json!("x")),
        without("remote_engine_id"),
        without("remote_host"),
        with("remote_port", json!(70_000)),
        with("do_remote_prefill", json!(false)),
        with("do_remote_decode", json!(true)),
    ] {
        let reply = json!({
            "id": "x", "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 32, "completion_tokens": 1, "total_tokens": 33},
            "kv_transfer_params": params,
        });
        let reply = Canned::reply("application/json", &reply.to_string());
        let nonsense = Canned::start(reply, Then::Close).await;
        let spec = Spec {
            prefill: 1,
            decode: 1,
            policy: "{ kind: round_robin }",
            extra_workers: vec![nonsense.worker("x0", "prefill")],
            ..Spec::default()
        };
        let mut trial = Trial::start(spec).await;
        let body = completion(&prompt(30, "hand-off"));
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{params}: {}", reply.text());
        let expected = reference.text(COMPLETIONS, &body).await;
        assert_eq!(whole_text(&reply.json(), 0), expected, "{params}");
        assert_eq!(reply.route("prefill"), Some("p0"), "{params}");
        assert_eq!(nonsense.asked(), 1, "{params}");
        assert_eq!(trial.counts(["p0", "d0"]), [1, 1], "{params}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn an_invalid_answer_of_the_only_worker_is_a_typed_error() {
    for bytes in [
        Canned::events(&[]),
        Canned::reply("text/html", "<html></html>"),
        "SSH-2.0-OpenSSH_9.9\r\n".to_owned(),
    ] {
        let nonsense = Canned::start(bytes, Then::Close).await;
        let spec = Spec {
            policy: "{ kind: least_loaded }",
            extra_workers: vec![nonsense.worker("x0", "both")],
            ..Spec::aggregated(0)
        };
        let mut trial = Trial::start(spec).await;
        let body = chat(&prompt(10, "only"));
        for body in [body.clone(), splitrail_tests::trial::streamed(&body)] {
            let reply = trial.post("engine_failed", CHAT, &body).await;
            assert_eq!(reply.status, 502, "{}", reply.text());
            error_of(&reply.json());
        }
        trial.finish().await;
    }
}
