//! One connection's way to the routes: what its requests have in common.

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
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::Service;

use super::pulse::Pulse;
use super::streams::Taken;
use super::{grpc, http as openai};
use crate::api::Endpoint;
use crate::boxed::pinned;
use crate::core::Core;

/// What is behind a listener.
#[derive(Clone)]
pub struct Routes {
    /// Who answers requests for engines, where those are told by method and path alone: they
    /// are spared the layers of a router, each of which costs as much as reading a head.
    pub(super) direct: Option<Direct>,
    /// All other routes.
    pub(super) all: Router,
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
    fn call(&self, peer: SocketAddr, mut request: Request<Incoming>) -> Routed {
        match self.direct.as_ref().and_then(|direct| direct.target(&request)) {
            Some(Target::Http(core, endpoint)) => {
                Routed::Direct(pinned(|| openai::answer(core, endpoint, peer, request)))
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

/// The way to the routes. There is one for each connection.
pub(super) struct Door {
    pub(super) routes: Routes,
    pub(super) pulse: Arc<Pulse>,
    pub(super) peer: SocketAddr,
    /// Fields of a head. Over HTTP/1 the library counts them.
    pub(super) headers_max: usize,
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
        let fits = is_h1 || request.headers().len() <= self.headers_max;
        let routed = match fits {
            true => self.routes.call(self.peer, request),
            false => Routed::Nowhere,
        };
        Answered { routed, active: Some(active), last }
    }
}

/// Where a request went.
enum Routed {
    Direct(Pin<Box<dyn Future<Output = Response<Outgoing>> + Send>>),
    Any(Box<RouteFuture<Infallible>>),
    /// Its head has too many fields.
    Nowhere,
}

impl Routed {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Response<Outgoing>> {
        match self {
            Self::Direct(answer) => answer.as_mut().poll(context),
            Self::Any(answer) => {
                let Ok(response) = ready!(Pin::new(answer).poll(context));
                Poll::Ready(response.map(Outgoing::Any))
            }
            Self::Nowhere => {
                let mut response = Response::new(Outgoing::Whole(Full::default()));
                *response.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                Poll::Ready(response)
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
        Poll::Ready(Ok(response.map(|body| Answering { body, taken, _active: active })))
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

/// The body of an answer.
pub(super) struct Answering {
    body: Outgoing,
    /// Whether the client takes it; known of HTTP/2 streams alone, since an HTTP/1 connection
    /// has but one.
    taken: Option<Arc<Taken>>,
    _active: Option<Active>,
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(context);
        if let Some(taken) = &this.taken {
            taken.set(frame.is_pending());
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
