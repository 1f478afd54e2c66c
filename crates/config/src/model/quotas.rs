//! Settings of the limits of tenants that several routers serve.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// How routers share the limits of tenants.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Quotas {
    /// Each router admits a fixed share.
    Local(LocalQuotas),
    /// Routers move shares of the limits between each other, over the broker of `events`.
    Nats(NatsQuotas),
}

impl Default for Quotas {
    fn default() -> Self {
        Self::Local(LocalQuotas::default())
    }
}

/// A fixed share of every limit.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct LocalQuotas {
    /// The share that this router admits. The shares of all routers should sum to 1.
    #[schemars(range(min = 0.0001, max = 1.0))]
    pub share: f64,
}

impl Default for LocalQuotas {
    fn default() -> Self {
        Self { share: 1.0 }
    }
}

/// Shares that routers keep in a key-value bucket of NATS JetStream.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct NatsQuotas {
    /// The bucket with the shares. All routers that share limits need the same name. A router creates
    /// a missing bucket.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9_-]+$"))]
    pub bucket: String,
    /// How long a router uses its shares without the broker. Afterwards the router admits a small
    /// part of every limit, and the other routers get the rest. From 20 s to 1 h.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub lease: Duration,
}

impl Default for NatsQuotas {
    fn default() -> Self {
        Self { bucket: "splitrail-quotas".to_owned(), lease: Duration::from_secs(120) }
    }
}
