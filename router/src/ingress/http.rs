//! The OpenAI API over HTTP. Only the paths listed here exist; the paths of engine requests are
//! chosen by the router.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Extension, Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{
    ACCEPT, ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, HOST, HeaderMap,
    HeaderName, ORIGIN, UPGRADE,
};
use http::{HeaderValue, StatusCode, Uri};
use http_body_util::Full;
use splitrail_engine::dialect::Dialect;

use super::connection_service::{Caller, DirectService, OutgoingBody, Routes};
use super::cross_origin::AllowedOrigins;
use super::head::early_reply_ends_connection;
use super::identify::{Sender, identify};
use super::near_path::near_path;
use super::own_paths::{OwnPath, own_paths};
use super::rate_limits;
use super::reply::{error_dialect, error_in};
use super::request_body::{BodyBound, BoundedBody};
use crate::core::Core;
use crate::service::{Call, Reply, ReplyBody, Scope, count_unplaced, serve};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::form::Boundary;
use splitrail_api::memory_budget::{Charge, MemoryBudget};
use splitrail_api::shares::ClientShare;
use splitrail_api::steering::Steering;
use splitrail_api::unread::UnreadRoom;
use splitrail_client_connection::certificate::ClientCertificate;
use splitrail_engine::sse::put_data;
use splitrail_fleet::ServedModels;
use splitrail_flow::prepare::Payload;
use splitrail_request_log::access_log::TenantName;
use splitrail_request_log::identity::{Identity, X_REQUEST_ID};

const X_ROUTE: HeaderName = HeaderName::from_static("x-splitrail-route");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
pub(super) const X_REMOVED_FIELDS: HeaderName =
    HeaderName::from_static("x-splitrail-removed-fields");
/// Tells nginx, whose replies are buffered by default, to pass events on as they come.
pub(crate) const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const X_USAGE: HeaderName = HeaderName::from_static("x-splitrail-usage");
/// The name under which Anthropic's clients read a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The routes of the HTTP API. Inference requests, which are most, skip the axum router.
pub fn routes(core: Arc<Core>) -> Routes {
    let serving = core.serving();
    let listen = &serving.config.listen;
    let hosts = listen.http_hosts.clone().into();
    let origins = AllowedOrigins::new(&listen.http_origins);
    drop(serving);
    Routes { direct: Some(DirectService::Http(Arc::clone(&core))), all: all(core), hosts, origins }
}

fn all(core: Arc<Core>) -> Router {
    // `DirectService` answers a POST to these paths; any other method is refused here.
    let post_only = |routes: Router<Arc<Core>>, endpoint: Endpoint| {
        let refuse = async move |Extension(identity): Extension<Identity>, headers: HeaderMap| {
            if asks_for_web_socket(&headers) {
                return no_web_socket(endpoint, &identity);
            }
            let error = wrong_method().with_request_id(&identity.request_id);
            let mut reply = error_in(endpoint.dialect(), error);
            reply.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
            reply
        };
        routes.route(endpoint.path(), any(refuse))
    };
    let add = |routes: Router<Arc<Core>>, own: OwnPath| routes.route(own.path, own.replies);
    let (with_sender, public): (Vec<_>, Vec<_>) =
        own_paths().into_iter().partition(|own| own.needs_credential);
    let with_sender = with_sender
        .into_iter()
        .fold(Router::new(), add)
        .layer(middleware::from_fn_with_state(Arc::clone(&core), name_sender));
    let routes = Endpoint::ALL.into_iter().fold(with_sender, post_only);
    public
        .into_iter()
        .fold(routes, add)
        .fallback(async |uri: Uri, Extension(identity): Extension<Identity>| {
            let error = Error::new(ErrorKind::UnknownPath, no_such_path(uri.path()));
            error_in(error_dialect(&uri), error.with_request_id(&identity.request_id))
        })
        .method_not_allowed_fallback(async |uri: Uri, Extension(identity): Extension<Identity>| {
            error_in(error_dialect(&uri), wrong_method().with_request_id(&identity.request_id))
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&core), name_reply))
        .with_state(core)
}

