//! Errors in the format of OpenAI's API, as vLLM writes them.

use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::{Value, json};

use crate::http::endpoint::Endpoint;

/// An error that is sent to a client.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{status}: {message}")]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<&'static str>,
    /// A code of the simulator; `None` repeats the status, as vLLM does.
    pub(crate) code: Option<String>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        Self { status, message: message.into(), kind, param: None, code: None }
    }

    pub(crate) fn bad_request(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(crate) fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The error for every request after the engine core has died.
    pub(crate) fn engine_dead() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "The engine core has died and takes no more requests.",
        )
        .with_code("engine_dead")
    }

    /// Whether a hand-off has other blocks, tokens or another prompt than were staged, of which the real
    /// engine says nothing.
    pub(crate) fn is_misuse(&self) -> bool {
        self.code.as_deref() == Some("hand_off_mismatch")
    }

    /// The reply of an endpoint: `/v1/messages` has its own format.
    pub(crate) fn in_reply_of(self, endpoint: Endpoint) -> Response {
        if endpoint != Endpoint::Messages {
            return self.into_response();
        }
        let error = json!({"type": self.kind, "message": self.message});
        json_response(self.status, &json!({"type": "error", "error": error}))
    }

    pub(crate) fn body(&self) -> Value {
        let code = match &self.code {
            Some(code) => json!(code),
            None => json!(self.status.as_u16()),
        };
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        json_response(self.status, &self.body())
    }
}

/// A complete JSON reply.
pub(crate) fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
