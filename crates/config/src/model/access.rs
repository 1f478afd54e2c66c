//! Who may use the router: credentials, tenants, and the limits of tenants.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::scalar;

/// A kind of credential with which clients prove who they are.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Auth {
    /// API keys, as `Authorization: Bearer` or `x-api-key`.
    Keys {
        /// The file with the hashes of the keys (`splitrail keys new` adds one), read again when it
        /// changes.
        file: PathBuf,
    },
    /// JSON Web Tokens as `Authorization: Bearer`, signed with RS256, ES256 or EdDSA.
    Jwt(JwtAuth),
    /// TLS client certificates of `client_ca` of `listen.http` or `listen.grpc`.
    ClientCertificate {
        /// The part that names the tenant.
        tenant: CertificateName,
    },
}

impl Auth {
    /// Joins relative paths with the folder of the file.
    pub(crate) fn anchor(&mut self, base_dir: &Path) {
        match self {
            Self::Keys { file } => *file = base_dir.join(&*file),
            Self::Jwt(jwt) => {
                if let Some(path) = jwt.jwks_file() {
                    jwt.jwks = base_dir.join(path).display().to_string();
                }
                jwt.jwks_ca.iter_mut().for_each(|path| *path = base_dir.join(&*path));
            }
            Self::ClientCertificate { .. } => {}
        }
    }
}

impl JwtAuth {
    /// The path of the file with the keys, if they are not fetched from a URL.
    pub fn jwks_file(&self) -> Option<&Path> {
        let is_url = self.jwks.contains("://");
        (!is_url).then(|| Path::new(&self.jwks))
    }
}

/// How JSON Web Tokens are verified.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct JwtAuth {
    /// The required value of the claim `iss`.
    #[schemars(length(min = 1, max = 2048))]
    pub issuer: String,
    /// The required claim `aud`, or one of its items.
    #[schemars(length(min = 1, max = 2048))]
    pub audience: String,
    /// The issuer's JSON Web Key Set: a file, read again when it changes, or an `https://` URL,
    /// fetched every `refresh_interval` and when a token names an unknown key.
    #[schemars(length(min = 1, max = 2048))]
    pub jwks: String,
    /// The authority of the URL's certificate (PEM). Default: the system's.
    #[serde(default)]
    pub jwks_ca: Option<PathBuf>,
    /// How often the URL is fetched.
    #[serde(default = "refresh_interval")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10s"))]
    pub refresh_interval: Duration,
    /// The claim that names the tenant.
    #[serde(default = "tenant_claim")]
    #[schemars(length(min = 1, max = 256))]
    pub tenant_claim: String,
    /// The claim with the role for the admin listener: `admin` or `read`, a text or in a list.
    /// Default: no role.
    #[serde(default)]
    #[schemars(length(min = 1, max = 256))]
    pub role_claim: Option<String>,
    /// The tenants that the issuer's tokens may name. Default: all.
    #[serde(default)]
    pub tenants: Option<Vec<String>>,
}

fn refresh_interval() -> Duration {
    Duration::from_secs(3600)
}

fn tenant_claim() -> String {
    "sub".to_owned()
}

/// The part of a client certificate that names a tenant.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum CertificateName {
    /// A URI of the subject alternative names (SPIFFE).
    SanUri,
    /// A DNS name of the subject alternative names.
    SanDns,
}

/// A tenant: clients that share limits, and by default a cache.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// The name, as in credentials, ledger and metrics.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub name: String,
    /// Further names in tokens and certificates, for example the URI of a certificate.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub identities: Vec<String>,
    /// The models, aliases and adapters that the tenant may send. Default: all.
    #[serde(default)]
    pub models: Option<Vec<String>>,
    /// Who shares cached blocks with the tenant.
    #[serde(default)]
    pub cache: CacheGroup,
    /// Maximum priority. Default: `queue.priority_max`, which always applies.
    #[serde(default)]
    #[schemars(range(min = 0, max = 100))]
    pub priority_max: Option<i32>,
    /// The tenant's share of queue, places in flight and request memory, relative to others.
    #[serde(default = "one")]
    #[schemars(range(min = 0.01, max = 1000.0))]
    pub weight: f64,
    /// Limits on what the tenant may use.
    #[serde(default)]
    pub limits: TenantLimits,
    /// Whether replies have `x-splitrail-route`, `server-timing`, `usage.splitrail`, and
    /// `started.route` over gRPC.
    #[serde(default)]
    pub debug: bool,
}

