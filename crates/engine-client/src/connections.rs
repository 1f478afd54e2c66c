//! Connections to engines, kept for later requests.
//!
//! A connection has no task of its own: the task that waits for a reply reads and writes it. That
//! saves each leg four task switches, and dropping the reply closes the connection, which
//! tells the engine to stop.
//!
//! A kept connection serves requests of one class only, to the engine process that it was opened
//! to: bytes that a faulty engine or proxy leaves in it can then be no reply to another class of
//! request.

use std::collections::VecDeque;
use std::error::Error as StdError;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dashmap::DashMap;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{StatusCode, Uri};
use hyper::body::{Body, Frame, SizeHint};
use hyper_util::client::legacy::connect::HttpConnector;
use tower::ServiceExt;

use crate::engine::Engine;
use crate::framing::{Framing, Head, HttpDate, Malformed};
use crate::guarded::Resolver;
use crate::stream::{Stream, peer};
use crate::tls::{TlsSettings, refused};
use crate::wire::{Connection, EngineRequest, NoReplyReason, Peer, ReplyError};
use rustc_hash::FxBuildHasher;

/// vLLM closes idle connections after 5 s. The router closes them earlier, so that a request is
/// rarely written to a connection that the engine is just closing: a hand-off that the engine may
/// have received cannot be sent again.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for which no connection to an engine is kept after it sent unsolicited bytes. Only when
/// connections are kept again can such bytes be taken for the reply to another client's request,
/// so a longer time means fewer such chances.
const QUARANTINE: Duration = Duration::from_secs(60);
/// Maximum number of idle connections to one engine; further ones are closed.
const IDLE_MAX: usize = 1024;

/// The purpose of a connection: a number for each kind of endpoint, with separate numbers for
/// streams.
pub(super) type Class = u8;

/// The address and purpose of a request.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub(super) authority: &'a Authority,
    /// Identifies the engine's process, as far as the router can tell a process from its successor.
    pub(super) process: u64,
    pub(super) class: Class,
    /// The engine for which unsolicited bytes are counted; `None` for requests other than
    /// inference.
    pub(super) engine: Option<&'a dyn Engine>,
    /// Whether the request needs a new connection.
    pub(super) fresh: bool,
}

/// The connections to a model's engines.
pub(super) struct Connections {
    connector: HttpConnector<Resolver>,
    /// How connections are secured, if they are.
    tls: Option<Arc<TlsSettings>>,
    /// Timeout for opening a connection, handshake included.
    timeout: Duration,
    idle: DashMap<Authority, Idle, FxBuildHasher>,
}

/// Idle connections to one engine. In each class, the connection that has been idle for longest is
/// first.
#[derive(Default)]
struct Idle {
    classes: Vec<(Class, VecDeque<IdleConnection>)>,
    count: usize,
    /// No connection is kept until this time, because the engine sent unsolicited bytes.
    none_until: Option<Instant>,
}

struct IdleConnection {
    since: Instant,
    process: u64,
    wire: Box<Connection>,
}

/// Why a request got no reply.
#[derive(Debug)]
pub(super) enum Failure {
    /// No connection could be made.
    Connect(Box<dyn StdError + Send + Sync>),
    /// A kept connection had ended; the engine may have received the request nevertheless.
    Stale,
    /// A new connection ended before the reply began.
    Closed,
    /// A reply arrived before the request was sent completely.
    Early,
    /// The engine's bytes are not valid HTTP.
    Malformed(Malformed),
    /// The request's body was taken back and must not be sent.
    Withdrawn,
}

impl From<NoReplyReason> for Failure {
    fn from(unanswered: NoReplyReason) -> Self {
        match unanswered {
            NoReplyReason::Stale { .. } | NoReplyReason::Unsolicited => Self::Stale,
            NoReplyReason::Closed => Self::Closed,
            NoReplyReason::Early => Self::Early,
            NoReplyReason::Refused(alert) => Self::Connect(io::Error::other(refused(alert)).into()),
            NoReplyReason::Malformed(malformed) => Self::Malformed(malformed),
            NoReplyReason::Withdrawn => Self::Withdrawn,
        }
    }
}

