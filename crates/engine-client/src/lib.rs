//! The HTTP client for engines.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::StatusCode;
use http::header::HeaderValue;
use http::uri::Authority;
use http_body_util::BodyExt;
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::task::JoinSet;

mod connections;
pub mod echoes;
mod engine;
mod failure;
pub mod framing;
mod gather;
mod guarded;
pub mod hosts;
pub mod networks;
mod proof;
mod question;
mod records;
pub mod retry_budget;
mod revocable_body;
mod stream;
mod timers;
mod tls;
mod wire;

pub use connections::EngineBody;
pub use failure::refusal_event;
pub use gather::too_large;
pub use gather::{ReplyMemory, ReplyRoom};
pub use proof::{Proof, Shape};
pub use question::{NoReply, Question, WholeReply};
pub use revocable_body::{RevocableBody, SendState};
pub use timers::{TimeoutError, Timer, Timers};
pub use tls::TlsSettings;

use crate::networks::Networks;
use crate::retry_budget::RetryBudget;
use connections::{BegunReply, Class, Connections, Destination};
pub use engine::Engine;
use failure::{failure, refusal};
use gather::gather;
use guarded::Resolver;
use splitrail_api::error::Error;
use splitrail_api::text::random_id;
use splitrail_engine::identity::RANK_HEADER;
use wire::EngineRequest;
pub use wire::Peer;
pub use wire::ReplyError;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
const X_GATE: &str = "x-splitrail-gate";
const X_PREFILL_TOKENS: &str = "x-splitrail-prefill-tokens";
const X_REQUEST_ID: &str = "x-request-id";
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The class of connections for reports of engines about themselves.
const REPORTS: Class = 255;
/// The class of connections to servers beside engines, such as bootstrap servers.
const BESIDE: Class = 254;

/// Maximum time for a server beside an engine to answer.
const BESIDE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time for an engine to end a body after its last event.
const FINISH_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of frames that are read without waiting.
const FRAMES_AT_ONCE: usize = 4;
/// Maximum number of bodies that are read to their end at the same time; beyond it the connection
/// is dropped.
const FINISHING_MAX: usize = 1024;

/// A client for one model's engines. Cheap to clone.
#[derive(Clone)]
pub struct EngineClient {
    plain: Pools,
    /// Connections to engines with an `https` URL.
    secured: Pools,
    /// TLS towards engines with an `https` URL.
    pub tls: Arc<TlsSettings>,
    /// The router's own credential, marked as sensitive.
    pub authorization: Option<HeaderValue>,
    /// Maximum size in bytes of a reply, or of one event of a stream.
    pub reply_max_bytes: usize,
    /// The memory budget of replies.
    pub memory: ReplyMemory,
    /// The model's budget for retries.
    retry_budget: Arc<RetryBudget>,
    /// Tasks that read bodies to their end after the last event.
    finishing: Arc<Mutex<JoinSet<()>>>,
    /// The timers of this client's calls.
    pub timers: Arc<Timers>,
}

/// How a client reaches engines.
pub struct ConnectOptions {
    /// Timeout for opening a connection, with the handshake of TLS.
    pub connect: Duration,
    /// The allowed networks of workers that are not listed.
    pub networks: Networks,
    /// TLS towards engines with an `https` URL.
    pub tls: Arc<TlsSettings>,
}

/// Connections to engines with the same scheme.
#[derive(Clone)]
struct Pools {
    listed: Arc<Connections>,
    /// Connections to workers that are not listed, whose host names must resolve to addresses in
    /// the allowed networks.
    guarded: Arc<Connections>,
}

impl Pools {
    fn new(options: &ConnectOptions, tls: Option<&Arc<TlsSettings>>) -> Self {
        let pool = |networks| {
            let connector = connector(Resolver::new(networks), options.connect);
            Connections::new(connector, tls.cloned(), options.connect)
        };
        Self { listed: pool(None), guarded: pool(Some(options.networks.clone())) }
    }

    fn of(&self, guarded: bool) -> &Arc<Connections> {
        if guarded { &self.guarded } else { &self.listed }
    }
}

/// The message if a worker refuses the rank to which a request is pinned.
pub const NO_SUCH_RANK: &str = "has no such data-parallel rank";

/// The headers of an engine request. The only header of the client that is passed on is the trace
/// context.
#[derive(Clone, Debug)]
pub struct LegHeaders {
    /// An id made by the router, the same for all legs of one attempt.
    pub request_id: HeaderValue,
    /// W3C trace context.
    pub traceparent: Option<HeaderValue>,
    /// What belongs to `traceparent`; not sent without it.
    pub tracestate: Option<HeaderValue>,
    /// The blocks that a shim must look for.
    pub gate: Option<HeaderValue>,
    /// The data-parallel rank that must take the request.
    pub rank: Option<u32>,
    /// Number of prompt tokens to compute, for the shim's count of queued work.
    pub prefill_tokens: Option<u64>,
    /// The routers that the request has come through before this one, as a value of `via`.
    pub via: Option<HeaderValue>,
    /// Whether the request needs a new connection because kept ones may hold replies to other
    /// requests.
    pub fresh: bool,
    /// The type of a body that is not JSON.
    pub content_type: Option<HeaderValue>,
}

