//! Classifies the failures and refusals of engines.

use std::io;

use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use serde_json::Value;

use super::engine::Engine;
use crate::connections::Failure;
use crate::{EngineBody, NO_SUCH_RANK};
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_engine::fields::is_router_only;
use splitrail_engine::identity::refuses_rank;

/// Maximum number of bytes of an error reply, or an error event, that are read for its message.
const ERROR_BODY_MAX_BYTES: usize = 64 << 10;

/// Maximum number of characters of an engine's message that are passed on.
const MESSAGE_MAX_CHARS: usize = 2000;

/// The error for a request that got no reply.
pub(super) fn failure(worker: &dyn Engine, failure: &Failure) -> Error {
    let error = match failure {
        Failure::Connect(error) => error,
        Failure::Stale => {
            let message = format!(
                "worker {} ended a kept connection as a request was written to it",
                worker.id()
            );
            return Error::new(ErrorKind::StaleConnection, message);
        }
        Failure::Closed => {
            return Error::engine(worker.id(), "closed the connection before it answered");
        }
        Failure::Early => {
            return Error::engine(worker.id(), "sent a reply before it had the whole request");
        }
        Failure::Malformed(malformed) => return Error::engine(worker.id(), &malformed.to_string()),
        Failure::Withdrawn => {
            return Error::new(ErrorKind::Internal, "a request was withdrawn while it was sent");
        }
    };
    let cause = io_cause(error.as_ref());
    // Process and system limits on open files (EMFILE, ENFILE) are not the worker's fault.
    if matches!(cause.and_then(io::Error::raw_os_error), Some(23 | 24)) {
        tracing::error!(
            "no file descriptor is free to connect to an engine: raise the limit on open files"
        );
        return Error::new(
            ErrorKind::Overloaded,
            "the router has no free file descriptor for a connection to an engine",
        );
    }
    let cause =
        cause.map_or_else(|| "no connection within the timeout".to_owned(), ToString::to_string);
    worker.set_unreachable(format_args!("it cannot be reached: {cause}"));
    Error::new(ErrorKind::EngineUnreachable, format!("worker {} cannot be reached", worker.id()))
}

pub(super) fn io_cause<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|e| e.downcast_ref())
}

/// Seconds after which a full engine that names no time is tried again.
const RETRY_AFTER_S: u32 = 1;

/// The statuses whose message is passed on to the client, because it tells the client what to change.
const TOLD_STATUSES: [u16; 5] = [400, 404, 413, 422, 501];

/// How vLLM's message begins if the model does not serve an endpoint. Other errors with status 501 are about
/// something in the request.
const UNSUPPORTED_ENDPOINT: &str = "The model does not support";

/// The error for an engine's error status; `retry_after_s` is its field `retry-after`.
pub(super) async fn refusal(
    worker: &dyn Engine,
    status: StatusCode,
    retry_after_s: Option<u32>,
    body: EngineBody,
) -> Error {
    let status = status.as_u16();
    let body = Limited::new(body, ERROR_BODY_MAX_BYTES).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let refused = Refused { status, is_told: TOLD_STATUSES.contains(&status), body: &body };
    rejection(worker, refused, retry_after_s).of_reply()
}

/// What an engine has refused a request with.
#[derive(Clone, Copy)]
struct Refused<'a> {
    status: u16,
    /// Whether the client gets the engine's message.
    is_told: bool,
    body: &'a [u8],
}

fn rejection(worker: &dyn Engine, refused: Refused<'_>, retry_after_s: Option<u32>) -> Error {
    let Refused { status, is_told, body } = refused;
    let told = |error: Error| if is_told { error } else { error.internal() };
    let engine_error = engine_message(body);
    match (status, &engine_error) {
        (429 | 503, _) => {
            let retry_after_s = retry_after_s.unwrap_or(RETRY_AFTER_S);
            let message = format!("worker {} is full (status {status})", worker.id());
            return Error::new(ErrorKind::EngineFull { status, retry_after_s }, message);
        }
        // Engines say of a model what is missing; of a path, they or their servers say the same of all.
        (404, Some((message, param))) if message != "Not Found" && is_error_object(body) => {
            let error = Error::new(ErrorKind::EngineLacksModel, message.clone());
            return told(match param {
                Some(param) => error.with_param(param.clone()),
                None => error,
            });
        }
        (501, Some((message, _)))
            if is_error_object(body) && !message.starts_with(UNSUPPORTED_ENDPOINT) => {}
        (404 | 405 | 501, _) => {
            let message = format!("the engine does not offer this path (status {status})");
            return Error::new(ErrorKind::EngineLacksPath, message);
        }
        (400..=499, _) => {}
        (508, _) => {
            let message =
                format!("worker {} leads back to a router: is its URL right?", worker.id());
            return Error::new(ErrorKind::LoopDetected, message);
        }
        _ => return Error::engine(worker.id(), &format!("answered with status {status}")),
    }
    let message = format!("worker {} refused with status {status}", worker.id());
    let own = Error::new(ErrorKind::EngineRejected(status), message);
    match engine_error {
        // A client cannot choose a rank, so a wrong rank is not the client's fault.
        Some((message, _)) if refuses_rank(&message) => {
            Error::engine(worker.id(), NO_SUCH_RANK).of_additions()
        }
        // A field that only the router writes is not the client's fault; the workers' roles may be
        // swapped.
        Some((_, Some(param))) if is_router_only(&param) => {
            let what = format!(
                "refused the hand-off (status {status}): is its role right, or are the roles of prefill and decode swapped?"
            );
            Error::engine(worker.id(), &what).of_additions()
        }
        Some((message, param)) if own.fault() == Fault::Client => {
            told(Error::rejected(status, message, param))
        }
        _ => own,
    }
}

