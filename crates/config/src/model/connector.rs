//! The engines of workers, and the connectors that move KV blocks between them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_engine::EngineKind;

/// The engine that the workers of a model run.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

impl From<Engine> for EngineKind {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Vllm => Self::Vllm,
            Engine::Sglang => Self::Sglang,
        }
    }
}

/// How KV is transferred from a prefill worker to a decode worker.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// NIXL of vLLM: the decode worker pulls the blocks.
    Nixl,
    /// NIXL of vLLM: both legs are sent at once, and the prefill worker writes the blocks into the
    /// decode worker's memory.
    NixlPush,
    /// Storage of all workers (LMCache, or vLLM's example connector). No hand-off: the decode
    /// worker finds the blocks there.
    SharedStorage,
    /// Mooncake of vLLM: both legs are sent at once, and the prefill worker pushes the blocks.
    Mooncake,
    /// SGLang: both legs are sent at once and meet at the prefill worker's bootstrap server. A
    /// worker serves no request alone.
    Sglang,
    /// There is no hand-off.
    #[default]
    None,
}

/// What follows from the choice of a connector.
struct Traits {
    /// The connector as the configuration spells it.
    name: &'static str,
    /// How the KV of a prompt reaches the decode worker.
    path: KvPath,
    /// Whether both legs meet at a bootstrap server of the prefill worker.
    has_bootstrap: bool,
    /// Whether engines name the host of their blocks, which the router must check.
    names_hosts: bool,
    /// Whether a decode worker can serve a request by itself.
    serves_alone: bool,
    /// The only engine that has it; `None` if any engine may.
    engine: Option<EngineKind>,
}

/// How the KV of a prompt reaches the decode worker, and so how the two legs are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPath {
    /// There is no hand-off.
    None,
    /// The prefill worker stages the blocks, and its reply says where; the decode leg follows, and its
    /// worker pulls them. Any worker can, so that prefixes can be fetched and read back.
    Pulled,
    /// The prefill worker writes the blocks into a storage, where the decode leg, which follows, finds
    /// them. Requests carry no hand-off.
    Stored,
    /// Both legs are sent at once. The decode worker registers with the prefill worker, which writes
    /// the blocks into its memory.
    Pushed,
    /// Both legs are sent at once and meet by an id of their own.
    Matched,
}

impl Connector {
    const fn traits(self) -> Traits {
        let nixl = Traits {
            name: "nixl",
            path: KvPath::Pulled,
            has_bootstrap: false,
            names_hosts: true,
            serves_alone: true,
            engine: Some(EngineKind::Vllm),
        };
        match self {
            Self::Nixl => nixl,
            Self::NixlPush => Traits { name: "nixl_push", path: KvPath::Pushed, ..nixl },
            Self::SharedStorage => Traits {
                name: "shared_storage",
                path: KvPath::Stored,
                names_hosts: false,
                engine: None,
                ..nixl
            },
            Self::Mooncake => Traits {
                name: "mooncake",
                path: KvPath::Matched,
                has_bootstrap: true,
                names_hosts: false,
                ..nixl
            },
            Self::Sglang => Traits {
                name: "sglang",
                path: KvPath::Matched,
                has_bootstrap: true,
                names_hosts: false,
                serves_alone: false,
                engine: Some(EngineKind::Sglang),
            },
            Self::None => Traits {
                name: "none",
                path: KvPath::None,
                names_hosts: false,
                engine: None,
                ..nixl
            },
        }
    }

    /// How the KV of a prompt reaches the decode worker.
    pub const fn kv_path(self) -> KvPath {
        self.traits().path
    }

    /// Whether the decode worker pulls blocks that the prefill worker has staged.
    pub const fn is_pulled(self) -> bool {
        matches!(self.kv_path(), KvPath::Pulled)
    }

    /// Whether there are hand-offs.
    pub const fn hands_over(self) -> bool {
        !matches!(self.kv_path(), KvPath::None)
    }

    /// Whether both legs are sent at once and wait for each other.
    pub const fn is_concurrent(self) -> bool {
        match self.kv_path() {
            KvPath::Pushed | KvPath::Matched => true,
            KvPath::None | KvPath::Pulled | KvPath::Stored => false,
        }
    }

    /// Whether both legs meet at a bootstrap server of the prefill worker.
    pub const fn has_bootstrap(self) -> bool {
        self.traits().has_bootstrap
    }

    /// Whether engines name the host of their blocks, which the router must check.
    pub const fn names_hosts(self) -> bool {
        self.traits().names_hosts
    }

    /// Whether a decode worker can serve a request by itself.
    pub const fn serves_alone(self) -> bool {
        self.traits().serves_alone
    }

    /// The only engine that has the connector; `None` if any engine may.
    pub const fn engine(self) -> Option<EngineKind> {
        self.traits().engine
    }

    /// The connector as the configuration spells it.
    pub const fn name(self) -> &'static str {
        self.traits().name
    }
}
