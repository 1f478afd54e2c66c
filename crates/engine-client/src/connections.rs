//! Connections to engines, kept for later requests.
//!
//! A connection has no task of its own: the task that waits for an answer reads and writes it. That
//! saves each leg four task switches, and dropping the answer closes the connection, which
//! tells the engine to stop.
//!
//! A kept connection serves requests of one class only, to the engine process that it was opened
//! to: bytes that a faulty engine or proxy leaves in it can then be no answer to another class of request.

use std::collections::VecDeque;
use std::error::Error as StdError;
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
use crate::framing::{Framing, Head, Malformed};
use crate::guarded::Resolver;
use crate::wire::{Ask, Broken, Peer, Unanswered, Wire};
use rustc_hash::FxBuildHasher;

/// vLLM closes idle connections after 5 s. The router's end earlier, so that a request is
/// rarely written to a connection that is just being closed: a hand-off that may
/// have been received cannot be sent again.
const IDLE: Duration = Duration::from_secs(3);
/// Time for which no connection to an engine is kept that sent unsolicited bytes. Each such time begins
/// with connections that are kept, and may give one client another's answer: the longer, the fewer.
const UNSOLICITED: Duration = Duration::from_secs(60);
/// Idle connections to one engine; more are closed.
const IDLE_MAX: usize = 1024;

/// What a connection is used for: a number of an endpoint's, apart for streams.
pub(super) type Class = u8;

/// Where a request goes, and what for.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub(super) authority: &'a Authority,
    /// The engine's process, as far as the router can tell one from the next.
    pub(super) process: u64,
    pub(super) class: Class,
    /// The engine, of which unsolicited bytes are counted; none for requests that are not inference.
    pub(super) engine: Option<&'a dyn Engine>,
    /// Whether a new connection is made for it.
    pub(super) fresh: bool,
}

/// The connections to a model's engines.
pub(super) struct Connections {
    connector: HttpConnector<Resolver>,
    idle: DashMap<Authority, Idle, FxBuildHasher>,
}

/// Idle connections to one engine, for each class the longest idle first.
#[derive(Default)]
struct Idle {
    classes: Vec<(Class, VecDeque<Kept>)>,
    count: usize,
    /// Until then no connection is kept, since the engine sent unsolicited bytes.
    none_until: Option<Instant>,
}

struct Kept {
    since: Instant,
    process: u64,
    wire: Box<Wire>,
}

/// Why a request got no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no connection.
    Connect(Box<dyn StdError + Send + Sync>),
    /// A kept connection had ended, and the request may have been received all the same.
    Stale,
    /// A new connection ended before the answer.
    Closed,
    /// An answer came before the request was sent.
    Early,
    /// What came is not HTTP.
    Malformed(Malformed),
    /// The request's body must not be sent.
    Withdrawn,
}

impl From<Unanswered> for Failure {
    fn from(unanswered: Unanswered) -> Self {
        match unanswered {
            Unanswered::Stale { .. } | Unanswered::Unsolicited => Self::Stale,
            Unanswered::Closed => Self::Closed,
            Unanswered::Early => Self::Early,
            Unanswered::Malformed(malformed) => Self::Malformed(malformed),
            Unanswered::Withdrawn => Self::Withdrawn,
        }
    }
}

/// An engine's answer, which has begun.
pub(super) struct Begun {
    pub(super) status: StatusCode,
    pub(super) peer: Option<Peer>,
    pub(super) body: EngineBody,
}

impl Connections {
    /// None yet.
    pub(super) fn new(connector: HttpConnector<Resolver>) -> Arc<Self> {
        Arc::new(Self { connector, idle: DashMap::default() })
    }

    /// Sends a request, on an idle connection if there is one. Where that had ended, the request
    /// is sent on a new one, if `again` agrees, which may change it: once, and only one that an
    /// engine may receive twice. Redirects are not followed.
    ///
    /// # Errors
    /// If no answer begins.
    pub(super) async fn request(
        self: &Arc<Self>,
        to: Destination<'_>,
        ask: &mut Ask,
        again: impl FnOnce(&mut Ask) -> bool,
    ) -> Result<Begun, Failure> {
        while let Some(mut wire) = self.check_out(to) {
            match wire.exchange(ask).await {
                Ok(head) => return Ok(self.begun(to, wire, head)),
                Err(Unanswered::Stale { sent: false }) => {}
                Err(Unanswered::Unsolicited) => {
                    to.engine.inspect(|engine| engine.count_unsolicited());
                    self.keep_none(to.authority);
                }
                Err(Unanswered::Stale { sent: true }) => {
                    // The others are as old.
                    if let Some(mut idle) = self.idle.get_mut(to.authority) {
                        idle.clear();
                    }
                    if !ask.is_repeatable() || !again(ask) {
                        return Err(Failure::Stale);
                    }
                    break;
                }
                Err(unanswered) => return Err(unanswered.into()),
            }
        }
        let mut wire = self.connect(to.authority).await?;
        let head = wire.exchange(ask).await?;
        Ok(self.begun(to, wire, head))
    }

