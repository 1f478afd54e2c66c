//! Where a reply ends: what is complete is complete without a word of the engine, and a reply that the
//! engine gave up is no reply, whatever its status says.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;
use splitrail_tests::canned::{Canned, Then};
use splitrail_tests::client::{streamed_text, whole_text};
use splitrail_tests::trial::{
    CHAT, COMPLETIONS, Reference, Trial, broken_off, chat, completion, either, prompt,
};

/// Workers in turn: the one that fails is the first to be asked, however often it has failed.
fn in_turn(spec: Spec) -> Spec {
    let (policy, model) = ("{ kind: round_robin }", "breaker: { failures: 0 }".to_owned());
    Spec { policy, model, ..spec }
}

#[tokio::test]
async fn a_reply_that_its_engine_aborts_comes_from_another_worker() {
    let reference = Reference::start().await;
    for (spec, engine) in
        [(Spec::aggregated(2), "w0"), (Spec { prefill: 1, decode: 2, ..Spec::default() }, "d0")]
    {
        let mut trial = Trial::start(in_turn(spec)).await;
        for turn in 0..2 {
            let (path, body) = either(turn, &prompt(40, &format!("{engine}{turn}-")));
            let expected = reference.text(path, &body).await;
            for after_tokens in [0, 5] {
                trial.fault(engine, FaultKind::Abort { after_tokens }, Some(1));
                let reply = trial.post("ok", path, &body).await;
                assert_eq!(reply.status, 200, "{path}: {}", reply.text());
                assert_eq!(whole_text(&reply.json(), 0), expected, "{path}");
            }
        }
        // The stream of a chat begins with a chunk that names the role.
        let body = completion(&prompt(40, &format!("{engine}-")));
        let expected = reference.text(COMPLETIONS, &body).await;
        trial.fault(engine, FaultKind::Abort { after_tokens: 0 }, Some(1));
        let mut events = trial.stream("ok", COMPLETIONS, &body).await;
        assert_eq!(streamed_text(&events.chunks().await, 0), expected, "{engine}");
        assert_eq!(trial.retries("decode").await, 5.0);
        trial.finish().await;
    }
}

#[tokio::test]
async fn a_stream_that_its_engine_aborts_ends_with_an_error() {
    let mut trial = Trial::start(in_turn(Spec::aggregated(2))).await;
    for (path, body) in
        [(CHAT, chat(&prompt(40, "chat"))), (COMPLETIONS, completion(&prompt(40, "text")))]
    {
        trial.fault("w0", FaultKind::Abort { after_tokens: 3 }, Some(1));
        let mut events = trial.stream("decode_lost", path, &body).await;
        let (chunks, error) = broken_off(&events.rest().await);
        assert!(!streamed_text(&chunks, 0).is_empty(), "what came is passed on");
        assert_eq!(error["code"], "decode_lost");
        trial.stream("ok", path, &body).await.chunks().await;
    }
    trial.finish().await;
}

#[tokio::test]
async fn a_stream_whose_choices_have_ended_is_complete_without_done() {
    let reference = Reference::start().await;
    let mut trial = Trial::start(Spec::aggregated(1)).await;
    for samples in [1, 3] {
        for (path, mut body) in
            [(CHAT, chat(&prompt(40, "chat"))), (COMPLETIONS, completion(&prompt(40, "text")))]
        {
            body["n"] = samples.into();
            body["stream_options"]["include_usage"] = true.into();
            let expected = reference.chunks(path, &body).await;
            trial.fault("w0", FaultKind::NoDone, Some(1));
            let chunks = trial.stream("ok", path, &body).await.chunks().await;
            for index in 0..samples {
                let text = streamed_text(&expected, index);
                assert_eq!(streamed_text(&chunks, index), text, "{path} {index}");
            }
            let usage = |chunks: &[serde_json::Value]| {
                chunks.last().unwrap()["usage"]["completion_tokens"].clone()
            };
            assert_eq!(usage(&chunks), usage(&expected), "{path}");
        }
    }
    trial.finish().await;
}

#[tokio::test]
async fn only_the_last_choice_ends_a_stream_and_its_last_line_needs_no_end() {
    let chunk = |index: u32, reason: &str| {
        format!(
            r#"data: {{"id":"x","object":"text_completion","created":1,"model":"sim","choices":[{{"index":{index},"text":"a","finish_reason":{reason}}}]}}"#
        )
    };
    let one_of_two = format!("{}\n\n{}\n\n", chunk(0, "\"stop\""), chunk(1, "null"));
    let [usage, end] = [
        r#"data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}"#,
        "data: [DONE]",
    ];
    let both = format!("{one_of_two}{}\n\n", chunk(1, "\"stop\""));
    for (stream, outcome) in [
        (one_of_two.clone(), "decode_lost"),
        (format!("{one_of_two}{}", &chunk(1, "\"stop\"")[..90]), "decode_lost"),
        (both.clone(), "ok"),
        (format!("{both}{usage}"), "ok"),
        (format!("{both}{usage}\n\n{end}"), "ok"),
        (format!("{both}{usage}\n\n{end}\n"), "ok"),
    ] {
        let reply = Canned::reply("text/event-stream", &stream);
        let engine = Canned::start(reply, Then::Close).await;
        let extra_workers = vec![engine.worker("x0", "both")];
        let mut trial = Trial::start(Spec { extra_workers, ..Spec::aggregated(0) }).await;
        let mut body = completion("two");
        body["n"] = 2.into();
        body["stream_options"]["include_usage"] = true.into();
        let events = trial.stream(outcome, COMPLETIONS, &body).await.rest().await;
        let is_complete = events.last().is_some_and(|last| last == "[DONE]");
        assert_eq!(is_complete, outcome == "ok", "{events:?}");
        let told = events.iter().any(|event| event.contains("\"completion_tokens\":2"));
        assert_eq!(told, stream.contains("usage"), "{events:?}");
        trial.finish().await;
    }
}
