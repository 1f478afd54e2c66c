//! What all requests of one connection share, between the connection and the routes.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::ConnectInfo;
use axum::routing::future::RouteFuture;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, Method, Request, Response, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::Service;

use super::head::Heads;
use super::pulse::Pulse;
use super::streams::Taken;
use super::{grpc, http as openai};
use crate::core::Core;
use splitrail_api::Endpoint;
use splitrail_api::unread::UnreadRoom;
use splitrail_flow::boxed::pinned;

/// What is behind a listener.
#[derive(Clone)]
pub struct Routes {
    /// Who answers requests for engines, where those are told by method and path alone: they
    /// are spared the layers of a router, each of which costs as much as reading a head.
    pub(super) direct: Option<Direct>,
    /// All other routes.
    pub(super) all: Router,
    /// Names by which the listener may be called; empty, any.
    pub(super) hosts: Arc<[String]>,
}

impl From<Router> for Routes {
    fn from(all: Router) -> Self {
        Self { direct: None, all, hosts: Arc::default() }
    }
}

/// Whose requests are told by method and path alone.
#[derive(Clone)]
pub(super) enum Direct {
    /// The OpenAI door's, for engines.
    Http(Arc<Core>),
    /// The gRPC door's, for its own service.
    Grpc(Arc<Core>),
}

impl Direct {
    /// What a request is for, if it is for these.
    fn target(&self, request: &Request<Incoming>) -> Option<Target> {
        match self {
            Self::Http(core) if request.method() == Method::POST => {
                let endpoint = Endpoint::at(request.uri().path())?;
                Some(Target::Http(Arc::clone(core), endpoint))
            }
            Self::Http(_) => None,
            Self::Grpc(core) => Some(Target::Grpc(Arc::clone(core), grpc::Method::of(request)?)),
        }
    }
}

enum Target {
    Http(Arc<Core>, Endpoint),
    Grpc(Arc<Core>, grpc::Method),
}

impl Routes {
    fn call(&self, caller: Caller, mut request: Request<Incoming>) -> Routed {
        let peer = caller.peer;
        match self.direct.as_ref().and_then(|direct| direct.target(&request)) {
            Some(Target::Http(core, endpoint)) => {
                Routed::Direct(pinned(|| openai::answer(core, endpoint, caller, request)))
            }
            Some(Target::Grpc(core, method)) => {
                Routed::Direct(pinned(|| grpc::answer(core, method, peer, request)))
            }
            None => {
                request.extensions_mut().insert(ConnectInfo(peer));
                Routed::Any(Box::new(self.all.clone().call(request)))
            }
        }
    }
}

/// Who sends a request.
pub(super) struct Caller {
    pub(super) peer: SocketAddr,
    /// Where its answer finds room, if others of its connection may wait there.
    pub(super) room: Option<Arc<UnreadRoom>>,
}

/// The way to the routes. There is one for each connection.
pub(super) struct Door {
    pub(super) routes: Routes,
    pub(super) pulse: Arc<Pulse>,
    pub(super) peer: SocketAddr,
    /// Fields of a head. Over HTTP/1 the library counts them.
    pub(super) headers_max: usize,
    /// Room for its answers, where it may have several at a time.
    pub(super) room: Option<Arc<UnreadRoom>>,
}

/// A request that is being answered: the connection is not idle meanwhile.
struct Active(Arc<Pulse>);

impl Active {
    fn new(pulse: &Arc<Pulse>) -> Self {
        pulse.request_begins();
        Self(Arc::clone(pulse))
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.request_ends();
    }
}

impl hyper::service::Service<Request<Incoming>> for Door {
    type Response = Response<Answering>;
    type Error = Infallible;
    type Future = Answered;

    fn call(&self, request: Request<Incoming>) -> Answered {
        let active = Active::new(&self.pulse);
        let is_h1 = request.version() < Version::HTTP_2;
        // The protocol is never changed, so what follows could be read in two ways.
        let last = is_h1
            && (request.headers().contains_key(UPGRADE) || request.method() == Method::CONNECT);
        let heads = Heads { headers_max: self.headers_max, hosts: &self.routes.hosts };
        let routed = match heads.refusal(&request) {
            None => {
                let caller = Caller { peer: self.peer, room: self.room.clone() };
                self.routes.call(caller, request)
            }
            Some(refusal) => Routed::Refused(Some(Box::new(refusal))),
        };
        Answered { routed, active: Some(active), last }
    }
}

