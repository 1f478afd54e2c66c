//! Forwards a shim's stream to the session of its worker.

use std::sync::Arc;

use tonic::Status;

use super::context::AttachContext;
use super::credentials::AllowedWorkers;
use super::hello;
use super::inbound::Inbound;
use super::registry::{Outbound, PendingStream, RegisterResult};
use super::session::Session;

/// Serves a stream from its hello to its end.
pub(super) async fn receive(
    context: Arc<AttachContext>,
    mut inbound: Inbound,
    outbound: Outbound,
    allowed: AllowedWorkers,
) {
    let reading = hello::read_hello(&context.cluster, &context.fleet, &mut inbound, &allowed);
    let checked = tokio::select! {
        () = context.stop.cancelled() => Err(Status::unavailable("the router stops")),
        () = outbound.closed() => return,
        checked = reading => checked,
    };
    let (status, outbound) = match checked {
        Ok(hello) => {
            match context.registry.register(Box::new(PendingStream { hello, inbound, outbound })) {
                RegisterResult::Passed => return,
                RegisterResult::Own(guard, stream) => {
                    return Session::new(context, guard).run(stream).await;
                }
                RegisterResult::Refused(status, outbound) => (status, outbound),
            }
        }
        Err(status) => (status, outbound),
    };
    context.count(status.code());
    if context.refused.may_log() {
        tracing::warn!(code = ?status.code(), why = status.message(), "a shim is refused");
    }
    let _gone = outbound.try_send(Err(status));
}
