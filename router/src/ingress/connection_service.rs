//! The service of one connection, between the HTTP library and the routes.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

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

use super::cross_origin::{AllowedOrigins, OriginGrant};
use super::head::{HeadLimits, early_reply_ends_connection};
use super::reply::{error_dialect, error_in};
use super::streams::BodyProgress;
use super::{grpc, http as openai};
use crate::core::Core;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::unread::UnreadRoom;
use splitrail_client_connection::certificate::ClientCertificate;
use splitrail_client_connection::connection_activity::ConnectionActivity;
use splitrail_flow::run::boxed::boxed_future;
use splitrail_request_log::identity::Identity;

/// The routes of a listener.
#[derive(Clone)]
pub struct Routes {
    /// Answers inference requests, which are recognised by method and path alone: they skip the
    /// layers of an axum router, each of which costs as much as reading a head.
    pub(super) direct: Option<DirectService>,
    /// All other routes.
    pub(super) all: Router,
    /// Host names that requests may use; any if empty.
    pub(super) hosts: Arc<[String]>,
    /// The sites whose pages may use the listener.
    pub(super) origins: AllowedOrigins,
}

impl From<Router> for Routes {
    fn from(all: Router) -> Self {
        Self { direct: None, all, hosts: Arc::default(), origins: AllowedOrigins::default() }
    }
}

/// The requests that are recognised by method and path alone.
#[derive(Clone)]
pub(super) enum DirectService {
    /// Those of the OpenAI API for engines.
    Http(Arc<Core>),
    /// Those of the gRPC API's own service.
    Grpc(Arc<Core>),
}

impl DirectService {
    /// The target of a request, if it is one of these.
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
    /// Whether the listener serves the requests of clients, and not those of operators.
    pub(super) fn are_of_clients(&self) -> bool {
        self.direct.is_some()
    }

    /// Whether the listener serves calls of gRPC.
    pub(super) fn are_of_grpc(&self) -> bool {
        matches!(self.direct, Some(DirectService::Grpc(_)))
    }

    /// Puts the id of a client's request that is refused because of its head into the refusal, and
    /// writes the request to the access log.
    fn note_refusal(
        &self,
        request: &Request<Incoming>,
        peer: SocketAddr,
        refusal: &mut Response<Body>,
    ) {
        let Some(DirectService::Http(core)) = &self.direct else { return };
        let identity = Identity::of_http(request.headers(), peer.ip());
        openai::put_id(&identity, error_dialect(request.uri()), refusal.headers_mut());
        let endpoint = Endpoint::at(request.uri().path()).map_or("none", Endpoint::name);
        core.logs.access_log.answered(
            &core.serving().config.access_log,
            &identity,
            endpoint,
            refusal,
        );
    }

    /// Whether a request is work for an engine.
    fn is_work(&self, request: &Request<Incoming>) -> bool {
        let target = self.direct.as_ref().and_then(|direct| direct.target(request));
        matches!(target, Some(Target::Http(..) | Target::Grpc(_, grpc::Method::Generate)))
    }

    fn call(&self, caller: Caller, mut request: Request<Incoming>) -> RequestHandler {
        let peer = caller.peer;
        match self.direct.as_ref().and_then(|direct| direct.target(&request)) {
            Some(Target::Http(core, endpoint)) => RequestHandler::Direct(boxed_future(|| {
                openai::answer(core, endpoint, caller, request)
            })),
            Some(Target::Grpc(core, method)) => {
                RequestHandler::Direct(boxed_future(|| grpc::answer(core, method, caller, request)))
            }
            None => {
                let extensions = request.extensions_mut();
                extensions.insert(ConnectInfo(peer));
                caller.certificate.map(|certificate| extensions.insert(certificate));
                RequestHandler::Any(Box::new(self.all.clone().call(request)))
            }
        }
    }
}

/// The sender of a request.
pub(super) struct Caller {
    pub(super) peer: SocketAddr,
    /// The names in the certificate that the client has presented in the TLS handshake, if any. The
    /// handlers of an axum router find the same value among the request's extensions.
    pub(super) certificate: Option<Arc<ClientCertificate>>,
    /// The limit on replies that wait for this connection's client, if the connection can have
    /// several.
    pub(super) room: Option<Arc<UnreadRoom>>,
}

/// The service that the HTTP library calls. There is one for each connection.
pub(super) struct ConnectionService {
    pub(super) routes: Routes,
    pub(super) activity: Arc<ConnectionActivity>,
    pub(super) peer: SocketAddr,
    /// The names in the client's certificate, if the client has presented one.
    pub(super) certificate: Option<Arc<ClientCertificate>>,
    /// Maximum number of fields of a head. For HTTP/1 the library checks it.
    pub(super) headers_max: usize,
    /// Maximum size of a head over HTTP/2 in bytes.
    pub(super) header_max_bytes: usize,
    /// The limit on replies that wait for the client, if the connection can have several replies.
    pub(super) room: Option<Arc<UnreadRoom>>,
}

