//! Answers shims that ask over the event plane how blocks are hashed.

use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::{Broker, names};
use splitrail_kv::HASH_LAYOUT;
use splitrail_proto::v1;
use tokio::time::sleep;

use crate::context::AttachContext;
use crate::hello::PROTOCOL;
use splitrail_fleet::ServedModel;

/// Pause before subscribing again.
const PAUSE: Duration = Duration::from_secs(1);

/// Answers all questions. Never ends.
pub(super) async fn run(context: &AttachContext, broker: &Broker) {
    loop {
        match broker.client.subscribe(names::terms_of_all()).await {
            Ok(mut questions) => {
                while let Some(question) = questions.next().await {
                    let Some(reply) = question.reply else { continue };
                    let Ok(ask) = v1::PlaneAsk::decode(question.payload) else { continue };
                    let serving = context.cluster.serving();
                    // A shim must name a model, not an adapter.
                    let named = serving.names.get(&ask.model);
                    let Some(named) = named.filter(|named| named.adapter.is_none()) else {
                        continue;
                    };
                    let terms = of(context, &serving.models[named.model]);
                    drop(serving);
                    let sent = broker.client.publish(reply, terms.encode_to_vec().into()).await;
                    if let Err(error) = sent {
                        tracing::debug!(%error, "cannot publish to the broker");
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "cannot subscribe to the questions of shims"),
        }
        sleep(PAUSE).await;
    }
}

/// How this router hashes a model's blocks. The block size is 0 if it is that of the engines: a shim
/// then hashes with its own engine's, and another one keeps no worker from attaching.
pub(super) fn of(context: &AttachContext, served: &ServedModel) -> v1::Welcome {
    let interval = context.config.load_interval.as_millis();
    v1::Welcome {
        protocol: PROTOCOL,
        router_id: context.router_id.clone(),
        hash_seed: context.cluster.hash_seed.0,
        hash_layout: HASH_LAYOUT,
        model: served.name().to_owned(),
        block_size: match served.pool.learns_block_size() {
            true => 0,
            false => served.pool.block_size(),
        },
        blocks_max: context.cluster.serving().limits.index_blocks_per_worker_max as u64,
        load_interval_ms: u32::try_from(interval).unwrap_or(u32::MAX),
        known_sequence: None,
    }
}

/// Whether a shim hashes blocks in the same way as this router.
pub(super) fn agree(ours: &v1::Welcome, theirs: &v1::Welcome) -> bool {
    let is_size = ours.block_size == 0 || ours.block_size == theirs.block_size;
    is_size
        && (ours.hash_seed, ours.hash_layout, &ours.model)
            == (theirs.hash_seed, theirs.hash_layout, &theirs.model)
}