/// Where a request went.
enum Routed {
    Direct(Pin<Box<dyn Future<Output = Response<Outgoing>> + Send>>),
    Any(Box<RouteFuture<Infallible>>),
    /// Nowhere: its head does not pass.
    Refused(Option<Box<Response<Body>>>),
}

impl Routed {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Response<Outgoing>> {
        match self {
            Self::Direct(answer) => answer.as_mut().poll(context),
            Self::Any(answer) => {
                let Ok(response) = ready!(Pin::new(answer).poll(context));
                Poll::Ready(response.map(Outgoing::Any))
            }
            Self::Refused(refusal) => {
                let refusal = refusal.take().map_or_else(Response::default, |refusal| *refusal);
                Poll::Ready(refusal.map(Outgoing::Any))
            }
        }
    }
}

/// An answer to come.
pub(super) struct Answered {
    routed: Routed,
    active: Option<Active>,
    /// Whether the connection ends with it.
    last: bool,
}

impl Future for Answered {
    type Output = Result<Response<Answering>, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut response = ready!(this.routed.poll(context));
        if this.last {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let active = this.active.take();
        let taken = Taken::of_this_stream();
        Poll::Ready(Ok(response.map(|body| Answering::new(body, taken, active))))
    }
}

/// What an answer says.
pub(super) enum Outgoing {
    /// All of it is there.
    Whole(Full<Bytes>),
    /// It comes as it may.
    Any(Body),
}

impl HttpBody for Outgoing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
            Self::Any(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Any(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Any(body) => body.size_hint(),
        }
    }
}

/// The body of an answer, in pieces.
///
/// The library takes whatever a body gives, however little of it the client has asked for. So
/// what was given is not watched, and not bounded; what is kept here is.
pub(super) struct Answering {
    body: Outgoing,
    /// What is not given yet of what the body gave.
    rest: Bytes,
    /// What the client takes; known of HTTP/2 streams alone, since an HTTP/1 connection has but
    /// one.
    taken: Option<Arc<Taken>>,
    _active: Option<Active>,
}

/// Bytes that the library gets at once for an HTTP/1 connection: it writes that much in one go.
const HTTP1_PIECE_BYTES: usize = 64 << 10;

/// The same for an HTTP/2 stream: a frame's length.
const HTTP2_PIECE_BYTES: usize = 16 << 10;

/// Bytes of a piece that an HTTP/2 stream may have more than its window takes, without being
/// watched.
const HTTP2_UNWATCHED_BYTES: usize = 1 << 10;

impl Answering {
    fn new(body: Outgoing, taken: Option<Arc<Taken>>, active: Option<Active>) -> Self {
        Self { body, rest: Bytes::new(), taken, _active: active }
    }

    /// The next piece of what the body gave.
    ///
    /// The library gives a piece to an HTTP/2 stream as soon as its window takes one byte, and
    /// ends the stream's task with the last one. So of a piece that ends long, the last byte goes
    /// by itself: the window has taken all before it by then.
    fn piece(&mut self) -> Bytes {
        let bytes = self.rest.len();
        match self.taken {
            None if bytes <= HTTP1_PIECE_BYTES => std::mem::take(&mut self.rest),
            None => self.rest.split_to(HTTP1_PIECE_BYTES),
            Some(_) if bytes <= HTTP2_UNWATCHED_BYTES => std::mem::take(&mut self.rest),
            Some(_) => self.rest.split_to(HTTP2_PIECE_BYTES.min(bytes - 1)),
        }
    }
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if this.rest.is_empty() {
            match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(trailers) => {
                        this.taken.iter().for_each(|taken| taken.gave(0));
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                Poll::Pending => {
                    this.taken.iter().for_each(|taken| taken.waits_for_body());
                    return Poll::Pending;
                }
                end => {
                    this.taken.iter().for_each(|taken| taken.gave(0));
                    return end;
                }
            }
        }
        let piece = this.piece();
        this.taken.iter().for_each(|taken| taken.gave(piece.len()));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}
