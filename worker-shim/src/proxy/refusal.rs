//! Errors of the proxy itself, in the format of OpenAI's API. No message repeats what a client or
//! an engine sent.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;

/// Why the proxy refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The gate header is malformed.
    MalformedGate,
    /// The replies of the endpoint cannot express a miss.
    GateUnsupported,
    /// The body of a miss is not a valid request.
    MalformedBody,
    /// The body of a miss cannot be read, because it is too long or compressed, or its reply would be
    /// too long.
    UnreadableBody,
    /// The path is not forwarded.
    UnknownPath,
    /// The path is not forwarded with this method.
    WrongMethod,
    /// The maximum number of requests is in flight, or the client's address has its share of them.
    Busy,
    /// The engine cannot be reached.
    EngineUnreachable,
    /// The engine closed the connection before it replied.
    EngineFailed,
    /// The client sent the body too slowly.
    SlowBody,
}

impl Refusal {
    fn status(self) -> StatusCode {
        match self {
            Self::MalformedGate | Self::GateUnsupported | Self::MalformedBody => {
                StatusCode::BAD_REQUEST
            }
            // Routers treat this status as an engine's refusal because of the threshold.
            Self::UnreadableBody => StatusCode::PRECONDITION_FAILED,
            Self::UnknownPath => StatusCode::NOT_FOUND,
            Self::WrongMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::Busy | Self::EngineUnreachable => StatusCode::SERVICE_UNAVAILABLE,
            Self::EngineFailed => StatusCode::BAD_GATEWAY,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
        }
    }

    /// The message, type, parameter and code.
    fn details(self) -> (&'static str, &'static str, Option<&'static str>, &'static str) {
        const INVALID: &str = "invalid_request_error";
        const GATE: Option<&str> = Some("x-splitrail-gate");
        match self {
            Self::MalformedGate => (
                "the header `x-splitrail-gate` must be `<namespace>:<rank>:<blocks>:<hash>`, \
                 namespace and hash in 16 hex digits, given once",
                INVALID,
                GATE,
                "gate_malformed",
            ),
            Self::GateUnsupported => (
                "the header `x-splitrail-gate` is for chats, completions and generate only",
                INVALID,
                GATE,
                "gate_malformed",
            ),
            Self::MalformedBody => (
                "the body is not a valid request of this endpoint",
                INVALID,
                None,
                "body_malformed",
            ),
            Self::UnreadableBody => (
                "the engine holds fewer blocks of the prompt than the gate requires",
                INVALID,
                GATE,
                "cache_threshold",
            ),
            Self::UnknownPath => {
                ("the shim does not forward this path", "not_found_error", None, "unknown_path")
            }
            Self::WrongMethod => {
                ("the path exists, but not with this method", INVALID, None, "method_not_allowed")
            }
            Self::Busy => (
                "the maximum number of requests is in flight (limits.requests_max), or this \
                 address has its share of them",
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
            Self::SlowBody => (
                "the body arrived too slowly; send it at 1 KiB per second or faster",
                INVALID,
                None,
                "body_timeout",
            ),
        }
    }

    /// The reply.
    pub(super) fn response(self) -> Response<Bytes> {
        let (message, kind, param, code) = self.details();
        let error = json!({"message": message, "type": kind, "param": param, "code": code});
        let mut response = Response::new(json!({ "error": error }).to_string().into());
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // The request has not run, and may succeed soon.
        if matches!(self, Self::Busy | Self::EngineUnreachable) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
