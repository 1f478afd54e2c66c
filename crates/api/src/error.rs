//! The one error type of a request, and the one place that turns it into a reply.
//!
//! An error knows whose fault it is and whether another attempt makes sense.
//! Messages never carry prompt text, token ids, completions or keys.

use std::borrow::Cow;

use http::StatusCode;
use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client's: the same request fails again.
    Client,
    /// An engine's: another worker may do better.
    Engine,
    /// The router's own, or its configuration's.
    Router,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is malformed or asks for what is not allowed.
    InvalidRequest,
    /// The body is larger than `limits.body_max_bytes`.
    BodyTooLarge,
    /// The body took longer than `limits.body_timeout`.
    BodyTimeout,
    /// The body's type or encoding is not accepted.
    UnsupportedMedia,
    /// The router is called by a host name that is not in `listen.http_hosts`.
    ForbiddenHost,
    /// No such model.
    UnknownModel,
    /// No such path.
    UnknownPath,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The client left before its request was whole.
    ClientGone,
    /// The router is full or draining.
    Overloaded,
    /// The client has its fair share of the router.
    OverShare,
    /// The model has too much to do; it may be tried again after so many seconds.
    Busy(u32),
    /// No worker can take the request.
    NoWorker,
    /// An engine refused the request; its status is relayed.
    EngineRejected(u16),
    /// No worker of the model has the endpoint.
    NotOffered,
    /// An engine could not be reached; it has not seen the request.
    EngineUnreachable,
    /// An engine failed, or answered nonsense.
    EngineFailed,
    /// A kept connection to an engine ended just as the request was written to it.
    StaleConnection,
    /// An engine sent what answers another request; it was dropped.
    ForeignAnswer,
    /// The answer is larger than `limits.engine_reply_max_bytes`.
    ReplyTooLarge,
    /// A prefill engine named a host for its blocks that is not of the fleet.
    ForeignHandOff,
    /// An engine took longer than a configured time-out.
    EngineTimeout,
    /// An engine holds less of the prompt than its threshold asks for, and ran nothing.
    BelowThreshold,
    /// No decode worker has taken a hand-off before its lease ended.
    LeaseExpired,
    /// The answer broke off after its first byte had been delivered.
    DecodeLost,
    /// A defect of the router.
    Internal,
}

/// An error of one request.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    message: Cow<'static, str>,
    param: Option<Cow<'static, str>>,
    code: Option<String>,
}

