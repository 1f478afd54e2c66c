use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;

use super::*;

#[test]
fn messages_of_client_errors_are_not_logged() {
    let refused = Error::rejected(400, "prompt `secret` is too long".into(), None);
    assert!(!refused.to_string().contains("secret"));
    assert!(refused.to_openai().contains("secret"), "the client itself is told");
    let failed = Error::new(ErrorKind::EngineFailed, "worker p0 answered with status 500");
    assert!(failed.to_string().contains("p0"));
}

#[test]
fn a_withheld_message_is_in_no_reply() {
    let failed = Error::engine("d1", "answered with status 500").withheld();
    let replies = [Dialect::Chunks, Dialect::Responses, Dialect::Messages]
        .map(|dialect| failed.to_body(dialect) + &failed.to_event(dialect));
    assert!(!replies.concat().contains("d1"), "{replies:?}");
    assert!(!failed.to_grpc().message().contains("d1"));
    assert!(failed.to_string().contains("d1"), "logs have the message");
    let mistake = Error::invalid("input", "`input` is missing").withheld();
    assert!(mistake.to_openai().contains("is missing"), "the client itself is told");
}

#[test]
fn each_dialect_has_errors_where_its_clients_look() {
    let error = Error::invalid("input", "`input` is missing");
    let body = |dialect| serde_json::from_str::<Value>(&error.to_body(dialect)).ok();
    let openai = body(Dialect::Chunks);
    assert_eq!(body(Dialect::Responses), openai);
    let mut anthropic = openai.unwrap_or_default();
    anthropic["type"] = json!("error");
    assert_eq!(body(Dialect::Messages), Some(anthropic), "a superset");
    for (kind, name) in [
        (ErrorKind::UnknownModel, "not_found_error"),
        (ErrorKind::BodyTooLarge, "request_too_large"),
        (ErrorKind::Busy(1), "rate_limit_error"),
        (ErrorKind::NoWorker, "overloaded_error"),
        (ErrorKind::EngineTimeout, "timeout_error"),
        (ErrorKind::EngineFailed, "api_error"),
        (ErrorKind::EngineRejected(422), "invalid_request_error"),
    ] {
        let event = Error::new(kind, "x").to_event(Dialect::Messages);
        let data = event.strip_prefix("event: error\ndata: ").unwrap_or_default();
        let told: Value = serde_json::from_str(data).unwrap_or_default();
        assert_eq!((&told["type"], &told["error"]["type"]), (&json!("error"), &json!(name)));
    }
}

/// The table of statuses in docs/http.md.
#[test]
fn what_says_nothing_of_the_request_is_tried_elsewhere_and_rarely_counts_against_the_worker() {
    let full = |status| ErrorKind::EngineFull { status, retry_after_s: 3 };
    for (kind, is_tried, counts, status, retry_after_s) in [
        (ErrorKind::EngineRejected(400), false, false, 400, None),
        (ErrorKind::EngineRejected(403), false, false, 403, None),
        (ErrorKind::EngineRejected(401), true, false, 502, None),
        (ErrorKind::EngineRejected(407), true, true, 502, None),
        (ErrorKind::EngineRejected(408), true, false, 502, None),
        (full(429), true, false, 429, Some(3)),
        (full(503), true, false, 503, Some(3)),
        (ErrorKind::EngineLacksPath, true, false, 404, None),
        (ErrorKind::EngineLacksModel, true, false, 404, None),
        (ErrorKind::EngineLost, true, false, 502, None),
        (ErrorKind::EngineFailed, true, true, 502, None),
        (ErrorKind::EngineTimeout, true, false, 504, None),
        (ErrorKind::LeaseExpired, true, false, 504, None),
    ] {
        let error = Error::new(kind, "no");
        assert_eq!(error.worth_another_worker(), is_tried, "{kind:?}");
        assert_eq!(error.speaks_against_its_worker(), counts, "{kind:?}");
        assert_eq!(error.status().as_u16(), status, "{kind:?}");
        assert_eq!(error.retry_after_s(), retry_after_s, "{kind:?}");
    }
    let slow = Error::new(ErrorKind::EngineTimeout, "").of_slow_prompt();
    assert!(!slow.worth_another_worker(), "another engine would take as long");
}

#[test]
fn only_what_another_worker_may_do_better_is_worth_one() {
    for (kind, another) in [
        (ErrorKind::EngineUnreachable, true),
        (ErrorKind::EngineFailed, true),
        (ErrorKind::ForeignHandOff, true),
        (ErrorKind::EngineTimeout, true),
        (ErrorKind::EngineRejected(400), false),
        (ErrorKind::DecodeLost, false),
        (ErrorKind::InvalidRequest, false),
        (ErrorKind::NoWorker, false),
    ] {
        assert_eq!(Error::new(kind, "").worth_another_worker(), another, "{kind:?}");
    }
}
