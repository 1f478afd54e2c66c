//! HTTP towards engines.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::StatusCode;
use http::header::HeaderValue;
use http::uri::Authority;
use http_body_util::{BodyExt, Limited};
use hyper::body::Body as _;
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::task::JoinSet;

mod connections;
pub mod framing;
mod guarded;
mod parcel;
mod timers;
mod wire;

pub use connections::{EngineBody, Response};
pub use parcel::{Parcel, Receipt};
pub(crate) use timers::{Late, Timer, Timers};

use crate::api::fields::is_router_only;
use crate::error::{Error, Fault, Kind};
use crate::fleet::{Networks, Worker};
use connections::{Connections, Failure};
use guarded::Resolver;
use wire::Ask;
pub use wire::Broken;
pub(crate) use wire::Peer;

const TRACEPARENT: &str = "traceparent";
const X_GATE: &str = "x-splitrail-gate";
const X_RANK: &str = "x-data-parallel-rank";
const X_PREFILL_TOKENS: &str = "x-splitrail-prefill-tokens";
const X_REQUEST_ID: &str = "x-request-id";
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// How long a server beside an engine may take to answer.
const ASK: Duration = Duration::from_secs(2);

/// How long an engine may take to end a body after its last event.
const FINISH: Duration = Duration::from_millis(500);
/// What is read of it without waiting.
const FRAMES_AT_ONCE: usize = 4;
/// Bodies that are read to their end at once; of others, the connection is dropped.
const FINISHING_MAX: usize = 1024;

/// Room that is made for a reply on its engine's word, before its bytes are there.
const RESERVED_MAX_BYTES: usize = 128 << 10;

/// Of an error reply, this much is read to learn its message.
const ERROR_BODY_MAX_BYTES: usize = 64 << 10;

/// A client for one model's engines. Cheap to clone.
#[derive(Clone)]
pub struct EngineClient {
    http: Arc<Connections>,
    /// For workers that are not written down: it looks their names up within the allowed
    /// networks only.
    guarded: Arc<Connections>,
    authorization: Option<HeaderValue>,
    reply_max_bytes: usize,
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
    /// The blocks that a side-car is to look for.
    pub gate: Option<HeaderValue>,
    /// The data-parallel rank that must take it.
    pub rank: Option<u32>,
    /// Prompt tokens that are to be computed, for a side-car's count of what is queued.
    pub prefill_tokens: Option<u64>,
}

impl EngineClient {
    /// A client. `authorization` is the router's own credential, if engines want one;
    /// `networks` are where the names of workers may lead that are not written down.
    pub fn new(
        connect: Duration,
        authorization: Option<HeaderValue>,
        reply_max_bytes: usize,
        networks: Networks,
    ) -> Self {
        let http = Connections::new(connector(Resolver::new(None), connect));
        let guarded = Connections::new(connector(Resolver::new(Some(networks)), connect));
        Self {
            http,
            guarded,
            authorization,
            reply_max_bytes,
            finishing: Arc::default(),
            timers: Arc::default(),
        }
    }

    /// Sends a request the way that is right for its worker. Redirects are not followed.
    async fn send(
        &self,
        (guarded, authority): (bool, &Authority),
        ask: Ask,
    ) -> Result<Response, Failure> {
        let connections = if guarded { &self.guarded } else { &self.http };
        connections.request(authority, ask).await
    }

