//! Streams on which nothing moves for long: clients get a head and comments, so that no proxy takes
//! their connection for dead.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::Events;
use splitrail_tests::dialect::{self, BOTH, MESSAGES, RESPONSES};
use splitrail_tests::scripted_server::{STREAM_HEAD, ScriptedReply, ScriptedServer};
use splitrail_tests::trial::{CHAT, COMPLETIONS, Trial, chat, completion, prompt};

const PATHS: [&str; 4] = [CHAT, COMPLETIONS, RESPONSES, MESSAGES];

/// A comment is due after a short silence.
const SHORT: &str = "streams: { keep_alive: 20ms }";

const PING: &str = "event: ping\ndata: {\"type\": \"ping\"}";

fn body(path: &str) -> serde_json::Value {
    match path {
        CHAT => chat(&prompt(40, "silent")),
        COMPLETIONS => completion(&prompt(40, "silent")),
        _ => dialect::request(path, &prompt(40, "silent"), 12),
    }
}

/// A whole stream of an engine.
fn stream(path: &str) -> &'static str {
    match path {
        CHAT => concat!(
            r#"data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"sim","choices":[{"index":0,"delta":{"content":"output"},"finish_reason":"stop"}]}"#,
            "\n\ndata: [DONE]\n\n"
        ),
        COMPLETIONS => concat!(
            r#"data: {"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"output","finish_reason":"stop"}]}"#,
            "\n\ndata: [DONE]\n\n"
        ),
        RESPONSES => concat!(
            "event: response.created\n",
            "data: {\"response\":{\"usage\":null},\"type\":\"response.created\"}\n\n",
            "event: response.output_text.delta\n",
            "data: {\"delta\":\"output\",\"type\":\"response.output_text.delta\"}\n\n",
            "event: response.completed\n",
            "data: {\"type\":\"response.completed\",\"response\":{\"usage\":null}}\n\n"
        ),
        _ => concat!(
            "event: message_start\n",
            "data: {\"type\":\"message_start\",\"message\":{\"id\":\"m\"}}\n\n",
            "event: content_block_delta\n",
            "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"output\"}}\n\n",
            "event: message_stop\n",
            "data: {\"type\":\"message_stop\"}\n\n"
        ),
    }
}

/// An engine that replies to inference with `first`, and with `last` when it is released.
async fn held(first: Vec<u8>, last: Vec<u8>) -> ScriptedServer {
    ScriptedServer::start(move |heard| match heard.is_inference() {
        true => ScriptedReply::Held { first: first.clone(), last: last.clone() },
        false => ScriptedReply::json(200, "{}"),
    })
    .await
}

fn worker(engine: &ScriptedServer, role: &str) -> Vec<String> {
    vec![format!("{{ id: x0, role: {role}, url: \"{}\" }}", engine.url())]
}

/// One worker, which is `engine`.
fn alone(engine: &ScriptedServer, top: &str) -> Spec {
    let model = "retries: { decode: 0 }".to_owned();
    Spec {
        extra_workers: worker(engine, "both"),
        top: top.to_owned(),
        model,
        ..Spec::aggregated(0)
    }
}

fn of_router(path: &str) -> &'static str {
    if path == MESSAGES { PING } else { ": keep-alive" }
}

async fn are_comments(events: &mut Events, comment: &str, path: &str) {
    for _ in 0..3 {
        assert_eq!(events.next_lines().await.as_deref(), Some(comment), "{path}");
    }
}

#[tokio::test]
async fn comments_go_out_while_an_engine_says_nothing() {
    for path in PATHS {
        let engine = held(Vec::new(), [STREAM_HEAD, stream(path).as_bytes()].concat()).await;
        let mut trial = Trial::start(alone(&engine, SHORT)).await;
        let mut events = trial.stream("ok", path, &body(path)).await;
        assert_eq!(events.status, 200, "{path}");
        let header = |name| events.headers[name].to_str().unwrap();
        assert_eq!(header("content-type"), "text/event-stream");
        assert_eq!(header("cache-control"), "no-cache");
        assert_eq!(header("x-accel-buffering"), "no");
        assert!(header("x-splitrail-route").contains("decode=x0"), "what is known is told");
        are_comments(&mut events, of_router(path), path).await;
        engine.release();
        let rest = events.rest_text().await;
        assert!(rest.ends_with(stream(path)), "{path}: {rest}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_failure_after_the_head_is_an_event() {
    let failure = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    for path in PATHS {
        let engine = held(Vec::new(), failure.to_vec()).await;
        let mut trial = Trial::start(alone(&engine, SHORT)).await;
        let mut events = trial.stream("engine_failed", path, &body(path)).await;
        assert_eq!(events.status, 200, "{path}");
        are_comments(&mut events, of_router(path), path).await;
        engine.release();
        let rest = events.rest_text().await;
        let (_, last) = rest.trim_end().rsplit_once("\n\n").unwrap_or(("", rest.trim_end()));
        assert_eq!(last.starts_with("event: error\n"), BOTH.contains(&path), "{path}: {rest}");
        assert!(last.contains("\"engine_failed\""), "{path}: {rest}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn comments_of_an_engine_reach_the_client_at_once() {
    for path in PATHS {
        let comment = if path == MESSAGES { PING } else { ": engine's own" };
        let first = [STREAM_HEAD, comment.as_bytes(), b"\n\n"].concat();
        let engine = held(first, stream(path).as_bytes().to_vec()).await;
        let mut trial = Trial::start(alone(&engine, "")).await;
        let mut events = trial.stream("ok", path, &body(path)).await;
        assert_eq!(events.next_lines().await.as_deref(), Some(comment), "{path}");
        engine.release();
        assert!(events.rest_text().await.contains("output"), "{path}");
        trial.finish().await;
    }
}

#[tokio::test]
async fn comments_of_a_decode_engine_reach_the_client_after_its_first_output() {
    let chunk = r#"data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"sim","choices":[{"index":0,"delta":{"content":"o"},"finish_reason":null}]}"#;
    let first = [STREAM_HEAD, chunk.as_bytes(), b"\n\n: engine's own\n\n"].concat();
    let engine = held(first, stream(CHAT).as_bytes().to_vec()).await;
    let spec =
        Spec { prefill: 1, decode: 0, extra_workers: worker(&engine, "decode"), ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let mut events = trial.stream("ok", CHAT, &body(CHAT)).await;
    assert_eq!(events.next_lines().await.as_deref(), Some(chunk));
    assert_eq!(events.next_lines().await.as_deref(), Some(": engine's own"));
    engine.release();
    assert!(events.rest_text().await.ends_with(stream(CHAT)));
    trial.finish().await;
}

#[tokio::test]
async fn a_prefill_leg_counts_and_a_client_that_leaves_then_frees_everything() {
    for path in PATHS {
        let spec = Spec { prefill: 1, decode: 1, top: SHORT.to_owned(), ..Spec::default() };
        let mut trial = Trial::start(spec).await;
        trial.fault("p0", FaultKind::Hang, Some(1));
        let mut events = trial.stream("cancelled", path, &body(path)).await;
        are_comments(&mut events, of_router(path), path).await;
        let route = events.headers["x-splitrail-route"].to_str().unwrap();
        assert!(route.contains("prefill=p0") && !route.contains("decode="), "{route}");
        drop(events);
        trial.finish().await;
    }
}
