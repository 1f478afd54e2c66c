//! One call of `FrontDoorService`, from its message to its reply.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderName};
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use prost::Message;
use splitrail_proto::v1;
use splitrail_proto::v1::generate_request::Prompt;
use tonic::Status;

use super::super::connection_service::{Caller, Outgoing};
use super::super::context::{Identity, trace_context};
use super::super::http::{X_REMOVED_FIELDS, log_failure};
use super::super::identify::{Sender, identify};
use super::super::request_body::BoundedBody;
use super::Method;
use super::body::payload;
use super::decode::{decode, discard};
use super::events::StreamedBody;
use super::explain::explain;
use super::head::{self, Deadline};
use super::message::{check_encoding, put, receive, succeeded};
use super::weigh::decoded_bytes;
use crate::core::Core;
use crate::service::{Call, ReplyBody, Scope, count_unplaced, serve};
use splitrail_api::Endpoint;
use splitrail_api::error::{Error, Kind};
use splitrail_api::memory_budget::Charge;
use splitrail_api::steering::Steering;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Size in bytes of a message's framing, and of the trailers of other clients' calls.
const FRAMING_BYTES: usize = 64 << 10;

/// Serves a call.
pub(in super::super) async fn answer<B>(
    core: Arc<Core>,
    method: Method,
    caller: Caller,
    request: Request<B>,
) -> Response<Outgoing>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let deadline = match head::check(&request, Instant::now()) {
        Ok(deadline) => deadline,
        Err(refusal) => {
            return refusal.into_response::<()>().map(|()| Outgoing::Whole(Full::default()));
        }
    };
    let mut answered = pin!(async {
        match method {
            Method::Generate => generate(&core, caller, request, deadline).await,
            Method::Explain => explain(&core, caller, request).await,
            Method::ListModels => list_models(&core, caller, request).await,
        }
    });
    let answered = match deadline {
        None => answered.await,
        Some(deadline) if deadline.is_over() => Err(Deadline::status()),
        Some(deadline) => {
            let in_time = tokio::time::timeout_at(deadline.at(), answered.as_mut()).await;
            in_time.unwrap_or_else(|_| Err(Deadline::status()))
        }
    };
    match answered {
        Ok((body, removed_fields)) => {
            let mut response = Response::new(Outgoing::Any(body));
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            if let Some(removed) = removed_fields.and_then(|names| names.parse().ok()) {
                headers.insert(X_REMOVED_FIELDS, removed);
            }
            response
        }
        Err(status) => status.into_http::<()>().map(|()| Outgoing::Whole(Full::default())),
    }
}

/// A reply, and the fields of `extra_body_json` that were not sent to engines.
pub(super) type Answered = (Body, Option<String>);

/// A call whose message has been received.
pub(super) struct Received {
    pub(super) message: Bytes,
    pub(super) held: Charge,
    pub(super) sender: Sender,
}

/// Receives the message of a call. A call for which no place is free is refused immediately, before
/// its message is awaited.
pub(super) async fn received<B>(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<B>,
) -> Result<Received, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let serving = core.serving();
    let limits = &serving.limits;
    let sender =
        identify(core, "grpc", caller.peer.ip(), request.headers(), caller.certificate.as_deref());
    let sender = sender.and_then(|sender| core.check_free_places(sender.share).map(|()| sender));
    let sender = sender.map_err(|error| {
        count_unplaced(&core.metrics, "none", error.outcome(), error.result());
        error.to_grpc()
    })?;
    check_encoding(request.headers())?;
    let body = BoundedBody::new(request.into_body(), core, limits, FRAMING_BYTES);
    let (message, held) = receive(body, limits.body_max_bytes).await?;
    Ok(Received { message, held, sender })
}

async fn generate<B>(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<B>,
    deadline: Option<Deadline>,
) -> Result<Answered, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let arrived = Instant::now();
    let traceparent = trace_context(request.headers().get(TRACEPARENT));
    let steering = Steering::read(request.headers());
    let Received { message: encoded, held, sender } = received(core, caller, request).await?;
    let (message, held): (v1::GenerateRequest, _) =
        decode(core, encoded.clone(), held, decoded_bytes).await?;
    let sent_id = Some(message.request_id.as_bytes()).filter(|id| !id.is_empty());
    let request_id = Identity::new(sent_id).request_id;
    let is_chat = matches!(message.prompt, Some(Prompt::Chat(_)));
    let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
    let mut scope = Scope::open(core, endpoint, arrived, sender);
    scope.hold(held);
    let steering = match steering {
        Ok(steering) => steering,
        Err(error) => {
            scope.fail(&error);
            discard(core, encoded.len(), message).await;
            return Err(status(&request_id, &error));
        }
    };
    let call = Call {
        endpoint,
        body: payload(message, &encoded),
        steering,
        request_id: request_id.clone(),
        traceparent,
        usage_detail: false,
        // Replies of this method are streams.
        room: None,
    };
    drop(encoded);
    let reply = serve(core, call, scope).await.map_err(|error| status(&request_id, &error))?;
    let shows_route = reply.shows_route();
    let decision = reply.route.0.into_iter().next().unwrap_or_default();
    let ReplyBody::Events(events) = reply.body else {
        let error = Error::new(Kind::Internal, "the reply is not a stream");
        return Err(status(&request_id, &error));
    };
    let body = StreamedBody::new(events, request_id, (decision, shows_route), is_chat, deadline);
    Ok((Body::new(body), reply.removed_fields))
}

async fn list_models<B>(
    core: &Arc<Core>,
    caller: Caller,
    request: Request<B>,
) -> Result<Answered, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
{
    let Received { message, held, sender } = received(core, caller, request).await?;
    let (v1::ListModelsRequest {}, _held) = decode(core, message, held, |_| 0).await?;
    let serving = core.serving();
    let usable = |names: &[String]| -> Vec<String> {
        names.iter().filter(|name| sender.may_use(name)).cloned().collect()
    };
    let listed = serving.models.iter().filter(|served| {
        let config = &served.config;
        let further = config.aliases.iter().chain(&config.adapters);
        std::iter::once(&config.name).chain(further).any(|name| sender.may_use(name))
    });
    let models = listed.map(|served| v1::Model {
        name: served.config.name.clone(),
        aliases: usable(&served.config.aliases),
        adapters: usable(&served.config.adapters),
        block_size: served.pool.block_size(),
    });
    Ok(whole(&v1::ListModelsResponse { models: models.collect() }))
}

/// The reply of a call with one message.
pub(super) fn whole(message: &impl Message) -> Answered {
    let mut out = BytesMut::new();
    put(&mut out, message);
    let trailers = std::future::ready(Some(Ok(succeeded())));
    (Body::new(Full::new(out.freeze()).with_trailers(trailers)), None)
}

/// The only place where an error becomes a gRPC status.
pub(super) fn status(request_id: &str, error: &Error) -> Status {
    log_failure(request_id, error);
    let mut status = error.to_grpc();
    if let Ok(id) = request_id.parse() {
        status.metadata_mut().insert("x-request-id", id);
    }
    status
}
