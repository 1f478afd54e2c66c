//! The gRPC API: the same core as for HTTP, with another framing.
//!
//! Calls of `FrontDoorService` use neither the tower layers nor the server of the gRPC library: the
//! single message of a call is read by `message`, and the messages of its reply are written by
//! `events`; `body` converts the message to the body that the core takes. The library serves health
//! and reflection, which are called rarely.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use bytes::Bytes;
use http::Request;
use splitrail_proto::v1::front_door_service_server::SERVICE_NAME;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes as Services;
use tonic_health::pb::health_server::HealthServer;

use super::connection_service::{Caller, DirectService, Routes};
use super::cross_origin::AllowedOrigins;
use crate::core::Core;

mod body;
mod call;
mod decode;
mod events;
mod explain;
mod head;
mod health;
mod library;
mod message;
mod places;
mod weigh;

pub(super) use call::answer;
pub(super) use head::is_grpc;
use health::Readiness;
use library::Guard;
use places::CallPlaces;

/// The gRPC API: `FrontDoorService`, health and reflection. The future updates health watches until
/// the router stops; its error is why it could not begin.
pub fn routes(
    core: &Arc<Core>,
    stop: CancellationToken,
) -> (Routes, impl Future<Output = io::Result<()>> + use<>) {
    let places = CallPlaces::new(Arc::clone(core));
    let (readiness, told) = Readiness::new(Arc::clone(core), stop, Arc::clone(&places));
    let guard = Guard { core: Arc::clone(core), places };
    let all = open(readiness).layer(from_fn_with_state(guard, library::guarded));
    let hosts = Arc::default();
    let origins = AllowedOrigins::default();
    (Routes { direct: Some(DirectService::Grpc(Arc::clone(core))), all, hosts, origins }, told)
}

/// The services that answer also when no place is free.
fn open(readiness: Readiness) -> Router {
    let mut open = Services::new(HealthServer::new(readiness));
    // Older clients use the earlier name of reflection.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => open = open.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "gRPC reflection is not available");
        }
    }
    open.into_axum_router()
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(splitrail_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// The status of a `Generate` call that fails before its reply begins; `None` if it does not. For
/// tests of the effects of messages.
pub async fn refusal(
    core: &Arc<Core>,
    request: Request<impl http_body::Body<Data = Bytes> + Unpin>,
) -> Option<i32> {
    let peer = SocketAddr::from(([127, 0, 0, 1], 0));
    let caller = Caller { peer, certificate: None, room: None };
    let response = answer(Arc::clone(core), Method::Generate, caller, request).await;
    let status = response.headers().get("grpc-status")?;
    Some(status.to_str().ok()?.parse().unwrap_or(-1))
}

/// A method of `FrontDoorService`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Generate,
    Explain,
    ListModels,
}

impl Method {
    /// The name as an endpoint in the access log. `Generate` has the endpoint of its prompt, once
    /// the message is read.
    fn endpoint(self) -> &'static str {
        match self {
            Self::Generate => "none",
            Self::Explain => "explain",
            Self::ListModels => "models",
        }
    }

    /// The method that a request calls.
    pub(super) fn of<B>(request: &Request<B>) -> Option<Self> {
        let path = request.uri().path().strip_prefix('/')?.strip_prefix(SERVICE_NAME)?;
        match path {
            "/Generate" => Some(Self::Generate),
            "/Explain" => Some(Self::Explain),
            "/ListModels" => Some(Self::ListModels),
            _ => None,
        }
    }
}
