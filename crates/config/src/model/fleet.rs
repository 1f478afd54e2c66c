//! How shims attach, and where workers may be that the file does not name.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Network, Secret};
use crate::scalar;

/// How shims attach, and where workers may be that the file does not name.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FleetConfig {
    /// What shims prove themselves with, as a bearer token. A file may hold several, one
    /// to a line, each of which is accepted; it is read again when it changes, so that tokens
    /// can be exchanged while routers and shims run.
    pub token: Option<Secret>,
    /// Tokens that are each for some workers only: a shim that shows one of them can attach as no
    /// other worker. Beside `token`, or in its place.
    pub tokens: Vec<FleetToken>,
    /// Networks in which workers must lie that are not written down under `workers`: those of
    /// shims, of discovery and of the admin listener. Names are looked up first.
    #[schemars(with = "Vec<String>")]
    pub networks: Vec<Network>,
    /// The fleet listener's certificate, its files read again as shims connect; left out, it speaks plain text.
    pub tls: Option<FleetTls>,
    /// Shims that may be attached at once.
    #[schemars(range(min = 1, max = 65_000))]
    pub attach_max: usize,
    /// How long a worker whose shim has gone without a word stays, and what is known of
    /// its blocks with it: one that comes back in time sends only what has changed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub rejoin_grace: Duration,
    /// How often shims tell their engine's load, even if nothing changes.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub load_interval: Duration,
    /// From when on a worker's last report of its load is too old: it is placed as if it were
    /// as busy as the busiest of its model.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub load_stale: Duration,
}

/// A token, and the workers that it is for.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetToken {
    /// The token; a file may hold several, as for `fleet.token`.
    pub token: Secret,
    /// The ids of the workers for which shims that show it may speak; an id that ends in `*`
    /// stands for all that begin so. Where the router knows the worker at a shim's address by
    /// another id, both must be listed.
    #[schemars(
        length(min = 1),
        inner(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._:*-]+$"))
    )]
    pub workers: Vec<String>,
}

/// What the fleet listener shows, and asks to be shown. PEM files.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetTls {
    /// The certificate, with those between it and its authority behind it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority whose certificates shims must show; left out, they need none.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
    /// The workers for which a shim with a certificate of `client_ca` may speak.
    #[serde(default)]
    pub client_workers: ClientWorkers,
}

/// The workers for which a certificate is good.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ClientWorkers {
    /// All.
    #[default]
    Any,
    /// Those whose ids are DNS names of the certificate (its subject alternative names).
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
            load_stale: Duration::from_secs(5),
        }
    }
}
