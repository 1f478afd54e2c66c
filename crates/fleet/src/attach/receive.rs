//! Forwards a shim's stream, from the listener or from the event plane, to the session of its worker.

use std::sync::Arc;

use tonic::Status;

use super::context::AttachContext;
use super::credentials::Allowed;
use super::greet;
use super::inbound::Inbound;
use super::seats::{Newcomer, Outbound, Seated};
use super::session::Session;

/// Takes a stream from its first message to its end.
pub(super) async fn receive(
    context: Arc<AttachContext>,
    mut inbound: Inbound,
    outbound: Outbound,
    allowed: Allowed,
) {
    let greeting = greet::greet(&context.cluster, &context.fleet, &mut inbound, &allowed);
    let greeted = tokio::select! {
        () = context.stop.cancelled() => Err(Status::unavailable("the router stops")),
        () = outbound.closed() => return,
        greeted = greeting => greeted,
    };
    let refused = match greeted {
        Ok(guest) => match context.seats.take(Box::new(Newcomer { guest, inbound, outbound })) {
            Seated::Passed => return,
            Seated::Own(chair, newcomer) => {
                return Session::new(context, chair).run(newcomer).await;
            }
            Seated::Refused(status, outbound) => (status, outbound),
        },
        Err(status) => (status, outbound),
    };
    let (status, outbound) = refused;
    context.count(status.code());
    tracing::warn!(%status, "a shim is turned away");
    let _gone = outbound.try_send(Err(status));
}
