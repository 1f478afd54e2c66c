//! Handles one request: answers it in the shim, or forwards it to the engine.

use std::convert::Infallible;
use std::error::Error as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri, Version, response};
use hyper::body::{Body, Incoming};
use splitrail_engine::identity::RANK_HEADER;
use splitrail_settings::address_shares::AddressPlace;

use super::ProxyInner;
use super::bodies::{
    BYTES_PER_TOKEN, EngineReplyBody, HandOffObserver, ReplyBody, RequestBody, discard,
    discard_unread,
};
use super::body_pace::{BodyPace, RequestBodyError};
use super::client::{ClientConnection, RequestPlace};
use super::engine_connections::{EngineBody, SendError};
use super::gate::{self, GateRequirement};
use super::hand_off_scan::HandOffScanner;
use super::headers::{remove_hop_by_hop, take_prefill_tokens};
use super::metrics::RequestOutcome;
use super::paths::{self, EndpointKind, PathMatch};
use super::refusal::Refusal;
use super::traffic::RequestTicket;

/// The header with which vLLM pins a request to a data-parallel rank.
const X_DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static(RANK_HEADER);

/// How a request is handled.
enum Decision {
    /// By the shim's own endpoints.
    Local(Response<Bytes>),
    Refuse(Refusal),
    /// The engine does not hold the required blocks.
    Miss(EndpointKind),
    Forward(EndpointKind, AddressPlace, RequestOutcome),
}

/// Answers a request. Dropping the future or the body of the reply aborts the request on the
/// engine too.
pub(super) async fn handle(
    proxy: Arc<ProxyInner>,
    client: Arc<ClientConnection>,
    request: Request<Incoming>,
) -> Result<Response<ReplyBody>, Infallible> {
    let open = client.open_request();
    let mut recorder = proxy.outcomes.start_request();
    let (mut parts, mut body) = request.into_parts();
    let (response, outcome) = match proxy.decide(&mut parts, client.address).await {
        Decision::Local(response) => (response, RequestOutcome::Local),
        Decision::Refuse(refusal) => {
            discard(&mut body).await;
            (refusal.response(), outcome_of(refusal))
        }
        Decision::Miss(kind) => match proxy.misses.answer(kind, &parts.headers, &mut body).await {
            Ok(response) => (response, RequestOutcome::GateMiss),
            Err(refusal) => {
                discard(&mut body).await;
                (refusal.response(), outcome_of(refusal))
            }
        },
        Decision::Forward(kind, place, outcome) => {
            let place = RequestPlace { _place: place, _open: open };
            match proxy.forward(kind, place, parts, body).await {
                Ok(response) => {
                    recorder.outcome = outcome;
                    return Ok(response);
                }
                Err(refusal) => (refusal.response(), outcome_of(refusal)),
            }
        }
    };
    recorder.outcome = outcome;
    Ok(response.map(|body| ReplyBody::Own(body.into())))
}

fn outcome_of(refusal: Refusal) -> RequestOutcome {
    match refusal {
        Refusal::MalformedGate | Refusal::GateUnsupported | Refusal::MalformedBody => {
            RequestOutcome::GateMalformed
        }
        Refusal::UnreadableBody => RequestOutcome::GateMiss,
        Refusal::UnknownPath | Refusal::WrongMethod => RequestOutcome::RefusedPath,
        Refusal::Busy => RequestOutcome::Busy,
        Refusal::EngineUnreachable => RequestOutcome::EngineUnreachable,
        Refusal::EngineFailed => RequestOutcome::EngineFailed,
        Refusal::SlowBody => RequestOutcome::SlowBody,
    }
}

impl ProxyInner {
    /// Decides how to handle a request. Removes the gate header, and pins the rank of a hit.
    async fn decide(&self, parts: &mut Parts, client: IpAddr) -> Decision {
        let path = parts.uri.path();
        if path.starts_with("/splitrail/") {
            return self.decide_local(parts);
        }
        let kind = match paths::find(&parts.method, path) {
            PathMatch::Path(kind) => kind,
            PathMatch::WrongMethod => return Decision::Refuse(Refusal::WrongMethod),
            PathMatch::Unknown => return Decision::Refuse(Refusal::UnknownPath),
        };
        let outcome = match gate::take(&mut parts.headers) {
            Ok(None) => RequestOutcome::Forwarded,
            Ok(Some(_)) if !kind.can_be_gated() => {
                return Decision::Refuse(Refusal::GateUnsupported);
            }
            Ok(Some(requirement)) if self.passes_gate(&requirement, &mut parts.headers).await => {
                RequestOutcome::GateHit
            }
            Ok(Some(_)) => return Decision::Miss(kind),
            Err(_) => return Decision::Refuse(Refusal::MalformedGate),
        };
        let places = self.config.limits.requests_max;
        match self.request_places.take(client, places, usize::MAX) {
            Some(place) => Decision::Forward(kind, place, outcome),
            None => Decision::Refuse(Refusal::Busy),
        }
    }

