//! Requests of routers: for an introduction of all workers, or a snapshot of one.

use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::Subscriber;
use splitrail_event_plane::names;
use splitrail_proto::v1::PlaneAsk;
use tokio::time::sleep;

use super::session::PlaneSession;

/// Delay before subscribing again.
const RESUBSCRIBE_DELAY: Duration = Duration::from_secs(1);

/// Subscribes to requests and handles them. Never ends.
pub(super) async fn run(plane: &PlaneSession) {
    let (model, worker) = plane.model_and_worker();
    loop {
        let subscribe = |subject| plane.broker.client.subscribe(subject);
        let all = subscribe(names::ask_all(model)).await;
        let one = subscribe(names::ask(model, worker)).await;
        match (all, one) {
            (Ok(all), Ok(one)) => handle_requests(plane, all, one).await,
            (Err(error), _) | (_, Err(error)) => plane.record_failure("subscribe", &error),
        }
        sleep(RESUBSCRIBE_DELAY).await;
    }
}

/// Handles requests until a subscription ends.
async fn handle_requests(plane: &PlaneSession, mut all: Subscriber, mut one: Subscriber) {
    loop {
        tokio::select! {
            hello_requested = all.next() => match hello_requested {
                Some(_) => plane.hello_requested.notify_one(),
                None => return,
            },
            hello_requested = one.next() => match hello_requested {
                Some(message) => {
                    let ask = PlaneAsk::decode(message.payload).unwrap_or_default();
                    let PlaneAsk { who, reason, .. } = ask;
                    tracing::info!(router = who.escape_debug().to_string(), reason = reason.escape_debug().to_string(), "a router asks for everything again");
                    plane.request_snapshot();
                }
                None => return,
            },
        }
    }
}
