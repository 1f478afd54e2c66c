//! A worker's KV events: whether they arrive, whose they are, and whether they can be replayed.

use std::time::Duration;

use splitrail_config::model::WorkerConfig;
use splitrail_engine::kv_events::{LiveStream, Subscription};
use splitrail_engine::zmtp::{AddressFilter, Endpoint};
use splitrail_engine_client::Engine;
use splitrail_engine_client::networks::Networks;
use splitrail_kv::KvEvent;
use tokio::time::{Instant, timeout_at};

use super::Asker;
use crate::facts::{EventsFact, ReplayFact};

/// Maximum size of one message with KV events, in bytes.
const PAYLOAD_MAX_BYTES: usize = 4 << 20;
/// Maximum number of batches of other requests that are read while the prompt's is awaited.
const BATCHES_MAX: usize = 4096;

/// The subscription to the first rank of a worker; `None` without an address.
pub(crate) fn subscription(
    asker: &Asker<'_>,
    worker: &WorkerConfig,
    networks: &Networks,
) -> Option<Subscription> {
    let endpoint =
        |address: Option<&str>| -> Option<Endpoint> { address.and_then(|text| text.parse().ok()) };
    let (events, replay) = (worker.written_events(), worker.kv_replay.as_deref());
    let mut subscription = Subscription::new(endpoint(events)?, endpoint(replay));
    subscription.limits.max_payload_bytes = PAYLOAD_MAX_BYTES;
    let left = |patience: Duration| asker.until(patience).saturating_duration_since(Instant::now());
    subscription.timing.connect_timeout = left(super::QUESTION_TIMEOUT);
    subscription.timing.replay_timeout = left(super::QUESTION_TIMEOUT);
    if asker.subject.is_guarded() {
        let networks = networks.clone();
        subscription.admits = Some(AddressFilter::new(move |ip| networks.admit(ip)));
    }
    Some(subscription)
}

/// Connects to the publisher.
pub(crate) async fn listen(subscription: &Subscription) -> Result<LiveStream, EventsFact> {
    subscription.listen().await.map_err(|error| EventsFact::Unreachable(error.to_string()))
}

/// Asks the replay service.
pub(crate) async fn replay(subscription: &Subscription) -> ReplayFact {
    if subscription.replay_endpoint.is_none() {
        return ReplayFact::Untested;
    }
    match subscription.check_replay().await {
        Ok(()) => ReplayFact::Answers,
        Err(error) => ReplayFact::Fails(error.to_string()),
    }
}

/// Waits for the events of a prompt that was just served: those with `tokens`, or any if these are
/// not known.
pub(crate) async fn arrival(
    stream: &mut LiveStream,
    tokens: Option<&[u32]>,
    until: Instant,
) -> EventsFact {
    let mut fact = EventsFact::Silent;
    for _ in 0..BATCHES_MAX {
        let Ok(next) = timeout_at(until, stream.next()).await else { return fact };
        match next {
            Err(error) => return EventsFact::Unreachable(error.to_string()),
            Ok(Err(garbage)) => fact = EventsFact::Undecodable(garbage.to_string()),
            Ok(Ok(events)) if events.iter().any(|event| is_of(event, tokens)) => {
                return EventsFact::Arrived;
            }
            Ok(Ok(_)) if fact == EventsFact::Silent => fact = EventsFact::OfAnother,
            Ok(Ok(_)) => {}
        }
    }
    fact
}

/// Whether an event stores the first block of the prompt with these tokens; without tokens, whether
/// it stores anything.
fn is_of(event: &KvEvent, tokens: Option<&[u32]>) -> bool {
    let KvEvent::Stored { blocks, .. } = event else { return false };
    let Some(tokens) = tokens else { return true };
    let first = blocks.first().map(|block| &block.tokens[..]);
    first.is_some_and(|block| !block.is_empty() && tokens.starts_with(block))
}
