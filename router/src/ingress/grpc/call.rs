//! One call of `FrontDoorService`, from its message to its reply.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use prost::Message;
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;
use tonic::Status;

use super::super::connection_service::{Caller, OutgoingBody};
use super::super::http::X_REMOVED_FIELDS;
use super::super::identify::{Sender, identify};
use super::super::request_body::BoundedBody;
use super::Method;
use super::body::payload;
use super::decode::{DecodedMessage, decode};
use super::events::StreamedBody;
use super::explain::explain;
use super::head::{self, Deadline, HeadRefusal};
use super::message::{check_encoding, put, receive, succeeded};
use super::weigh::decoded_bytes;
use crate::core::Core;
use crate::service::{Call, ReplyBody, Scope, count_unplaced, log_failure, serve};
use splitrail_access::Tenant;
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::Charge;
use splitrail_api::steering::Steering;
use splitrail_request_log::access_log::{outcome_of, result_of};
use splitrail_request_log::identity::{ClientTrace, Identity, Protocol, request_id};
use splitrail_settings::logging::RequestIds;

/// Size in bytes of a message's framing, and of the trailers of other clients' calls.
const FRAMING_BYTES: usize = 64 << 10;

/// Serves a call.
pub(in super::super) async fn answer<B: http_body::Body<Data = Bytes> + Unpin>(
    core: Arc<Core>,
    method: Method,
    caller: Caller,
    request: Request<B>,
) -> Response<OutgoingBody> {
    let trace = ClientTrace::read(request.headers());
    let identity = Identity::new(None, caller.peer.ip(), Protocol::Grpc, trace);
    let identity = identity.come_through(request.headers());
    let known = CallFacts::default();
    let endpoint = method.endpoint();
    let log = CallLog { core: &core, identity: &identity, endpoint, known: &known };
    let deadline = match head::check(&request, identity.arrived) {
        Ok(deadline) => deadline,
        Err(refusal) => return log.refuse_head(*refusal),
    };
    let _open = OpenCall(log);
    let mut answered = pin!(async {
        match method {
            Method::Generate => generate(&core, caller, request, deadline, log).await,
            Method::Explain => log.note(explain(&core, caller, request, log).await),
            Method::ListModels => log.note(list_models(&core, caller, request, log).await),
        }
    });
    let answered = match deadline {
        None => answered.await,
        Some(deadline) if deadline.is_over() => log.refuse(Deadline::status()),
        Some(deadline) => {
            let in_time = tokio::time::timeout_at(deadline.at(), answered.as_mut()).await;
            in_time.unwrap_or_else(|_| log.refuse(Deadline::status()))
        }
    };
    match answered {
        Ok((body, removed_fields)) => {
            let mut response = Response::new(OutgoingBody::Any(body));
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            if let Some(removed) = removed_fields.and_then(|names| names.parse().ok()) {
                headers.insert(X_REMOVED_FIELDS, removed);
            }
            response
        }
        Err(status) => status.into_http::<()>().map(|()| OutgoingBody::Whole(Full::default())),
    }
}

/// Counts calls that end without a scope, and writes them to the access log.
#[derive(Clone, Copy)]
pub(super) struct CallLog<'a> {
    core: &'a Core,
    identity: &'a Identity,
    endpoint: &'static str,
    known: &'a CallFacts,
}

/// What is known of a call besides its identity.
#[derive(Default)]
struct CallFacts {
    tenant: OnceLock<Arc<Tenant>>,
    /// Whether the call is counted and in the access log, or will be when its scope ends.
    is_noted: AtomicBool,
}

impl CallLog<'_> {
    fn note<T>(self, answered: Result<T, Status>) -> Result<T, Status> {
        self.end(answered.as_ref().err());
        answered
    }

    /// Notes how the call has ended, unless that has been noted, or its scope will.
    fn end(self, refusal: Option<&Status>) {
        if self.known.is_noted.swap(true, Relaxed) {
            return;
        }
        let (core, identity, tenant) = (self.core, self.identity, self.known.tenant.get());
        let (outcome, result) =
            refusal.map_or(("ok", "ok"), |refusal| (outcome_of(refusal), result_of(refusal)));
        if let Some(tenant) = tenant {
            tenant.series.ended(&core.metrics, &tenant.label, outcome);
        }
        let seconds = identity.arrived.elapsed().as_secs_f64();
        count_unplaced(&core.metrics, self.endpoint, outcome, result, seconds);
        let serving = core.serving();
        let (config, tenant) = (&serving.config.access_log, tenant.map(|tenant| &tenant.name));
        core.logs.access_log.called(config, identity, self.endpoint, refusal, tenant);
    }

    fn refuse<T>(self, status: Status) -> Result<T, Status> {
        self.note(Err(status))
    }

    /// The reply to a request whose head is refused. One that is no gRPC call is not counted as one.
    fn refuse_head(self, refusal: HeadRefusal) -> Response<OutgoingBody> {
        let response = match refusal {
            HeadRefusal::Wrong(status) => {
                self.end(Some(&status));
                status.into_http()
            }
            HeadRefusal::NoCall(status) => {
                let mut response = Response::default();
                *response.status_mut() = status;
                let serving = self.core.serving();
                let config = &serving.config.access_log;
                self.core.logs.access_log.answered(config, self.identity, self.endpoint, &response);
                response
            }
        };
        response.map(|()| OutgoingBody::Whole(Full::default()))
    }
}

