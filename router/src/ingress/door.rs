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
use axum::response::Response;
use axum::routing::future::RouteFuture;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, Method, Request, StatusCode, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tower::Service;

use super::pulse::Pulse;
use super::streams::Taken;

/// The way to the routes. There is one for each connection.
pub(super) struct Door {
    pub(super) routes: Router,
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
    type Response = http::Response<Answering>;
    type Error = Infallible;
    type Future = Answered;

    fn call(&self, mut request: Request<Incoming>) -> Answered {
        let active = Active::new(&self.pulse);
        let is_h1 = request.version() < Version::HTTP_2;
        // The protocol is never changed, so what follows could be read in two ways.
        let last = is_h1
            && (request.headers().contains_key(UPGRADE) || request.method() == Method::CONNECT);
        let fits = is_h1 || request.headers().len() <= self.headers_max;
        let routed = fits.then(|| {
            request.extensions_mut().insert(ConnectInfo(self.peer));
            self.routes.clone().call(request)
        });
        Answered { routed, active: Some(active), last }
    }
}

/// An answer to come.
pub(super) struct Answered {
    /// What the routes say, unless the head has too many fields.
    routed: Option<RouteFuture<Infallible>>,
    active: Option<Active>,
    /// Whether the connection ends with it.
    last: bool,
}

impl Future for Answered {
    type Output = Result<http::Response<Answering>, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut response = match &mut this.routed {
            Some(routed) => ready!(Pin::new(routed).poll(context))?,
            None => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                response
            }
        };
        if this.last {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        let active = this.active.take();
        let taken = Taken::of_this_stream();
        Poll::Ready(Ok(response.map(|body| Answering { body, taken, _active: active })))
    }
}

/// The body of an answer.
pub(super) struct Answering {
    body: Body,
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
