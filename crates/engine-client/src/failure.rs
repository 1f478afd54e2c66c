//! Classifies the failures and refusals of engines.

use std::io;

use http::StatusCode;
use http_body_util::{BodyExt, Limited};

use super::engine::Engine;
use crate::connections::Failure;
use crate::{EngineBody, NO_SUCH_RANK};
use splitrail_api::error::{Error, Fault, Kind};
use splitrail_engine::fields::is_router_only;

/// Of an error reply, this much is read to learn its message.
const ERROR_BODY_MAX_BYTES: usize = 64 << 10;

/// What a request that got no reply means.
pub(super) fn failure(worker: &dyn Engine, failure: &Failure) -> Error {
    let error = match failure {
        Failure::Connect(error) => error,
        Failure::Stale => {
            let message = format!(
                "worker {} ended a kept connection as a request was written to it",
                worker.id()
            );
            return Error::new(Kind::StaleConnection, message);
        }
        Failure::Closed => {
            return Error::engine(worker.id(), "closed the connection before it answered");
        }
        Failure::Early => {
            return Error::engine(worker.id(), "sent an answer before it had the whole request");
        }
        Failure::Malformed(malformed) => return Error::engine(worker.id(), &malformed.to_string()),
        Failure::Withdrawn => {
            return Error::new(Kind::Internal, "a request was withdrawn while it was sent");
        }
    };
    let cause = io_cause(error.as_ref());
    // Process and system limits on open files (EMFILE, ENFILE) say nothing of a worker.
    if matches!(cause.and_then(io::Error::raw_os_error), Some(23 | 24)) {
        tracing::error!("no file is left to connect to an engine: raise the limit on open files");
        return Error::new(Kind::Overloaded, "the router has no file left to reach an engine");
    }
    let cause = cause.map_or_else(|| "no connection in time".to_owned(), ToString::to_string);
    worker.set_unreachable(format_args!("it cannot be reached: {cause}"));
    Error::new(Kind::EngineUnreachable, format!("worker {} cannot be reached", worker.id()))
}

fn io_cause<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|e| e.downcast_ref())
}

/// What an engine's error status means. Its own message is relayed where the
/// client is at fault, since it tells the client what to change.
pub(super) async fn refusal(worker: &dyn Engine, status: StatusCode, body: EngineBody) -> Error {
    let status = status.as_u16();
    let body = Limited::new(body, ERROR_BODY_MAX_BYTES).collect().await;
    let said = body.ok().and_then(|body| engine_message(&body.to_bytes()));
    // What an engine does not implement is no failure of its own.
    if !(400..500).contains(&status) && status != 501 {
        return Error::engine(worker.id(), &format!("answered with status {status}"));
    }
    rejection(worker, status, said)
}

fn rejection(worker: &dyn Engine, status: u16, said: Option<(String, Option<String>)>) -> Error {
    let message = format!("worker {} refused with status {status}", worker.id());
    let own = Error::new(Kind::EngineRejected(status), message);
    match said {
        // No client can name a rank.
        Some((message, _)) if message.starts_with("data_parallel_rank") => {
            Error::engine(worker.id(), NO_SUCH_RANK)
        }
        // What the router wrote itself is not the client's fault: swapped roles, say.
        Some((_, Some(param))) if is_router_only(&param) => {
            let what = format!("refused the hand-off (status {status}): is its role right?");
            Error::engine(worker.id(), &what)
        }
        Some((message, param)) if own.fault() == Fault::Client => {
            Error::rejected(status, message, param)
        }
        // Which of the two it does not know tells a model from a path.
        Some((message, param)) if status == 404 => match param {
            Some(param) => own.with_param(param),
            None if message.starts_with("The model `") => own.with_param("model"),
            None => own,
        },
        _ => own,
    }
}

/// An error event in place of a stream's first chunk: engines that send their
/// headers early say there what their status would have been.
pub fn refusal_event(worker: &dyn Engine, event: &[u8]) -> Error {
    let status = serde_json::from_slice::<serde_json::Value>(event)
        .ok()
        .and_then(|event| event.get("error")?.get("code")?.as_u64())
        .and_then(|code| u16::try_from(code).ok())
        .filter(|code| (400..500).contains(code));
    match status {
        Some(status) => rejection(worker, status, engine_message(event)),
        None => Error::engine(worker.id(), "answered with an error event"),
    }
}

/// Message and parameter of OpenAI's error shape, nested or (older engines) flat.
fn engine_message(body: &[u8]) -> Option<(String, Option<String>)> {
    const MESSAGE_MAX_CHARS: usize = 2000;
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = value.get("error").unwrap_or(&value);
    let message = error.get("message")?.as_str()?.chars().take(MESSAGE_MAX_CHARS).collect();
    let param = error.get("param").and_then(|param| param.as_str()).map(str::to_owned);
    Some((message, param))
}