/// An engine's reply whose head has been read.
pub(super) struct BegunReply {
    pub(super) status: StatusCode,
    pub(super) peer: Option<Peer>,
    /// The field `date`, if it has the usual form.
    pub(super) date: Option<HttpDate>,
    /// The field `retry-after`, if it is a number of seconds.
    pub(super) retry_after_s: Option<u32>,
    pub(super) body: EngineBody,
}

impl Connections {
    /// Creates a pool without connections. With `tls`, all of them are secured; opening one takes at
    /// most `timeout`.
    pub(super) fn new(
        connector: HttpConnector<Resolver>,
        tls: Option<Arc<TlsSettings>>,
        timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self { connector, tls, timeout, idle: DashMap::default() })
    }

    /// Sends a request, on an idle connection if there is one. If that connection had ended, the
    /// request is sent once more on a new connection, provided that an engine may receive it twice
    /// and `again` agrees (`again` may change the request). Redirects are not followed.
    ///
    /// # Errors
    /// No reply began.
    pub(super) async fn request(
        self: &Arc<Self>,
        to: Destination<'_>,
        request: &mut EngineRequest,
        again: impl FnOnce(&mut EngineRequest) -> bool,
    ) -> Result<BegunReply, Failure> {
        while let Some(mut wire) = self.check_out(to) {
            match wire.exchange(request).await {
                Ok(head) => return Ok(self.begun(to, wire, head)),
                Err(NoReplyReason::Stale { sent: false }) => {}
                Err(NoReplyReason::Unsolicited) => {
                    to.engine.inspect(|engine| engine.count_unsolicited());
                    self.keep_none(to.authority);
                }
                Err(NoReplyReason::Stale { sent: true }) => {
                    // The other idle connections are at least as old.
                    if let Some(mut idle) = self.idle.get_mut(to.authority) {
                        idle.clear();
                    }
                    if !request.is_repeatable() || !again(request) {
                        return Err(Failure::Stale);
                    }
                    break;
                }
                Err(unanswered) => return Err(unanswered.into()),
            }
        }
        let mut wire = self.connect(to.authority).await?;
        let head = wire.exchange(request).await?;
        Ok(self.begun(to, wire, head))
    }

    fn begun(
        self: &Arc<Self>,
        to: Destination<'_>,
        wire: Box<Connection>,
        head: Head,
    ) -> BegunReply {
        let Head { status, framing, keeps, date, retry_after_s } = head;
        let peer = wire.peer;
        let return_to = keeps.then(|| ReturnTo {
            connections: Arc::clone(self),
            authority: to.authority.clone(),
            process: to.process,
            class: to.class,
        });
        let body = EngineBody { framing, wire: Some(wire), return_to, is_proven: false };
        BegunReply { status, peer, date, retry_after_s, body }
    }

    fn check_out(&self, to: Destination<'_>) -> Option<Box<Connection>> {
        if to.fresh {
            return None;
        }
        let now = Instant::now();
        let mut idle = self.idle.get_mut(to.authority)?;
        idle.forget_old(now);
        idle.take(to)
    }

    fn check_in(&self, back: ReturnTo, wire: Box<Connection>) {
        let since = Instant::now();
        let mut idle = self.idle.entry(back.authority).or_default();
        idle.forget_old(since);
        idle.put(back.class, IdleConnection { since, process: back.process, wire });
    }

    /// Closes the idle connections to an engine that sent unsolicited bytes, and keeps none for a
    /// while: such bytes may arrive after the next request was written, where they look like its
    /// reply.
    fn keep_none(&self, authority: &Authority) {
        let now = Instant::now();
        let mut idle = self.idle.entry(authority.clone()).or_default();
        idle.forget_old(now);
        idle.clear();
        if idle.none_until.replace(now + QUARANTINE).is_none() {
            tracing::warn!(%authority, "the engine, or a proxy before it, sent bytes after its reply had ended: for a minute its connections serve one request each");
        }
    }

    async fn connect(&self, authority: &Authority) -> Result<Box<Connection>, Failure> {
        // Also drops the entries of engines that are gone.
        let now = Instant::now();
        self.idle.retain(|_, idle| {
            idle.forget_old(now);
            idle.count > 0 || idle.none_until.is_some()
        });
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority.clone());
        let uri = uri.path_and_query(PathAndQuery::from_static("/")).build();
        let uri = uri.map_err(|error| Failure::Connect(error.into()))?;
        let began = Instant::now();
        let stream = self.connector.clone().oneshot(uri).await;
        let stream = stream.map_err(|error| Failure::Connect(error.into()))?;
        let socket = stream.into_inner();
        let peer = peer(&socket);
        let stream = match &self.tls {
            None => Stream::from(socket),
            Some(tls) => {
                let left = self.timeout.saturating_sub(began.elapsed());
                let secured = tls.connect(authority.host(), socket, left).await;
                secured.map_err(|error| Failure::Connect(error.into()))?
            }
        };
        Ok(Box::new(Connection::new(stream, peer)))
    }
}