impl ConnectionService {
    /// The reply to a request over a connection whose client has a certificate that has expired: no
    /// new connection would be accepted with it.
    fn expired(&self, request: &Request<Incoming>) -> Option<Response<Body>> {
        let certificate = self.certificate.as_ref()?;
        if certificate.remaining(SystemTime::now()).is_some() {
            return None;
        }
        let message = "the client certificate has expired: open a connection with a new one";
        let error = Error::new(ErrorKind::Unauthenticated, message);
        Some(error_in(error_dialect(request.uri()), error))
    }
}

/// Marks a request as being answered: meanwhile the connection is not idle.
struct ActiveRequest {
    activity: Arc<ConnectionActivity>,
    /// Whether the request is work for an engine that counts only while it is being answered: it has
    /// not been answered to its end.
    is_open_work: bool,
}

impl ActiveRequest {
    fn new(activity: &Arc<ConnectionActivity>, is_work: bool) -> Self {
        activity.request_begins();
        if is_work {
            activity.work_begins();
        }
        Self { activity: Arc::clone(activity), is_open_work: is_work }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.activity.request_ends();
        if self.is_open_work {
            self.activity.work_is_lost();
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for ConnectionService {
    type Response = Response<ReplyPieces>;
    type Error = Infallible;
    type Future = ReplyFuture;

    fn call(&self, request: Request<Incoming>) -> ReplyFuture {
        let active = ActiveRequest::new(&self.activity, self.routes.is_work(&request));
        let is_h1 = request.version() < Version::HTTP_2;
        // The protocol is never changed, so the following bytes would be ambiguous.
        let last = is_h1
            && (request.headers().contains_key(UPGRADE) || request.method() == Method::CONNECT);
        // The handlers of requests that are recognised by their path read bodies themselves.
        let ends_if_refused = early_reply_ends_connection(&request);
        let (headers_max, header_max_bytes) = (self.headers_max, self.header_max_bytes);
        let heads = HeadLimits { headers_max, header_max_bytes, hosts: &self.routes.hosts };
        let refusal = self.expired(&request).or_else(|| heads.refusal(&request));
        let grant = self.routes.origins.grant(&request);
        let preflight = grant.as_ref().and_then(|grant| grant.preflight(&request));
        let routed = match refusal {
            None if let Some(preflight) = preflight => {
                RequestHandler::Answered(Some(Box::new(preflight)))
            }
            None => {
                let certificate = self.certificate.clone();
                let caller = Caller { peer: self.peer, certificate, room: self.room.clone() };
                self.routes.call(caller, request)
            }
            Some(mut refusal) => {
                self.routes.note_refusal(&request, self.peer, &mut refusal);
                RequestHandler::Answered(Some(Box::new(refusal)))
            }
        };
        let ends_if_refused = ends_if_refused && !matches!(routed, RequestHandler::Direct(_));
        ReplyFuture { routed, active: Some(active), last, ends_if_refused, grant }
    }
}

/// The handler of a request.
enum RequestHandler {
    Direct(Pin<Box<dyn Future<Output = Response<OutgoingBody>> + Send>>),
    Any(Box<RouteFuture<Infallible>>),
    /// The request was answered because of its head alone.
    Answered(Option<Box<Response<Body>>>),
}

impl RequestHandler {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Response<OutgoingBody>> {
        match self {
            Self::Direct(reply) => reply.as_mut().poll(context),
            Self::Any(reply) => {
                let Ok(response) = ready!(Pin::new(reply).poll(context));
                Poll::Ready(response.map(OutgoingBody::Any))
            }
            Self::Answered(reply) => {
                let reply = reply.take().map_or_else(Response::default, |reply| *reply);
                Poll::Ready(reply.map(OutgoingBody::Any))
            }
        }
    }
}

/// A future reply.
pub(super) struct ReplyFuture {
    routed: RequestHandler,
    active: Option<ActiveRequest>,
    /// Whether the connection ends after it.
    last: bool,
    /// Whether the connection ends after it if it is a refusal, because the body was not read.
    ends_if_refused: bool,
    /// The permission of the page that has sent the request.
    grant: Option<OriginGrant>,
}

impl Future for ReplyFuture {
    type Output = Result<Response<ReplyPieces>, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut response = ready!(this.routed.poll(context));
        let is_refusal = response.status().is_client_error() || response.status().is_server_error();
        if this.last || this.ends_if_refused && is_refusal {
            // A reply that names another protocol is a statement about the connection, too.
            let names_protocol = response.headers().contains_key(UPGRADE);
            let options = if names_protocol { "close, upgrade" } else { "close" };
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static(options));
        }
        if let Some(grant) = this.grant.take() {
            grant.put(response.headers_mut());
        }
        let active = this.active.take();
        let taken = BodyProgress::of_this_stream();
        let is_good =
            response.status() == StatusCode::OK && !response.headers().contains_key(GRPC_STATUS);
        Poll::Ready(Ok(response.map(|body| ReplyPieces::new(body, taken, active, is_good))))
    }
}

/// The body of a reply.
pub(super) enum OutgoingBody {
    /// A complete body.
    Whole(Full<Bytes>),
    /// A stream.
    Any(Body),
}

impl HttpBody for OutgoingBody {
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

/// The body of a reply, in pieces.
///
/// The library takes everything that a body yields, even if the client has received little of it,
/// and what the library holds is neither monitored nor bounded. The rest that is kept here is.
pub(super) struct ReplyPieces {
    body: OutgoingBody,
    /// The rest of the body's last item that has not been yielded.
    rest: Bytes,
    /// Whether a part of that item has been yielded.
    is_split: bool,
    /// What the client has taken; only for HTTP/2 streams, because an HTTP/1 connection has only
    /// one reply at a time.
    taken: Option<Arc<BodyProgress>>,
    active: Option<ActiveRequest>,
    /// Whether the reply is a good one, so that its end is that of work done.
    is_good: bool,
    /// Whether the body has ended.
    has_ended: bool,
}

/// The field of a reply that refuses a call.
const GRPC_STATUS: &str = "grpc-status";

/// Number of bytes that the library gets at once for an HTTP/1 connection; it writes them in one
/// call.
const HTTP1_PIECE_BYTES: usize = 64 << 10;

/// The same for an HTTP/2 stream: the length of a frame.
const HTTP2_PIECE_BYTES: usize = 16 << 10;

/// Number of bytes by which an item of a stream may exceed an HTTP/2 stream's window without being
/// monitored.
const HTTP2_UNWATCHED_BYTES: usize = 1 << 10;

impl ReplyPieces {
    fn new(
        body: OutgoingBody,
        taken: Option<Arc<BodyProgress>>,
        active: Option<ActiveRequest>,
        is_good: bool,
    ) -> Self {
        Self { body, rest: Bytes::new(), is_split: false, taken, active, is_good, has_ended: false }
    }

