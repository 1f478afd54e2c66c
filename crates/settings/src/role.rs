//! The role of a worker, which routers and shims configure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The role of a worker.
#[derive(
    Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Serves prefill legs.
    Prefill,
    /// Serves decode legs.
    Decode,
    /// Serves both.
    Both,
}

impl Role {
    /// The role as the configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}