/// The error for an error event in place of a stream's first chunk: engines that send their headers
/// early put the status into that event, whose error is nested or flat. Of a longer event than an
/// error reply may be, nothing is read. The words of an error inside a good reply are not for clients.
pub fn refusal_event(worker: &dyn Engine, event: &[u8]) -> Error {
    let read = Some(event).filter(|event| event.len() <= ERROR_BODY_MAX_BYTES);
    let status = read
        .and_then(|event| serde_json::from_slice::<Value>(event).ok())
        .and_then(|event| event.get("error").unwrap_or(&event).get("code")?.as_u64())
        .and_then(|code| u16::try_from(code).ok())
        .filter(|code| (400..500).contains(code) || *code == 503);
    match status {
        Some(status) => {
            let refused = Refused { status, is_told: false, body: event };
            rejection(worker, refused, None).of_reply()
        }
        None => Error::engine(worker.id(), "answered with an error event").of_reply(),
    }
}

/// Message and parameter of an error reply: OpenAI's error shape, nested or (older engines) flat;
/// `error` or `detail` as a text; the list of faults of FastAPI; or a text without JSON.
fn engine_message(body: &[u8]) -> Option<(String, Option<String>)> {
    const PARAM_MAX_CHARS: usize = 256;
    let Ok(value) = serde_json::from_slice::<Value>(body) else {
        return Some((plain_text(body)?, None));
    };
    let error = value.get("error").unwrap_or(&value);
    let text = |key| error.get(key).and_then(Value::as_str);
    let detail = value.get("detail");
    let fault = detail.and_then(|faults| faults.get(0));
    let message = text("message").or(error.as_str()).or(detail.and_then(Value::as_str));
    let message = message.or_else(|| fault?.get("msg")?.as_str())?;
    // The first part of a fault's place is the part of the request.
    let place = || fault?.get("loc")?.get(1)?.as_str();
    let param = text("param").or_else(place);
    let beginning = |text: &str, max_chars| text.chars().take(max_chars).collect();
    Some((
        beginning(message, MESSAGE_MAX_CHARS),
        param.map(|param| beginning(param, PARAM_MAX_CHARS)),
    ))
}

/// Whether a reply is an error of OpenAI's shape, and not one of the server in front of the engine.
fn is_error_object(body: &[u8]) -> bool {
    serde_json::from_slice::<Value>(body)
        .is_ok_and(|value| value.get("error").is_some() || value["object"] == "error")
}

/// The beginning of a reply that is a text and no markup.
fn plain_text(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?.trim();
    let is_message = !text.is_empty() && !text.starts_with(['<', '{', '[']);
    is_message.then(|| text.chars().take(MESSAGE_MAX_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_message_and_a_long_parameter_the_beginning_is_read() {
        let body =
            serde_json::json!({"error": {"message": "é".repeat(9000), "param": "p".repeat(9000)}});
        let read = engine_message(body.to_string().as_bytes());
        assert_eq!(read, Some(("é".repeat(2000), Some("p".repeat(256)))));
    }

    #[test]
    fn the_message_of_an_engine_is_read_in_each_form_that_engines_and_their_fronts_use() {
        const WORDS: &str = "too long";
        for (body, param) in [
            (r#"{"error": {"message": "too long", "param": "prompt"}}"#, Some("prompt")),
            (r#"{"object": "error", "message": "too long", "param": null}"#, None),
            (r#"{"type": "error", "error": {"message": "too long"}}"#, None),
            (r#"{"error": "too long", "error_type": "validation"}"#, None),
            (r#"{"detail": "too long"}"#, None),
            (r#"{"detail": [{"loc": ["body", "prompt", 0], "msg": "too long"}]}"#, Some("prompt")),
            (r#"{"detail": [{"loc": ["body"], "msg": "too long"}]}"#, None),
            ("too long\n", None),
        ] {
            let expected = Some((WORDS.to_owned(), param.map(str::to_owned)));
            assert_eq!(engine_message(body.as_bytes()), expected, "{body}");
        }
        for body in
            ["", " ", "null", "[]", "{}", "{\"a\"", "<html>too long</html>", r#"{"detail": []}"#]
        {
            assert_eq!(engine_message(body.as_bytes()), None, "{body}");
        }
        assert_eq!(engine_message(b"\xff"), None);
    }
}
