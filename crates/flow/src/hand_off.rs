//! What connects a prefill leg with its decode leg, in the format of each connector.

use std::time::Instant;

use splitrail_engine::nixl::PREFILL_PARAMS_JSON;

use splitrail_api::{Endpoint, JsonObject};
use splitrail_config::model::Connector;
use splitrail_fleet::Served;
use splitrail_fleet::{Exclusion, Pool, Worker};
use splitrail_ledger::veto::VetoReason;
use splitrail_policy::Leg;

/// The member in which vLLM's connectors talk.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// The members that lead both legs to their room.
pub type RoomMembers = [(&'static str, String); 3];

/// What a prefill leg is told of the decode leg to come.
#[derive(Clone, Copy, Debug)]
pub enum Lead<'a> {
    /// NIXL: that there will be one; the reply says how to reach the blocks.
    Pulled,
    /// Shared storage: nothing.
    Stored,
    /// Mooncake: the name of the transfer, as raw JSON.
    Pushed(&'a str),
    /// SGLang: the room in which to meet it.
    Met(&'a RoomMembers),
}

impl Lead<'_> {
    /// Whether prefill samples the first token for decode, and so must sample as the
    /// client asked; else its token is thrown away.
    pub fn samples(self) -> bool {
        matches!(self, Self::Met(_))
    }

    /// Adds what the prefill leg's body carries.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Pulled => body.set(KV_TRANSFER_PARAMS, PREFILL_PARAMS_JSON),
            Self::Stored => {}
            Self::Pushed(params) => body.set(KV_TRANSFER_PARAMS, params),
            Self::Met(members) => put_members(members, body),
        }
    }
}

/// What a decode leg carries of its prefill leg.
#[derive(Clone, Copy, Debug)]
pub enum Carried<'a> {
    /// Nothing: there was none, or the blocks are where any request finds them.
    Nothing,
    /// The parameters of one of vLLM's connectors, as raw JSON.
    Params(&'a str),
    /// SGLang's room.
    Room(&'a RoomMembers),
}

impl Carried<'_> {
    /// Adds it to the decode leg's body.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Nothing => {}
            Self::Params(params) => body.set(KV_TRANSFER_PARAMS, params),
            Self::Room(members) => put_members(members, body),
        }
    }
}

fn put_members(members: &RoomMembers, body: &mut JsonObject) {
    for (key, raw) in members {
        body.set(key, raw.as_str());
    }
}

/// Workers from which no hand-off is to be expected on a path, as was seen: none where the
/// connector's replies carry none.
pub(super) fn missing(served: &Served, endpoint: Endpoint, now: Instant) -> Vec<Exclusion> {
    let dialect = endpoint.dialect();
    if served.config.connector != Connector::Nixl || !dialect.names_events() {
        return Vec::new();
    }
    let misses = |worker: &&Worker| !worker.hand_overs.may_come(dialect, now);
    let roster = served.pool.roster();
    let missing = roster.iter().map(|worker| &**worker).filter(misses);
    missing.map(|worker| Exclusion::new(worker.index, VetoReason::NoHandOff)).collect()
}

/// The last worker that can decode: it is not asked for the prefill, since an engine does not
/// hand over to itself.
pub(super) fn kept_for_decode(pool: &Pool, failed: &[Exclusion]) -> Vec<Exclusion> {
    let last = pool.last_up(Leg::Decode, failed);
    last.map(|worker| Exclusion::new(worker, VetoReason::KeptForDecode)).into_iter().collect()
}

/// Whether no hand-off is to be expected from any prefill worker that could be asked.
pub(super) fn none_comes(served: &Served, endpoint: Endpoint, now: Instant) -> bool {
    let missing = missing(served, endpoint, now);
    if missing.is_empty() {
        return false;
    }
    let spared = kept_for_decode(&served.pool, &[]);
    let others = served.pool.any_up(Leg::Prefill, &[&spared[..], &missing].concat());
    !others && served.pool.any_up(Leg::Prefill, &spared)
}