fn one() -> f64 {
    1.0
}

/// Limits on what a tenant may use. Without a value, a limit does not apply.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct TenantLimits {
    /// Maximum number of requests in a minute.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub requests_per_minute: Option<u64>,
    /// Maximum tokens in a minute, weighted by `models[].token_weights`.
    #[schemars(range(min = 1, max = 1_000_000_000_000_u64))]
    pub tokens_per_minute: Option<u64>,
    /// Maximum tokens in a day (UTC), weighted likewise.
    #[schemars(range(min = 1, max = 1_000_000_000_000_u64))]
    pub tokens_per_day: Option<u64>,
    /// Maximum requests in flight. Each prompt of a batch counts.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests_in_flight: Option<usize>,
}

/// What a token counts towards the limits of tenants.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct TokenWeights {
    /// A prompt token that was not cached.
    #[schemars(range(min = 0, max = 1000))]
    pub uncached: u64,
    /// A prompt token that was cached.
    #[schemars(range(min = 0, max = 1000))]
    pub cached: u64,
    /// A generated token.
    #[schemars(range(min = 0, max = 1000))]
    pub output: u64,
    /// The generated tokens reserved for a sample of a request without `max_tokens`, or with 0, which
    /// SGLang takes for no limit. Unused ones are given back at its end.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub output_default: u64,
}

impl Default for TokenWeights {
    fn default() -> Self {
        Self { uncached: 1, cached: 0, output: 1, output_default: 1024 }
    }
}

/// For requests that no other setting is for.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// The tenant of requests without a credential. Default: 401 if `auth` is configured.
    pub tenant: Option<String>,
}

/// The tenants among which cached blocks are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheGroup {
    /// The tenant alone.
    #[default]
    Own,
    /// All tenants that name the group.
    Shared(String),
}

/// The group of `cache: shared`.
const COMMON_GROUP: &str = "shared";

/// Maximum length of the name of a group, in bytes.
const GROUP_MAX_BYTES: usize = 64;

impl Serialize for CacheGroup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Own => serializer.serialize_str("own"),
            Self::Shared(group) if group == COMMON_GROUP => serializer.serialize_str("shared"),
            Self::Shared(group) => serializer.collect_map([("shared", group)]),
        }
    }
}

impl<'de> Deserialize<'de> for CacheGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CacheGroupVisitor)
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SharedGroup {
    /// The name of the group.
    #[schemars(length(min = 1, max = GROUP_MAX_BYTES))]
    shared: String,
}

struct CacheGroupVisitor;

impl<'de> Visitor<'de> for CacheGroupVisitor {
    type Value = CacheGroup;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("own, shared, or a mapping with the name of a group")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<CacheGroup, E> {
        match text {
            "own" => Ok(CacheGroup::Own),
            "shared" => Ok(CacheGroup::Shared(COMMON_GROUP.to_owned())),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CacheGroup, A::Error> {
        let group = SharedGroup::deserialize(de::value::MapAccessDeserializer::new(map))?;
        Ok(CacheGroup::Shared(group.shared))
    }
}

impl JsonSchema for CacheGroup {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "CacheGroup".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let group = generator.subschema_for::<SharedGroup>();
        json_schema!({
            "anyOf": [
                {
                    "type": "string", "const": "own",
                    "description": "The tenant shares cached blocks with nobody."
                },
                {
                    "type": "string", "const": "shared",
                    "description": "All tenants with this value share cached blocks."
                },
                group
            ]
        })
    }
}
