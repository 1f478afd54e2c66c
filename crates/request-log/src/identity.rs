//! What a request is called, for clients, logs and engines: its id and its trace context.

use std::net::IpAddr;
use std::time::Instant;

use http::HeaderValue;
use http::header::{HeaderMap, HeaderName};

use splitrail_api::error::Error;
use splitrail_api::name::Name;
use splitrail_api::session::session;
use splitrail_api::text::random_id;
use splitrail_api::via;
use splitrail_ledger::timeline::RequestTrace;
use splitrail_settings::logging::RequestIds;
use splitrail_telemetry::trace_context::TraceContext;

/// The header with a request's id, in requests and replies.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Maximum length in bytes of a `tracestate`. Longer ones may be dropped by the specification.
const TRACESTATE_MAX_BYTES: usize = 512;

/// Maximum length in bytes of a client's id that is kept.
const ID_MAX_BYTES: usize = 128;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The id for the client, logs and records. Engines never see it.
    pub request_id: Name,
    /// When it arrived.
    pub arrived: Instant,
    /// The address of the client.
    pub client: IpAddr,
    /// The protocol of the listener.
    pub protocol: Protocol,
    /// The trace that the client takes part in.
    pub trace: ClientTrace,
    /// The session that the client names.
    pub session: Option<Name>,
    /// The routers that it has come through, as a value of `via`.
    pub via: Option<HeaderValue>,
}

/// The protocol of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// The APIs over HTTP.
    Http,
    /// The API over gRPC.
    Grpc,
}

impl Protocol {
    /// The name in the access log and in traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }

    /// The status of a request that ended well.
    pub fn ok(self) -> u16 {
        match self {
            Self::Http => 200,
            Self::Grpc => 0,
        }
    }

    /// The status of an error: that of HTTP, or the code of gRPC.
    pub fn status(self, error: &Error) -> u16 {
        match self {
            Self::Http => error.status().as_u16(),
            Self::Grpc => error.to_grpc().code() as u16,
        }
    }

    /// The status of a request whose client left before its reply began: 499, as other proxies log
    /// it, or the code of gRPC.
    pub fn cancelled(self) -> u16 {
        match self {
            Self::Http => 499,
            Self::Grpc => 1,
        }
    }
}

/// The trace context of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientTrace {
    /// The client's `traceparent`, if it is valid, with the members of version 00.
    pub traceparent: Option<HeaderValue>,
    /// The client's `tracestate`, if it has a `traceparent`.
    pub tracestate: Option<HeaderValue>,
}

impl ClientTrace {
    /// Reads the trace context from the head of a request.
    pub fn read(headers: &HeaderMap) -> Self {
        let traceparent = trace_context(headers.get(TRACEPARENT));
        let sent = headers.get(TRACESTATE).filter(|_| traceparent.is_some());
        let fits = |value: &&HeaderValue| {
            value.len() <= TRACESTATE_MAX_BYTES && value.to_str().is_ok_and(|text| !text.is_empty())
        };
        Self { traceparent, tracestate: sent.filter(fits).cloned() }
    }

    /// The client's place in its trace.
    pub fn context(&self) -> Option<TraceContext> {
        TraceContext::parse(self.traceparent.as_ref()?.to_str().ok()?)
    }
}

impl Identity {
    /// The identity of a request that arrives now. Uses the client's id if it is short and plain,
    /// otherwise a new one.
    pub fn new(
        sent_id: Option<&[u8]>,
        client: IpAddr,
        protocol: Protocol,
        trace: ClientTrace,
    ) -> Self {
        let (request_id, arrived) = (request_id(sent_id), Instant::now());
        Self { request_id, arrived, client, protocol, trace, session: None, via: None }
    }

    /// Reads its session, and the routers that the request has come through, from its head.
    #[must_use]
    pub fn come_through(mut self, headers: &HeaderMap) -> Self {
        self.session = session(headers).map(Name::from);
        // A request that comes back is refused before it has an identity.
        self.via = via::passed(headers).ok().flatten();
        self
    }

    /// The identity of a request over HTTP that arrives now.
    pub fn of_http(headers: &HeaderMap, client: IpAddr) -> Self {
        let sent_id = headers.get(X_REQUEST_ID).map(HeaderValue::as_bytes);
        let trace = ClientTrace::read(headers);
        Self::new(sent_id, client, Protocol::Http, trace).come_through(headers)
    }

    /// The ids for log lines about the request, which is traced if it has a place in a trace.
    pub fn log_ids(&self, trace: Option<&RequestTrace>) -> RequestIds {
        let context = trace.map(|trace| trace.context).or_else(|| self.trace.context());
        RequestIds::new(&self.request_id, context.map(|context| context.trace_id))
    }

    /// Puts the id into the head of the reply.
    pub fn put(&self, headers: &mut HeaderMap) {
        if let Ok(id) = HeaderValue::from_str(&self.request_id) {
            headers.insert(X_REQUEST_ID, id);
        }
    }
}

/// The client's id if it is short and plain, otherwise a new one.
pub fn request_id(sent: Option<&[u8]>) -> Name {
    let sane = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
    let kept = sent
        .filter(|id| (1..=ID_MAX_BYTES).contains(&id.len()) && id.iter().all(sane))
        .and_then(|id| std::str::from_utf8(id).ok());
    kept.map_or_else(|| random_id().as_str().into(), Name::from)
}

/// A client's W3C trace context, if it is valid. Of a later version than 00, the part that version 00
/// defines is kept, as version 00: engines get no free text of a client.
fn trace_context(sent: Option<&HeaderValue>) -> Option<HeaderValue> {
    let text = sent?.to_str().ok()?;
    let known = TraceContext::parse(text)?;
    match text.starts_with("00-") {
        true => sent.cloned(),
        false => HeaderValue::try_from(known.to_header()).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_trace_context_is_dropped() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let sent = HeaderValue::from_static(good);
        assert_eq!(trace_context(Some(&sent)), Some(sent));
        for bad in [
            "",
            "00",
            "a free text",
            &good[1..],
            &good.to_uppercase(),
            &good.replace("00-4", "ff-4"),
        ] {
            let sent = HeaderValue::from_str(bad).ok();
            assert_eq!(trace_context(sent.as_ref()), None, "{bad}");
        }
    }

    #[test]
    fn a_trace_context_is_kept_if_its_known_part_is_valid() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let kept = |text: &str| trace_context(HeaderValue::from_str(text).ok().as_ref());
        // Engines get no free text of a client: only the part that this version knows.
        for later in [good.replace("00-4", "cc-4"), good.replace("00-4", "cc-4") + "-what-ever"] {
            assert_eq!(kept(&later), HeaderValue::from_str(good).ok(), "{later}");
        }
        for no_id in [
            good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            good.replace("00f067aa0ba902b7", &"0".repeat(16)),
        ] {
            assert_eq!(kept(&no_id), None, "{no_id}");
        }
        let unknown_flags = good.replace("-01", "-ff");
        assert_eq!(kept(&unknown_flags), HeaderValue::from_str(&unknown_flags).ok());
    }

    #[test]
    fn only_short_request_ids_of_plain_characters_are_kept() {
        assert_eq!(request_id(Some(b"abc-1.2_3:4")), "abc-1.2_3:4");
        for bad in [&b""[..], b"a b", b"a\nb", "\u{e9}".as_bytes(), &[b'a'; 129]] {
            assert_eq!(request_id(Some(bad)).len(), 32);
        }
        assert_ne!(request_id(None), request_id(None));
    }
}
