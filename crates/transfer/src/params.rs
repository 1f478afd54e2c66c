//! The members of request bodies that connect a prefill leg with its decode leg, in the format of
//! each connector.

use splitrail_api::JsonObject;
use splitrail_engine::connectors::nixl::PREFILL_PARAMS_JSON;

/// The member of bodies and replies that vLLM's connectors use.
const KV_TRANSFER_PARAMS: &str = "kv_transfer_params";

/// The member of bodies that names a request, on endpoints that ignore `X-Request-Id` (responses).
const REQUEST_ID: &str = "request_id";

/// The members that name the bootstrap room of both legs (SGLang).
pub type RoomMembers = [(&'static str, String); 3];

/// What the body of a prefill leg says about the decode leg.
#[derive(Clone, Copy, Debug)]
pub enum PrefillParams<'a> {
    /// NIXL: a decode leg will follow; the reply says how to reach the blocks.
    Pulled,
    /// NIXL: the same, and first the KV of these parameters is read from another worker.
    Reads {
        /// The parameters of what is read, as raw JSON.
        params: &'a str,
        /// Whether the engine is asked for the token ids of the prompt.
        asks_for_ids: bool,
    },
    /// Shared storage: the body says nothing.
    Stored,
    /// Mooncake: the transfer parameters with the transfer id, as raw JSON.
    Pushed(&'a str),
    /// NIXL in push mode: the engines match the legs by their request id.
    Matched(Matched<'a>),
    /// SGLang: the bootstrap room of both legs.
    Room(&'a RoomMembers),
}

impl PrefillParams<'_> {
    /// Whether the prefill engine samples the first token of the reply, and so must use the
    /// client's sampling parameters. Otherwise the token of the prefill leg is thrown away.
    pub fn samples(self) -> bool {
        matches!(self, Self::Room(_))
    }

    /// Adds the members to the body of the prefill leg.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Pulled => body.set(KV_TRANSFER_PARAMS, PREFILL_PARAMS_JSON),
            Self::Stored => {}
            Self::Reads { params, asks_for_ids } => {
                body.set(KV_TRANSFER_PARAMS, params);
                if asks_for_ids {
                    body.set("return_token_ids", "true");
                }
            }
            Self::Pushed(params) => body.set(KV_TRANSFER_PARAMS, params),
            Self::Matched(matched) => matched.put(body),
            Self::Room(members) => put_members(members, body),
        }
    }
}

/// The members of a leg that its engine matches with the other leg by the request id.
#[derive(Clone, Copy, Debug)]
pub struct Matched<'a> {
    /// The transfer parameters, as raw JSON.
    pub params: &'a str,
    /// The request id as raw JSON, if the endpoint takes it from the body and not from the header.
    pub request_id: Option<&'a str>,
}

impl Matched<'_> {
    fn put(self, body: &mut JsonObject) {
        body.set(KV_TRANSFER_PARAMS, self.params);
        if let Some(request_id) = self.request_id {
            body.set(REQUEST_ID, request_id);
        }
    }
}

/// What the body of a decode leg says about its prefill leg.
#[derive(Clone, Copy, Debug)]
pub enum DecodeParams<'a> {
    /// Nothing: there was no prefill leg, or the blocks are in a storage where any request finds
    /// them.
    Nothing,
    /// The parameters of one of vLLM's connectors, as raw JSON.
    Params(&'a str),
    /// NIXL in push mode: where decode registers, and the request id.
    Matched(Matched<'a>),
    /// The bootstrap room of SGLang.
    Room(&'a RoomMembers),
}

impl DecodeParams<'_> {
    /// Adds the members to the body of the decode leg.
    pub fn put(self, body: &mut JsonObject) {
        match self {
            Self::Nothing => {}
            Self::Params(params) => body.set(KV_TRANSFER_PARAMS, params),
            Self::Matched(matched) => matched.put(body),
            Self::Room(members) => put_members(members, body),
        }
    }
}

fn put_members(members: &RoomMembers, body: &mut JsonObject) {
    for (key, raw) in members {
        body.set(key, raw.as_str());
    }
}
