//! vLLM's Mooncake hand-off: the prefill engine pushes the KV, and both legs are sent at once.
//!
//! The two legs find each other by a transfer id that the router makes. The prefill leg's reply
//! does not mention the transfer. The decode engine asks the prefill engine's bootstrap server for
//! the address of the engine with the given id, so the router must first ask that server for the id
//! (`GET <bootstrap>/query`): the id changes whenever the engine starts.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use crate::json::ShapeError;

/// Default port of the bootstrap server (`VLLM_MOONCAKE_BOOTSTRAP_PORT`).
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The path at which a bootstrap server reports its engines' ids.
pub const QUERY_PATH: &str = "/query";

/// Maximum size of a bootstrap server's reply in bytes.
pub const MAX_QUERY_BYTES: usize = 1 << 20;

/// Maximum number of data-parallel ranks of one engine.
const MAX_RANKS: usize = 4096;
const MAX_ENGINE_ID_BYTES: usize = 256;

/// The name of one transfer, for one prefill and one decode request.
///
/// The prefill engine frees the KV after it has pushed it, so an id serves one pair. It cannot be
/// cloned, and the decode leg's parameters consume it.
#[derive(Debug)]
pub struct TransferId(String);

impl TransferId {
    /// An id from 128 random bits.
    pub fn from_random(bits: u128) -> Self {
        Self(format!("{bits:032x}"))
    }

    /// The id in the form that engines use.
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

/// The engine id of each data-parallel rank, as reported by a bootstrap server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineIds(BTreeMap<u32, String>);

/// A bootstrap server's reply that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// The reply is not an object of ranks with engine ids.
    #[error("the bootstrap server's reply: {0}")]
    Shape(#[from] ShapeError),
    /// No engine has registered yet.
    #[error("no engine has registered with the bootstrap server")]
    NoEngine,
    /// The reply has more or longer entries than a real server sends.
    #[error("the bootstrap server's reply is out of bounds")]
    OutOfBounds,
}

#[derive(Deserialize)]
struct Entry {
    engine_id: String,
}

/// The engine of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankEngine<'a> {
    /// The rank.
    pub rank: u32,
    /// The id of its engine.
    pub id: &'a str,
    /// Whether there are no other ranks. Otherwise a request must be pinned to this one.
    pub is_only: bool,
}

impl EngineIds {
    /// Parses the reply to [`QUERY_PATH`].
    ///
    /// # Errors
    /// The reply is not that of a bootstrap server.
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

    /// The engine of a rank, or of the lowest rank if none is given.
    pub fn of_rank(&self, rank: Option<u32>) -> Option<RankEngine<'_>> {
        let (rank, id) = match rank {
            Some(rank) => self.0.get_key_value(&rank)?,
            None => self.0.first_key_value()?,
        };
        Some(RankEngine { rank: *rank, id, is_only: self.0.len() == 1 })
    }
}
