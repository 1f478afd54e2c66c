//! `grpc.health.v1`: the result of `/ready` over gRPC.
//!
//! A client that checks health keeps one watch open for the lifetime of its channel. So watches may
//! stay open, are bounded in number, and share one timer.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use futures_util::Stream;
use futures_util::stream::{self, StreamExt};
use splitrail_proto::v1::front_door_service_server::SERVICE_NAME;
use tokio::sync::watch;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::head::Deadline;
use super::places::CallPlaces;
use crate::core::Core;
use splitrail_settings::address_shares::AddressPlace;

/// The service `grpc.health.v1`, consistent with `/ready`.
pub(super) struct Readiness {
    core: Arc<Core>,
    stop: CancellationToken,
    places: Arc<CallPlaces>,
    /// The current status, for watches.
    sender: Arc<watch::Sender<ServingStatus>>,
}

/// Interval at which the status is computed for all health watches.
const WATCH_PERIOD: Duration = Duration::from_millis(500);

impl Readiness {
    /// The service, and the future that updates the status until the router stops.
    pub(super) fn new(
        core: Arc<Core>,
        stop: CancellationToken,
        places: Arc<CallPlaces>,
    ) -> (Self, impl Future<Output = io::Result<()>> + use<>) {
        let sender = Arc::new(watch::Sender::new(status_of(&core)));
        let refreshing = refresh_periodically(Arc::clone(&core), stop.clone(), Arc::clone(&sender));
        (Self { core, stop, places, sender }, refreshing)
    }

    fn known(service: &str) -> Result<(), Status> {
        match service {
            "" | SERVICE_NAME => Ok(()),
            _ => Err(Status::not_found("there is no such service")),
        }
    }
}

async fn refresh_periodically(
    core: Arc<Core>,
    stop: CancellationToken,
    sender: Arc<watch::Sender<ServingStatus>>,
) -> io::Result<()> {
    loop {
        tokio::select! {
            () = tokio::time::sleep(WATCH_PERIOD) => look(&core, &sender),
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// Updates the status if it has changed.
fn look(core: &Core, sender: &watch::Sender<ServingStatus>) {
    let now = status_of(core);
    sender.send_if_modified(|status| std::mem::replace(status, now) != now);
}

fn status_of(core: &Core) -> ServingStatus {
    match core.unready() {
        None => ServingStatus::Serving,
        Some(_) => ServingStatus::NotServing,
    }
}

fn reply(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status as i32 }
}

#[tonic::async_trait]
impl Health for Readiness {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        Self::known(&request.get_ref().service)?;
        Ok(Response::new(reply(status_of(&self.core))))
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Self::known(&request.get_ref().service)?;
        let extensions = request.extensions();
        let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip());
        let peer = peer.ok_or_else(|| Status::internal("a call without an address"))?;
        let place = self.places.take(peer)?;
        let deadline = extensions.get::<Option<Deadline>>().copied().flatten();
        look(&self.core, &self.sender);
        let status = self.sender.subscribe();
        let watching = OpenWatch { status, last: None, deadline, is_over: false, _place: place };
        let changes = stream::unfold(watching, OpenWatch::next);
        // A watch never ends by itself, but it must not delay a drain.
        let stop = self.stop.clone().cancelled_owned();
        Ok(Response::new(Box::pin(changes.take_until(stop))))
    }
}

/// An open watch.
struct OpenWatch {
    status: watch::Receiver<ServingStatus>,
    /// The status that was last sent to the client.
    last: Option<ServingStatus>,
    deadline: Option<Deadline>,
    is_over: bool,
    _place: AddressPlace,
}

impl OpenWatch {
    /// Waits for the next change of the status.
    async fn next(mut self) -> Option<(Result<HealthCheckResponse, Status>, Self)> {
        while !self.is_over {
            let now = *self.status.borrow_and_update();
            if self.last != Some(now) {
                self.last = Some(now);
                return Some((Ok(reply(now)), self));
            }
            tokio::select! {
                changed = self.status.changed() => changed.ok()?,
                () = passes(self.deadline) => {
                    self.is_over = true;
                    return Some((Err(Deadline::status()), self));
                }
            }
        }
        None
    }
}

/// Waits until a deadline has passed; forever if there is none.
async fn passes(deadline: Option<Deadline>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.at()).await,
        None => std::future::pending().await,
    }
}
