//! What routers ask for.

use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::async_nats::Subscriber;
use splitrail_event_plane::names;
use splitrail_proto::v1::PlaneAsk;
use tokio::time::sleep;

use super::Plane;

/// Backoff before subscribing again.
const PAUSE: Duration = Duration::from_secs(1);

/// Listens. Never ends.
pub(super) async fn run(plane: &Plane) {
    let (model, worker) = plane.names();
    loop {
        let subscribe = |subject| plane.broker.client.subscribe(subject);
        let all = subscribe(names::ask_all(model)).await;
        let one = subscribe(names::ask(model, worker)).await;
        match (all, one) {
            (Ok(all), Ok(one)) => hear(plane, all, one).await,
            (Err(error), _) | (_, Err(error)) => plane.failed("subscribe", &error),
        }
        sleep(PAUSE).await;
    }
}

/// Until a subscription ends.
async fn hear(plane: &Plane, mut all: Subscriber, mut one: Subscriber) {
    loop {
        tokio::select! {
            asked = all.next() => match asked {
                Some(_) => plane.asked.notify_one(),
                None => return,
            },
            asked = one.next() => match asked {
                Some(message) => {
                    let ask = PlaneAsk::decode(message.payload).unwrap_or_default();
                    let PlaneAsk { who, reason, .. } = ask;
                    tracing::info!(router = who.escape_debug().to_string(), reason = reason.escape_debug().to_string(), "a router asks for everything again");
                    plane.wish_for_snapshot();
                }
                None => return,
            },
        }
    }
}
