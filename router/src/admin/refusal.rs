//! Error replies of the admin listener.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::{Value, json};

use crate::reload::problem_json;
use splitrail_config::Problem;

/// The result of a call that may be refused.
pub(super) type Result<T> = std::result::Result<T, AdminError>;

/// A refusal: the front door's error object, and further members for an operator.
pub(super) struct AdminError {
    status: StatusCode,
    code: &'static str,
    message: String,
    /// Further members of the reply.
    more: Vec<(&'static str, Value)>,
}

impl AdminError {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), more: Vec::new() }
    }

    /// Adds a member to the reply.
    pub(super) fn with(mut self, name: &'static str, value: Value) -> Self {
        self.more.push((name, value));
        self
    }

    /// Adds all problems with their places.
    pub(super) fn with_problems(self, problems: &[Problem]) -> Self {
        self.with("problems", problems.iter().map(problem_json).collect())
    }
}

/// Refuses a body that is not sent as JSON, with this message.
pub(super) fn check_is_json(headers: &HeaderMap, message: &str) -> Result<()> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    match kind.split(';').next().map(str::trim) {
        Some("application/json") => Ok(()),
        _ => {
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            Err(AdminError::new(status, "unsupported_media", message))
        }
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let kind = match self.status.as_u16() {
            404 => "not_found_error",
            500.. => "service_unavailable_error",
            _ => "invalid_request_error",
        };
        let error =
            json!({"message": self.message, "type": kind, "param": null, "code": self.code});
        let mut body = json!({"error": error});
        for (name, value) in self.more {
            body[name] = value;
        }
        let mut response = Response::new(Body::from(body.to_string()));
        *response.status_mut() = self.status;
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(CONTENT_TYPE, json);
        response
    }
}
