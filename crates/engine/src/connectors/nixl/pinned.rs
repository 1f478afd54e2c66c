//! The KV of a finished decode leg that its engine keeps pinned, so that a later prefill leg can read
//! it back (vLLM's NIXL connector with `bidirectional_kv_xfer`).
//!
//! The parameters go back to a prefill engine cut to whole blocks. vLLM 0.32 checks nothing: it
//! copies the first blocks of the list under the hashes of the *new* prompt. One id or one token too
//! many, or other tokens, make the reply wrong with status 200, and the prefix cache of the prefill
//! engine as well. So only KV in one cache group, with exactly the blocks of its tokens, is read.

use std::fmt;

use serde::Deserialize;

use super::{HandOffError, IDS, MAX_HAND_OFF_BYTES};
use crate::json;

const TOKENS: &str = "remote_num_tokens";

/// Why pinned KV cannot be read back exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InexactPin {
    /// The blocks are in several cache groups (sliding windows, several attention types), whose ids
    /// do not stand for the same tokens.
    #[error("pinned KV in {0} cache groups")]
    Groups(usize),
    /// The number of ids is not the number of blocks that the tokens fill.
    #[error("{ids} block ids for {tokens} tokens in blocks of {block_size}")]
    Count {
        /// Number of block ids.
        ids: usize,
        /// Number of tokens whose KV is pinned.
        tokens: u32,
        /// Tokens per block of the router's index.
        block_size: u32,
    },
}

/// The KV of a finished decode leg, pinned in its engine.
///
/// It serves **one** read, so it cannot be cloned.
pub struct PinnedKv {
    raw: Box<str>,
    /// The host from which a prefill engine reads.
    pub host: Box<str>,
    /// Number of tokens whose KV is pinned: the prompt and what was generated, without the last
    /// token, whose KV the engine never computed.
    pub tokens: u32,
    groups: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Params {
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    remote_block_ids: Option<Ids>,
    remote_engine_id: Option<String>,
    remote_request_id: Option<String>,
    remote_host: Option<Box<str>>,
    remote_port: Option<u16>,
    remote_num_tokens: Option<u32>,
    transfer_mode: Option<String>,
}

/// A list for each cache group, or one list in older versions.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    Groups(Vec<Vec<u32>>),
    Plain(Vec<u32>),
}

impl PinnedKv {
    /// Parses the value of `kv_transfer_params` in a decode leg's reply, as JSON. `None` if the
    /// engine keeps nothing pinned for a prefill leg.
    ///
    /// # Errors
    /// If the value says that the engine does, and lacks what a reader needs.
    pub fn from_reply(raw: &str) -> Result<Option<Self>, HandOffError> {
        if raw == "null" {
            return Ok(None);
        }
        let bytes = raw.len();
        if bytes > MAX_HAND_OFF_BYTES {
            return Err(HandOffError::TooLarge { bytes });
        }
        let params: Params = json::object(raw)?;
        if params.do_remote_decode != Some(true) || params.do_remote_prefill == Some(true) {
            return Ok(None);
        }
        if params.transfer_mode.as_deref().is_some_and(|mode| mode != "pull") {
            return Err(HandOffError::NotPull);
        }
        let groups = match params.remote_block_ids {
            Some(Ids::Plain(ids)) => vec![ids],
            Some(Ids::Groups(groups)) => groups,
            None => Vec::new(),
        };
        let is_complete = params.remote_engine_id.is_some()
            && params.remote_request_id.is_some()
            && params.remote_port.is_some();
        let host = params.remote_host.filter(|_| is_complete);
        match host {
            Some(host) if groups.iter().any(|ids| !ids.is_empty()) => {
                let tokens = params.remote_num_tokens.unwrap_or(0);
                Ok(Some(Self { raw: raw.into(), host, tokens, groups }))
            }
            _ => Err(HandOffError::NoBlocks),
        }
    }

    /// Whether the ids stand for the blocks of the tokens, one by one.
    ///
    /// # Errors
    /// Why the KV cannot be read back exactly.
    pub fn check(&self, block_size: u32) -> Result<(), InexactPin> {
        let [ids] = &self.groups[..] else { return Err(InexactPin::Groups(self.groups.len())) };
        let (ids, tokens) = (ids.len(), self.tokens);
        match block_size > 0 && tokens.div_ceil(block_size) as usize == ids {
            true => Ok(()),
            false => Err(InexactPin::Count { ids, tokens, block_size }),
        }
    }

    /// The parameters of a prefill leg that reads the first `blocks` blocks. `None` if so many are not
    /// full, or if the KV cannot be read back exactly.
    pub fn read_json(&self, blocks: usize, block_size: u32) -> Option<String> {
        self.check(block_size).ok()?;
        let tokens = u32::try_from(blocks).ok()?.checked_mul(block_size)?;
        if blocks == 0 || tokens > self.tokens {
            return None;
        }
        self.with(Some(self.groups[0].get(..blocks)?), tokens)
    }

    /// The parameters of a prefill leg whose prompt is the first token alone: its engine reads
    /// nothing and tells the owner that the blocks are no longer needed.
    pub fn release_json(&self) -> Option<String> {
        self.with(None, 1)
    }

    /// The parameters as they came, with other ids and another number of tokens.
    fn with(&self, ids: Option<&[u32]>, tokens: u32) -> Option<String> {
        let raw = &*self.raw;
        let [ids_now, tokens_now] = json::pick(raw, [IDS, TOKENS]).ok()?;
        let ids_at = json::place_of(raw, ids_now?)?;
        let tokens_at = json::place_of(raw, tokens_now?)?;
        let ids = match ids {
            None => raw[ids_at.clone()].to_owned(),
            Some(ids) => {
                let list = serde_json::to_string(ids).ok()?;
                let is_plain = !raw[ids_at.clone()][1..].trim_start().starts_with('[');
                if is_plain { list } else { format!("[{list}]") }
            }
        };
        let mut edits = [(ids_at, ids), (tokens_at, tokens.to_string())];
        edits.sort_by_key(|(at, _)| std::cmp::Reverse(at.start));
        let mut json = raw.to_owned();
        for (at, text) in edits {
            json.replace_range(at, &text);
        }
        Some(json)
    }

    /// Number of pinned blocks over all cache groups. The last block may be partly filled.
    pub fn blocks(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    /// Bytes of memory that the value takes, approximately.
    pub fn bytes(&self) -> usize {
        self.raw.len() + self.host.len() + self.blocks() * size_of::<u32>() + size_of::<Self>()
    }
}

impl fmt::Debug for PinnedKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedKv")
            .field("host", &self.host)
            .field("tokens", &self.tokens)
            .field("blocks", &self.blocks())
            .finish_non_exhaustive()
    }
}