fn wrong_method() -> Error {
    Error::new(ErrorKind::MethodNotAllowed, "the path exists, but not with this method")
}

fn no_such_path(path: &str) -> String {
    const NONE: &str = "there is no such path";
    near_path(path).map_or_else(
        || format!("{NONE}: `GET /docs` lists all paths"),
        |near| format!("{NONE}: did you mean `{near}`?"),
    )
}

fn asks_for_web_socket(headers: &HeaderMap) -> bool {
    headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Some clients ask for a WebSocket first, and use HTTP without delay only after a 426.
fn no_web_socket(endpoint: Endpoint, identity: &Identity) -> Response {
    let message = "there are no WebSockets here: send the request with POST";
    let error = Error::new(ErrorKind::MethodNotAllowed, message).with_code("upgrade_required");
    let mut reply = error_in(endpoint.dialect(), error.with_request_id(&identity.request_id));
    *reply.status_mut() = StatusCode::UPGRADE_REQUIRED;
    // RFC 9110, section 15.5.22: the reply names the protocol.
    let headers = reply.headers_mut();
    headers.insert(UPGRADE, HeaderValue::from_static("HTTP/1.1"));
    reply
}

/// Gives each reply the header with the request's id, so that clients can name the request when
/// they report a problem.
async fn name_reply(State(core): State<Arc<Core>>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    let client = peer.map_or(Ipv4Addr::UNSPECIFIED.into(), |ConnectInfo(peer)| peer.ip());
    let identity = Identity::of_http(request.headers(), client);
    let endpoint = match request.uri().path() {
        // Probes, which are asked all the time.
        "/health" | "/ready" => None,
        path if path.starts_with("/v1/models") => Some("models"),
        _ => Some("none"),
    };
    let dialect = error_dialect(request.uri());
    request.extensions_mut().insert(identity.clone());
    let mut reply = next.run(request).await;
    put_id(&identity, dialect, reply.headers_mut());
    if let Some(endpoint) = endpoint {
        core.logs.access_log.answered(
            &core.serving().config.access_log,
            &identity,
            endpoint,
            &reply,
        );
    }
    reply
}

/// Puts the id of a request into the head of its reply, under the names that clients of the dialect
/// read.
pub(super) fn put_id(identity: &Identity, dialect: Dialect, headers: &mut HeaderMap) {
    identity.put(headers);
    if dialect == Dialect::Messages
        && let Some(id) = headers.get(X_REQUEST_ID).cloned()
    {
        headers.insert(REQUEST_ID, id);
    }
}

/// Identifies the sender of a request that reads something.
async fn name_sender(
    State(core): State<Arc<Core>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    mut request: Request,
    next: Next,
) -> Response {
    let certificate = request.extensions().get::<Arc<ClientCertificate>>().map(|c| &**c);
    match identify(&core, "http", peer.ip(), request.headers(), certificate) {
        Ok(sender) => {
            let (dialect, tenant) = (error_dialect(request.uri()), sender.tenant.clone());
            request.extensions_mut().insert(sender);
            let mut reply = next.run(request).await;
            if let Some(tenant) = tenant {
                rate_limits::put(reply.headers_mut(), dialect, &tenant);
                reply.extensions_mut().insert(TenantName(tenant.name.clone()));
            }
            reply
        }
        Err(error) => error_in(error_dialect(request.uri()), error),
    }
}

/// Serves an inference request.
pub(super) async fn answer<B: http_body::Body<Data = Bytes> + Unpin>(
    core: Arc<Core>,
    endpoint: Endpoint,
    Caller { peer, certificate, room }: Caller,
    request: http::Request<B>,
) -> http::Response<OutgoingBody> {
    let identity = Identity::of_http(request.headers(), peer.ip());
    let early = EarlyReply::to(&request, endpoint.dialect());
    let sender = identify(&core, "http", peer.ip(), request.headers(), certificate.as_deref());
    let sender = sender.inspect_err(|error| {
        let seconds = identity.arrived.elapsed().as_secs_f64();
        count_unplaced(&core.metrics, endpoint.name(), error.outcome(), error.result(), seconds);
    });
    let tenant = sender.as_ref().ok().and_then(|sender| sender.tenant.clone());
    let reply = match sender {
        Ok(sender) => generate(&core, endpoint, &identity, sender, room, request).await,
        Err(error) => {
            let reply = early.refuse(error.with_request_id(&identity.request_id));
            core.logs.access_log.answered(
                &core.serving().config.access_log,
                &identity,
                endpoint.name(),
                &reply,
            );
            Ok(reply)
        }
    };
    let mut reply =
        reply.unwrap_or_else(|error| error_in(endpoint.dialect(), error).map(OutgoingBody::Any));
    // What is accepted here, if the type of the body was refused.
    if let Some(accepted) = reply.headers_mut().get_mut(ACCEPT).filter(|_| endpoint.transcribes()) {
        *accepted = HeaderValue::from_static("multipart/form-data");
    }
    put_id(&identity, endpoint.dialect(), reply.headers_mut());
    if let Some(tenant) = tenant {
        rate_limits::put(reply.headers_mut(), endpoint.dialect(), &tenant);
    }
    reply
}

/// Serves a chat that an operator sends, as one of this sender.
pub(crate) async fn answer_operator(
    core: &Arc<Core>,
    sender: Sender,
    peer: IpAddr,
    request: http::Request<Full<Bytes>>,
) -> Response {
    let (endpoint, identity) = (Endpoint::Chat, Identity::of_http(request.headers(), peer));
    let reply = generate(core, endpoint, &identity, sender, None, request).await;
    let mut reply = match reply {
        Ok(reply) => reply.map(Body::new),
        Err(error) => error_in(endpoint.dialect(), error),
    };
    put_id(&identity, endpoint.dialect(), reply.headers_mut());
    reply
}

async fn generate(
    core: &Arc<Core>,
    endpoint: Endpoint,
    identity: &Identity,
    sender: Sender,
    room: Option<Arc<UnreadRoom>>,
    request: http::Request<impl http_body::Body<Data = Bytes> + Unpin>,
) -> Result<http::Response<OutgoingBody>, Error> {
    let serving = core.serving();
    let client = Client { share: sender.share, memory: Arc::clone(&sender.memory) };
    let mut scope = Scope::open(core, endpoint, identity.clone(), sender);
    let usage_detail = request.headers().contains_key(X_USAGE);
    let early = EarlyReply::to(&request, endpoint.dialect());
    let received = receive(core, endpoint, &serving, client, request).await;
    let (steering, body, held) = match received {
        Ok(received) => received,
        Err(error) => {
            scope.fail(&error);
            return Ok(early.refuse(scope.for_client(error)));
        }
    };
    scope.hold(held);
    drop(serving);
    let call = Call { endpoint, body, steering, usage_detail, room };
    let reply = serve(core, call, scope).await?;
    Ok(respond(reply, endpoint.dialect()))
}

/// A reply that is sent before the body of its request has been read.
#[derive(Clone, Copy)]
struct EarlyReply {
    dialect: Dialect,
    ends_connection: bool,
}

impl EarlyReply {
    fn to<B: http_body::Body>(request: &http::Request<B>, dialect: Dialect) -> Self {
        Self { dialect, ends_connection: early_reply_ends_connection(request) }
    }

    fn refuse(self, error: Error) -> http::Response<OutgoingBody> {
        let mut reply = error_in(self.dialect, error);
        if self.ends_connection {
            reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        reply.map(OutgoingBody::Any)
    }
}

/// What a request is charged to before its body is complete.
struct Client {
    share: Option<ClientShare>,
    memory: Arc<MemoryBudget>,
}

async fn receive(
    core: &Arc<Core>,
    endpoint: Endpoint,
    serving: &ServedModels,
    client: Client,
    request: http::Request<impl http_body::Body<Data = Bytes> + Unpin>,
) -> Result<(Steering, Payload, Charge), Error> {
    core.check_free_places(client.share)?;
    let boundary = match endpoint.transcribes() {
        true => Some(check_form(&request, &serving.config.listen.http_origins)?),
        false => check_content_type(request.headers()).map(|()| None)?,
    };
    check_headers(request.headers())?;
    let steering = Steering::read(request.headers())?;
    let body = BoundedBody::new(request.into_body(), core, &serving.limits, &client.memory, 0);
    let (body, held) = body.whole().await?;
    let body = match boundary {
        Some(boundary) => Payload::Form(body, boundary),
        None => Payload::Json(body),
    };
    Ok((steering, body, held))
}

/// Receives the whole body of an operator's request, bounded in size, and in time like those of clients,
/// with its charge to `memory`.
///
/// # Errors
/// As for requests of clients.
pub(crate) async fn whole(
    body: Body,
    core: &Arc<Core>,
    memory: &Arc<MemoryBudget>,
    bound: BodyBound,
) -> Result<(Bytes, Charge), Error> {
    let serving = core.serving();
    BoundedBody::new(body, core, &serving.limits, memory, 0).of_operator(bound).whole().await
}

fn check_headers(headers: &HeaderMap) -> Result<(), Error> {
    let identity = HeaderValue::from_static("identity");
    if headers.get_all(CONTENT_ENCODING).iter().any(|encoding| encoding != identity) {
        let message = "compressed bodies are not accepted: send the body as it is, without \
             `content-encoding`";
        return Err(Error::new(ErrorKind::UnsupportedMedia, message));
    }
    if headers.get_all(X_USAGE).iter().any(|value| value != "detail") {
        let message = "the header `x-splitrail-usage` can only be `detail`";
        return Err(Error::invalid("x-splitrail-usage", message));
    }
    Ok(())
}

/// A web page of another site can send any body, but for JSON the browser first asks the router for
/// permission, which the router gives to the pages of `listen.http_origins` only. So only JSON is
/// accepted.
fn check_content_type(headers: &HeaderMap) -> Result<(), Error> {
    let mut given = headers.get_all(CONTENT_TYPE).iter();
    let (first, second) = (given.next(), given.next());
    let is_json = first.is_some_and(|value| is_json(value.as_bytes()));
    if is_json && second.is_none() {
        return Ok(());
    }
    let message = "the body must be JSON: send the header `content-type: application/json`";
    Err(Error::new(ErrorKind::UnsupportedMedia, message).with_param("content-type"))
}

/// The boundary of a form. A browser lets pages of other sites send forms without asking, and names the
/// site: only the router's own pages and those of `listen.http_origins` may.
fn check_form<B>(request: &http::Request<B>, origins: &[String]) -> Result<Boundary, Error> {
    let headers = request.headers();
    let mut given = headers.get_all(CONTENT_TYPE).iter();
    let form = given.next().and_then(|value| Boundary::of_content_type(value.as_bytes()));
    let boundary = form.filter(|_| given.next().is_none()).ok_or_else(|| {
        let message = "the body must be a form: send the header `content-type: \
                       multipart/form-data` with its `boundary`";
        Error::new(ErrorKind::UnsupportedMedia, message).with_param("content-type")
    })?;
    let Some(origin) = headers.get(ORIGIN).map(HeaderValue::as_bytes) else {
        return Ok(boundary);
    };
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let own = authority.or(headers.get(HOST).map(HeaderValue::as_bytes));
    let is_own = own.is_some_and(|own| {
        [&b"http://"[..], b"https://"]
            .iter()
            .any(|scheme| origin.strip_prefix(*scheme) == Some(own))
    });
    match is_own || origins.iter().any(|listed| listed == "*" || listed.as_bytes() == origin) {
        true => Ok(boundary),
        false => {
            let message = "pages of this origin may not send forms (listen.http_origins)";
            Err(Error::new(ErrorKind::NotPermitted, message).with_param("origin"))
        }
    }
}

/// Whether a media type is JSON or a JSON-based one (`application/x+json`).
fn is_json(value: &[u8]) -> bool {
    let essence = value.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let is = |other: &[u8]| essence.eq_ignore_ascii_case(other);
    let is_type = essence.iter().all(|byte| byte.is_ascii_graphic() && *byte != b',');
    let within = essence.split_at_checked(b"application/".len());
    is(b"application/json")
        || is_type
            && within.is_some_and(|(kind, name)| {
                kind.eq_ignore_ascii_case(b"application/")
                    && name.len() > b"+json".len()
                    && name[name.len() - b"+json".len()..].eq_ignore_ascii_case(b"+json")
            })
}

fn respond(reply: Reply, dialect: Dialect) -> http::Response<OutgoingBody> {
    let mut response = match reply.body {
        ReplyBody::Whole(body) => whole_reply(body, "application/json"),
        ReplyBody::Text(body) => whole_reply(body, "text/plain; charset=utf-8"),
        ReplyBody::Events(events) => {
            let framed = events.map(Some).chain(futures_util::stream::iter([None]));
            let framed = framed.scan(false, move |failed, event| {
                let frame = frame(event, dialect, failed);
                std::future::ready(frame.map(Ok::<_, std::convert::Infallible>))
            });
            let body = OutgoingBody::Any(Body::from_stream(framed));
            let mut response = http::Response::new(body);
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            headers.insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
            response
        }
    };
    let headers = response.headers_mut();
    if let Some(timing) = reply.server_timing {
        let shown = [(X_ROUTE, reply.route.header()), (SERVER_TIMING, timing)];
        for (name, value) in shown {
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(name, value);
            }
        }
    }
    if let Some(removed) = reply.removed_fields.and_then(|names| names.parse().ok()) {
        headers.insert(X_REMOVED_FIELDS, removed);
    }
    response
}

fn whole_reply(body: Bytes, content_type: &'static str) -> http::Response<OutgoingBody> {
    let mut response = http::Response::new(OutgoingBody::Whole(Full::new(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// An event as bytes for the client. A stream that failed ends with its error event and without
/// `[DONE]`, so that no client takes it for complete. Comments, which begin with `:`, already consist
/// of lines; in APIs with named events, so do all events, and one of them marks the end.
fn frame(
    event: Option<Result<Bytes, Error>>,
    dialect: Dialect,
    failed: &mut bool,
) -> Option<Bytes> {
    const ENDS: &[u8] = b"\n\n";
    let named = dialect.names_events();
    let lines = match event {
        Some(Ok(lines)) if named || lines.starts_with(b":") => lines,
        Some(Ok(data)) => {
            let mut framed = Vec::with_capacity(b"data: ".len() + data.len() + ENDS.len());
            put_data(&mut framed, &data);
            framed.extend_from_slice(ENDS);
            return Some(framed.into());
        }
        Some(Err(error)) => {
            *failed = true;
            Bytes::from(error.to_event(dialect))
        }
        None if *failed || named => return None,
        None => return Some(Bytes::from_static(b"data: [DONE]\n\n")),
    };
    Some([&lines, ENDS].concat().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_recognized_by_its_content_type() {
        for (value, expected) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("application/json ;charset=utf-8", true),
            ("application/vnd.x+json", true),
            ("application/+json", false),
            ("text/plain", false),
            ("text/plain; application/json", false),
            ("text/json", false),
            ("application/json, text/plain", false),
            ("text/plain, application/x+json", false),
            ("application/jsonx", false),
            ("application/x-www-form-urlencoded", false),
            ("", false),
        ] {
            assert_eq!(is_json(value.as_bytes()), expected, "{value}");
        }
    }
}
