//! Usage comes once, as the last event, however the engine reports it.

use serde_json::{Value, json};
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;
use splitrail_tests::raw_engine::{RawEngine, Turn, reply};
use splitrail_tests::{Cluster, Spec};

use super::{answer, client, generate, words};

/// The answer of an engine whose stream ends with this usage, after as many running totals as it has
/// parts.
async fn answered(last: &'static str) -> Result<super::Answer, tonic::Status> {
    let engine = RawEngine::start(move |_| {
        let event = |members: &str| {
            let ids = r#""id":"c","object":"text_completion","created":1,"model":"sim""#;
            format!("data: {{{ids},{members}}}\n\n")
        };
        let part = |count: u64, finish_reason: Value| {
            let choice = json!({"index": 0, "text": "x", "finish_reason": finish_reason});
            let usage = json!({"prompt_tokens": 9, "completion_tokens": count});
            event(&format!(r#""choices":[{choice}],"usage":{usage}"#))
        };
        let mut events = vec![part(1, Value::Null), part(2, json!("stop"))];
        if !last.is_empty() {
            events.push(event(&format!(r#""choices":[],"usage":{last}"#)));
        }
        events.push("data: [DONE]\n\n".to_owned());
        Turn::answer(reply(200, "text/event-stream", &events.concat()))
    })
    .await;
    let worker = format!("{{ id: a, role: both, url: \"{}\", kv_events: none }}", engine.url());
    let spec = Spec { extra_workers: vec![worker], ..Spec::aggregated(0) };
    let cluster = Cluster::start(spec).await;
    let mut client = client(&cluster).await;
    answer(&mut client, generate(Prompt::Text(words(3, "a")))).await
}

#[tokio::test]
async fn running_totals_of_an_engine_are_not_passed_on() {
    for last in ["", r#"{"prompt_tokens":9,"completion_tokens":2}"#] {
        let answer = answered(last).await.unwrap();
        assert_eq!(answer.texts[&0], "xx");
        let v1::Usage { prompt_tokens, completion_tokens, .. } = answer.usage;
        assert_eq!((prompt_tokens, completion_tokens), (9, 2), "{last}");
    }
}

#[tokio::test]
async fn usage_that_cannot_be_read_does_not_end_a_delivered_reply() {
    for last in [
        r#"{"prompt_tokens":9,"completion_tokens":2.5}"#,
        r#"{"prompt_tokens":9.5,"completion_tokens":2}"#,
        r#"{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":"1"}}"#,
        r#""none""#,
    ] {
        let answer = answered(last).await.unwrap();
        assert_eq!((answer.texts[&0].as_str(), answer.usage.prompt_tokens), ("xx", 9), "{last}");
    }
}
