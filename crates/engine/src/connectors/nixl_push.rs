//! The NIXL hand-off in push mode (`NixlPushConnector` of vLLM 0.32): the decode engine registers its
//! blocks with the prefill engine, which writes the KV into them.
//!
//! Both legs are sent at once. The engines match them by the request id that both legs carry
//! (`X-Request-Id` on the same endpoint), so an id serves one pair. The decode leg names the prefill
//! engine, whose identity every reply to a prefill leg contains. The identity changes when the engine
//! restarts.

use std::fmt;

use serde::Deserialize;
use serde_json::json;

use crate::connectors::nixl::MAX_HAND_OFF_BYTES;
use crate::json::{self, ShapeError};

const MAX_ENGINE_ID_BYTES: usize = 256;
/// Maximum length of a host name.
const MAX_HOST_BYTES: usize = 255;

/// The identity of a prefill engine, or of one of its data-parallel ranks: where decode engines
/// register.
#[derive(Clone, PartialEq, Eq)]
pub struct PushEngine {
    engine_id: String,
    host: String,
    port: u16,
    tp_size: u32,
    pp_size: u32,
}

/// What a prefill reply says of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushReply {
    /// The engine that has replied.
    pub engine: PushEngine,
    /// Number of prompt tokens that the engine had cached.
    pub cached_tokens: Option<u32>,
}

/// Why `kv_transfer_params` do not name an engine that pushes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The value is null or missing: the engine has no connector.
    #[error("the prefill reply has no `kv_transfer_params`")]
    Absent,
    /// The value is longer than a hand-off can be, or a name in it is.
    #[error("the prefill reply's `kv_transfer_params` are out of bounds")]
    OutOfBounds,
    /// The value is not an object with the fields of a hand-off.
    #[error("hand-off: {0}")]
    Shape(#[from] ShapeError),
    /// The engine's decode engines pull.
    #[error("the engine hands over by pull, which is `connector: nixl`")]
    Pull,
    /// The reply is not that of a prefill engine.
    #[error("the hand-off does not ask for a remote prefill")]
    NotForDecode,
}

#[derive(Deserialize)]
struct Params {
    do_remote_prefill: Option<bool>,
    remote_engine_id: String,
    remote_host: String,
    remote_port: u16,
    tp_size: Option<u32>,
    pp_size: Option<u32>,
    remote_prefill_cached_tokens: Option<u32>,
    transfer_mode: Option<String>,
}

impl PushReply {
    /// Parses the value of `kv_transfer_params` in a prefill leg's reply, as JSON.
    ///
    /// # Errors
    /// Why the value names no engine that pushes.
    pub fn parse(raw: &str) -> Result<Self, PushError> {
        if raw == "null" {
            return Err(PushError::Absent);
        }
        if raw.len() > MAX_HAND_OFF_BYTES {
            return Err(PushError::OutOfBounds);
        }
        let params: Params = json::object(raw)?;
        if params.transfer_mode.as_deref() != Some("push") {
            return Err(PushError::Pull);
        }
        if params.do_remote_prefill != Some(true) {
            return Err(PushError::NotForDecode);
        }
        let fits = |text: &str, most: usize| (1..=most).contains(&text.len());
        let sizes = [params.tp_size, params.pp_size].map(|size| size.unwrap_or(1));
        if !fits(&params.remote_engine_id, MAX_ENGINE_ID_BYTES)
            || !fits(&params.remote_host, MAX_HOST_BYTES)
            || sizes.contains(&0)
        {
            return Err(PushError::OutOfBounds);
        }
        let [tp_size, pp_size] = sizes;
        let engine = PushEngine {
            engine_id: params.remote_engine_id,
            host: params.remote_host,
            port: params.remote_port,
            tp_size,
            pp_size,
        };
        Ok(Self { engine, cached_tokens: params.remote_prefill_cached_tokens })
    }

    /// Parses the reply to a prefill leg.
    ///
    /// # Errors
    /// Why the reply names no engine that pushes.
    pub fn from_body(reply: &[u8]) -> Result<Self, PushError> {
        let [raw] = json::pick_from_slice(reply, ["kv_transfer_params"])?;
        raw.map_or(Err(PushError::Absent), Self::parse)
    }
}

impl PushEngine {
    /// The host at which decode engines register.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The identity for operators. The rank is that to which legs are pinned.
    pub fn view(&self, rank: Option<u32>) -> serde_json::Value {
        let Self { engine_id, host, port, tp_size, pp_size } = self;
        json!({
            "rank": rank, "engine_id": engine_id, "host": host, "port": port,
            "tp_size": tp_size, "pp_size": pp_size,
        })
    }

    /// The decode leg's `kv_transfer_params`. `request_id` is the id that both legs carry. The engine
    /// uses the header and not this member, but without the member it crashes.
    pub fn decode_params_json(&self, request_id: &str) -> String {
        json!({
            "do_remote_decode": false,
            "do_remote_prefill": true,
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_request_id": request_id,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
        })
        .to_string()
    }
}

impl fmt::Debug for PushEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushEngine")
            .field("host", &self.host)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}
