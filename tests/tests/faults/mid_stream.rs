//! Decode workers that fail after the first byte: the client gets the text so far and a complete
//! error event.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::client::streamed_text;
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, either, prompt, streamed,
};

fn in_turn(decode: usize) -> Spec {
    Spec { decode, policy: "{ kind: round_robin }", ..Spec::default() }
}

#[tokio::test]
async fn a_broken_stream_ends_with_an_error_event_and_without_done() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(in_turn(2)).await;
    for (turn, after_chunks) in [1, 3, 7, 11].into_iter().enumerate() {
        let (path, body) = either(turn, &prompt(40, &format!("f{turn}-")));
        let expected = reference.text(path, &body).await;
        trial.fault("d0", FaultKind::DieMidStream { after_chunks }, Some(1));
        let mut events = trial.stream("decode_lost", path, &body).await;
        assert_eq!(events.status, 200, "the stream had begun");
        let (chunks, error) = broken_off(&events.rest().await);
        assert_eq!(chunks.len(), after_chunks, "what came is passed on");
        let text = streamed_text(&chunks, 0);
        assert!(expected.starts_with(&text), "{text:?} of {expected:?}");
        assert_eq!(error["code"], "decode_lost");
        trial.check().await;
        // The next in turn is d1, unhurt.
        let mut events = trial.stream("ok", path, &body).await;
        assert_eq!(streamed_text(&events.chunks().await, 0), expected);
    }
    assert_eq!(trial.counts(["d0", "d1"]), [4, 4], "an answer begun is not begun again");
    assert_eq!(trial.retries("decode").await, 0.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_stream_without_done_is_an_error() {
    let mut trial = Trial::start(in_turn(1)).await;
    // 12 tokens and their finish reason are there; usage and `[DONE]` are not.
    let (path, body) = (COMPLETIONS, completion(&prompt(30, "end")));
    trial.fault("d0", FaultKind::DieMidStream { after_chunks: 12 }, Some(1));
    let mut events = trial.stream("decode_lost", path, &body).await;
    let (chunks, _) = broken_off(&events.rest().await);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_core_that_dies_during_the_stream_is_one_error_event() {
    let spec = Spec { engine: |_, config| config.decode_us_per_step = 20_000, ..in_turn(2) };
    let mut trial = Trial::start(spec).await;
    // The engine itself then sends an error event, and `[DONE]` after it.
    let mut body = chat(&prompt(30, "core"));
    body["max_tokens"] = 500.into();
    let mut events = trial.stream("decode_lost", CHAT, &body).await;
    let mut seen = vec![events.next().await.unwrap(), events.next().await.unwrap()];
    let route = events.headers["x-splitrail-route"].to_str().unwrap();
    let dying = if route.contains("decode=d0") { "d0" } else { "d1" };
    trial.cluster.engine(dying).die();
    seen.extend(events.rest().await);
    let (_, error) = broken_off(&seen);
    assert_eq!(error["code"], "decode_lost");
    trial.finish().await;
}

#[tokio::test]
async fn an_engine_that_goes_silent_during_the_stream_times_out() {
    let spec = Spec {
        model: "timeouts: { first_token: 20s, stream_idle: 150ms }".into(),
        // The first token comes, the second one not for long.
        engine: |name, config| {
            if name == "d0" {
                config.decode_us_per_step = 900_000;
            }
        },
        ..in_turn(1)
    };
    let mut trial = Trial::start(spec).await;
    for (path, body) in
        [(CHAT, chat(&prompt(30, "silent"))), (COMPLETIONS, completion(&prompt(30, "mute")))]
    {
        let mut events = trial.stream("decode_lost", path, &body).await;
        let (chunks, error) = broken_off(&events.rest().await);
        assert!(!chunks.is_empty(), "the first token was passed on");
        assert_eq!(error["code"], "decode_lost");
        trial.check().await;
    }
    assert_eq!(trial.cluster.engine("d0").state().totals.aborted, 2, "the engine was told");
    trial.finish().await;
}

#[tokio::test]
async fn a_broken_reply_that_is_not_streamed_has_no_event() {
    let mut trial = Trial::start(in_turn(1)).await;
    trial.fault("d0", FaultKind::DieMidStream { after_chunks: 5 }, Some(2));
    let body = completion(&prompt(30, "whole"));
    let reply = trial.post("engine_failed", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 502, "{}", reply.text());
    assert_eq!(reply.header("content-type"), "application/json");
    let reply = trial.post("decode_lost", COMPLETIONS, &streamed(&body)).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "text/event-stream");
    trial.finish().await;
}