    /// The next piece of the body's last item.
    ///
    /// The library gives a piece to an HTTP/2 stream as soon as its window allows one byte, and
    /// ends the stream's task with the last piece. So the last byte is yielded separately: by then
    /// the window has allowed everything before it. Short items of a stream are yielded whole, but
    /// no part of a longer item, because it keeps all of the item in memory.
    fn piece(&mut self) -> Bytes {
        let bytes = self.rest.len();
        let bytes_max = match self.taken {
            None => HTTP1_PIECE_BYTES,
            Some(_) if bytes <= 1 => bytes,
            Some(_) if bytes <= HTTP2_UNWATCHED_BYTES && !self.is_last_or_split() => bytes,
            Some(_) => HTTP2_PIECE_BYTES.min(bytes - 1),
        };
        self.is_split = bytes > bytes_max;
        match self.is_split {
            true => self.rest.split_to(bytes_max),
            false => std::mem::take(&mut self.rest),
        }
    }

    /// Whether the body's last item is known to end the body, or a part of it has been yielded.
    fn is_last_or_split(&self) -> bool {
        self.is_split || self.body.is_end_stream()
    }
}

impl HttpBody for ReplyPieces {
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
                        this.has_ended = true;
                        this.taken.iter().for_each(|taken| taken.note_yielded(0));
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                Poll::Pending => {
                    this.taken.iter().for_each(|taken| taken.waits_for_body());
                    return Poll::Pending;
                }
                end => {
                    this.has_ended |= matches!(end, Poll::Ready(None));
                    this.taken.iter().for_each(|taken| taken.note_yielded(0));
                    return end;
                }
            }
        }
        let piece = this.piece();
        this.taken.iter().for_each(|taken| taken.note_yielded(piece.len()));
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

impl Drop for ReplyPieces {
    fn drop(&mut self) {
        let is_complete = self.has_ended || self.is_end_stream();
        if let Some(active) = self.active.as_mut().filter(|_| self.is_good && is_complete) {
            active.is_open_work = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of the futures that a function makes.
    fn future_bytes<A, B, C, D, F: Future>(_function: impl Fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// Each request has one of these futures. With 14 KB instead of 4 KB, a request took a tenth more
    /// processor time: the first level of the processor's cache holds little more.
    #[test]
    fn the_future_of_a_request_is_small() {
        const BYTES_MAX: usize = 6 << 10;
        let bytes =
            [future_bytes(openai::answer::<Incoming>), future_bytes(grpc::answer::<Incoming>)];
        assert!(bytes.iter().all(|bytes| *bytes <= BYTES_MAX), "{bytes:?}");
    }
}
