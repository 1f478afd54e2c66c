//! Connections to engines, kept for the next request.
//!
//! A connection has no task of its own: whoever waits for an answer moves it along. That
//! spares each leg four changes of tasks, and dropping the answer closes the connection,
//! which is how an engine learns that nobody wants it any more.

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

use super::framing::{Framing, Head};
use super::guarded::Resolver;
use super::wire::{Ask, Broken, Peer, Wire};
use crate::quick_hash::QuickHash;

/// vLLM closes idle connections after 5 s. Ours end earlier, so that a request is
/// never written to a connection that is just being closed: a hand-off that may
/// have been received cannot be sent again.
const IDLE: Duration = Duration::from_secs(3);
/// Idle connections to one engine; more are closed.
const IDLE_MAX: usize = 1024;

/// The connections to a model's engines.
pub(super) struct Connections {
    connector: HttpConnector<Resolver>,
    idle: DashMap<Authority, Idle, QuickHash>,
}

/// Idle connections to one engine, each with since when: the longest idle first.
type Idle = VecDeque<(Instant, Box<Wire>)>;

/// Why a request got no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no connection.
    Connect(Box<dyn StdError + Send + Sync>),
    /// There was one, and it broke.
    Broken,
}

impl From<Broken> for Failure {
    fn from(Broken: Broken) -> Self {
        Self::Broken
    }
}

/// An engine's answer, which has begun.
pub struct Response {
    /// What it begins with.
    pub status: StatusCode,
    /// Who answers, where that is known.
    pub(crate) peer: Option<Peer>,
    /// The rest.
    pub body: EngineBody,
}

impl Connections {
    /// None yet.
    pub(super) fn new(connector: HttpConnector<Resolver>) -> Arc<Self> {
        Arc::new(Self { connector, idle: DashMap::default() })
    }

    /// Sends a request, on an idle connection if there is one.
    ///
    /// # Errors
    /// If no answer begins.
    pub(super) async fn request(
        self: &Arc<Self>,
        authority: &Authority,
        ask: Ask,
    ) -> Result<Response, Failure> {
        let mut wire = match self.check_out(authority) {
            Some(wire) => wire,
            None => self.connect(authority).await?,
        };
        let Head { status, framing, keeps } = wire.exchange(ask).await?;
        let peer = wire.peer;
        let way_back = keeps.then(|| (Arc::clone(self), authority.clone()));
        let mut body = EngineBody { framing, wire: Some(wire), way_back };
        body.has_moved();
        Ok(Response { status, peer, body })
    }

    fn check_out(&self, authority: &Authority) -> Option<Box<Wire>> {
        let now = Instant::now();
        let mut idle = self.idle.get_mut(authority)?;
        forget_old(&mut idle, now);
        // An engine that has hung up is found out here.
        std::iter::from_fn(|| idle.pop_back()).map(|(_, wire)| wire).find(|wire| wire.is_quiet())
    }

    fn check_in(&self, authority: Authority, wire: Box<Wire>) {
        let now = Instant::now();
        let mut idle = self.idle.entry(authority).or_default();
        forget_old(&mut idle, now);
        if idle.len() < IDLE_MAX {
            idle.push_back((now, wire));
        }
    }

    async fn connect(&self, authority: &Authority) -> Result<Box<Wire>, Failure> {
        // Connections to engines that are gone go as well.
        let now = Instant::now();
        self.idle.retain(|_, idle| {
            forget_old(idle, now);
            !idle.is_empty()
        });
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority.clone());
        let uri = uri.path_and_query(PathAndQuery::from_static("/")).build();
        let uri = uri.map_err(|error| Failure::Connect(error.into()))?;
        let stream = self.connector.clone().oneshot(uri).await;
        let stream = stream.map_err(|error| Failure::Connect(error.into()))?;
        Ok(Box::new(Wire::new(stream.into_inner())))
    }
}

fn forget_old(idle: &mut Idle, now: Instant) {
    while idle.front().is_some_and(|(since, _)| now.duration_since(*since) > IDLE) {
        idle.pop_front();
    }
}

/// The body of an engine's answer. Read to its end, its connection serves another request;
/// dropped before, the connection is closed.
pub struct EngineBody {
    framing: Framing,
    wire: Option<Box<Wire>>,
    /// Where the connection goes, if it may be used again.
    way_back: Option<(Arc<Connections>, Authority)>,
}

impl EngineBody {
    /// Gives the connection back once nothing more is to come over it.
    fn has_moved(&mut self) {
        if self.framing.has_ended()
            && let Some(wire) = self.wire.take()
            && let Some((connections, authority)) = self.way_back.take()
            && wire.is_drained()
        {
            connections.check_in(authority, wire);
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
        let Some(wire) = &mut this.wire else { return Poll::Ready(None) };
        let piece = wire.poll_piece(&mut this.framing, context);
        match &piece {
            Poll::Pending => {}
            Poll::Ready(Some(Ok(_))) => this.has_moved(),
            Poll::Ready(Some(Err(Broken)) | None) => {
                this.has_moved();
                this.wire = None;
            }
        }
        piece.map(|piece| piece.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.wire.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            Framing::Chunked(_) | Framing::UntilClose => SizeHint::default(),
        }
    }
}
