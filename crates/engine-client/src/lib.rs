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
pub mod networks;
mod parcel;
mod proof;
pub mod retry_budget;
mod timers;
mod wire;

pub use connections::EngineBody;
pub use failure::refusal_event;
pub use gather::ReplyMemory;
pub use gather::too_large;
pub use parcel::{Parcel, Receipt};
pub use proof::{Proof, Shape};
pub use timers::{Late, Timer, Timers};

use crate::networks::Networks;
use crate::retry_budget::RetryBudget;
use connections::{Begun, Class, Connections, Destination};
pub use engine::Engine;
use failure::{failure, refusal};
use gather::gather;
use guarded::Resolver;
use splitrail_api::error::Error;
use splitrail_api::text::random_id;
use splitrail_api::unread::Unread;
use wire::Ask;
pub use wire::Broken;
pub use wire::Peer;

const TRACEPARENT: &str = "traceparent";
const X_GATE: &str = "x-splitrail-gate";
const X_RANK: &str = "x-data-parallel-rank";
const X_PREFILL_TOKENS: &str = "x-splitrail-prefill-tokens";
const X_REQUEST_ID: &str = "x-request-id";
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The class of connections for what an engine says of itself.
const REPORTS: Class = 255;
/// The class of connections to servers beside engines.
const BESIDE: Class = 254;

/// How long a server beside an engine may take to answer.
const ASK: Duration = Duration::from_secs(2);

/// How long an engine may take to end a body after its last event.
const FINISH: Duration = Duration::from_millis(500);
/// What is read of it without waiting.
const FRAMES_AT_ONCE: usize = 4;
/// Bodies that are read to their end at once; of others, the connection is dropped.
const FINISHING_MAX: usize = 1024;

/// A client for one model's engines. Cheap to clone.
#[derive(Clone)]
pub struct EngineClient {
    http: Arc<Connections>,
    /// For workers that are not written down: it looks their names up within the allowed
    /// networks only.
    guarded: Arc<Connections>,
    authorization: Option<HeaderValue>,
    reply_max_bytes: usize,
    memory: ReplyMemory,
    /// What the model's requests have left for retries.
    retry_budget: Arc<RetryBudget>,
    /// Bodies that are read to their end after their last event.
    finishing: Arc<Mutex<JoinSet<()>>>,
    timers: Arc<Timers>,
}

/// What is said of a worker that refuses the rank that a request is pinned to.
pub const NO_SUCH_RANK: &str = "has no such data-parallel rank";

/// What goes with a request, apart from its body. No header of the client's
/// travels on but the trace context.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// The router-made id, the same for the legs of one attempt.
    pub request_id: HeaderValue,
    /// W3C trace context.
    pub traceparent: Option<HeaderValue>,
    /// The blocks that a shim is to look for.
    pub gate: Option<HeaderValue>,
    /// The data-parallel rank that must take it.
    pub rank: Option<u32>,
    /// Prompt tokens that are to be computed, for a shim's count of what is queued.
    pub prefill_tokens: Option<u64>,
    /// Whether it needs a new connection: kept ones may hold answers to other requests.
    pub fresh: bool,
}

impl EngineClient {
    /// A client. `authorization` is the router's own credential, if engines want one;
    /// `networks` are where the names of workers may lead that are not written down.
    pub fn new(
        connect: Duration,
        authorization: Option<HeaderValue>,
        (reply_max_bytes, memory): (usize, ReplyMemory),
        networks: Networks,
        retry_budget: Arc<RetryBudget>,
    ) -> Self {
        let http = Connections::new(connector(Resolver::new(None), connect));
        let guarded = Connections::new(connector(Resolver::new(Some(networks)), connect));
        Self {
            http,
            guarded,
            authorization,
            reply_max_bytes,
            memory,
            retry_budget,
            finishing: Arc::default(),
            timers: Arc::default(),
        }
    }

    /// The router's own credential, marked as sensitive.
    pub fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// Sends a JSON body; returns once a successful status line is there. Where a kept connection
    /// turns out to have ended, the body is sent once more, with another id, on a new one: if an
    /// engine may receive it twice, and the model's budget for retries allows it.
    ///
    /// # Errors
    /// As of whom is at fault: unreachable, refused (with the engine's message), failed.
    pub async fn post(
        &self,
        worker: &dyn Engine,
        shape: Shape,
        body: impl Into<Parcel>,
        envelope: &Envelope,
    ) -> Result<Response, Error> {
        let mut ask = Ask::new("POST", worker.authority(), shape.path(), body.into());
        if let Some(value) = &self.authorization {
            ask.field("authorization", value);
        }
        ask.field("content-type", &JSON);
        ask.id(X_REQUEST_ID, &envelope.request_id);
        if let Some(trace) = &envelope.traceparent {
            ask.field(TRACEPARENT, trace);
        }
        if let Some(rank) = envelope.rank {
            ask.number(X_RANK, rank.into());
        }
        if let Some(tokens) = envelope.prefill_tokens.filter(|_| worker.has_shim()) {
            ask.number(X_PREFILL_TOKENS, tokens);
        }
        if let Some(gate) = &envelope.gate {
            ask.field(X_GATE, gate);
        }
        let mut request_id = envelope.request_id.clone();
        let again = |ask: &mut Ask| {
            let allowed = self.retry_budget.withdraw();
            if allowed {
                // The engine may still be at work for the first.
                request_id = another_id(&request_id);
                ask.set_id(&request_id);
                worker.count_resent();
            }
            allowed
        };
        let class = shape.number();
        let (authority, process) = (worker.authority(), worker.process());
        let (engine, fresh) = (Some(worker), envelope.fresh);
        let to = Destination { authority, process, class, engine, fresh };
        let begun =
            self.connections(worker.is_guarded()).request(to, &mut ask.ended(), again).await;
        let Begun { status, peer, mut body } = begun.map_err(|error| failure(worker, &error))?;
        if status != StatusCode::OK {
            // Nothing can be told of errors.
            body.prove();
            return Err(refusal(worker, status, body).await);
        }
        let proof = Proof { request_id, shape, teaches: envelope.gate.is_none() };
        Ok(Response { peer, body, proof })
    }

