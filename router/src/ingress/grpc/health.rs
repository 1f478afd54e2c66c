//! `grpc.health.v1`: the word of `/ready` in gRPC's framing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::{self, StreamExt};
use splitrail_proto::v1::front_door_service_server::SERVICE_NAME;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::Health;

use crate::core::Core;

/// `grpc.health.v1`, in agreement with `/ready`.
pub(super) struct Readiness {
    pub(super) core: Arc<Core>,
    pub(super) stop: CancellationToken,
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
            "" | SERVICE_NAME => Ok(()),
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