    /// The router's own credential, marked as sensitive.
    pub fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    /// Sends a JSON body; returns once a successful status line is there.
    ///
    /// # Errors
    /// As of whom is at fault: unreachable, refused (with the engine's message), failed.
    pub async fn post(
        &self,
        worker: &Arc<Worker>,
        path: &'static str,
        body: impl Into<Parcel>,
        envelope: &Envelope,
    ) -> Result<Response, Error> {
        let mut ask = self.ask_of("POST", worker, path, body.into());
        ask.field("content-type", &JSON);
        ask.field(X_REQUEST_ID, &envelope.request_id);
        if let Some(trace) = &envelope.traceparent {
            ask.field(TRACEPARENT, trace);
        }
        if let Some(rank) = envelope.rank {
            ask.number(X_RANK, rank.into());
        }
        if let Some(tokens) = envelope.prefill_tokens.filter(|_| worker.config.shim) {
            ask.number(X_PREFILL_TOKENS, tokens);
        }
        if let Some(gate) = &envelope.gate {
            ask.field(X_GATE, gate);
        }
        let response = self.send((worker.guarded, &worker.authority), ask).await;
        let response = response.map_err(|error| failure(worker, &error))?;
        if response.status == StatusCode::OK {
            Ok(response)
        } else {
            Err(refusal(worker, response).await)
        }
    }

    /// Reads a whole reply, up to `limits.engine_reply_max_bytes`.
    ///
    /// # Errors
    /// If it is too long or breaks off.
    pub async fn whole(&self, worker: &Worker, body: EngineBody) -> Result<Bytes, Error> {
        match read_whole(body, self.reply_max_bytes).await {
            Some(Ok(whole)) => Ok(whole),
            Some(Err(_)) => Err(Error::engine(worker.id(), "closed the connection in mid-reply")),
            None => {
                Err(Error::engine(worker.id(), "sent a reply over limits.engine_reply_max_bytes"))
            }
        }
    }

    /// The timers of its calls.
    pub(crate) fn timers(&self) -> &Arc<Timers> {
        &self.timers
    }

