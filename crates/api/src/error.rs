//! The error type of all requests, and the only place that turns errors into replies.
//!
//! An error knows whose fault it is and whether another attempt makes sense. Messages written by
//! the router contain no prompt text, token ids, completions or keys. An engine's own message may
//! quote the prompt; it goes to that client only and is never logged.

use std::borrow::Cow;

use http::StatusCode;

use crate::name::Name;

mod reply;

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client's fault: the same request would fail again.
    Client,
    /// An engine's fault: another worker may succeed.
    Engine,
    /// The fault of the router or its configuration.
    Router,
}

/// A limit of a tenant that a request has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReached {
    /// The limit, by its key in the configuration.
    pub limit: &'static str,
    /// Whether the limit counts requests or tokens: `requests` or `tokens`.
    pub unit: &'static str,
    /// Milliseconds after which the same request would be admitted; `None` if the quota of a day is
    /// used up, or if the request alone is larger than the limit.
    pub retry_after_ms: Option<u64>,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is malformed or asks for something that is not allowed.
    InvalidRequest,
    /// The body is larger than `limits.body_size_max`.
    BodyTooLarge,
    /// The body took longer than `limits.body_timeout`.
    BodyTimeout,
    /// The body's type or encoding is not accepted.
    UnsupportedMedia,
    /// The request's host name is not in `listen.http_hosts`.
    ForbiddenHost,
    /// The request has no credential, or one that is not valid.
    Unauthenticated,
    /// The credential is valid, but does not allow the request.
    NotPermitted,
    /// The tenant has reached a limit on what it may use.
    LimitReached(LimitReached),
    /// No served model has the name.
    UnknownModel,
    /// The path does not exist.
    UnknownPath,
    /// The path exists, but not with this method.
    MethodNotAllowed,
    /// The client disconnected before its request was complete.
    ClientGone,
    /// The router is full.
    Overloaded,
    /// The client already uses its fair share of the router.
    OverShare,
    /// The model is overloaded; the request may be retried after this many seconds.
    Busy(u32),
    /// No worker can take the request.
    NoWorker,
    /// An engine refused the request with this status. The status is relayed if the client is at
    /// fault.
    EngineRejected(u16),
    /// An engine is full, as it has said with status 429 or 503.
    EngineFull {
        /// The status.
        status: u16,
        /// Seconds after which it asks to be tried again.
        retry_after_s: u32,
    },
    /// An engine does not have the path of the request, or does not implement it.
    EngineLacksPath,
    /// An engine does not have the model or the adapter of the request.
    EngineLacksModel,
    /// The engine left service while the leg waited for it.
    EngineLost,
    /// No worker of the model supports the endpoint.
    NotOffered,
    /// An engine could not be reached and has not received the request.
    EngineUnreachable,
    /// An engine failed or sent an invalid reply.
    EngineFailed,
    /// A reused connection to an engine ended while the request was being written to it.
    StaleConnection,
    /// An engine sent the reply to another request; it was dropped.
    ForeignReply,
    /// The reply is larger than `limits.engine_reply_size_max`.
    ReplyTooLarge,
    /// A hand-off names a host that does not belong to the fleet.
    ForeignHandOff,
    /// The request has come back to a router that it had come through: a worker's URL leads there.
    LoopDetected,
    /// An engine took longer than a configured timeout.
    EngineTimeout,
    /// An engine has less of the prompt cached than its threshold requires, and did nothing.
    BelowThreshold,
    /// No decode worker fetched a hand-off before its lease expired.
    LeaseExpired,
    /// The reply ended early after its first byte had been sent to the client.
    DecodeLost,
    /// The router stops, and has no time left for the request.
    RouterStopping,
    /// A defect of the router.
    Internal,
}

/// An error of one request.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: Cow<'static, str>,
    param: Option<Cow<'static, str>>,
    /// What few errors have; boxed so that results stay small.
    rare: Option<Box<RareParts>>,
}