impl Error {
    /// An error with its message.
    pub fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into(), param: None, code: None }
    }

    /// A 400 that names the field at fault.
    pub fn invalid(
        param: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { param: Some(param.into()), ..Self::new(Kind::InvalidRequest, message) }
    }

    /// An engine's refusal, in its own words.
    pub fn rejected(status: u16, message: String, param: Option<String>) -> Self {
        Self { param: param.map(Cow::Owned), ..Self::new(Kind::EngineRejected(status), message) }
    }

    /// An engine's failure, named by worker.
    pub fn engine(worker: &str, what: &str) -> Self {
        Self::new(Kind::EngineFailed, format!("worker {worker} {what}"))
    }

    /// The same error with a machine-readable code.
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The same error with the field at fault.
    pub fn with_param(self, param: impl Into<Cow<'static, str>>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// What went wrong.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The field at fault, if one is named.
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The text for people.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether the model has too much to do for the request.
    pub fn is_busy(&self) -> bool {
        matches!(self.kind, Kind::Busy(_))
    }

    /// Whose fault it is.
    pub fn fault(&self) -> Fault {
        match self.kind {
            Kind::InvalidRequest
            | Kind::BodyTooLarge
            | Kind::BodyTimeout
            | Kind::UnsupportedMedia
            | Kind::ForbiddenHost
            | Kind::UnknownModel
            | Kind::UnknownPath
            | Kind::MethodNotAllowed
            | Kind::NotOffered
            // What makes an answer so large is in the request: its `n`, `logprobs`, `max_tokens`.
            | Kind::ReplyTooLarge
            | Kind::ClientGone => Fault::Client,
            // An engine that will not take the router's credential, does not know the
            // model or the path that the router knows of it, is asked too much of, or has
            // a threshold of its own (412) says nothing about the client's request.
            Kind::EngineRejected(401 | 403 | 404 | 405 | 407 | 408 | 412 | 429 | 501) => {
                Fault::Engine
            }
            Kind::EngineRejected(_) => Fault::Client,
            Kind::EngineUnreachable
            | Kind::EngineFailed
            | Kind::StaleConnection
            | Kind::ForeignAnswer
            | Kind::ForeignHandOff
            | Kind::EngineTimeout
            | Kind::BelowThreshold
            | Kind::LeaseExpired
            | Kind::DecodeLost => Fault::Engine,
            Kind::Overloaded
            | Kind::OverShare
            | Kind::Busy(_)
            | Kind::NoWorker
            | Kind::Internal => Fault::Router,
        }
    }

    /// Whether the same request may succeed on another worker.
    pub fn worth_another_worker(&self) -> bool {
        self.fault() == Fault::Engine && self.kind != Kind::DecodeLost
    }

    /// Whether the worker that it came from is at fault, so that others should be spared it:
    /// neither where it is only full, nor where the request or a connection was.
    pub fn speaks_against_its_worker(&self) -> bool {
        let full = matches!(self.kind, Kind::EngineRejected(408 | 429) | Kind::BelowThreshold);
        self.fault() == Fault::Engine && !full && !self.is_of_the_connection()
    }

    /// Whether it came of a connection, and says nothing of the worker behind it: the same worker
    /// may be asked again.
    pub fn is_of_the_connection(&self) -> bool {
        matches!(self.kind, Kind::StaleConnection | Kind::ForeignAnswer)
    }

    /// The HTTP status of the reply.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            // Clients send again what failed with a 5xx: an answer that is too large would be
            // generated several times for nothing.
            Kind::InvalidRequest | Kind::ReplyTooLarge | Kind::ClientGone => {
                StatusCode::BAD_REQUEST
            }
            Kind::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Kind::UnsupportedMedia => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::ForbiddenHost => StatusCode::FORBIDDEN,
            Kind::UnknownModel | Kind::UnknownPath | Kind::NotOffered => StatusCode::NOT_FOUND,
            Kind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Kind::Overloaded | Kind::NoWorker => StatusCode::SERVICE_UNAVAILABLE,
            Kind::OverShare | Kind::Busy(_) | Kind::EngineRejected(429) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Kind::EngineRejected(_) if self.fault() == Fault::Engine => StatusCode::BAD_GATEWAY,
            Kind::EngineRejected(status) => {
                StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST)
            }
            Kind::EngineUnreachable
            | Kind::EngineFailed
            | Kind::StaleConnection
            | Kind::ForeignAnswer
            | Kind::ForeignHandOff
            | Kind::BelowThreshold
            | Kind::DecodeLost => StatusCode::BAD_GATEWAY,
            Kind::EngineTimeout | Kind::LeaseExpired => StatusCode::GATEWAY_TIMEOUT,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Seconds after which a client may try again, where that makes sense.
    pub fn retry_after_s(&self) -> Option<u32> {
        match self.kind {
            Kind::Overloaded | Kind::OverShare | Kind::NoWorker | Kind::EngineRejected(429) => {
                Some(1)
            }
            Kind::Busy(seconds) => Some(seconds),
            _ => None,
        }
    }

    /// The short name used in metrics, logs and `code`.
    pub fn outcome(&self) -> &'static str {
        match self.kind {
            Kind::InvalidRequest => "invalid_request",
            Kind::BodyTooLarge => "body_too_large",
            Kind::BodyTimeout => "body_timeout",
            Kind::UnsupportedMedia => "unsupported_media",
            Kind::ForbiddenHost => "forbidden_host",
            Kind::UnknownModel => "model_not_found",
            Kind::UnknownPath => "path_not_found",
            Kind::MethodNotAllowed => "method_not_allowed",
            Kind::ClientGone => "cancelled",
            Kind::Overloaded => "overloaded",
            Kind::OverShare => "over_share",
            Kind::Busy(_) => "busy",
            Kind::NoWorker => "no_worker",
            Kind::EngineRejected(_) => "engine_rejected",
            Kind::NotOffered => "not_offered",
            Kind::EngineUnreachable => "engine_unreachable",
            Kind::EngineFailed => "engine_failed",
            Kind::StaleConnection => "stale_connection",
            Kind::ForeignAnswer => "foreign_answer",
            Kind::ReplyTooLarge => "reply_too_large",
            Kind::ForeignHandOff => "foreign_hand_off",
            Kind::EngineTimeout => "engine_timeout",
            Kind::BelowThreshold => "below_threshold",
            Kind::LeaseExpired => "lease_expired",
            Kind::DecodeLost => "decode_lost",
            Kind::Internal => "internal",
        }
    }

    /// OpenAI's error object: `{"error": {message, type, param, code}}`.
    pub fn to_openai(&self) -> String {
        json!({ "error": self.openai() }).to_string()
    }

    fn openai(&self) -> Value {
        let kind = match (self.fault(), self.kind) {
            (Fault::Client, Kind::UnknownModel | Kind::UnknownPath | Kind::NotOffered) => {
                "not_found_error"
            }
            (Fault::Client, _) => "invalid_request_error",
            (_, Kind::OverShare | Kind::Busy(_) | Kind::EngineRejected(429)) => "rate_limit_error",
            (_, Kind::Overloaded | Kind::NoWorker) => "service_unavailable_error",
            (Fault::Engine, _) => "engine_error",
            (Fault::Router, _) => "internal_error",
        };
        let code = self.code.as_deref().unwrap_or_else(|| self.outcome());
        json!({"message": self.message, "type": kind, "param": self.param, "code": code})
    }

    /// The error as the body of a reply in this dialect: OpenAI's object, around which
    /// Anthropic has a `type` and other names for kinds of errors.
    pub fn to_body(&self, dialect: Dialect) -> String {
        match dialect {
            Dialect::Chunks | Dialect::Responses => self.to_openai(),
            Dialect::Messages => json!({"type": "error", "error": self.to_anthropic()}).to_string(),
        }
    }

    /// The error as a stream's last event.
    pub fn to_event(&self, dialect: Dialect) -> String {
        match dialect {
            Dialect::Chunks => format!("data: {}", self.to_openai()),
            Dialect::Messages => format!("event: error\ndata: {}", self.to_body(dialect)),
            Dialect::Responses => {
                // OpenAI has the members at the top; its clients raise what stands in `error`.
                let code = self.code.as_deref().unwrap_or_else(|| self.outcome());
                let event = json!({
                    "type": "error", "message": self.message, "code": code, "param": self.param,
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

    /// The same error for gRPC clients.
    pub fn to_grpc(&self) -> tonic::Status {
        use tonic::Code;
        let code = match (self.fault(), self.kind) {
            (_, Kind::UnknownModel | Kind::UnknownPath | Kind::NotOffered) => Code::NotFound,
            (_, Kind::BodyTooLarge | Kind::Overloaded | Kind::OverShare) => Code::ResourceExhausted,
            (_, Kind::Busy(_) | Kind::EngineRejected(429)) => Code::ResourceExhausted,
            (_, Kind::BodyTimeout) => Code::DeadlineExceeded,
            (Fault::Client, _) => Code::InvalidArgument,
            (_, Kind::EngineTimeout | Kind::LeaseExpired) => Code::DeadlineExceeded,
            (_, Kind::DecodeLost) => Code::Aborted,
            (_, Kind::Internal) => Code::Internal,
            _ => Code::Unavailable,
        };
        tonic::Status::new(code, self.message.to_string())
    }
}

/// For logs. Messages of client errors may quote the client, or an engine that
/// quotes the client: they go to that client alone, and logs get the name.
impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.fault() {
            Fault::Client => write!(f, "{} ({})", self.outcome(), self.status().as_u16()),
            Fault::Engine | Fault::Router => write!(f, "{}: {}", self.outcome(), self.message),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_of_clients_and_engines_are_not_logged() {
        let refused = Error::rejected(400, "prompt `secret` is too long".into(), None);
        assert!(!refused.to_string().contains("secret"));
        assert!(refused.to_openai().contains("secret"), "the client itself is told");
        let failed = Error::new(Kind::EngineFailed, "worker p0 answered with status 500");
        assert!(failed.to_string().contains("p0"));
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
            (Kind::UnknownModel, "not_found_error"),
            (Kind::BodyTooLarge, "request_too_large"),
            (Kind::Busy(1), "rate_limit_error"),
            (Kind::NoWorker, "overloaded_error"),
            (Kind::EngineTimeout, "timeout_error"),
            (Kind::EngineFailed, "api_error"),
            (Kind::EngineRejected(422), "invalid_request_error"),
        ] {
            let event = Error::new(kind, "x").to_event(Dialect::Messages);
            let data = event.strip_prefix("event: error\ndata: ").unwrap_or_default();
            let told: Value = serde_json::from_str(data).unwrap_or_default();
            assert_eq!((&told["type"], &told["error"]["type"]), (&json!("error"), &json!(name)));
        }
    }

    #[test]
    fn only_what_another_worker_may_do_better_is_worth_one() {
        for (kind, another) in [
            (Kind::EngineUnreachable, true),
            (Kind::EngineFailed, true),
            (Kind::ForeignHandOff, true),
            (Kind::EngineTimeout, true),
            (Kind::EngineRejected(429), true),
            (Kind::EngineRejected(400), false),
            (Kind::DecodeLost, false),
            (Kind::InvalidRequest, false),
            (Kind::NoWorker, false),
        ] {
            assert_eq!(Error::new(kind, "").worth_another_worker(), another, "{kind:?}");
        }
    }
}