impl LegHeaders {
    /// Headers of a request with an id that no other request has, and nothing else.
    pub fn with_random_id() -> Self {
        Self {
            request_id: random_request_id(),
            traceparent: None,
            tracestate: None,
            gate: None,
            rank: None,
            prefill_tokens: None,
            via: None,
            fresh: false,
            content_type: None,
        }
    }
}

/// An id for a request, which no other one has.
pub fn random_request_id() -> HeaderValue {
    let id = HeaderValue::try_from(random_id());
    // Hexadecimal digits are always a valid header value, so the fallback is never used.
    id.unwrap_or_else(|_| HeaderValue::from_static("splitrail"))
}

impl EngineClient {
    /// Creates a client. `authorization` is the router's own credential, if engines require one; a
    /// reply has at most `reply_max_bytes`.
    pub fn new(
        options: ConnectOptions,
        authorization: Option<HeaderValue>,
        reply_max_bytes: usize,
        memory: ReplyMemory,
        retry_budget: Arc<RetryBudget>,
    ) -> Self {
        Self {
            plain: Pools::new(&options, None),
            secured: Pools::new(&options, Some(&options.tls)),
            tls: options.tls,
            authorization,
            reply_max_bytes,
            memory,
            retry_budget,
            finishing: Arc::default(),
            timers: Arc::default(),
        }
    }

    /// Sends a body, of JSON unless `leg_headers` say otherwise; returns when a successful status line has arrived. If a kept connection
    /// turns out to have ended, the body is sent once more with another id on a new connection,
    /// provided that an engine may receive the body twice and the model's retry budget allows it.
    ///
    /// # Errors
    /// The engine cannot be reached, refused the request (with the engine's message), or failed.
    pub async fn post(
        &self,
        worker: &dyn Engine,
        shape: Shape,
        body: impl Into<RevocableBody>,
        leg_headers: &LegHeaders,
    ) -> Result<Response, Error> {
        let mut request = EngineRequest::new("POST", worker.authority(), shape.path, body.into());
        if let Some(value) = &self.authorization {
            request.field("authorization", value);
        }
        request.field("content-type", leg_headers.content_type.as_ref().unwrap_or(&JSON));
        request.id(X_REQUEST_ID, &leg_headers.request_id);
        if let Some(trace) = &leg_headers.traceparent {
            request.field(TRACEPARENT, trace);
            if let Some(state) = &leg_headers.tracestate {
                request.field(TRACESTATE, state);
            }
        }
        if let Some(rank) = leg_headers.rank {
            request.number(RANK_HEADER, rank.into());
        }
        if let Some(tokens) = leg_headers.prefill_tokens.filter(|_| worker.has_shim()) {
            request.number(X_PREFILL_TOKENS, tokens);
        }
        if let Some(gate) = &leg_headers.gate {
            request.field(X_GATE, gate);
        }
        request.via(leg_headers.via.as_ref());
        let mut request_id = leg_headers.request_id.clone();
        let again = |request: &mut EngineRequest| {
            let allowed = self.retry_budget.withdraw();
            if allowed {
                // The engine may still work on the first request.
                request_id = another_id(&request_id);
                request.set_id(&request_id);
                worker.count_resent();
            }
            allowed
        };
        let class = shape.number;
        let (authority, process) = (worker.authority(), worker.process());
        let (engine, fresh) = (Some(worker), leg_headers.fresh);
        let to = Destination { authority, process, class, engine, fresh };
        let begun = self.connections(worker).request(to, &mut request.ended(), again).await;
        let BegunReply { status, peer, retry_after_s, mut body, .. } =
            begun.map_err(|error| failure(worker, &error))?;
        if status != StatusCode::OK {
            // Error replies carry no id that could be checked.
            body.prove();
            return Err(refusal(worker, status, retry_after_s, body).await);
        }
        let proof = Proof { request_id, shape, teaches: leg_headers.gate.is_none() };
        Ok(Response { peer, body, proof })
    }

    fn connections(&self, worker: &dyn Engine) -> &Arc<Connections> {
        let pools = if worker.uses_tls() { &self.secured } else { &self.plain };
        pools.of(worker.is_guarded())
    }

    /// Reads a complete reply of up to `limits.engine_reply_size_max`. A reply that goes to a client
    /// has a `room`, and waits until the client has read enough of its other replies.
    ///
    /// # Errors
    /// The reply is too long, truncated, or for another request, or the client does not read its
    /// replies.
    pub async fn whole(
        &self,
        worker: &dyn Engine,
        response: Response,
        room: Option<&ReplyRoom>,
    ) -> Result<Bytes, Error> {
        let Response { mut body, proof, .. } = response;
        const KEY: &str = "limits.engine_reply_size_max";
        let reply = gather(&mut body, self.reply_max_bytes, &self.memory, room).await;
        let reply = reply.map_err(|error| error.of(worker, KEY, &self.memory))?;
        proof.check(worker, &reply)?;
        body.prove();
        Ok(reply)
    }

