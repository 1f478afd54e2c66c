//! Usage of recorded and constructed replies.

use crate::support::fixture_text;
use serde::Deserialize;
use serde_json::value::RawValue;
use splitrail_engine::dialect::Dialect;
use splitrail_engine::json::Fault;
use splitrail_engine::usage::{EngineUsage, ShapeError, UsageError};

#[derive(Deserialize)]
struct Reply<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

/// Usages in a recorded reply, which is one object or a stream.
pub(crate) fn recorded(name: &str) -> Vec<Result<EngineUsage, UsageError>> {
    let text = fixture_text(&format!("http/{name}.txt"));
    let reply = text.split("HTTP 200").nth(1).unwrap();
    let objects = reply.lines().map(|line| line.trim_start_matches("data: "));
    objects
        .filter(|line| line.starts_with('{'))
        .filter_map(|line| serde_json::from_str::<Reply<'_>>(line).unwrap().usage)
        .map(|usage| EngineUsage::parse(Dialect::Chunks, usage.get()))
        .collect()
}

fn usage(prompt: u32, completion: u32, cached: Option<u32>) -> EngineUsage {
    let completion_tokens = Some(completion);
    EngineUsage { prompt_tokens: prompt, completion_tokens, cached_tokens: cached }
}

/// A usage without a count of generated tokens.
fn prompt_only(prompt_tokens: u32, cached_tokens: Option<u32>) -> EngineUsage {
    EngineUsage { prompt_tokens, completion_tokens: None, cached_tokens }
}

#[test]
fn recorded_usages_are_read_as_reported() {
    assert_eq!(recorded("completion_cold"), [Ok(usage(288, 4, Some(0)))]);
    assert_eq!(recorded("completion_warm"), [Ok(usage(288, 4, Some(256)))]);
    assert_eq!(recorded("chat_cold"), [Ok(usage(310, 4, Some(0)))]);
    assert_eq!(recorded("chat_warm"), [Ok(usage(310, 4, Some(288)))]);
    assert_eq!(recorded("completion_stream_warm"), [Ok(usage(289, 4, Some(288)))]);
}

#[test]
fn a_cached_figure_that_the_engine_does_not_report_is_none() {
    assert_eq!(recorded("A_cold_nodetailsflag"), [Ok(usage(96, 2, None))]);
    // A stream with continuous usage has usage in every chunk, but details only in the last one.
    let continuous = recorded("completion_stream_continuous");
    assert_eq!(continuous[0], Ok(usage(288, 1, None)));
    assert_eq!(continuous.last().unwrap(), &Ok(usage(288, 4, Some(256))));
    for details in ["null", "{}", r#"{"cached_tokens":null}"#] {
        let text = format!(r#"{{"prompt_tokens":3,"prompt_tokens_details":{details}}}"#);
        assert_eq!(parse(&text), Ok(prompt_only(3, None)), "{details}");
    }
}

/// Usages of a recorded reply in another dialect, wherever they are in the reply.
fn recorded_in(dialect: Dialect, name: &str) -> Vec<Result<EngineUsage, UsageError>> {
    #[derive(Deserialize)]
    struct Event<'a> {
        #[serde(borrow)]
        usage: Option<&'a RawValue>,
        #[serde(borrow, alias = "message")]
        response: Option<Reply<'a>>,
    }
    let text = fixture_text(&format!("http/{name}.txt"));
    let reply = text.split("HTTP 200").nth(1).unwrap();
    let objects = reply.lines().map(|line| line.trim_start_matches("data: "));
    let usage = |line: &str| {
        let event: Event<'_> = serde_json::from_str(line).unwrap();
        let usage = event.usage.or(event.response.and_then(|response| response.usage));
        usage.map(|usage| EngineUsage::parse(dialect, usage.get()))
    };
    objects.filter(|line| line.starts_with('{')).filter_map(usage).collect()
}

#[test]
fn responses_and_messages_have_fields_of_their_own() {
    let of_response = |name| recorded_in(Dialect::Responses, name);
    assert_eq!(of_response("responses_cold"), [Ok(usage(85, 4, Some(0)))]);
    assert_eq!(of_response("responses_stream_warm"), [Ok(usage(85, 4, Some(64)))]);
    // The parts of a message's prompt add up to the prompt.
    let of_message = |name| recorded_in(Dialect::Messages, name);
    assert_eq!(of_message("messages_warm"), [Ok(usage(85, 4, Some(64)))]);
    let streamed = [Ok(usage(85, 0, None)), Ok(usage(85, 4, Some(0)))];
    assert_eq!(of_message("messages_stream_cold"), streamed);
    for dialect in [Dialect::Responses, Dialect::Messages] {
        assert_eq!(EngineUsage::parse(dialect, "null"), Err(UsageError::Absent));
        for text in [r#"{"input_tokens":-1}"#, r#"{"output_tokens":1}"#, "[1]"] {
            let parsed = EngineUsage::parse(dialect, text);
            assert!(is_fault_of_form(&parsed), "{text}: {parsed:?}");
        }
    }
    let too_many = r#"{"input_tokens":3,"input_tokens_details":{"cached_tokens":4}}"#;
    assert!(EngineUsage::parse(Dialect::Responses, too_many).is_err());
}

fn parse(text: &str) -> Result<EngineUsage, UsageError> {
    EngineUsage::parse(Dialect::Chunks, text)
}

fn is_fault_of_form(parsed: &Result<EngineUsage, UsageError>) -> bool {
    matches!(parsed, Err(UsageError::Shape(_) | UsageError::Count(_)))
}

#[test]
fn the_fault_of_a_usage_names_its_count() {
    for (text, name) in [
        (r#"{"completion_tokens":3}"#, "prompt_tokens"),
        (r#"{"prompt_tokens":9,"completion_tokens":3.0}"#, "completion_tokens"),
        (r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":-1}}"#, "cached_tokens"),
    ] {
        assert_eq!(parse(text), Err(UsageError::Count(name)), "{text}");
    }
}

/// The usage for the client is made from the same object, and cannot be if a key is there twice.
#[test]
fn a_usage_with_any_key_twice_is_none() {
    for dialect in [Dialect::Chunks, Dialect::Responses, Dialect::Messages] {
        let text = r#"{"prompt_tokens":9,"input_tokens":9,"x":1,"x":2}"#;
        let (usage, fault) = EngineUsage::read(dialect, text);
        let twice = |error: &ShapeError| error.fault == Fault::DuplicateKey;
        assert!(usage.is_none());
        assert!(matches!(fault, Some(UsageError::Shape(error)) if twice(&error)));
    }
    let in_details =
        r#"{"prompt_tokens":9,"prompt_tokens_details":{"x":1,"x":2,"cached_tokens":4}}"#;
    assert_eq!(parse(in_details), Ok(prompt_only(9, Some(4))));
}

#[test]
fn absurd_usages_are_errors() {
    assert_eq!(parse("null"), Err(UsageError::Absent));
    for text in [
        r#"{"prompt_tokens":-1}"#,
        r#"{"prompt_tokens":4294967296}"#,
        r#"{"prompt_tokens":1e400}"#,
        r#"{"prompt_tokens":1.5}"#,
        r#"{"prompt_tokens":"3"}"#,
        r#"{"prompt_tokens":null}"#,
        r#"{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":-1}}"#,
        r#"{"completion_tokens":3}"#,
        "[1,2,null]",
        "7",
    ] {
        assert!(is_fault_of_form(&parse(text)), "{text}: {:?}", parse(text));
    }
    let too_many = r#"{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}"#;
    assert_eq!(
        parse(too_many),
        Err(UsageError::CachedExceedsPrompt { cached_tokens: 4, prompt_tokens: 3 })
    );
}

#[test]
fn counts_beside_one_that_cannot_be_read_are_kept() {
    let read = |dialect, text| EngineUsage::read(dialect, text).0;
    for (text, expected) in [
        (
            r#"{"prompt_tokens":9,"completion_tokens":3.0,"prompt_tokens_details":{"cached_tokens":8}}"#,
            Some(prompt_only(9, Some(8))),
        ),
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":-1}}"#,
            Some(usage(9, 3, None)),
        ),
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":10}}"#,
            Some(usage(9, 3, None)),
        ),
        (r#"{"prompt_tokens":9,"prompt_tokens_details":7}"#, Some(prompt_only(9, None))),
        (r#"{"prompt_tokens":9.0,"completion_tokens":3}"#, None),
        (r#"{"prompt_tokens":9,"prompt_tokens":8}"#, None),
        ("[1]", None),
    ] {
        assert_eq!(read(Dialect::Chunks, text), expected, "{text}");
    }
    let response =
        r#"{"input_tokens":9,"output_tokens":"3","input_tokens_details":{"cached_tokens":4}}"#;
    assert_eq!(read(Dialect::Responses, response), Some(prompt_only(9, Some(4))));
    let message = r#"{"input_tokens":4,"cache_read_input_tokens":5,"cache_creation_input_tokens":-1,"output_tokens":3}"#;
    assert_eq!(read(Dialect::Messages, message), Some(usage(9, 3, Some(5))));
}