    /// Fetches a text that an engine tells of itself.
    ///
    /// # Errors
    /// If it cannot be had.
    pub async fn get(&self, worker: &Worker, path: &'static str) -> Result<String, Error> {
        let ask = self.ask_of("GET", worker, path, Bytes::new().into());
        let response = self.send((worker.guarded, &worker.authority), ask).await;
        let response = response.map_err(|error| failure(worker, &error))?;
        if response.status != StatusCode::OK {
            return Err(Error::engine(worker.id(), "does not answer with 200"));
        }
        let text = self.whole(worker, response.body).await?;
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
        let ask = Ask::new("GET", authority, path, Bytes::new().into());
        let exchange = async {
            let response = self.send((guarded, authority), ask).await;
            let response = response.map_err(|_| "it cannot be reached")?;
            if response.status != StatusCode::OK {
                return Err("it does not answer with 200");
            }
            let body = Limited::new(response.body, max_bytes).collect().await;
            let body = body.map_err(|_| "its answer is too long, or broke off")?.to_bytes();
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

    /// The largest reply, or event of a stream, that is accepted.
    pub fn reply_max_bytes(&self) -> usize {
        self.reply_max_bytes
    }

    fn ask_of(&self, method: &str, worker: &Worker, path: &str, body: Parcel) -> Ask {
        let mut ask = Ask::new(method, &worker.authority, path, body);
        if let Some(value) = &self.authorization {
            ask.field("authorization", value);
        }
        ask
    }
}

/// All of a body, which is not copied if it comes in one piece; `None` if it is longer.
async fn read_whole(mut body: EngineBody, max_bytes: usize) -> Option<Result<Bytes, Broken>> {
    let (mut first, mut whole) = (Bytes::new(), Vec::new());
    while !body.is_end_stream() {
        let data = match body.frame().await {
            None => break,
            Some(Err(error)) => return Some(Err(error)),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        if first.len() + whole.len() + data.len() > max_bytes {
            return None;
        }
        if first.is_empty() && whole.is_empty() {
            // Most replies are one piece.
            first = data;
            continue;
        }
        if whole.is_empty() {
            let left = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
            whole.reserve_exact(first.len() + data.len() + left.min(RESERVED_MAX_BYTES));
            whole.extend_from_slice(&std::mem::take(&mut first));
        }
        whole.extend_from_slice(&data);
    }
    Some(Ok(if whole.is_empty() { first } else { whole.into() }))
}

fn connector(resolver: Resolver, connect: Duration) -> HttpConnector<Resolver> {
    let mut connector = HttpConnector::new_with_resolver(resolver);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector.set_keepalive(Some(Duration::from_secs(30)));
    connector
}

/// What a request that got no reply means.
fn failure(worker: &Worker, failure: &Failure) -> Error {
    let Failure::Connect(error) = failure else {
        return Error::engine(worker.id(), "closed the connection before it answered");
    };
    let cause = io_cause(error.as_ref());
    // Process and system limits on open files (EMFILE, ENFILE) say nothing of a worker.
    if matches!(cause.and_then(io::Error::raw_os_error), Some(23 | 24)) {
        tracing::error!("no file is left to connect to an engine: raise the limit on open files");
        return Error::new(Kind::Overloaded, "the router has no file left to reach an engine");
    }
    let cause = cause.map_or_else(|| "no connection in time".to_owned(), ToString::to_string);
    worker.set_up(false, format_args!("it cannot be reached: {cause}"));
    Error::new(Kind::EngineUnreachable, format!("worker {} cannot be reached", worker.id()))
}

fn io_cause<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|e| e.downcast_ref())
}

/// What an engine's error status means. Its own message is relayed where the
/// client is at fault, since it tells the client what to change.
async fn refusal(worker: &Worker, response: Response) -> Error {
    let status = response.status.as_u16();
    let body = Limited::new(response.body, ERROR_BODY_MAX_BYTES).collect().await;
    let said = body.ok().and_then(|body| engine_message(&body.to_bytes()));
    // What an engine does not implement is no failure of its own.
    if !(400..500).contains(&status) && status != 501 {
        return Error::engine(worker.id(), &format!("answered with status {status}"));
    }
    rejection(worker, status, said)
}

fn rejection(worker: &Worker, status: u16, said: Option<(String, Option<String>)>) -> Error {
    let message = format!("worker {} refused with status {status}", worker.id());
    let own = Error::new(Kind::EngineRejected(status), message);
    match said {
        // No client can name a rank.
        Some((message, _)) if message.starts_with("data_parallel_rank") => {
            Error::engine(worker.id(), NO_SUCH_RANK)
        }
        // What the router wrote itself is not the client's fault: swapped roles, say.
        Some((_, Some(param))) if is_router_only(&param) => {
            let what = format!("refused the hand-off (status {status}): is its role right?");
            Error::engine(worker.id(), &what)
        }
        Some((message, param)) if own.fault() == Fault::Client => {
            Error::rejected(status, message, param)
        }
        // Which of the two it does not know tells a model from a path.
        Some((message, param)) if status == 404 => match param {
            Some(param) => own.with_param(param),
            None if message.starts_with("The model `") => own.with_param("model"),
            None => own,
        },
        _ => own,
    }
}

/// An error event in place of a stream's first chunk: engines that send their
/// headers early say there what their status would have been.
pub(crate) fn refusal_event(worker: &Worker, event: &[u8]) -> Error {
    let status = serde_json::from_slice::<serde_json::Value>(event)
        .ok()
        .and_then(|event| event.get("error")?.get("code")?.as_u64())
        .and_then(|code| u16::try_from(code).ok())
        .filter(|code| (400..500).contains(code));
    match status {
        Some(status) => rejection(worker, status, engine_message(event)),
        None => Error::engine(worker.id(), "answered with an error event"),
    }
}

/// Message and parameter of OpenAI's error shape, nested or (older engines) flat.
fn engine_message(body: &[u8]) -> Option<(String, Option<String>)> {
    const MESSAGE_MAX_CHARS: usize = 2000;
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let error = value.get("error").unwrap_or(&value);
    let message = error.get("message")?.as_str()?.chars().take(MESSAGE_MAX_CHARS).collect();
    let param = error.get("param").and_then(|param| param.as_str()).map(str::to_owned);
    Some((message, param))
}
