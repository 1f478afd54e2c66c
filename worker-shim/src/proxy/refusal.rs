//! Errors of the proxy itself, in the shape of OpenAI's API. No message repeats what a
//! client or an engine sent.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;

/// Why a request was not answered by the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The gate header makes no sense.
    GateMalformed,
    /// The path's replies have no form for a miss.
    GateElsewhere,
    /// A miss whose body does not say what shape the answer must have.
    BodyMalformed,
    /// A miss whose body is too long, or of a coding, to be looked into.
    BodyUnread,
    /// The path is not forwarded.
    UnknownPath,
    /// Nor with this method.
    WrongMethod,
    /// As many requests as are allowed are under way.
    Busy,
    /// No connection to the engine.
    EngineUnreachable,
    /// The engine closed the connection before it answered.
    EngineFailed,
}

impl Refusal {
    fn status(self) -> StatusCode {
        match self {
            Self::GateMalformed | Self::GateElsewhere | Self::BodyMalformed => {
                StatusCode::BAD_REQUEST
            }
            // Routers know it as an engine's way to turn a request away.
            Self::BodyUnread => StatusCode::PRECONDITION_FAILED,
            Self::UnknownPath => StatusCode::NOT_FOUND,
            Self::WrongMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::Busy | Self::EngineUnreachable => StatusCode::SERVICE_UNAVAILABLE,
            Self::EngineFailed => StatusCode::BAD_GATEWAY,
        }
    }

    /// Message, type, parameter and code.
    fn words(self) -> (&'static str, &'static str, Option<&'static str>, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const GATE: Option<&str> = Some("x-splitrail-gate");
        match self {
            Self::GateMalformed => (
                "the header `x-splitrail-gate` must be `<namespace>:<rank>:<blocks>:<hash>`, \
                 namespace and hash in 16 hex digits, given once",
                INVALID,
                GATE,
                "gate_malformed",
            ),
            Self::GateElsewhere => (
                "the header `x-splitrail-gate` is for chats, completions and generate only",
                INVALID,
                GATE,
                "gate_malformed",
            ),
            Self::BodyMalformed => {
                ("the body is no request of this endpoint", INVALID, None, "body_malformed")
            }
            Self::BodyUnread => (
                "the engine holds fewer blocks of the prompt than were asked for",
                INVALID,
                GATE,
                "cache_threshold",
            ),
            Self::UnknownPath => {
                ("the shim forwards no such path", "not_found_error", None, "unknown_path")
            }
            Self::WrongMethod => {
                ("the path exists, but not with this method", INVALID, None, "method_not_allowed")
            }
            Self::Busy => (
                "as many requests as the shim allows are under way",
                "service_unavailable_error",
                None,
                "busy",
            ),
            Self::EngineUnreachable => (
                "the engine cannot be reached",
                "service_unavailable_error",
                None,
                "engine_unreachable",
            ),
            Self::EngineFailed => (
                "the engine closed the connection before it answered",
                "engine_error",
                None,
                "engine_failed",
            ),
        }
    }

    /// The reply.
    pub(super) fn response(self) -> Response<Bytes> {
        let (message, kind, param, code) = self.words();
        let error = json!({"message": message, "type": kind, "param": param, "code": code});
        let mut response = Response::new(json!({ "error": error }).to_string().into());
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // Where nothing has run yet, and soon may.
        if matches!(self, Self::Busy | Self::EngineUnreachable) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
