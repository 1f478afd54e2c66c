//! Replies of several listeners.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, HeaderName, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{HeaderValue, StatusCode, Uri};
use serde_json::json;
use splitrail_engine::dialect::Dialect;

use crate::attention;
use crate::core::Core;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_request_log::access_log::RefusalOutcome;

/// Milliseconds after which a client may retry; OpenAI's clients read it before `retry-after`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// Whether a client should retry; OpenAI's clients obey it.
const X_SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error as an OpenAI error object.
pub fn reply_error(error: Error) -> Response {
    error_in(Dialect::Chunks, error)
}

/// The only place where an error becomes an HTTP reply.
pub fn error_in(dialect: Dialect, error: Error) -> Response {
    let mut response = Response::new(Body::from(error.to_body(dialect)));
    *response.status_mut() = error.status();
    response.extensions_mut().insert(RefusalOutcome(error.outcome()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = error.retry_after_s() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(ms) = error.retry_after_ms() {
        headers.insert(RETRY_AFTER_MS, HeaderValue::from(ms));
    }
    if error.should_not_retry() {
        headers.insert(X_SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    match error.kind() {
        // RFC 9110, section 11.6.1, and RFC 6750, section 3.
        ErrorKind::Unauthenticated => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The accepted content type; RFC 9110, section 15.5.16.
        ErrorKind::UnsupportedMedia if error.param() == Some("content-type") => {
            headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        }
        ErrorKind::UnsupportedMedia => {
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        // The rest of the body is not read.
        ErrorKind::BodyTimeout => {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        _ => {}
    }
    response
}

/// The dialect in which a client expects an error about a path.
pub(super) fn error_dialect(uri: &Uri) -> Dialect {
    match uri.path().starts_with(Endpoint::Messages.path()) {
        true => Dialect::Messages,
        false => Dialect::Chunks,
    }
}

/// Reports that the process is alive.
pub async fn health() -> Response {
    json_reply(json!({"status": "ok"}))
}

/// Whether the router can take traffic.
pub async fn ready(State(core): State<Arc<Core>>) -> Response {
    match core.unready() {
        None => match attention::notes_of_models(&core) {
            notes if notes.is_empty() => json_reply(json!({"status": "ready"})),
            notes => json_reply(json!({"status": "ready", "notes": notes})),
        },
        Some(reason) => {
            let body = json!({"status": "not ready", "reason": reason});
            (StatusCode::SERVICE_UNAVAILABLE, json_reply(body)).into_response()
        }
    }
}

/// A JSON reply.
pub fn json_reply(value: serde_json::Value) -> Response {
    json_text_reply(value.to_string())
}

/// A reply of JSON text.
pub fn json_text_reply(text: impl Into<Body>) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, json)], text.into()).into_response()
}
