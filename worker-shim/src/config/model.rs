//! The configuration as typed values: one struct per mapping of the YAML file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_event_plane::config::BrokerConfig;
use splitrail_settings::{Secret, scalar};

/// A whole configuration file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The engine, `http://HOST:PORT`.
    pub engine: String,
    /// Where requests to the engine, the shim's metrics and its status are served;
    /// port 0 takes any free one. As private as the engine itself.
    #[schemars(with = "scalar::Address")]
    pub listen: SocketAddr,
    /// Where routers reach `listen`, `http://HOST:PORT`; left out, `listen` itself. Needed if
    /// that is `0.0.0.0` or `[::]`.
    #[serde(default)]
    pub advertise: Option<String>,
    /// Routers to attach to: `HOST:PORT` of their `listen.fleet`. A name with several addresses
    /// stands for a router at each. None with `events` of kind `nats`, else at least one.
    #[serde(default)]
    pub router: Vec<String>,
    /// How routers hear of the engine.
    #[serde(default)]
    pub events: Events,
    /// What the engine is used for.
    pub role: Role,
    /// The worker's name, unique in its model: letters, digits and `._:-`.
    #[schemars(regex(pattern = "^[A-Za-z0-9._:-]+$"), length(min = 1, max = 64))]
    pub id: String,
    /// The model's name as the engine serves it; left out, the first that it lists.
    #[serde(default)]
    pub model: Option<String>,
    /// What routers want to see; left out, the environment variable `SPLITRAIL_FLEET_TOKEN`, if
    /// it is set.
    #[serde(default)]
    pub token: Option<Secret>,
    /// TLS towards routers, its files read again for each connection; left out, connections are in the clear.
    #[serde(default)]
    pub tls: Option<Tls>,
    /// The seed of block hashes that routers must have; left out, the first router's. A router
    /// with another one is refused either way.
    #[serde(default)]
    pub hash_seed: Option<u64>,
    /// Between two looks at the engine's health and figures.
    #[serde(
        default = "load_interval",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText")]
    pub load_interval: Duration,
    /// How the shim ends.
    #[serde(default)]
    pub drain: Drain,
    /// Where the engine publishes KV events (rank 0; rank r is r ports further),
    /// `tcp://HOST:PORT`; left out, the engine is asked (`/kv_event_sources`).
    #[serde(default)]
    pub kv_events: Option<String>,
    /// Where they can be had again, likewise.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// The engine's key, for the shim's own questions. Requests bring their own.
    #[serde(default)]
    pub engine_api_key: Option<Secret>,
    /// How the engine hands KV over; left out, `nixl` if its metrics show it, else not known.
    #[serde(default)]
    pub connector: Option<Connector>,
    /// The engine's name towards other engines, where its connector has one.
    #[serde(default)]
    pub connector_engine_id: Option<String>,
    /// Where decode workers meet the engine, `http://HOST:PORT`, for connectors that send both
    /// legs at once.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// How long the engine keeps the blocks of a hand-off that nobody has fetched
    /// (`kv_lease_duration`); left out, the routers' own setting counts.
    #[serde(
        default,
        deserialize_with = "optional_duration",
        serialize_with = "optional_duration_text"
    )]
    #[schemars(with = "Option<scalar::DurationText>")]
    pub lease: Option<Duration>,
    /// Bounds.
    #[serde(default)]
    pub limits: Limits,
}

/// What an engine is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
    /// Either.
    Both,
}

/// How routers hear of the engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Events {
    /// By a stream to each of them.
    Direct {},
    /// Over a NATS broker, which all routers listen to.
    Nats(BrokerConfig),
}

impl Default for Events {
    fn default() -> Self {
        Self::Direct {}
    }
}

/// How an engine hands KV over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// vLLM's NIXL.
    Nixl,
    /// vLLM's Mooncake.
    Mooncake,
    /// A storage that engines share.
    SharedStorage,
    /// SGLang's.
    Sglang,
}

impl Connector {
    /// As routers are told.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
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
    /// Certificates (PEM) that a router's own must come from.
    pub ca: PathBuf,
    /// The shim's certificate (PEM), for routers that want one.
    #[serde(default)]
    pub cert: Option<PathBuf>,
    /// Its key (PEM).
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// The name in routers' certificates; left out, the host of their address.
    #[serde(default)]
    pub server_name: Option<String>,
}

/// How the shim ends after a stop signal. A second signal ends it at once.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Drain {
    /// How long requests in flight, and KV that decode workers still have to fetch, may take.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub grace: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Self { grace: Duration::from_secs(120) }
    }
}

/// Bounds on what the shim holds.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Connections from routers at once.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// Requests to the engine at once; further ones get status 503.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_max: usize,
    /// KV blocks that are kept track of, of each rank.
    #[schemars(range(min = 1024, max = 100_000_000))]
    pub mirror_blocks_max: usize,
    /// Memory for recent changes, in bytes: a router that was away for no longer goes on
    /// without a snapshot.
    #[schemars(range(min = 65_536, max = 1_073_741_824_u64))]
    pub changes_max_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            requests_max: 4096,
            mirror_blocks_max: 4_000_000,
            changes_max_bytes: 8 << 20,
        }
    }
}

impl Config {
    /// Makes the paths independent of where the process runs.
    pub(super) fn anchor(&mut self, base_dir: &Path) {
        for secret in [&mut self.token, &mut self.engine_api_key] {
            if let Some(Secret::File { path }) = secret {
                *path = base_dir.join(&*path);
            }
        }
        if let Events::Nats(broker) = &mut self.events {
            broker.anchor(base_dir);
        }
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

fn optional_duration<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let read = |text: String| scalar::parse_duration(&text).map_err(serde::de::Error::custom);
    text.map(read).transpose()
}

fn optional_duration_text<S: serde::Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    duration.map(scalar::format_duration).serialize(serializer)
}