/// A call until its reply begins. If its client leaves before, dropping this value notes it.
struct OpenCall<'a>(CallLog<'a>);

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.0.end(Some(&Status::cancelled("the client has left")));
    }
}

/// A reply, and the fields of `extra_body_json` that were not sent to engines.
pub(super) type CallReply = (Body, Option<String>);

/// A call whose message has been received.
pub(super) struct ReceivedCall {
    pub(super) message: Bytes,
    pub(super) held: Charge,
    pub(super) sender: Sender,
}

/// Receives the message of a call. A call for which no place is free is refused immediately, before
/// its message is awaited.
pub(super) async fn received(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<impl http_body::Body<Data = Bytes> + Unpin>,
    log: CallLog<'_>,
) -> Result<ReceivedCall, Status> {
    let serving = core.serving();
    let limits = &serving.limits;
    let sender =
        identify(core, "grpc", caller.peer.ip(), request.headers(), caller.certificate.as_deref());
    if let Ok(Sender { tenant: Some(tenant), .. }) = &sender {
        log.known.tenant.get_or_init(|| Arc::clone(tenant));
    }
    let sender = sender.and_then(|sender| core.check_free_places(sender.share).map(|()| sender));
    let sender = sender.map_err(|error| error.to_grpc())?;
    check_encoding(request.headers())?;
    let body = BoundedBody::new(request.into_body(), core, limits, &sender.memory, FRAMING_BYTES);
    let (message, held) = receive(body, limits.body_max_bytes).await?;
    Ok(ReceivedCall { message, held, sender })
}

async fn generate(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<impl http_body::Body<Data = Bytes> + Unpin>,
    deadline: Option<Deadline>,
    log: CallLog<'_>,
) -> Result<CallReply, Status> {
    let steering = Steering::read(request.headers());
    let call = received(core, caller, request, log).await.or_else(|status| log.refuse(status))?;
    let ReceivedCall { message: encoded, held, sender } = call;
    let decoded = decode(core, encoded.clone(), held, decoded_bytes).await;
    let (decoded, held): (DecodedMessage<v1::GenerateRequest>, _) =
        decoded.or_else(|status| log.refuse(status))?;
    let sent_id = Some(decoded.request_id.as_bytes()).filter(|id| !id.is_empty());
    let request_id = request_id(sent_id);
    let identity = Identity { request_id, ..log.identity.clone() };
    let is_chat = matches!(decoded.prompt, Some(Prompt::Chat(_)));
    let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
    let mut scope = Scope::open(core, endpoint, identity, sender);
    scope.hold(held);
    scope.set_deadline(deadline.map(Deadline::at));
    log.known.is_noted.store(true, Relaxed);
    let ids = scope.ids.clone();
    let steering = match steering {
        Ok(steering) => steering,
        Err(error) => {
            scope.fail(&error);
            return Err(status(&ids, &error));
        }
    };
    let call = Call {
        endpoint,
        body: payload(decoded, &encoded),
        steering,
        usage_detail: false,
        // Replies of this method are streams.
        room: None,
    };
    drop(encoded);
    let reply = serve(core, call, scope).await.map_err(|error| status(&ids, &error))?;
    let shows_route = reply.shows_route();
    let decision = reply.route.0.into_iter().next().unwrap_or_default();
    let ReplyBody::Events(events) = reply.body else {
        let error = Error::new(ErrorKind::Internal, "the reply is not a stream");
        log_failure(&ids, None, &error);
        return Err(status(&ids, &error));
    };
    let body = StreamedBody::new(events, ids, decision, shows_route, is_chat, deadline);
    Ok((Body::new(body), reply.removed_fields))
}

async fn list_models(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<impl http_body::Body<Data = Bytes> + Unpin>,
    log: CallLog<'_>,
) -> Result<CallReply, Status> {
    let ReceivedCall { message, held, sender } = received(core, caller, request, log).await?;
    let (_empty, _held): (DecodedMessage<v1::ListModelsRequest>, _) =
        decode(core, message, held, |_| 0).await?;
    let serving = core.serving();
    let models = serving.models.iter().filter_map(|served| {
        let config = &served.config;
        let further = config.aliases.iter().chain(&config.adapters);
        // A tenant that may use other names only is not told the configured one.
        let name =
            std::iter::once(&config.name).chain(further).find(|name| sender.may_use(name))?;
        let usable = |names: &[String]| -> Vec<String> {
            let others = names.iter().filter(|other| *other != name && sender.may_use(other));
            others.cloned().collect()
        };
        let loaded = |mut names: Vec<String>| {
            names.retain(|name| served.pool.may_have_adapter(name));
            names
        };
        Some(v1::Model {
            name: name.clone(),
            aliases: usable(&config.aliases),
            adapters: loaded(usable(&config.adapters)),
            block_size: served.pool.block_size(),
        })
    });
    Ok(whole(&v1::ListModelsResponse { models: models.collect() }))
}

/// The reply of a call with one message.
pub(super) fn whole(message: &impl Message) -> CallReply {
    let mut out = BytesMut::new();
    put(&mut out, message);
    let trailers = std::future::ready(Some(Ok(succeeded())));
    (Body::new(Full::new(out.freeze()).with_trailers(trailers)), None)
}

/// The only place where an error becomes a gRPC status.
pub(super) fn status(ids: &RequestIds, error: &Error) -> Status {
    let mut status = error.to_grpc();
    if let Ok(id) = ids.request_id().parse() {
        status.metadata_mut().insert("x-request-id", id);
    }
    status
}
