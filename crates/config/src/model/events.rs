//! Settings of the event plane between shims and routers.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_event_plane::config::{BrokerConfig, Login};

use crate::scalar;

/// How shims' words come to this router.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Events {
    /// By a stream of each to `listen.fleet`.
    Direct {},
    /// Over a NATS broker as well, for large fleets.
    Nats(NatsEvents),
}

impl Default for Events {
    fn default() -> Self {
        Self::Direct {}
    }
}

/// The event plane over NATS JetStream.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NatsEvents {
    /// Servers of one NATS cluster, `nats://HOST:PORT` or `tls://HOST:PORT`; the others are
    /// learned from them. JetStream must be on.
    #[schemars(length(min = 1, max = 32))]
    pub servers: Vec<String>,
    /// What the router proves itself with; left out, nothing. Read again for each connection.
    #[serde(default)]
    pub login: Option<Login>,
    /// Certificates (PEM) that a `tls://` server's own must come from; left out, the system's.
    #[serde(default)]
    pub tls_ca: Option<PathBuf>,
    /// The name under which the broker keeps this router's place in the streams, different for
    /// each router; left out, made of the host's name and the port of `listen.http`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 128))]
    pub durable: Option<String>,
    /// For how long a worker of which nothing is heard is believed to hold what it held: while
    /// the broker, or its shim's way to it, is away.
    #[serde(
        default = "cut_off_max",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText")]
    pub cut_off_max: Duration,
    /// Bytes of one model's changes that the broker keeps; the oldest make room for new ones.
    #[serde(default = "stream_max_bytes")]
    #[schemars(range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub stream_max_bytes: u64,
    /// For how long it keeps them.
    #[serde(
        default = "stream_max_age",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText")]
    pub stream_max_age: Duration,
    /// Where it keeps them, and the snapshots.
    #[serde(default)]
    pub storage: Storage,
    /// How many servers of the cluster do.
    #[serde(default = "replicas")]
    #[schemars(range(min = 1, max = 5))]
    pub replicas: usize,
}

/// Where a broker keeps what it is given.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// On its disk, so that a restart loses nothing.
    #[default]
    File,
    /// In its memory.
    Memory,
}

impl NatsEvents {
    /// The broker.
    pub fn broker(&self) -> BrokerConfig {
        let (servers, login) = (self.servers.clone(), self.login.clone());
        BrokerConfig { servers, login, tls_ca: self.tls_ca.clone() }
    }

    /// Makes the paths independent of where the process runs.
    pub(crate) fn anchor(&mut self, base_dir: &std::path::Path) {
        let mut broker = self.broker();
        broker.anchor(base_dir);
        (self.login, self.tls_ca) = (broker.login, broker.tls_ca);
    }
}

fn cut_off_max() -> Duration {
    Duration::from_secs(10)
}

fn stream_max_bytes() -> u64 {
    1 << 30
}

fn stream_max_age() -> Duration {
    Duration::from_secs(3600)
}

fn replicas() -> usize {
    1
}
