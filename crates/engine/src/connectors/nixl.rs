//! The NIXL hand-off in pull mode: the prefill engine keeps the KV and reports its location, and
//! the decode engine fetches it from there.

use std::fmt;

use serde::Deserialize;

mod blocks;
mod pinned;
mod prefix;

pub use pinned::{InexactPin, PinnedKv};

use crate::json::{self, ShapeError};

/// The prefill leg's `kv_transfer_params`. The leg must not be streamed: a streamed reply carries
/// no hand-off, and its blocks stay pinned until the lease ends.
pub const PREFILL_PARAMS_JSON: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;

/// The member with the block ids.
const IDS: &str = "remote_block_ids";

/// Maximum size of an accepted hand-off in bytes: the block ids of several million tokens.
pub const MAX_HAND_OFF_BYTES: usize = 4 << 20;

/// The location of one prompt's KV in a prefill engine.
///
/// A hand-off serves **one** decode request. Once used, its blocks may be overwritten, and an
/// engine that gets it again answers 200 with wrong text. So it cannot be cloned, and turning it
/// into a request consumes it.
pub struct HandOff {
    raw: Box<str>,
    params: Params,
}

/// Why `kv_transfer_params` are not a usable hand-off.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandOffError {
    /// The value is null: the engine has no connector, or the leg was streamed.
    #[error("the prefill reply has no hand-off")]
    Absent,
    /// Larger than [`MAX_HAND_OFF_BYTES`].
    #[error("a hand-off of {bytes} bytes")]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The value is not an object with the fields of a hand-off.
    #[error("hand-off: {0}")]
    Shape(#[from] ShapeError),
    /// The hand-off does not tell the decode engine to fetch anything.
    #[error("the hand-off does not ask for a remote prefill")]
    NotForDecode,
    /// The hand-off names no block. Such a hand-off has been seen to crash a decode engine.
    #[error("the hand-off names no blocks")]
    NoBlocks,
    /// The prefill engine pushes the KV by itself.
    #[error("the engine hands over by push, which is `connector: nixl_push`")]
    Push,
    /// The transfer mode is neither pull nor push.
    #[error("the hand-off is not in pull mode")]
    NotPull,
}

#[derive(Deserialize)]
struct Params {
    do_remote_prefill: Option<bool>,
    do_remote_decode: Option<bool>,
    /// Counted and not read.
    #[serde(skip)]
    block_count: usize,
    remote_engine_id: String,
    remote_host: String,
    remote_port: u16,
    remote_request_id: Option<String>,
    remote_num_tokens: Option<u32>,
    remote_prefill_cached_tokens: Option<u32>,
    remote_blocks_expiry_time: Option<f64>,
    transfer_mode: Option<String>,
}

/// The member that decides whether the others are needed.
#[derive(Deserialize)]
struct Flags {
    do_remote_prefill: Option<bool>,
}

impl HandOff {
    /// Parses the value of `kv_transfer_params` in a prefill leg's reply, as JSON.
    ///
    /// # Errors
    /// Why the value cannot be sent to a decode engine.
    pub fn from_reply(raw: &str) -> Result<Self, HandOffError> {
        let bytes = raw.len();
        if raw == "null" {
            return Err(HandOffError::Absent);
        }
        if bytes > MAX_HAND_OFF_BYTES {
            return Err(HandOffError::TooLarge { bytes });
        }
        let params = match Params::read(raw) {
            Ok(params) => params,
            // If nothing is to be fetched, the other members may be missing.
            Err(error) => {
                let flags: Flags = json::object(raw)?;
                return Err(match flags.do_remote_prefill {
                    Some(true) => error.into(),
                    _ => HandOffError::NotForDecode,
                });
            }
        };
        if params.do_remote_prefill != Some(true) || params.do_remote_decode == Some(true) {
            return Err(HandOffError::NotForDecode);
        }
        if params.block_count == 0 {
            return Err(HandOffError::NoBlocks);
        }
        match params.transfer_mode.as_deref() {
            None | Some("pull") => {}
            Some("push") => return Err(HandOffError::Push),
            Some(_) => return Err(HandOffError::NotPull),
        }
        Ok(Self { raw: raw.into(), params })
    }

    /// The decode leg's `kv_transfer_params`: what the prefill engine sent, byte for byte.
    pub fn into_json(self) -> Box<str> {
        self.raw
    }

    /// The `kv_transfer_params` of a prefill leg of another engine that takes the first `blocks` blocks
    /// of `block_size` tokens and computes the rest of its prompt (vLLM's `bidirectional_kv_xfer`).
    /// `None` if they cannot be taken exactly. They are a use of the hand-off, which is to be consumed.
    pub fn prefix_params(&self, blocks: u32, block_size: u32) -> Option<String> {
        prefix::prefix_params(&self.raw, blocks, block_size)
    }

    /// The host from which decode fetches.
    pub fn remote_host(&self) -> &str {
        &self.params.remote_host
    }

    /// Number of tokens whose KV is handed off. If the prefill leg generated more than one token,
    /// this is more than the prompt has.
    pub fn remote_num_tokens(&self) -> Option<u32> {
        self.params.remote_num_tokens
    }

    /// Number of prompt tokens that the prefill engine had cached. Absent up to vLLM 0.22, whose
    /// decode engine then reports the whole prompt as cached.
    pub fn remote_prefill_cached_tokens(&self) -> Option<u32> {
        self.params.remote_prefill_cached_tokens
    }

    /// When the engine frees the blocks, in seconds of its own clock. vLLM 0.32 leaves this null in
    /// pull mode; its default lease is 30 s.
    pub fn remote_blocks_expiry_s(&self) -> Option<f64> {
        self.params.remote_blocks_expiry_time
    }

    /// Number of block ids, over all cache groups.
    pub fn block_count(&self) -> usize {
        self.params.block_count
    }
}

impl Params {
    /// Counts block ids where they stand, a thousand of them for a long prompt, and reads the
    /// rest.
    fn read(raw: &str) -> Result<Self, ShapeError> {
        let [ids] = json::pick(raw, [IDS])?;
        let Some(place) = ids.and_then(|ids| json::place_of(raw, ids)) else {
            return json::object(raw);
        };
        let (before, ids, behind) = (&raw[..place.start], &raw[place.clone()], &raw[place.end..]);
        let block_count = blocks::count(ids)?;
        // With all ids, only to say where the error is.
        let params =
            json::object(&[before, "null", behind].concat()).or_else(|_| json::object(raw));
        Ok(Self { block_count, ..params? })
    }
}

impl fmt::Debug for HandOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandOff")
            .field("remote_engine_id", &self.params.remote_engine_id)
            .field("remote_host", &self.remote_host())
            .field("remote_port", &self.params.remote_port)
            .field("remote_request_id", &self.params.remote_request_id)
            .field("remote_num_tokens", &self.remote_num_tokens())
            .field("remote_prefill_cached_tokens", &self.remote_prefill_cached_tokens())
            .field("block_count", &self.block_count())
            .finish_non_exhaustive()
    }
}