    fn begun(self: &Arc<Self>, to: Destination<'_>, wire: Box<Wire>, head: Head) -> Begun {
        let Head { status, framing, keeps } = head;
        let peer = wire.peer;
        let way_back = keeps.then(|| WayBack {
            connections: Arc::clone(self),
            authority: to.authority.clone(),
            process: to.process,
            class: to.class,
        });
        let body = EngineBody { framing, wire: Some(wire), way_back, is_proven: false };
        Begun { status, peer, body }
    }

    fn check_out(&self, to: Destination<'_>) -> Option<Box<Wire>> {
        if to.fresh {
            return None;
        }
        let now = Instant::now();
        let mut idle = self.idle.get_mut(to.authority)?;
        idle.forget_old(now);
        idle.take(to)
    }

    fn check_in(&self, back: WayBack, wire: Box<Wire>) {
        let since = Instant::now();
        let mut idle = self.idle.entry(back.authority).or_default();
        idle.forget_old(since);
        idle.put(back.class, Kept { since, process: back.process, wire });
    }

    /// Closes the idle connections to an engine that sent unsolicited bytes, and keeps none for a while:
    /// such bytes may arrive after the next request was written, where they look like its answer.
    fn keep_none(&self, authority: &Authority) {
        let now = Instant::now();
        let mut idle = self.idle.entry(authority.clone()).or_default();
        idle.forget_old(now);
        idle.clear();
        if idle.none_until.replace(now + UNSOLICITED).is_none() {
            tracing::warn!(%authority, "the engine, or a proxy before it, sent bytes after its answer had ended: for a minute its connections serve one request each");
        }
    }

    async fn connect(&self, authority: &Authority) -> Result<Box<Wire>, Failure> {
        // Connections to engines that are gone go as well.
        let now = Instant::now();
        self.idle.retain(|_, idle| {
            idle.forget_old(now);
            idle.count > 0 || idle.none_until.is_some()
        });
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority.clone());
        let uri = uri.path_and_query(PathAndQuery::from_static("/")).build();
        let uri = uri.map_err(|error| Failure::Connect(error.into()))?;
        let stream = self.connector.clone().oneshot(uri).await;
        let stream = stream.map_err(|error| Failure::Connect(error.into()))?;
        Ok(Box::new(Wire::new(stream.into_inner())))
    }
}

impl Idle {
    fn forget_old(&mut self, now: Instant) {
        self.none_until = self.none_until.filter(|until| now < *until);
        for (_, kept) in &mut self.classes {
            while kept.front().is_some_and(|kept| now.duration_since(kept.since) > IDLE) {
                kept.pop_front();
                self.count -= 1;
            }
        }
    }

    fn clear(&mut self) {
        self.classes.clear();
        self.count = 0;
    }

    /// The connection that was used last.
    fn take(&mut self, to: Destination<'_>) -> Option<Box<Wire>> {
        let (_, kept) = self.classes.iter_mut().find(|(class, _)| *class == to.class)?;
        while let Some(last) = kept.pop_back() {
            self.count -= 1;
            if last.process == to.process {
                return Some(last.wire);
            }
        }
        None
    }

    fn put(&mut self, class: Class, kept: Kept) {
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

/// Where a connection goes once its answer has ended.
struct WayBack {
    connections: Arc<Connections>,
    authority: Authority,
    process: u64,
    class: Class,
}

/// The body of an engine's answer. Proven and read to its end, its connection serves another
/// request; dropped before, the connection is closed.
pub struct EngineBody {
    framing: Framing,
    wire: Option<Box<Wire>>,
    /// Where the connection goes, if it may be used again.
    way_back: Option<WayBack>,
    /// Whether it is for the request that was sent, as far as that can be told.
    is_proven: bool,
}

impl EngineBody {
    /// It is for the request that was sent, as far as that can be told: its connection may serve
    /// another one once it has ended.
    pub fn prove(&mut self) {
        self.is_proven = true;
        self.has_moved();
    }

    /// Gives the connection back once nothing more is to come over it.
    fn has_moved(&mut self) {
        if self.is_proven
            && self.framing.has_ended()
            && let Some(wire) = self.wire.take()
            && let Some(way_back) = self.way_back.take()
        {
            let connections = Arc::clone(&way_back.connections);
            connections.check_in(way_back, wire);
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
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
