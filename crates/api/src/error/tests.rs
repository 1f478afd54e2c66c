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
fn statuses_that_say_nothing_of_the_request_are_tried_elsewhere_and_not_passed_on() {
    const ELSEWHERE: [u16; 9] = [401, 403, 404, 405, 407, 408, 412, 429, 501];
    for status in (400..500).chain([501]) {
        let error = Error::rejected(status, "no".into(), None);
        let is_tried = ELSEWHERE.contains(&status);
        assert_eq!(error.worth_another_worker(), is_tried, "{status}");
        let counts = is_tried && ![408, 429].contains(&status);
        assert_eq!(error.speaks_against_its_worker(), counts, "{status}");
        let told = if is_tried && status != 429 { 502 } else { status };
        assert_eq!(error.status().as_u16(), told, "{status}");
        assert_eq!(error.retry_after_s().is_some(), status == 429, "{status}");
    }
}

#[test]
fn only_what_another_worker_may_do_better_is_worth_one() {
    for (kind, another) in [
        (ErrorKind::EngineUnreachable, true),
        (ErrorKind::EngineFailed, true),
        (ErrorKind::ForeignHandOff, true),
        (ErrorKind::EngineTimeout, true),
        (ErrorKind::EngineRejected(429), true),
        (ErrorKind::EngineRejected(400), false),
        (ErrorKind::DecodeLost, false),
        (ErrorKind::InvalidRequest, false),
        (ErrorKind::NoWorker, false),
    ] {
        assert_eq!(Error::new(kind, "").worth_another_worker(), another, "{kind:?}");
    }
}
