//! How an error becomes a reply, in the form of each API.

use std::sync::Arc;

use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;

use super::{Error, ErrorKind, Fault, LimitReached};

impl Error {
    /// OpenAI's error object: `{"error": {message, type, param, code}}`.
    pub fn to_openai(&self) -> String {
        json!({ "error": self.openai() }).to_string()
    }

    fn openai(&self) -> Value {
        let kind = match (self.fault(), self.kind) {
            (
                _,
                ErrorKind::UnknownModel
                | ErrorKind::UnknownPath
                | ErrorKind::NotOffered
                | ErrorKind::EngineLacksPath
                | ErrorKind::EngineLacksModel,
            ) => "not_found_error",
            (_, ErrorKind::NotPermitted) => "permission_error",
            (_, ErrorKind::LimitReached(LimitReached { retry_after_ms: None, .. })) => {
                "insufficient_quota"
            }
            (_, ErrorKind::LimitReached(reached)) => reached.unit,
            (Fault::Client, _) => "invalid_request_error",
            (_, ErrorKind::EngineFull { status: 503, .. }) => "service_unavailable_error",
            (_, ErrorKind::OverShare | ErrorKind::Busy(_) | ErrorKind::EngineFull { .. }) => {
                "rate_limit_error"
            }
            (_, ErrorKind::Overloaded | ErrorKind::NoWorker | ErrorKind::RouterStopping) => {
                "service_unavailable_error"
            }
            (Fault::Engine, _) => "engine_error",
            (Fault::Router, _) => "internal_error",
        };
        let code = self.code();
        json!({"message": self.client_message(), "type": kind, "param": self.param, "code": code})
    }

    /// The error as the body of a reply in this dialect: OpenAI's object; in Anthropic's dialect
    /// with an outer `type`, the id of the request if it is known, and other names for kinds of errors.
    pub fn to_body(&self, dialect: Dialect) -> String {
        match dialect {
            Dialect::Chunks | Dialect::Responses => self.to_openai(),
            Dialect::Messages => {
                let mut body = json!({"type": "error", "error": self.to_anthropic()});
                if let Some(id) = self.rare.as_ref().and_then(|rare| rare.request_id.as_ref()) {
                    body["request_id"] = json!(id);
                }
                body.to_string()
            }
        }
    }

    /// The error as the last event of a stream.
    pub fn to_event(&self, dialect: Dialect) -> String {
        match dialect {
            Dialect::Chunks => format!("data: {}", self.to_openai()),
            Dialect::Messages => format!("event: error\ndata: {}", self.to_body(dialect)),
            Dialect::Responses => {
                // OpenAI's events have the members at the top level; its clients read `error`.
                let code = self.code();
                let event = json!({
                    "type": "error", "message": self.client_message(), "code": code, "param": self.param,
                    "error": self.openai(),
                });
                format!("event: error\ndata: {event}")
            }
        }
    }

    fn to_anthropic(&self) -> Value {
        let kind = match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ => "api_error",
        };
        let mut error = self.openai();
        error["type"] = json!(kind);
        error
    }

    /// The error as a status for gRPC clients, whose source is the error.
    pub fn to_grpc(&self) -> tonic::Status {
        use tonic::Code;
        let code = match (self.fault(), self.kind) {
            (
                _,
                ErrorKind::UnknownModel
                | ErrorKind::UnknownPath
                | ErrorKind::NotOffered
                | ErrorKind::EngineLacksPath
                | ErrorKind::EngineLacksModel,
            ) => Code::NotFound,
            (_, ErrorKind::Unauthenticated) => Code::Unauthenticated,
            (_, ErrorKind::NotPermitted) => Code::PermissionDenied,
            (_, ErrorKind::LimitReached(_)) => Code::ResourceExhausted,
            (_, ErrorKind::BodyTooLarge | ErrorKind::Overloaded | ErrorKind::OverShare) => {
                Code::ResourceExhausted
            }
            (_, ErrorKind::EngineFull { status: 503, .. }) => Code::Unavailable,
            (_, ErrorKind::Busy(_) | ErrorKind::EngineFull { .. }) => Code::ResourceExhausted,
            (_, ErrorKind::BodyTimeout) => Code::DeadlineExceeded,
            (Fault::Client, _) => Code::InvalidArgument,
            (_, ErrorKind::EngineTimeout | ErrorKind::LeaseExpired) => Code::DeadlineExceeded,
            (_, ErrorKind::DecodeLost) => Code::Aborted,
            (_, ErrorKind::LoopDetected) => Code::FailedPrecondition,
            (_, ErrorKind::Internal) => Code::Internal,
            _ => Code::Unavailable,
        };
        let mut status = tonic::Status::new(code, self.client_message());
        status.set_source(Arc::new(self.clone()));
        status
    }
}
