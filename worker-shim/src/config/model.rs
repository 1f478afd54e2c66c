//! The configuration as typed values: one struct per mapping of the YAML file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_engine::EngineKind;
pub use splitrail_settings::Role;
use splitrail_settings::{Secret, scalar, size};

/// A whole configuration file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The engine's address, `http://HOST:PORT`.
    pub engine: String,
    /// The address at which the shim serves requests to the engine, its metrics and its status.
    /// Port 0 takes any free port. Protect this address like the engine itself.
    #[schemars(with = "scalar::Address")]
    pub listen: SocketAddr,
    /// The address at which routers reach `listen`, `http://HOST:PORT`, or
    /// `https://HOST:PORT` if a TLS server is in front of the shim. Defaults to `listen`. Required
    /// if `listen` is `0.0.0.0` or `[::]`.
    #[serde(default)]
    pub advertise: Option<String>,
    /// The routers to attach to: `HOST:PORT` of their `listen.fleet`. The shim attaches to every
    /// address of a name. At least one is required.
    #[serde(default)]
    pub router: Vec<String>,
    /// The role of the engine.
    pub role: Role,
    /// The worker's id, unique in its model: letters, digits and `._:-`.
    #[schemars(regex(pattern = "^[A-Za-z0-9._:-]+$"), length(min = 1, max = 64))]
    pub id: String,
    /// The model's name as the engine serves it. Defaults to the first model that the engine lists.
    #[serde(default)]
    pub model: Option<String>,
    /// The token that authenticates the shim to routers: the first line that is not empty. Defaults to
    /// the environment variable `SPLITRAIL_FLEET_TOKEN`, if it is set.
    #[serde(default)]
    pub token: Option<Secret>,
    /// TLS towards routers. Its files are read again for each connection. Without it, connections
    /// are not encrypted.
    #[serde(default)]
    pub tls: Option<Tls>,
    /// The seed of block hashes that routers must use. Defaults to that of the first router. A router
    /// with another seed is refused in both cases.
    #[serde(default)]
    pub hash_seed: Option<u64>,
    /// Interval between two reads of the engine's health and metrics. A shorter interval shows
    /// load earlier and costs the engine more processor time.
    #[serde(
        default = "load_interval",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "20ms", "x-maximum" = "10s"))]
    pub load_interval: Duration,
    /// How the shim stops after a stop signal.
    #[serde(default)]
    pub drain: Drain,
    /// The address at which rank 0 of the engine publishes KV events, `tcp://HOST:PORT`; rank r uses
    /// the port plus r. Without it, the shim asks the engine (`/kv_event_sources`, or SGLang's
    /// `/server_info`).
    #[serde(default)]
    pub kv_events: Option<String>,
    /// The address at which rank 0 of the engine replays KV events; rank r uses the port plus r.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// The engine's API key for the shim's own requests. Forwarded requests carry their own.
    #[serde(default)]
    pub engine_api_key: Option<Secret>,
    /// The engine's connector. Without it, the shim reports `nixl` if the engine's metrics show it,
    /// and otherwise none.
    #[serde(default)]
    pub connector: Option<Connector>,
    /// The engine's name towards other engines, if its connector uses one.
    #[serde(default)]
    pub connector_engine_id: Option<String>,
    /// The engine's bootstrap server, `http://HOST:PORT`, for connectors that send both legs at
    /// once.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// How long the engine keeps the blocks of a hand-off that has not been fetched
    /// (`kv_lease_duration`). Without it, the routers' own setting applies.
    #[serde(
        default,
        deserialize_with = "scalar::optional_duration",
        serialize_with = "scalar::optional_duration_text"
    )]
    #[schemars(with = "Option<scalar::DurationText>")]
    pub lease: Option<Duration>,
    /// Limits of what the shim accepts and holds.
    #[serde(default)]
    pub limits: Limits,
}

/// How an engine transfers KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// NIXL of vLLM.
    Nixl,
    /// NIXL of vLLM in push mode.
    NixlPush,
    /// Mooncake of vLLM.
    Mooncake,
    /// Storage that engines share.
    SharedStorage,
    /// The transfer of SGLang.
    Sglang,
}

impl Connector {
    /// The engine that has it.
    #[must_use]
    pub fn engine(self) -> EngineKind {
        match self {
            Self::Nixl | Self::NixlPush | Self::Mooncake | Self::SharedStorage => EngineKind::Vllm,
            Self::Sglang => EngineKind::Sglang,
        }
    }

    /// The name in reports to routers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::NixlPush => "nixl_push",
            Self::Mooncake => "mooncake",
            Self::SharedStorage => "shared_storage",
            Self::Sglang => "sglang",
        }
    }
}

/// TLS towards routers.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The certificates (PEM) of the authorities that may sign a router's certificate.
    pub ca: PathBuf,
    /// The shim's certificate (PEM), for routers that require one.
    #[serde(default)]
    pub cert: Option<PathBuf>,
    /// The key (PEM) of the shim's certificate.
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// The name in the routers' certificates. Defaults to the host of their address.
    #[serde(default)]
    pub server_name: Option<String>,
}

/// How the shim stops after a stop signal. A second signal stops it at once.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Drain {
    /// Maximum time to wait for requests in flight and for hand-offs that have not been fetched. Keep
    /// it shorter than the time after which the process is killed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub grace: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Self { grace: Duration::from_secs(120) }
    }
}

/// Limits of what the shim holds.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum number of connections from clients. Further ones wait to be accepted. One address
    /// (IPv6: its first 64 bits) may hold no more than eight times as many as are free; further ones
    /// of that address get status 503 and are closed.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// Maximum number of requests to the engine in flight. Further ones get status 503. One address
    /// may hold no more than eight times as many as are free.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_max: usize,
    /// Maximum number of mirrored KV blocks per rank. Raise it above the cache size of the engine.
    #[schemars(range(min = 1024, max = 100_000_000))]
    pub mirror_blocks_max: usize,
    /// Maximum memory for recent changes. A router that reconnects while the changes that it
    /// missed are still kept needs no snapshot. Raise it if routers are often disconnected for long.
    #[serde(rename = "change_log_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 65_536, max = 1_073_741_824_u64))]
    pub change_log_max_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            requests_max: 4096,
            mirror_blocks_max: 4_000_000,
            change_log_max_bytes: 8 << 20,
        }
    }
}

impl Config {
    /// Resolves relative paths against `base_dir`.
    pub(super) fn anchor(&mut self, base_dir: &Path) {
        let secrets = self.token.iter_mut().chain(&mut self.engine_api_key);
        secrets.for_each(|secret| secret.anchor(base_dir));
        if let Some(Tls { ca, cert, key, .. }) = &mut self.tls {
            for path in [Some(ca), cert.as_mut(), key.as_mut()].into_iter().flatten() {
                *path = base_dir.join(&*path);
            }
        }
    }
}

fn load_interval() -> Duration {
    Duration::from_millis(250)
}
