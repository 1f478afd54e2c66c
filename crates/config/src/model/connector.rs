//! The connectors, which move KV blocks between workers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How KV is transferred from a prefill worker to a decode worker.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// NIXL of vLLM. The decode worker pulls the blocks from the prefill worker.
    Nixl,
    /// NIXL of vLLM in push mode. Both legs are sent at once, and the prefill worker writes the
    /// blocks into the decode worker's memory.
    NixlPush,
    /// Storage that all workers share (LMCache, or vLLM's example connector). Requests carry no
    /// hand-off, because the decode worker finds the blocks in the storage.
    SharedStorage,
    /// Mooncake of vLLM. Both legs are sent at once, and the prefill worker pushes the blocks.
    Mooncake,
    /// The transfer of SGLang. Both legs are sent at once and meet at the bootstrap server of the
    /// prefill worker. A worker serves no request alone.
    Sglang,
    /// There is no hand-off.
    #[default]
    None,
}

impl Connector {
    /// Whether both legs are sent at once and wait for each other.
    pub fn is_concurrent(self) -> bool {
        matches!(self, Self::NixlPush | Self::Mooncake | Self::Sglang)
    }

    /// Whether both legs meet at a bootstrap server of the prefill worker.
    pub fn has_bootstrap(self) -> bool {
        matches!(self, Self::Mooncake | Self::Sglang)
    }

    /// Whether engines name the host of their blocks, which the router must check.
    pub fn names_hosts(self) -> bool {
        matches!(self, Self::Nixl | Self::NixlPush)
    }

    /// Whether a decode worker can serve a request by itself.
    pub fn serves_alone(self) -> bool {
        self != Self::Sglang
    }

    /// The connector as the configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::NixlPush => "nixl_push",
            Self::SharedStorage => "shared_storage",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
            Self::None => "none",
        }
    }
}
