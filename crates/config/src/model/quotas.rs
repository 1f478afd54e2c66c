//! Settings of the limits of tenants that several routers serve.

use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_settings::Secret;

use crate::scalar;

/// How routers share the limits of tenants.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Quotas {
    /// Each router admits a fixed share.
    Local(LocalQuotas),
    /// Routers move shares of the limits between each other, over a NATS broker.
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
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NatsQuotas {
    /// Servers of one NATS cluster, `nats://HOST:PORT` or `tls://HOST:PORT`. Further servers are
    /// learned from them. JetStream must be enabled.
    #[schemars(length(min = 1, max = 32))]
    pub servers: Vec<String>,
    /// The credentials with which the router authenticates to the broker. They are read again for
    /// each connection. Without them, the router does not authenticate.
    #[serde(default)]
    pub login: Option<BrokerLogin>,
    /// The certificates (PEM) of the authorities that may sign the certificate of a `tls://`
    /// server. Defaults to those of the system.
    #[serde(default)]
    pub tls_ca: Option<PathBuf>,
    /// The bucket with the shares. All routers that share limits need the same name. A router creates
    /// a missing bucket.
    #[serde(default = "bucket")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9_-]+$"))]
    pub bucket: String,
    /// Number of servers of the NATS cluster that keep the bucket. Applies when the bucket is
    /// created; one that exists stays as it is (`nats stream edit`).
    #[serde(default = "stream_replicas")]
    #[schemars(range(min = 1, max = 5))]
    pub stream_replicas: usize,
    /// How long a router uses its shares without the broker. Afterwards the router admits a small
    /// part of every limit, and the other routers get the rest.
    #[serde(
        default = "lease",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "20s", "x-maximum" = "1h"))]
    pub lease: Duration,
}

impl NatsQuotas {
    /// Resolves relative paths against the folder of the configuration file.
    pub(crate) fn anchor(&mut self, base_dir: &Path) {
        self.login.iter_mut().for_each(|login| login.secret_mut().anchor(base_dir));
        if let Some(path) = &mut self.tls_ca {
            *path = base_dir.join(&*path);
        }
    }
}

/// The credentials with which a router authenticates to the broker.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BrokerLogin {
    /// A user of the broker with a password.
    User {
        /// The name of the user.
        name: String,
        /// The password of the user.
        password: Secret,
    },
    /// A token of the broker.
    Token {
        /// The token.
        token: Secret,
    },
}

impl BrokerLogin {
    /// The secret of the login.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        match self {
            Self::User { password, .. } => password,
            Self::Token { token } => token,
        }
    }

    pub(crate) fn secret_mut(&mut self) -> &mut Secret {
        match self {
            Self::User { password, .. } => password,
            Self::Token { token } => token,
        }
    }
}

fn bucket() -> String {
    "splitrail-quotas".to_owned()
}

fn stream_replicas() -> usize {
    1
}

fn lease() -> Duration {
    Duration::from_secs(120)
}