impl Idle {
    fn forget_old(&mut self, now: Instant) {
        self.none_until = self.none_until.filter(|until| now < *until);
        for (_, kept) in &mut self.classes {
            while kept.front().is_some_and(|kept| now.duration_since(kept.since) > IDLE_TIMEOUT) {
                kept.pop_front();
                self.count -= 1;
            }
        }
    }

    fn clear(&mut self) {
        self.classes.clear();
        self.count = 0;
    }

    /// Takes the connection that was used last.
    fn take(&mut self, to: Destination<'_>) -> Option<Box<Connection>> {
        let (_, kept) = self.classes.iter_mut().find(|(class, _)| *class == to.class)?;
        while let Some(last) = kept.pop_back() {
            self.count -= 1;
            if last.process == to.process {
                return Some(last.wire);
            }
        }
        None
    }

    fn put(&mut self, class: Class, kept: IdleConnection) {
        if self.count == IDLE_MAX || self.none_until.is_some() {
            return;
        }
        self.count += 1;
        match self.classes.iter_mut().find(|(known, _)| *known == class) {
            Some((_, all)) => all.push_back(kept),
            None => self.classes.push((class, VecDeque::from([kept]))),
        }
    }
}

/// Returns a connection to the pool when its reply has ended.
struct ReturnTo {
    connections: Arc<Connections>,
    authority: Authority,
    process: u64,
    class: Class,
}

/// The body of an engine's reply. When it is proven and read to its end, its connection serves
/// another request; when it is dropped earlier, the connection is closed.
pub struct EngineBody {
    framing: Framing,
    wire: Option<Box<Connection>>,
    /// Returns the connection to the pool, if it may be used again.
    return_to: Option<ReturnTo>,
    /// Whether the reply is known to belong to the request, if its engine allows to know this.
    is_proven: bool,
}

impl EngineBody {
    /// Marks the reply as belonging to the request: its connection may serve another request when
    /// the body has ended.
    pub fn prove(&mut self) {
        self.is_proven = true;
        self.has_moved();
    }

    /// Returns the connection to the pool if the reply is proven and nothing more will arrive for
    /// it.
    fn has_moved(&mut self) {
        if self.is_proven
            && self.framing.has_ended()
            && let Some(wire) = self.wire.take()
            && let Some(return_to) = self.return_to.take()
        {
            let connections = Arc::clone(&return_to.connections);
            connections.check_in(return_to, wire);
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = ReplyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ReplyError>>> {
        let this = &mut *self;
        let Some(wire) = this.wire.as_mut().filter(|_| !this.framing.has_ended()) else {
            return Poll::Ready(None);
        };
        let piece = wire.poll_piece(&mut this.framing, context);
        match &piece {
            Poll::Pending => {}
            Poll::Ready(Some(Ok(_))) => this.has_moved(),
            Poll::Ready(None) => this.has_moved(),
            Poll::Ready(Some(Err(_))) => this.wire = None,
        }
        piece.map(|piece| piece.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.wire.is_none() || self.framing.has_ended()
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            Framing::Chunked(_) | Framing::UntilClose => SizeHint::default(),
        }
    }
}