    /// Fetches a text of up to `max_bytes` in which an engine describes itself.
    ///
    /// # Errors
    /// The engine cannot be reached, or its reply is not a valid text with status 200.
    pub async fn get(
        &self,
        worker: &dyn Engine,
        path: &'static str,
        max_bytes: usize,
    ) -> Result<String, Error> {
        let (status, text) = self.get_any(worker, path, max_bytes).await?;
        if status != StatusCode::OK {
            let what = format!("answers {path} with status {}", status.as_u16());
            return Err(Error::engine(worker.id(), &what).of_reply());
        }
        String::from_utf8(text.into())
            .map_err(|_| Error::engine(worker.id(), "sent a text that is not UTF-8"))
    }

    /// Sends a `GET` to an engine. Returns status and body of any reply, with a body of up to
    /// `max_bytes`.
    ///
    /// # Errors
    /// The engine cannot be reached, or its reply is not complete or too long.
    pub async fn get_any(
        &self,
        worker: &dyn Engine,
        path: &'static str,
        max_bytes: usize,
    ) -> Result<(StatusCode, Bytes), Error> {
        let mut request = EngineRequest::new("GET", worker.authority(), path, Bytes::new().into());
        if let Some(value) = &self.authorization {
            request.field("authorization", value);
        }
        request.via(None);
        let (authority, process) = (worker.authority(), worker.process());
        let to = Destination { authority, process, class: REPORTS, engine: None, fresh: false };
        let begun = self.connections(worker).request(to, &mut request.ended(), |_| true).await;
        let BegunReply { status, mut body, .. } = begun.map_err(|error| failure(worker, &error))?;
        body.prove();
        let text = gather(&mut body, max_bytes, &self.memory, None).await;
        Ok((status, text.map_err(|error| error.of_report(worker))?))
    }

    /// Fetches a text from a server beside an engine; with `guarded`, the server must be in the
    /// allowed networks. The router's credential is not sent, because it is for engines only.
    ///
    /// # Errors
    /// Says why the text cannot be fetched.
    pub async fn ask(
        &self,
        authority: &Authority,
        guarded: bool,
        path: &'static str,
        max_bytes: usize,
    ) -> Result<String, &'static str> {
        let mut request = EngineRequest::new("GET", authority, path, Bytes::new().into()).ended();
        let to = Destination { authority, process: 0, class: BESIDE, engine: None, fresh: false };
        let exchange = async {
            let begun = self.plain.of(guarded).request(to, &mut request, |_| true).await;
            let BegunReply { status, mut body, .. } = begun.map_err(|_| "it cannot be reached")?;
            body.prove();
            if status != StatusCode::OK {
                return Err("it does not answer with 200");
            }
            let body = gather(&mut body, max_bytes, &self.memory, None).await;
            let body = body.map_err(|_| "its reply is too long, or broke off")?;
            String::from_utf8(body.into()).map_err(|_| "its reply is not UTF-8")
        };
        let late = |_| Err("it does not answer in time");
        tokio::time::timeout(BESIDE_TIMEOUT, exchange).await.unwrap_or_else(late)
    }

    /// Reads a body to its end in the background. Some engines end the body a moment after their
    /// last event, and only then can the connection serve another request. The client's reply does
    /// not wait for this.
    pub fn finish(&self, mut body: EngineBody) {
        // Usually the end has already arrived.
        for _ in 0..FRAMES_AT_ONCE {
            match body.frame().now_or_never() {
                Some(Some(Ok(_))) => {}
                Some(_) => return,
                None => break,
            }
        }
        let mut finishing = self.finishing.lock().unwrap_or_else(PoisonError::into_inner);
        while finishing.try_join_next().is_some() {}
        if finishing.len() < FINISHING_MAX {
            finishing.spawn(async move {
                let ended =
                    async { while body.frame().await.is_some_and(|frame| frame.is_ok()) {} };
                // A body that does not end is dropped, which closes its connection.
                let _in_time = tokio::time::timeout(FINISH_TIMEOUT, ended).await;
            });
        }
    }
}

/// An engine's reply to an inference request, with status 200.
pub struct Response {
    /// The address that answered, if known.
    pub peer: Option<Peer>,
    /// The body, which is not read yet.
    pub body: EngineBody,
    /// Checks that the reply belongs to the request.
    pub proof: Proof,
}

/// A new id for a request that is sent again.
fn another_id(before: &HeaderValue) -> HeaderValue {
    let id = HeaderValue::from_str(&random_id()).ok();
    // The new id overwrites the old one in the head, so both need the same length.
    id.filter(|id| id.len() == before.len()).unwrap_or_else(|| before.clone())
}

fn connector<L>(resolver: Resolver<L>, connect: Duration) -> HttpConnector<Resolver<L>> {
    let mut connector = HttpConnector::new_with_resolver(resolver);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector.set_keepalive(Some(Duration::from_secs(30)));
    connector
}
