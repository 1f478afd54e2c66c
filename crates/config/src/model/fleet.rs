//! Settings of the listener to which shims attach, and the networks in which discovered workers may be.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Network, Secret};
use crate::scalar;

/// How shims attach, and the networks of unlisted workers.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FleetConfig {
    /// The token with which shims attach for any worker. A file has one per line, each is accepted,
    /// and is read again when it changes.
    pub token: Option<Secret>,
    /// Tokens for certain workers only, beside `token` or instead of it.
    pub tokens: Vec<FleetToken>,
    /// Networks of unlisted workers (from shims, discovery, the admin listener). Names are resolved
    /// first.
    #[schemars(with = "Vec<String>")]
    pub networks: Vec<Network>,
    /// TLS of the fleet listener. The files are read again as shims connect.
    pub tls: Option<FleetTls>,
    /// Maximum number of attached shims.
    #[schemars(range(min = 1, max = 65_000))]
    pub attach_max: usize,
    /// How long a worker and its blocks are kept after its shim has disconnected without notice.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub rejoin_grace: Duration,
    /// Interval of shims' load reports if nothing changes.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub load_interval: Duration,
    /// Age from which a load report is outdated: the worker then counts as busy as the busiest of
    /// its model. At least twice `load_interval`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub load_stale_after: Duration,
}

/// A token and the workers that it is valid for.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetToken {
    /// The token; a file as for `fleet.token`.
    pub token: Secret,
    /// The ids of the workers. `*` at the end matches all ids with that prefix. If the router knows
    /// a shim's address by another id, list both.
    #[schemars(
        length(min = 1),
        inner(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._:*-]+$"))
    )]
    pub workers: Vec<String>,
    /// The models of the workers. Default: all models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub models: Option<Vec<String>>,
}

/// The certificates of the fleet listener, as PEM files.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetTls {
    /// The certificate, followed by the intermediate certificates.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authority of shims' certificates. Default: no certificate is needed.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
    /// The workers of a certificate of `client_ca`.
    #[serde(default)]
    pub client_workers: ClientWorkers,
}

/// The workers that a certificate is valid for.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ClientWorkers {
    /// All workers.
    #[default]
    Any,
    /// Workers whose ids are DNS names of the certificate.
    DnsNames,
}

/// Loopback and what is private by RFC 1918 and RFC 4193.
const PRIVATE: [(IpAddr, u8); 6] = [
    (IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 0)), 8),
    (IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), 128),
    (IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 0)), 8),
    (IpAddr::V4(std::net::Ipv4Addr::new(172, 16, 0, 0)), 12),
    (IpAddr::V4(std::net::Ipv4Addr::new(192, 168, 0, 0)), 16),
    (IpAddr::V6(std::net::Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0)), 7),
];

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            token: None,
            tokens: Vec::new(),
            networks: PRIVATE.map(|(address, bits)| Network::new(address, bits)).to_vec(),
            tls: None,
            attach_max: 4096,
            rejoin_grace: Duration::from_secs(10),
            load_interval: Duration::from_secs(1),
            load_stale_after: Duration::from_secs(5),
        }
    }
}
