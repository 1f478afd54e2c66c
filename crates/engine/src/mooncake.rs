//! vLLM's Mooncake hand-off: prefill pushes, and both legs are sent at once.
//!
//! The two legs find each other by a transfer id that the router makes. The prefill
//! leg's reply says nothing of the transfer. Decode asks the prefill engine's
//! bootstrap server where the engine with the given id listens, so the router has
//! to ask that server for the id first (`GET <bootstrap>/query`): the id changes
//! whenever the engine starts.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use crate::json::ShapeError;

/// The bootstrap server's port unless configured (`VLLM_MOONCAKE_BOOTSTRAP_PORT`).
pub const BOOTSTRAP_PORT: u16 = 8998;

/// Where a bootstrap server tells its engines' ids.
pub const QUERY_PATH: &str = "/query";

/// Largest answer of a bootstrap server that is read, in bytes.
pub const MAX_QUERY_BYTES: usize = 1 << 20;

/// Most data-parallel ranks of one engine.
const MAX_RANKS: usize = 4096;
const MAX_ENGINE_ID_BYTES: usize = 256;

/// The name of one transfer, for one prefill and one decode request.
///
/// Prefill frees the KV once it has been pushed, so an id is good for one pair. It
/// cannot be cloned, and the decode leg's parameters consume it.
#[derive(Debug)]
pub struct TransferId(String);

impl TransferId {
    /// An id from 128 random bits.
    pub fn from_random(bits: u128) -> Self {
        Self(format!("{bits:032x}"))
    }

    /// The id as engines see it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The prefill leg's `kv_transfer_params`.
    pub fn prefill_params_json(&self) -> String {
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": self.0})
            .to_string()
    }

    /// The decode leg's `kv_transfer_params`. `bootstrap` is the URL of the prefill
    /// engine's bootstrap server, with its scheme.
    pub fn into_decode_params_json(self, bootstrap: &str, remote_engine_id: &str) -> String {
        json!({
            "do_remote_decode": false,
            "do_remote_prefill": true,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": remote_engine_id,
            "transfer_id": self.0,
        })
        .to_string()
    }
}

/// What a bootstrap server knows: each data-parallel rank's engine id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineIds(BTreeMap<u32, String>);

/// An answer of a bootstrap server that is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// Not an object of ranks with engine ids.
    #[error("the bootstrap server's answer: {0}")]
    Shape(#[from] ShapeError),
    /// No engine has registered yet.
    #[error("no engine has registered with the bootstrap server")]
    NoEngine,
    /// More or longer entries than any real one has.
    #[error("the bootstrap server's answer is out of bounds")]
    OutOfBounds,
}

#[derive(Deserialize)]
struct Entry {
    engine_id: String,
}

impl EngineIds {
    /// Reads the answer to [`QUERY_PATH`].
    ///
    /// # Errors
    /// If it is not what a bootstrap server says.
    pub fn parse(text: &str) -> Result<Self, QueryError> {
        if text.len() > MAX_QUERY_BYTES {
            return Err(QueryError::OutOfBounds);
        }
        let entries: BTreeMap<u32, Entry> = crate::json::object(text)?;
        if entries.is_empty() {
            return Err(QueryError::NoEngine);
        }
        let fits = |entry: &Entry| (1..=MAX_ENGINE_ID_BYTES).contains(&entry.engine_id.len());
        if entries.len() > MAX_RANKS || !entries.values().all(fits) {
            return Err(QueryError::OutOfBounds);
        }
        Ok(Self(entries.into_iter().map(|(rank, entry)| (rank, entry.engine_id)).collect()))
    }

    /// The id of a rank's engine, and whether there are others.
    pub fn of_rank(&self, rank: u32) -> Option<(&str, bool)> {
        Some((self.0.get(&rank)?, self.0.len() > 1))
    }

    /// The lowest rank with its engine's id, and whether there are others, so that a
    /// request must be pinned to it.
    pub fn first(&self) -> Option<(u32, &str, bool)> {
        let (rank, id) = self.0.first_key_value()?;
        Some((*rank, id, self.0.len() > 1))
    }
}
