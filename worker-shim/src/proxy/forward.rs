//! One request: turned away here, or sent on to the engine.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri, Version, response};
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use tokio::sync::OwnedSemaphorePermit;

use super::Inner;
use super::bodies::{
    Answer, BYTES_PER_TOKEN, HandOffWatch, Relay, Upload, discard, discard_unread,
};
use super::gate::{self, Ask};
use super::handoff::Scan;
use super::headers::{remove_hop_by_hop, take_prefill_tokens};
use super::metrics::Outcome;
use super::paths::{self, Found, Kind};
use super::refusal::Refusal;
use super::traffic::Ticket;
use super::upstream::{Failed, Line};

/// By which vLLM pins a request to a data-parallel rank.
const X_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// What is done with a request.
enum Decision {
    /// The shim itself has answered.
    Local(Response<Bytes>),
    Refuse(Refusal),
    /// The engine does not hold what is asked for.
    Miss(Kind),
    Forward(Kind, OwnedSemaphorePermit, Outcome),
}

/// Answers a request. Dropping the future, or the answer's body, ends it on the engine too.
pub(super) async fn answer(
    proxy: Arc<Inner>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let mut counting = proxy.outcomes.begin();
    let (mut parts, mut body) = request.into_parts();
    let (response, outcome) = match proxy.decide(&mut parts).await {
        Decision::Local(response) => (response, Outcome::Local),
        Decision::Refuse(refusal) => {
            discard(&mut body).await;
            (refusal.response(), outcome_of(refusal))
        }
        Decision::Miss(kind) => match proxy.misses.answer(kind, &parts.headers, &mut body).await {
            Ok(response) => (response, Outcome::GateMiss),
            Err(refusal) => {
                discard(&mut body).await;
                (refusal.response(), outcome_of(refusal))
            }
        },
        Decision::Forward(kind, place, outcome) => {
            match proxy.forward(kind, place, parts, body).await {
                Ok(response) => {
                    counting.outcome = outcome;
                    return Ok(response);
                }
                Err(refusal) => (refusal.response(), outcome_of(refusal)),
            }
        }
    };
    counting.outcome = outcome;
    Ok(response.map(|body| Answer::Own(Full::new(body))))
}

fn outcome_of(refusal: Refusal) -> Outcome {
    match refusal {
        Refusal::GateMalformed | Refusal::GateElsewhere | Refusal::BodyMalformed => {
            Outcome::GateMalformed
        }
        Refusal::BodyUnread => Outcome::GateMiss,
        Refusal::UnknownPath | Refusal::WrongMethod => Outcome::RefusedPath,
        Refusal::Busy => Outcome::Busy,
        Refusal::EngineUnreachable => Outcome::EngineUnreachable,
        Refusal::EngineFailed => Outcome::EngineFailed,
    }
}

