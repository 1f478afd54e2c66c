//! Forwards a shim's stream, from the listener or from the event plane, to the session of its worker.

use std::sync::Arc;

use tonic::Status;

use super::context::AttachContext;
use super::credentials::Allowed;
use super::greet;
use super::inbound::Inbound;
use super::registry::{Outbound, PendingStream, Registration};
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
        Ok(request) => {
            match context.registry.register(Box::new(PendingStream { request, inbound, outbound }))
            {
                Registration::Passed => return,
                Registration::Own(lease, stream) => {
                    return Session::new(context, lease).run(stream).await;
                }
                Registration::Refused(status, outbound) => (status, outbound),
            }
        }
        Err(status) => (status, outbound),
    };
    let (status, outbound) = refused;
    context.count(status.code());
    tracing::warn!(%status, "a shim is turned away");
    let _gone = outbound.try_send(Err(status));
}
