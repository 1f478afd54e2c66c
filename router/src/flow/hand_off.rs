//! What ties a prefill leg to its decode leg, in each connector's words.

use splitrail_engine::mooncake::TransferId;
use splitrail_engine::{nixl, sglang};

use crate::api::JsonObject;

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
    /// Mooncake: the name of the transfer.
    Pushed(&'a TransferId),
    /// SGLang: the room in which to meet it.
    Met(&'a RoomMembers),
}

impl Lead<'_> {
    /// Whether prefill samples the first token for decode, and so must sample as the
    /// client asked; else its token is thrown away.
    pub fn samples(&self) -> bool {
        matches!(self, Self::Met(_))
    }

    /// Adds what the prefill leg's body carries.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Pulled => body.set(KV_TRANSFER_PARAMS, nixl::PREFILL_PARAMS_JSON),
            Self::Stored => {}
            Self::Pushed(transfer) => {
                body.set(KV_TRANSFER_PARAMS, transfer.prefill_params_json());
            }
            Self::Met(members) => put_members(members, body),
        }
    }
}

/// What a decode leg is given of its prefill leg. It is spent on one request: it cannot
/// be cloned, and putting it into a body consumes it.
#[derive(Debug)]
pub enum HandOff {
    /// NIXL's, as the prefill engine wrote it.
    Pulled(nixl::HandOff),
    /// Shared storage's: the blocks are where any request finds them.
    Stored,
    /// Mooncake's: where the transfer comes from, as raw JSON.
    Pushed(String),
    /// SGLang's room.
    Met(RoomMembers),
}

impl HandOff {
    /// SGLang's, with the prefill leg's half of it.
    pub fn meeting(room: sglang::Room, host: &str, port: u16) -> (RoomMembers, Self) {
        let members = room.into_members(host, port);
        (members.clone(), Self::Met(members))
    }

    /// Adds what the decode leg's body carries.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Pulled(hand_off) => body.set(KV_TRANSFER_PARAMS, hand_off.into_json().get()),
            Self::Stored => {}
            Self::Pushed(params) => body.set(KV_TRANSFER_PARAMS, params),
            Self::Met(members) => put_members(&members, body),
        }
    }

    /// Whether it is gone once a request has carried it.
    pub fn is_single_use(&self) -> bool {
        !matches!(self, Self::Stored)
    }

    /// Prompt tokens that prefill had cached, where the hand-off tells.
    pub fn cached_tokens(&self) -> Option<u32> {
        match self {
            Self::Pulled(hand_off) => hand_off.remote_prefill_cached_tokens(),
            Self::Stored | Self::Pushed(_) | Self::Met(_) => None,
        }
    }
}

fn put_members(members: &RoomMembers, body: &mut JsonObject) {
    for (key, raw) in members {
        body.set(key, raw.as_str());
    }
}
