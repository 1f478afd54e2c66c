//! Settings of the event plane between shims and routers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_event_plane::config::BrokerConfig;
use splitrail_settings::size;

use crate::scalar;

/// How the reports of shims reach this router.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Events {
    /// By a stream from each shim to `listen.fleet`.
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
    /// The broker, and the credentials for it.
    #[serde(flatten)]
    pub broker: BrokerConfig,
    /// The name under which the broker keeps this router's position in the streams. It must be
    /// different for each router. Defaults to a name made from the host name and the port of
    /// `listen.http`.
    #[serde(default)]
    #[schemars(length(min = 1, max = 128))]
    pub durable_name: Option<String>,
    /// How long the blocks of a worker are counted after its last report, while the broker is down
    /// or the worker's shim cannot reach the broker. Afterwards the worker's overlap is not used.
    /// At least twice `fleet.load_interval`.
    #[serde(
        default = "disconnect_grace",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText")]
    pub disconnect_grace: Duration,
    /// Maximum size of the changes of one model that the broker keeps. The oldest ones are
    /// dropped first.
    #[serde(rename = "stream_size_max", default = "stream_max_bytes")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub stream_max_bytes: u64,
    /// Maximum age of the changes that the broker keeps. At least one minute.
    #[serde(
        default = "stream_max_age",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText")]
    pub stream_max_age: Duration,
    /// Where the broker keeps changes and snapshots. Applies when its streams are created; those
    /// that exist stay as they are (`nats stream edit`).
    #[serde(default)]
    pub storage: Storage,
    /// Number of servers of the NATS cluster that keep each change and snapshot. Applies like
    /// `storage`.
    #[serde(default = "stream_replicas")]
    #[schemars(range(min = 1, max = 5))]
    pub stream_replicas: usize,
}

/// Where the broker keeps changes and snapshots.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// On its disk. A restart loses nothing.
    #[default]
    File,
    /// In its memory. A restart loses everything, and routers request new snapshots.
    Memory,
}

fn disconnect_grace() -> Duration {
    Duration::from_secs(10)
}

fn stream_max_bytes() -> u64 {
    1 << 30
}

fn stream_max_age() -> Duration {
    Duration::from_secs(3600)
}

fn stream_replicas() -> usize {
    1
}