impl Inner {
    /// Takes the gate's header away, and pins the rank if it is a hit.
    async fn decide(&self, parts: &mut Parts) -> Decision {
        let path = parts.uri.path();
        if path.starts_with("/splitrail/") {
            return self.decide_local(parts);
        }
        let kind = match paths::find(&self.config.extra_paths, &parts.method, path) {
            Found::Path(kind) => kind,
            Found::WrongMethod => return Decision::Refuse(Refusal::WrongMethod),
            Found::Unknown => return Decision::Refuse(Refusal::UnknownPath),
        };
        let outcome = match gate::take(&mut parts.headers) {
            Ok(None) => Outcome::Forwarded,
            Ok(Some(_)) if !kind.can_be_gated() => {
                return Decision::Refuse(Refusal::GateElsewhere);
            }
            Ok(Some(ask)) if self.opens(&ask, &mut parts.headers).await => Outcome::GateHit,
            Ok(Some(_)) => return Decision::Miss(kind),
            Err(_) => return Decision::Refuse(Refusal::GateMalformed),
        };
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => Decision::Forward(kind, place, outcome),
            Err(_) => Decision::Refuse(Refusal::Busy),
        }
    }

    fn decide_local(&self, parts: &Parts) -> Decision {
        let mut request = Request::new(());
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() = parts.uri.clone();
        *request.headers_mut() = parts.headers.clone();
        match (self.local)(&request) {
            Some(response) => Decision::Local(response),
            None => Decision::Refuse(Refusal::UnknownPath),
        }
    }

    /// Whether the engine holds the blocks on a rank that the request will surely run on.
    /// It is then pinned there.
    async fn opens(&self, ask: &Ask, headers: &mut HeaderMap) -> bool {
        let (several, takes_rank) = {
            let known = self.capabilities.borrow();
            (known.ranks.is_some_and(|ranks| ranks > 1), known.takes_rank_header == Some(true))
        };
        let pinned = several || ask.rank != 0;
        // What one rank holds says nothing where the engine may choose another one.
        if (pinned && !takes_rank) || !self.residency.holds(ask).await {
            return false;
        }
        if pinned {
            headers.insert(X_RANK, ask.rank.into());
        }
        true
    }

    async fn forward(
        &self,
        kind: Kind,
        place: OwnedSemaphorePermit,
        mut parts: Parts,
        body: Incoming,
    ) -> Result<Response<Answer>, Refusal> {
        let prefill_tokens = take_prefill_tokens(&mut parts.headers).map(u64::from);
        let known = prefill_tokens.or_else(|| Some(body.size_hint().exact()? / BYTES_PER_TOKEN));
        let ticket = kind.computes().then(|| self.traffic.enter(known.unwrap_or(0)));
        let meter = ticket.as_ref().filter(|_| known.is_none()).map(Ticket::meter);
        remove_hop_by_hop(&mut parts.headers);
        parts.extensions.clear();
        parts.version = Version::HTTP_11;
        parts.uri = only_path(parts.uri)?;
        let (body, mut unread) = Upload::new(body, meter);
        match self.engine.send(Request::from_parts(parts, body), &mut unread).await {
            Ok((head, body)) => {
                if !self.reachable.swap(true, Ordering::Relaxed) {
                    tracing::info!(engine = %self.config.engine, "the engine answers again");
                }
                Ok(self.relay(kind, head, body, ticket, place))
            }
            Err(error) => {
                drop((ticket, place));
                discard_unread(unread).await;
                Err(self.failure(&error))
            }
        }
    }

    fn relay(
        &self,
        kind: Kind,
        mut parts: response::Parts,
        body: Line,
        ticket: Option<Ticket>,
        place: OwnedSemaphorePermit,
    ) -> Response<Answer> {
        remove_hop_by_hop(&mut parts.headers);
        let streams = is_event_stream(&parts.headers);
        // Engines send a stream's head before they compute, and other heads after it.
        if let Some(ticket) = ticket.as_ref().filter(|_| !streams) {
            ticket.begun();
        }
        let may_hand_over = kind.can_be_gated() && !streams && parts.status == StatusCode::OK;
        let watch = may_hand_over.then(|| HandOffWatch {
            scan: Scan::default(),
            traffic: Arc::clone(&self.traffic),
            lease: self.lease(),
        });
        let relay = Relay { body, ticket, watch, place: Some(place) };
        Response::from_parts(parts, Answer::Engine(relay))
    }

    fn lease(&self) -> Duration {
        let known = self.capabilities.borrow().lease_ms;
        known.map_or(self.config.lease, Duration::from_millis)
    }

    fn failure(&self, error: &Failed) -> Refusal {
        let engine = &self.config.engine;
        let cause = match error {
            Failed::Connect(cause) => cause,
            Failed::Broken(cause) => {
                tracing::warn!(%engine, %cause, "the engine broke off before it answered");
                return Refusal::EngineFailed;
            }
        };
        // Once, however many requests find it out.
        if self.reachable.swap(false, Ordering::Relaxed) {
            tracing::warn!(%engine, %cause, "the engine cannot be reached");
        }
        Refusal::EngineUnreachable
    }
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