    fn connections(&self, guarded: bool) -> &Arc<Connections> {
        if guarded { &self.guarded } else { &self.http }
    }

    /// Reads a whole reply, up to `limits.engine_reply_max_bytes`.
    ///
    /// # Errors
    /// If it is too long, breaks off, or is for another request.
    pub async fn whole(&self, worker: &dyn Engine, response: Response) -> Result<Bytes, Error> {
        self.gathered(worker, response, None).await
    }

    /// The same of a reply for a client, which waits for room among its client's other answers.
    ///
    /// # Errors
    /// As [`whole`](Self::whole), or if the client does not take those.
    pub async fn whole_answer(
        &self,
        worker: &dyn Engine,
        response: Response,
        unread: &Unread,
    ) -> Result<Bytes, Error> {
        self.gathered(worker, response, Some(unread)).await
    }

    async fn gathered(
        &self,
        worker: &dyn Engine,
        response: Response,
        unread: Option<&Unread>,
    ) -> Result<Bytes, Error> {
        let Response { mut body, proof, .. } = response;
        const KEY: &str = "limits.engine_reply_max_bytes";
        let reply = gather(&mut body, self.reply_max_bytes, &self.memory, unread).await;
        let reply = reply.map_err(|error| error.of(worker, KEY, &self.memory))?;
        proof.check(worker, &reply)?;
        body.prove();
        Ok(reply)
    }

    /// The timers of its calls.
    pub fn timers(&self) -> &Arc<Timers> {
        &self.timers
    }

    /// Fetches a text of up to `max_bytes` that an engine tells of itself.
    ///
    /// # Errors
    /// If it cannot be had.
    pub async fn get(
        &self,
        worker: &dyn Engine,
        path: &'static str,
        max_bytes: usize,
    ) -> Result<String, Error> {
        let mut ask = Ask::new("GET", worker.authority(), path, Bytes::new().into());
        if let Some(value) = &self.authorization {
            ask.field("authorization", value);
        }
        let (authority, process) = (worker.authority(), worker.process());
        let to = Destination { authority, process, class: REPORTS, engine: None, fresh: false };
        let begun =
            self.connections(worker.is_guarded()).request(to, &mut ask.ended(), |_| true).await;
        let Begun { status, mut body, .. } = begun.map_err(|error| failure(worker, &error))?;
        body.prove();
        if status != StatusCode::OK {
            return Err(Error::engine(worker.id(), "does not answer with 200"));
        }
        let text = gather(&mut body, max_bytes, &self.memory, None).await;
        let text = text.map_err(|error| error.of_report(worker, &self.memory))?;
        String::from_utf8(text.into())
            .map_err(|_| Error::engine(worker.id(), "sent a text that is not UTF-8"))
    }

    /// Fetches a text from a server that stands beside an engine, which may be `guarded`. The
    /// router's credential is for engines alone.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub async fn ask(
        &self,
        authority: &Authority,
        guarded: bool,
        path: &'static str,
        max_bytes: usize,
    ) -> Result<String, &'static str> {
        let mut ask = Ask::new("GET", authority, path, Bytes::new().into()).ended();
        let to = Destination { authority, process: 0, class: BESIDE, engine: None, fresh: false };
        let exchange = async {
            let begun = self.connections(guarded).request(to, &mut ask, |_| true).await;
            let Begun { status, mut body, .. } = begun.map_err(|_| "it cannot be reached")?;
            body.prove();
            if status != StatusCode::OK {
                return Err("it does not answer with 200");
            }
            let body = gather(&mut body, max_bytes, &self.memory, None).await;
            let body = body.map_err(|_| "its answer is too long, or broke off")?;
            String::from_utf8(body.into()).map_err(|_| "its answer is not UTF-8")
        };
        let late = |_| Err("it does not answer in time");
        tokio::time::timeout(ASK, exchange).await.unwrap_or_else(late)
    }

    /// Reads a body to its end, which some engines send a moment after their last
    /// event: only then can the connection be used again. The answer does not wait.
    pub fn finish(&self, mut body: EngineBody) {
        // Most often it is there already.
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
                // A body that goes on is dropped, and its connection with it.
                let _in_time = tokio::time::timeout(FINISH, ended).await;
            });
        }
    }

    /// The memory that replies may take.
    pub fn memory(&self) -> &ReplyMemory {
        &self.memory
    }

    /// The largest reply, or event of a stream, that is accepted.
    pub fn reply_max_bytes(&self) -> usize {
        self.reply_max_bytes
    }
}

/// An engine's answer to a request for inference, which has begun with a 200.
pub struct Response {
    /// Who answers, where that is known.
    pub peer: Option<Peer>,
    /// The rest.
    pub body: EngineBody,
    /// What shows that it is for the request.
    pub proof: Proof,
}

/// An id for a request that is sent again.
fn another_id(before: &HeaderValue) -> HeaderValue {
    let id = HeaderValue::from_str(&random_id()).ok();
    // Ids are written over each other.
    id.filter(|id| id.len() == before.len()).unwrap_or_else(|| before.clone())
}

fn connector<L>(resolver: Resolver<L>, connect: Duration) -> HttpConnector<Resolver<L>> {
    let mut connector = HttpConnector::new_with_resolver(resolver);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector.set_keepalive(Some(Duration::from_secs(30)));
    connector
}
