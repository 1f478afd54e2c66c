//! Checks calls before the gRPC library serves them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use tonic::Status;

use super::super::identify::identify;
use super::super::request_body::BoundedBody;
use super::head::{self, Deadline};
use super::places::CallPlaces;
use crate::core::Core;
use splitrail_client_connection::certificate::ClientCertificate;
use splitrail_settings::address_shares::AddressPlace;

/// The state of the check.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) core: Arc<Core>,
    pub(super) places: Arc<CallPlaces>,
}

/// Prefix of the paths of all reflection services.
const REFLECTION: &str = "/grpc.reflection.";

/// Checks a call's head and the credential of reflection calls, bounds its body in size and time,
/// and bounds the number of reflection calls, which would stay open while their client sends
/// nothing.
pub(super) async fn guarded(
    State(guard): State<Guard>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    mut request: Request,
    next: Next,
) -> Response {
    let deadline = match head::check(&request, Instant::now()) {
        Ok(deadline) => deadline,
        Err(refusal) => return refusal.into_response(),
    };
    if deadline.is_some_and(Deadline::is_over) {
        return Deadline::status().into_http();
    }
    request.extensions_mut().insert(deadline);
    let place = match request.uri().path().starts_with(REFLECTION) {
        true => match reflecting(&guard, peer, &request) {
            Ok(place) => Some(place),
            Err(status) => return status.into_http(),
        },
        false => None,
    };
    let serving = guard.core.serving();
    let memory = guard.core.memory.of_client(guard.core.admission.of_address(peer.ip()));
    let request = request.map(|body| {
        let body = BoundedBody::new(body, &guard.core, &serving.limits, &memory, 0);
        // The call has its place until its body is dropped.
        Body::new(body.map_frame(move |frame| {
            let _held = &place;
            frame
        }))
    });
    drop(serving);
    next.run(request).await
}

/// The place of a reflection call, which needs a credential like other calls.
fn reflecting(guard: &Guard, peer: SocketAddr, request: &Request) -> Result<AddressPlace, Status> {
    let certificate = request.extensions().get::<Arc<ClientCertificate>>();
    let certificate = certificate.map(|certificate| &**certificate);
    identify(&guard.core, "grpc", peer.ip(), request.headers(), certificate)
        .map_err(|error| error.to_grpc())?;
    guard.places.take(peer.ip())
}