#[derive(Clone, Debug, Default)]
struct RareParts {
    /// The machine-readable code, if it is not the outcome.
    code: Option<String>,
    /// The name that the client sent as `model`, if no served model has it.
    unknown_model: Option<String>,
    /// The id of the request, for the client.
    request_id: Option<Name>,
    /// Whether the error is an engine's reply.
    is_reply: bool,
    /// Whether an engine refuses what the router has added to the request.
    is_of_additions: bool,
    /// Whether the message is withheld from clients, because it names the worker.
    is_withheld: bool,
    /// Whether the message is in an engine's words that are not for clients.
    is_internal: bool,
    /// Whether the prompt itself took too long.
    is_slow_prompt: bool,
    /// Whether it is of a stream that fell silent after it had begun.
    is_silent_stream: bool,
}

impl Error {
    /// An error of a kind with a message.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into(), param: None, rare: None }
    }

    /// A 400 that names the field at fault.
    pub fn invalid(
        param: impl Into<Cow<'static, str>>,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::InvalidRequest, message) }
    }

    /// An engine's refusal with the engine's own message.
    pub fn rejected(status: u16, message: String, param: Option<String>) -> Self {
        Self {
            param: param.map(Cow::Owned),
            ..Self::new(ErrorKind::EngineRejected(status), message)
        }
    }

    /// An engine's failure; the message names the worker.
    pub fn engine(worker: &str, what: &str) -> Self {
        Self::new(ErrorKind::EngineFailed, format!("worker {worker} {what}"))
    }

    /// Sets the machine-readable code.
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.rare.get_or_insert_default().code = Some(code.into());
        self
    }

    /// Names the unknown model that the client asked for.
    pub fn with_unknown_model(mut self, name: impl Into<String>) -> Self {
        self.rare.get_or_insert_default().unknown_model = Some(name.into());
        self
    }

    /// The name that the client sent as `model`, if no served model has it.
    pub fn unknown_model(&self) -> Option<&str> {
        self.rare.as_ref()?.unknown_model.as_deref()
    }

    /// Sets the id of the request, which errors have in Anthropic's dialect.
    #[must_use]
    pub fn with_request_id(mut self, id: &Name) -> Self {
        self.rare.get_or_insert_default().request_id = Some(id.clone());
        self
    }

    /// Marks the error as one that an engine has replied with, so the request has ended there.
    #[must_use]
    pub fn of_reply(mut self) -> Self {
        self.rare.get_or_insert_default().is_reply = true;
        self
    }

    /// Marks the error as an engine's refusal of what the router has added to the request.
    #[must_use]
    pub fn of_additions(mut self) -> Self {
        self.rare.get_or_insert_default().is_of_additions = true;
        self
    }

    /// Withholds the message of an engine's failure from the client, because the message names the
    /// worker. Logs still have the message.
    #[must_use]
    pub fn withheld(mut self) -> Self {
        if matches!(self.fault(), Fault::Engine | Fault::Router) {
            self.rare.get_or_insert_default().is_withheld = true;
        }
        self
    }

    /// Marks the message as words of an engine that are not for clients: only some statuses of
    /// refusals tell a client what to change.
    #[must_use]
    pub fn internal(mut self) -> Self {
        self.param = None;
        self.rare.get_or_insert_default().is_internal = true;
        self
    }

    /// The message for the client.
    fn client_message(&self) -> Cow<'_, str> {
        if self.rare.as_ref().is_some_and(|rare| rare.is_internal) {
            let status = self.status().as_u16();
            return format!("the engine refused the request with status {status}").into();
        }
        match (self.rare.as_ref().is_some_and(|rare| rare.is_withheld), self.fault()) {
            (true, Fault::Engine) => "the request failed at an engine".into(),
            (true, _) if self.kind == ErrorKind::NoWorker => {
                "no worker can take the request".into()
            }
            _ => Cow::Borrowed(&self.message),
        }
    }

    /// Whether the same engine would refuse the same request again: it is the client's fault, or the
    /// engine does not take what the router has added.
    pub fn is_lasting_refusal(&self) -> bool {
        self.fault() == Fault::Client || self.rare.as_ref().is_some_and(|rare| rare.is_of_additions)
    }

    /// Whether an engine has replied with the error. Otherwise its request may still run there.
    pub fn is_reply(&self) -> bool {
        matches!(self.kind, ErrorKind::EngineRejected(_) | ErrorKind::BelowThreshold)
            || self.rare.as_ref().is_some_and(|rare| rare.is_reply)
    }

    fn code(&self) -> &str {
        let code = self.rare.as_ref().and_then(|rare| rare.code.as_deref());
        code.unwrap_or_else(|| self.outcome())
    }

    /// Sets the field at fault.
    pub fn with_param(self, param: impl Into<Cow<'static, str>>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// The kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The field at fault, if one is named.
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The human-readable message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether the error means that the model is overloaded.
    pub fn is_busy(&self) -> bool {
        matches!(self.kind, ErrorKind::Busy(_))
    }

    /// Whose fault the error is.
    pub fn fault(&self) -> Fault {
        match self.kind {
            ErrorKind::InvalidRequest
            | ErrorKind::BodyTooLarge
            | ErrorKind::BodyTimeout
            | ErrorKind::UnsupportedMedia
            | ErrorKind::ForbiddenHost
            | ErrorKind::Unauthenticated
            | ErrorKind::NotPermitted
            | ErrorKind::LimitReached(_)
            | ErrorKind::UnknownModel
            | ErrorKind::UnknownPath
            | ErrorKind::MethodNotAllowed
            | ErrorKind::NotOffered
            // The size of a reply is determined by the request: `n`, `logprobs`, `max_tokens`.
            | ErrorKind::ReplyTooLarge
            | ErrorKind::ClientGone => Fault::Client,
            // An engine that does not accept the router's credential, gave up waiting, or has its own
            // threshold (412) says nothing about the client's request.
            ErrorKind::EngineRejected(401 | 407 | 408 | 412) => Fault::Engine,
            ErrorKind::EngineRejected(_) => Fault::Client,
            ErrorKind::EngineFull { .. }
            | ErrorKind::EngineLacksPath
            | ErrorKind::EngineLacksModel
            | ErrorKind::EngineLost
            | ErrorKind::EngineUnreachable
            | ErrorKind::EngineFailed
            | ErrorKind::StaleConnection
            | ErrorKind::ForeignReply
            | ErrorKind::ForeignHandOff
            | ErrorKind::LoopDetected
            | ErrorKind::EngineTimeout
            | ErrorKind::BelowThreshold
            | ErrorKind::LeaseExpired
            | ErrorKind::DecodeLost => Fault::Engine,
            ErrorKind::Overloaded
            | ErrorKind::OverShare
            | ErrorKind::Busy(_)
            | ErrorKind::NoWorker
            | ErrorKind::RouterStopping
            | ErrorKind::Internal => Fault::Router,
        }
    }

    /// Whether an engine has refused the request because it is too long for the engine's context.
    pub fn is_too_long(&self) -> bool {
        const WORDS: [&str; 2] = ["context length", "model length"];
        self.kind == ErrorKind::EngineRejected(400)
            && WORDS.iter().any(|words| self.message.contains(words))
    }

    /// Whether the same request may succeed on another worker.
    pub fn worth_another_worker(&self) -> bool {
        let is_slow = self.rare.as_ref().is_some_and(|rare| rare.is_slow_prompt);
        self.fault() == Fault::Engine && self.kind != ErrorKind::DecodeLost && !is_slow
    }

    /// Whether the error counts against the worker that it came from, in circuit breakers and
    /// ejection. It does only if the engine failed: not if the engine is full, lacks what is asked
    /// for, does not take the router's key, or is late, which may be due to the request.
    pub fn speaks_against_its_worker(&self) -> bool {
        match self.kind {
            ErrorKind::EngineFailed
            | ErrorKind::EngineUnreachable
            | ErrorKind::ForeignHandOff
            | ErrorKind::LoopDetected
            | ErrorKind::DecodeLost
            | ErrorKind::EngineRejected(407 | 412) => true,
            // The lease of a hand-off is short; the worker's queue may just be long.
            _ => self.rare.as_ref().is_some_and(|rare| rare.is_silent_stream),
        }
    }

    /// Marks the error as that of a prompt that took too long on an engine which worked meanwhile:
    /// another engine would take as long.
    #[must_use]
    pub fn of_slow_prompt(mut self) -> Self {
        self.rare.get_or_insert_default().is_slow_prompt = true;
        self
    }

    /// Marks the error as that of a stream that had begun and then said nothing for too long, which is not
    /// due to the request.
    #[must_use]
    pub fn of_silent_stream(mut self) -> Self {
        self.rare.get_or_insert_default().is_silent_stream = true;
        self
    }

    /// Whether the error is due to a connection and says nothing about the worker, so that the same
    /// worker may be tried again.
    pub fn is_of_the_connection(&self) -> bool {
        matches!(self.kind, ErrorKind::StaleConnection | ErrorKind::ForeignReply)
    }

    /// The HTTP status of the reply.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            // Clients retry after a 5xx; a reply that is too large would be generated several times
            // for nothing.
            ErrorKind::InvalidRequest | ErrorKind::ReplyTooLarge | ErrorKind::ClientGone => {
                StatusCode::BAD_REQUEST
            }
            ErrorKind::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            ErrorKind::UnsupportedMedia => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorKind::ForbiddenHost | ErrorKind::NotPermitted => StatusCode::FORBIDDEN,
            ErrorKind::Unauthenticated => StatusCode::UNAUTHORIZED,
            ErrorKind::UnknownModel
            | ErrorKind::UnknownPath
            | ErrorKind::NotOffered
            | ErrorKind::EngineLacksPath
            | ErrorKind::EngineLacksModel => StatusCode::NOT_FOUND,
            ErrorKind::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            ErrorKind::Overloaded | ErrorKind::NoWorker | ErrorKind::RouterStopping => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            ErrorKind::OverShare | ErrorKind::Busy(_) | ErrorKind::LimitReached(_) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            ErrorKind::EngineFull { status: 503, .. } => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::EngineFull { .. } => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::EngineRejected(_) if self.fault() == Fault::Engine => {
                StatusCode::BAD_GATEWAY
            }
            ErrorKind::EngineRejected(status) => {
                StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST)
            }
            ErrorKind::EngineUnreachable
            | ErrorKind::EngineLost
            | ErrorKind::EngineFailed
            | ErrorKind::StaleConnection
            | ErrorKind::ForeignReply
            | ErrorKind::ForeignHandOff
            | ErrorKind::BelowThreshold
            | ErrorKind::DecodeLost => StatusCode::BAD_GATEWAY,
            ErrorKind::EngineTimeout | ErrorKind::LeaseExpired => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::LoopDetected => StatusCode::LOOP_DETECTED,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Seconds after which a client may retry, if a retry makes sense.
    pub fn retry_after_s(&self) -> Option<u32> {
        match self.kind {
            ErrorKind::Overloaded
            | ErrorKind::OverShare
            | ErrorKind::NoWorker
            | ErrorKind::RouterStopping => Some(1),
            ErrorKind::Busy(seconds) | ErrorKind::EngineFull { retry_after_s: seconds, .. } => {
                Some(seconds)
            }
            ErrorKind::LimitReached(LimitReached { retry_after_ms: Some(ms), .. }) => {
                Some(u32::try_from(ms.div_ceil(1000)).unwrap_or(u32::MAX))
            }
            _ => None,
        }
    }

    /// Milliseconds after which a client may retry, if they are known more precisely than in
    /// seconds. OpenAI's clients read the header `retry-after-ms` first.
    pub fn retry_after_ms(&self) -> Option<u64> {
        match self.kind {
            ErrorKind::LimitReached(reached) => reached.retry_after_ms,
            _ => None,
        }
    }

    /// Whether clients that retry by status alone should not: OpenAI's clients read the header
    /// `x-should-retry`.
    pub fn should_not_retry(&self) -> bool {
        matches!(self.kind, ErrorKind::LimitReached(LimitReached { retry_after_ms: None, .. }))
    }

    /// The short name used in metrics, logs and `code`.
    pub fn outcome(&self) -> &'static str {
        match self.kind {
            ErrorKind::InvalidRequest => "invalid_request",
            ErrorKind::BodyTooLarge => "body_too_large",
            ErrorKind::BodyTimeout => "body_timeout",
            ErrorKind::UnsupportedMedia => "unsupported_media",
            ErrorKind::ForbiddenHost => "forbidden_host",
            ErrorKind::Unauthenticated => "invalid_api_key",
            ErrorKind::NotPermitted => "permission_denied",
            ErrorKind::LimitReached(LimitReached { retry_after_ms: None, .. }) => {
                "insufficient_quota"
            }
            ErrorKind::LimitReached(_) => "rate_limit_exceeded",
            ErrorKind::UnknownModel => "model_not_found",
            ErrorKind::UnknownPath => "path_not_found",
            ErrorKind::MethodNotAllowed => "method_not_allowed",
            ErrorKind::ClientGone => "cancelled",
            ErrorKind::Overloaded => "overloaded",
            ErrorKind::OverShare => "over_share",
            ErrorKind::Busy(_) => "busy",
            ErrorKind::NoWorker => "no_worker",
            ErrorKind::EngineRejected(_) => "engine_rejected",
            ErrorKind::NotOffered | ErrorKind::EngineLacksPath => "not_offered",
            ErrorKind::EngineLacksModel => "engine_lacks_model",
            ErrorKind::EngineFull { .. } => "engine_full",
            ErrorKind::EngineLost => "engine_lost",
            ErrorKind::EngineUnreachable => "engine_unreachable",
            ErrorKind::EngineFailed => "engine_failed",
            ErrorKind::StaleConnection => "stale_connection",
            ErrorKind::ForeignReply => "foreign_reply",
            ErrorKind::ReplyTooLarge => "reply_too_large",
            ErrorKind::ForeignHandOff => "foreign_hand_off",
            ErrorKind::LoopDetected => "loop_detected",
            ErrorKind::EngineTimeout => "engine_timeout",
            ErrorKind::BelowThreshold => "below_threshold",
            ErrorKind::LeaseExpired => "lease_expired",
            ErrorKind::DecodeLost => "decode_lost",
            ErrorKind::RouterStopping => "router_stopping",
            ErrorKind::Internal => "internal",
        }
    }

    /// How the request ended, for service level objectives. Only `failed` and `shed` are the fault of
    /// the router and its engines.
    pub fn result(&self) -> &'static str {
        match (self.fault(), self.kind) {
            (_, ErrorKind::ClientGone) => "cancelled",
            (_, ErrorKind::LimitReached(_)) => "limited",
            (Fault::Client, _) => "invalid",
            (_, ErrorKind::Overloaded | ErrorKind::OverShare | ErrorKind::Busy(_)) => "shed",
            (_, ErrorKind::EngineFull { .. }) => "shed",
            (_, ErrorKind::EngineLacksPath | ErrorKind::EngineLacksModel) => "invalid",
            (Fault::Engine | Fault::Router, _) => "failed",
        }
    }

    /// The tenant's limit that the request has reached, by its key in the configuration.
    pub fn limit_reached(&self) -> Option<&'static str> {
        match self.kind {
            ErrorKind::LimitReached(reached) => Some(reached.limit),
            _ => None,
        }
    }
}

/// Formats the error for logs. Messages of client errors may quote the client, or an engine that
/// quotes the client, so logs contain only the name and the status of such errors.
impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.fault() {
            Fault::Client => write!(f, "{} ({})", self.outcome(), self.status().as_u16()),
            // In the engine's words.
            _ if self.kind == ErrorKind::EngineLacksModel => f.write_str(self.outcome()),
            Fault::Engine | Fault::Router => write!(f, "{}: {}", self.outcome(), self.message),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests;
