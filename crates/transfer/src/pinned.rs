//! What decode engines keep pinned after a leg, for prefill legs that read it back.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::{Model, PeerFetch};
use splitrail_engine::connectors::nixl::PinnedKv;
use splitrail_engine::dialect::Dialect;
use splitrail_fleet::read_back::{NewPin, ReadBack};
use splitrail_fleet::{ServedModel, Worker};
use splitrail_reply::dialect;
use splitrail_telemetry::Metrics;

/// A token with which pins are released whose prompt is not known. The engine reads nothing for it.
pub const ANY_TOKEN: u32 = 1;

/// Whether what engines of the model keep pinned after decode legs is read back or released: prefill legs
/// read KV back, or workers take prefixes as with a decode leg.
pub fn may_pin(config: &Model) -> bool {
    (config.read_back || config.fetches_prefixes()) && config.connector.is_pulled()
}

/// Whether the model reads KV back, and the engine reports token ids on this endpoint.
pub fn reads_back(config: &Model, endpoint: Endpoint) -> bool {
    config.read_back && config.connector.is_pulled() && reports_ids(endpoint)
}

/// Whether engines report the token ids of prompts on this endpoint, or get them in the request.
pub fn reports_ids(endpoint: Endpoint) -> bool {
    matches!(endpoint, Endpoint::Chat | Endpoint::Completions | Endpoint::Generate)
}

/// Releases what the engine of a reply keeps pinned and nothing will read: that of a leg that only
/// took a hand-off, or of an endpoint whose token ids are not to be had.
pub fn release_pinned(
    served: &Arc<ServedModel>,
    metrics: &Arc<Metrics>,
    holder: &Arc<Worker>,
    dialect: Dialect,
    reply: &JsonObject,
) {
    if may_pin(&served.config)
        && let Some(kv) = read_pinned(served, holder, reply, !dialect::ended(dialect, reply))
    {
        let (first_token, since) = (ANY_TOKEN, Instant::now());
        let holder = Arc::clone(holder);
        let new_pin = NewPin { kv, holder, first_token, hashes: Vec::new(), since };
        ReadBack::keep(served, metrics, new_pin);
    }
}

/// The same, for a reply that is not read otherwise.
pub fn release_pinned_of(
    served: &Arc<ServedModel>,
    metrics: &Arc<Metrics>,
    holder: &Arc<Worker>,
    dialect: Dialect,
    reply: Bytes,
) {
    if may_pin(&served.config)
        && let Ok(reply) = JsonObject::parse(reply)
    {
        release_pinned(served, metrics, holder, dialect, &reply);
    }
}

/// What the engine of a decode leg with a hand-off keeps pinned, as its reply says. The reply shows
/// as well that the engine keeps something, or that it keeps nothing if `shows_absence`.
pub fn read_pinned(
    served: &ServedModel,
    holder: &Worker,
    reply: &JsonObject,
    shows_absence: bool,
) -> Option<PinnedKv> {
    let (model, worker) = (served.name(), holder.id());
    let kv = match PinnedKv::from_reply(reply.raw("kv_transfer_params").unwrap_or("null")) {
        Ok(Some(kv)) => kv,
        Ok(None) => {
            // With `auto`, workers take prefixes in two steps alone, for which nothing need be pinned.
            let Model { read_back, peer_fetch, .. } = &served.config;
            let matters = *read_back || *peer_fetch == PeerFetch::OneShot;
            if shows_absence && matters && holder.transfer.read_back.set_keeps_for_read_back(false)
            {
                let what = "the engine keeps nothing pinned after a decode leg: without \
                            bidirectional_kv_xfer it takes part in no read-back and takes no prefix \
                            in one shot";
                tracing::warn!(model, worker, "{what}");
            }
            return None;
        }
        Err(error) => {
            tracing::warn!(model, worker, %error, "what the engine keeps pinned cannot be used");
            return None;
        }
    };
    if holder.transfer.read_back.set_keeps_for_read_back(true) {
        tracing::info!(model, worker, "the engine has bidirectional_kv_xfer");
    }
    // A prefill engine would connect to that host.
    if served.admit_host(holder, &kv.host, None).is_err() {
        let what = "the engine keeps KV for read-back at a host outside the fleet (see \
                    hand_off_networks)";
        tracing::warn!(model, worker, "{what}");
        return None;
    }
    Some(kv)
}