    fn decide_local(&self, parts: &Parts) -> Decision {
        match (self.local)(&parts.method, parts.uri.path()) {
            Some(response) => Decision::Local(response),
            None => Decision::Refuse(Refusal::UnknownPath),
        }
    }

    /// Whether the engine holds the required blocks on a rank on which the request is certain to
    /// run. If necessary, the request is pinned to that rank.
    async fn passes_gate(&self, requirement: &GateRequirement, headers: &mut HeaderMap) -> bool {
        let (has_several_ranks, takes_rank) = {
            let known = self.capabilities.borrow();
            (known.ranks.is_some_and(|ranks| ranks > 1), known.takes_rank_header == Some(true))
        };
        let pinned = has_several_ranks || requirement.rank != 0;
        // The blocks of one rank do not matter if the engine may choose another rank.
        if (pinned && !takes_rank) || !self.residency.holds(requirement).await {
            return false;
        }
        if pinned {
            headers.insert(X_DATA_PARALLEL_RANK, requirement.rank.into());
        }
        true
    }

    async fn forward(
        &self,
        kind: EndpointKind,
        place: RequestPlace,
        mut parts: Parts,
        body: Incoming,
    ) -> Result<Response<ReplyBody>, Refusal> {
        let prefill_tokens = take_prefill_tokens(&mut parts.headers).map(u64::from);
        let known = prefill_tokens.or_else(|| Some(body.size_hint().exact()? / BYTES_PER_TOKEN));
        let ticket = kind.computes().then(|| self.traffic.enter(known.unwrap_or(0)));
        let meter = ticket.as_ref().filter(|_| known.is_none()).map(RequestTicket::meter);
        let pace = BodyPace::new(self.config.limits.body_grace);
        remove_hop_by_hop(&mut parts.headers);
        parts.extensions.clear();
        parts.version = Version::HTTP_11;
        parts.uri = only_path(parts.uri)?;
        let (body, mut unread) = RequestBody::new(body, pace, meter);
        match self.engine.send(Request::from_parts(parts, body), &mut unread).await {
            Ok((head, body)) => {
                if !self.reachable.swap(true, Ordering::Relaxed) {
                    tracing::info!(engine = %self.config.engine, "the engine answers again");
                }
                Ok(self.to_client(kind, head, body, ticket, place))
            }
            Err(error) => {
                drop((ticket, place));
                discard_unread(unread).await;
                Err(self.refusal_for(&error))
            }
        }
    }

    fn to_client(
        &self,
        kind: EndpointKind,
        mut parts: response::Parts,
        body: EngineBody,
        ticket: Option<RequestTicket>,
        place: RequestPlace,
    ) -> Response<ReplyBody> {
        remove_hop_by_hop(&mut parts.headers);
        let streams = is_event_stream(&parts.headers);
        // Engines send the head of a stream before the prefill, and other heads after it.
        if let Some(ticket) = ticket.as_ref().filter(|_| !streams) {
            ticket.begin_reply();
        }
        let may_have_hand_off = kind.can_be_gated() && !streams && parts.status == StatusCode::OK;
        let hand_off = may_have_hand_off.then(|| HandOffObserver {
            scanner: HandOffScanner::default(),
            traffic: Arc::clone(&self.traffic),
            lease: self.lease(),
        });
        let body = EngineReplyBody { body, ticket, hand_off, place: Some(place) };
        Response::from_parts(parts, ReplyBody::Engine(body))
    }

    fn lease(&self) -> Duration {
        let known = self.capabilities.borrow().lease_ms;
        known.map_or(self.config.lease, Duration::from_millis)
    }

    fn refusal_for(&self, error: &SendError) -> Refusal {
        let engine = &self.config.engine;
        let cause = match error {
            SendError::Connect(cause) => cause,
            SendError::Broken(cause) if is_slow_body(cause) => return Refusal::SlowBody,
            SendError::Broken(cause) => {
                tracing::warn!(%engine, %cause, "the engine closed the connection before it replied");
                return Refusal::EngineFailed;
            }
        };
        // Log the change once, not for each request.
        if self.reachable.swap(false, Ordering::Relaxed) {
            tracing::warn!(%engine, %cause, "the engine cannot be reached");
        }
        Refusal::EngineUnreachable
    }
}

/// Whether a request failed because its client sent the body too slowly.
fn is_slow_body(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(RequestBodyError::TooSlow))
}

fn only_path(asked: Uri) -> Result<Uri, Refusal> {
    let path = asked.into_parts().path_and_query;
    path.map(Uri::from).ok_or(Refusal::UnknownPath)
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let expected = b"text/event-stream";
    let value = headers.get(CONTENT_TYPE).map(|value| value.as_bytes()).unwrap_or_default();
    value.get(..expected.len()).is_some_and(|start| start.eq_ignore_ascii_case(expected))
}
