//! The form of every error, independent of the reason and of the component that refuses.

use http::StatusCode;
use serde_json::Value;

use crate::Reply;

/// Checks that a reply is an error in OpenAI's shape with this status, and that the
/// client can name the request; gives the error object.
pub fn openai_error(reply: &Reply, status: u16) -> Value {
    let text = reply.text();
    let expected = StatusCode::from_u16(status).expect("a status");
    assert_eq!(reply.status, expected, "{text}");
    assert_eq!(reply.header("content-type"), "application/json", "{text}");
    assert!(!reply.header("x-request-id").is_empty(), "no id: {text}");
    error_object(&text)
}

/// Checks that a body is an error in OpenAI's shape; gives the error object.
pub fn error_object(body: &str) -> Value {
    let json: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body:?}"));
    let error = &json["error"];
    let message = error["message"].as_str();
    assert!(message.is_some_and(|message| !message.is_empty()), "{body}");
    assert!(error["type"].is_string(), "{body}");
    let param = error.get("param").expect("a param");
    assert!(param.is_null() || param.is_string(), "{body}");
    assert!(error.get("code").is_some(), "{body}");
    error.clone()
}
