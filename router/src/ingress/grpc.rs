//! The gRPC front door: the same core behind another framing.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::middleware::{Next, from_fn_with_state};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::{self, StreamExt};
use http_body_util::BodyExt;
use prost::Message;
use serde::Deserialize;
use splitrail_proto::v1;
use splitrail_proto::v1::front_door_service_server::{FrontDoorService, FrontDoorServiceServer};
use splitrail_proto::v1::generate_request::Prompt;
use splitrail_proto::v1::generate_response::Event;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::{Health, HealthServer};

use super::arriving::Arriving;
use super::context::{Identity, trace_context};
use super::grpc_body::body_of;
use super::http::{client_of, log_failure};
use crate::admission::ShareKey;
use crate::api::Endpoint;
use crate::api::steering::Steering;
use crate::core::Core;
use crate::error::{Error, Kind};
use crate::ledger::decisions::DecisionHandle;
use crate::name::Name;
use crate::prepare::Payload;
use crate::reply::merge::Events;
use crate::service::{Call, ReplyBody, Scope, serve};

/// A message's framing, and room for the trailers of others.
const FRAMING_BYTES: usize = 64 << 10;

/// The gRPC door: `FrontDoorService`, health and reflection.
pub fn routes(core: &Arc<Core>, stop: CancellationToken) -> Router {
    let max_bytes = core.serving().limits.body_max_bytes;
    let door = FrontDoorServiceServer::new(FrontDoor { core: Arc::clone(core) })
        .max_decoding_message_size(max_bytes);
    let arriving = from_fn_with_state(Arc::clone(core), arriving);
    let door = Routes::new(door).into_axum_router().reset_fallback().layer(arriving);
    // Health and reflection answer however full the door is.
    let mut open = Routes::new(HealthServer::new(Readiness { core: Arc::clone(core), stop }));
    // Older clients ask for reflection by its earlier name.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => open = open.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "gRPC reflection is not available");
        }
    }
    open.into_axum_router().merge(door)
}

/// A call that would find no room is refused at once. A call of one message may be followed by
/// any number of others, which the library reads to their end: the body as a whole is bounded,
/// in bytes and time.
async fn arriving(
    State(core): State<Arc<Core>>,
    mut request: axum::extract::Request,
    next: Next,
) -> axum::response::Response {
    let serving = core.serving();
    let client = client_of(&core, &serving.limits, &request);
    if let Err(error) = core.look_for_room(client) {
        let labels = ["none", "none", "none", error.outcome()];
        core.metrics.requests.with_label_values(&labels).inc();
        return error.to_grpc().into_http();
    }
    request.extensions_mut().insert(Client(client));
    let body = |body| Arriving::new(body, &core, &serving.limits, FRAMING_BYTES);
    let request = request.map(|given| Body::new(body(given).map_err(|error| error.to_grpc())));
    next.run(request).await
}

/// Whose room a call takes.
#[derive(Clone, Copy)]
struct Client(Option<ShareKey>);

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(splitrail_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

struct FrontDoor {
    core: Arc<Core>,
}

type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl FrontDoorService for FrontDoor {
    type GenerateStream = GenerateStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<GenerateStream>, Status> {
        let traceparent = request.metadata().get("traceparent");
        let traceparent =
            traceparent.and_then(|value| http::HeaderValue::from_bytes(value.as_bytes()).ok());
        let traceparent = trace_context(traceparent.as_ref());
        let steering = Steering::read(request.metadata().as_ref());
        let client = request.extensions().get::<Client>().and_then(|client| client.0);
        let message = request.into_inner();
        let sent_id = Some(message.request_id.as_bytes()).filter(|id| !id.is_empty());
        let Identity { request_id, arrived } = Identity::new(sent_id);
        let is_chat = matches!(message.prompt, Some(Prompt::Chat(_)));
        let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
        let mut scope = Scope::open(&self.core, endpoint, arrived, client);
        let steering = steering.map_err(|error| {
            scope.end(error.outcome());
            status(&request_id, &error)
        })?;
        let bytes = message.encoded_len();
        let make = Box::new(move || body_of(message));
        let body = Payload::Made { bytes, make };
        let call = Call {
            endpoint,
            body,
            steering,
            request_id: request_id.clone(),
            traceparent,
            usage_detail: false,
        };
        let reply = serve(&self.core, call, scope).await.map_err(|e| status(&request_id, &e))?;
        let decision = reply.route.0.into_iter().next().unwrap_or_default();
        let ReplyBody::Events(events) = reply.body else {
            let error = Error::new(Kind::Internal, "a stream was asked for");
            return Err(status(&request_id, &error));
        };
        let started = started(request_id.clone(), &decision);
        let rest = responses(events, request_id, decision, is_chat);
        Ok(Response::new(Box::pin(stream::iter([Ok(started)]).chain(rest))))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = self
            .core
            .serving()
            .models
            .iter()
            .map(|served| v1::Model {
                name: served.config.name.clone(),
                aliases: served.config.aliases.clone(),
                adapters: served.config.adapters.clone(),
                block_size: served.pool.block_size(),
            })
            .collect();
        Ok(Response::new(v1::ListModelsResponse { models }))
    }
}

/// The one place where an error becomes a gRPC status.
fn status(request_id: &str, error: &Error) -> Status {
    log_failure(request_id, error);
    let mut status = error.to_grpc();
    if let Ok(id) = request_id.parse() {
        status.metadata_mut().insert("x-request-id", id);
    }
    status
}

fn response(event: Event) -> v1::GenerateResponse {
    v1::GenerateResponse { event: Some(event) }
}

fn started(request_id: Name, decision: &DecisionHandle) -> v1::GenerateResponse {
    let decision = decision.read();
    let route = v1::Route {
        flow: decision.flow.to_owned(),
        prefill_worker: decision.prefill_worker.map(String::from),
        decode_worker: decision.decode_worker.unwrap_or_default().into(),
        overlap_blocks: decision.overlap_blocks,
    };
    response(Event::Started(v1::Started { request_id: request_id.into(), route: Some(route) }))
}

/// What this door reads of an OpenAI chunk.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<ChunkUsage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    #[serde(alias = "reasoning_content")]
    reasoning: Option<String>,
}

#[derive(Deserialize)]
struct ChunkUsage {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

fn responses(
    events: Events,
    request_id: Name,
    decision: DecisionHandle,
    is_chat: bool,
) -> impl Stream<Item = Result<v1::GenerateResponse, Status>> + Send {
    let mut events = events;
    // What one event has become, and is still to be said; its room serves all events.
    let mut left = VecDeque::new();
    stream::poll_fn(move |context| {
        loop {
            if let Some(said) = left.pop_front() {
                return Poll::Ready(Some(Ok(said)));
            }
            let failed = match ready!(events.as_mut().poll_next(context)) {
                None => return Poll::Ready(None),
                Some(Ok(data)) => match convert(&data, &decision, is_chat, &mut left) {
                    Some(()) => continue,
                    None => {
                        let what = "an engine sent a chunk that is not OpenAI's";
                        Error::new(Kind::EngineFailed, what)
                    }
                },
                Some(Err(error)) => error,
            };
            return Poll::Ready(Some(Err(status(&request_id, &failed))));
        }
    })
}

fn convert(
    data: &Bytes,
    decision: &DecisionHandle,
    is_chat: bool,
    out: &mut VecDeque<v1::GenerateResponse>,
) -> Option<()> {
    let chunk: Chunk = serde_json::from_slice(data).ok()?;
    for Choice { index, text, delta, finish_reason } in chunk.choices {
        let (text, reasoning) = match delta {
            Some(delta) if is_chat => (delta.content, delta.reasoning),
            _ => (text, None),
        };
        let text = text.unwrap_or_default();
        if !text.is_empty() || reasoning.is_some() {
            out.push_back(response(Event::Delta(v1::Delta { index, text, reasoning })));
        }
        if let Some(finish_reason) = finish_reason {
            let finished = v1::Finished { index, finish_reason };
            out.push_back(response(Event::Finished(finished)));
        }
    }
    // Running totals are not asked for here, so usage comes once, at the end.
    if let Some(usage) = chunk.usage {
        let cached_tokens = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
        let source = match (cached_tokens, decision.with(|decision| decision.cached_source)) {
            (Some(_), Some("engine")) => v1::CachedSource::Engine,
            (Some(_), _) => v1::CachedSource::Estimate,
            (None, _) => v1::CachedSource::Unspecified,
        };
        out.push_back(response(Event::Usage(v1::Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens,
            cached_source: source.into(),
        })));
    }
    Some(())
}

/// `grpc.health.v1`, in agreement with `/ready`.
struct Readiness {
    core: Arc<Core>,
    stop: CancellationToken,
}

/// Between two looks of a health watch.
const WATCH_PERIOD: Duration = Duration::from_millis(500);

impl Readiness {
    fn status(core: &Core) -> tonic_health::pb::HealthCheckResponse {
        use tonic_health::ServingStatus;
        let ready = core.unready().is_none();
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        tonic_health::pb::HealthCheckResponse { status: status as i32 }
    }

    fn known(service: &str) -> Result<(), Status> {
        match service {
            "" | "splitrail.v1.FrontDoorService" => Ok(()),
            _ => Err(Status::not_found("there is no such service")),
        }
    }
}

#[tonic::async_trait]
impl Health for Readiness {
    type WatchStream =
        Pin<Box<dyn Stream<Item = Result<tonic_health::pb::HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<tonic_health::pb::HealthCheckRequest>,
    ) -> Result<Response<tonic_health::pb::HealthCheckResponse>, Status> {
        Self::known(&request.get_ref().service)?;
        Ok(Response::new(Self::status(&self.core)))
    }

    async fn watch(
        &self,
        request: Request<tonic_health::pb::HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Self::known(&request.get_ref().service)?;
        let state = (Arc::clone(&self.core), None::<i32>);
        let changes = stream::unfold(state, |(core, last)| async move {
            loop {
                let now = Self::status(&core);
                if Some(now.status) != last {
                    return Some((Ok(now), (core, Some(now.status))));
                }
                tokio::time::sleep(WATCH_PERIOD).await;
            }
        });
        // A watch never ends by itself: it must not hold a drain up.
        let stop = self.stop.clone().cancelled_owned();
        Ok(Response::new(Box::pin(changes.take_until(stop))))
    }
}
