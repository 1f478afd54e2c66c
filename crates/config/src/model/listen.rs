//! The listeners of the router.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::access::Auth;
use crate::scalar::{self, Address};

/// Listening addresses: `IP:PORT`, or `{ address: IP:PORT, tls: ... }` for a listener with TLS. Port
/// 0 takes any free port.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Listen {
    /// The listener for HTTP clients.
    pub http: Listener,
    /// Host names (without ports) of the HTTP listener. Others get 403 except on `/health` and
    /// `/ready`: protection against DNS rebinding. Empty: any name.
    pub http_hosts: Vec<String>,
    /// Origins (`https://chat.example`) whose web pages may use the HTTP listener from a browser
    /// (CORS); `*`: any. Empty: none.
    pub http_origins: Vec<String>,
    /// The listener for gRPC clients.
    pub grpc: Option<Listener>,
    /// Whether gRPC serves `Explain`, which shows other clients' load and which prompts are cached.
    /// Only if operators alone reach the listener; with `auth`, for tenants with `debug`.
    pub grpc_explain: bool,
    /// The address at which shims attach. Never a public one.
    #[schemars(with = "Option<scalar::Address>")]
    pub fleet: Option<SocketAddr>,
    /// The [admin listener](http.md#admin-listener-listenadmin). Never a public address.
    pub admin: Listener,
    /// Host names (without ports) of the admin listener, beside `localhost` and IP addresses (on
    /// loopback: those of loopback). Others get 403 (DNS rebinding). Beyond loopback, only names of
    /// requests without a credential are checked, unless it accepts nothing but TLS, and not for
    /// `/metrics`, `/health`, `/ready` and the files of the live page.
    pub admin_hosts: Vec<String>,
    /// Who may use the admin listener.
    pub admin_access: AdminAccess,
    /// Serves `/metrics`, `/health` and `/ready` alone, without a credential. It may be public: names of
    /// models, workers and tenants, no content.
    pub metrics: Option<Listener>,
}

impl Listen {
    /// Joins relative paths with the folder of the file.
    pub(crate) fn anchor(&mut self, base_dir: &Path) {
        let listeners = [
            Some(&mut self.http),
            self.grpc.as_mut(),
            Some(&mut self.admin),
            self.metrics.as_mut(),
        ];
        for tls in listeners.into_iter().flatten().filter_map(|listener| listener.tls.as_mut()) {
            let paths = [&mut tls.cert, &mut tls.key].into_iter().chain(&mut tls.client_ca);
            paths.for_each(|path| *path = base_dir.join(&*path));
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            http: SocketAddr::from(([0, 0, 0, 0], 8000)).into(),
            http_hosts: Vec::new(),
            http_origins: Vec::new(),
            grpc: None,
            grpc_explain: false,
            fleet: None,
            admin: SocketAddr::from(([127, 0, 0, 1], 9090)).into(),
            admin_hosts: Vec::new(),
            admin_access: AdminAccess::default(),
            metrics: None,
        }
    }
}

/// Who may use the admin listener.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AdminAccess {
    /// Who reaches it may read. Changes come from the router's own host, or with a credential of
    /// the role `admin`.
    #[default]
    Open,
    /// Every request needs a credential with the role `read`, or `admin` for changes. `/health` and
    /// `/ready` need none.
    Roles,
}

/// A listener: its address, and how its connections are encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The address.
    pub address: SocketAddr,
    /// The certificates. Without them, connections are not encrypted.
    pub tls: Option<ListenerTls>,
}

/// The certificates of a listener, as PEM files. They are read again when they change.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ListenerTls {
    /// The certificate, followed by the intermediate certificates.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authority of clients' certificates.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
    /// Whether clients need a certificate of `client_ca`. Default: `required` if `auth` is empty.
    #[serde(default)]
    pub client_certificates: Option<ClientCertificates>,
    /// Whether plain connections are accepted too, for a migration.
    #[serde(default)]
    pub plain_text: bool,
}

impl ListenerTls {
    /// Whether clients must have a certificate, with these credentials.
    pub fn client_certificates(&self, auth: &[Auth]) -> ClientCertificates {
        self.client_certificates.unwrap_or(match auth {
            [] => ClientCertificates::Required,
            _ => ClientCertificates::Optional,
        })
    }
}

/// Whether clients must have a certificate.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ClientCertificates {
    /// Connections without a certificate are accepted.
    Optional,
    /// Connections without a certificate are refused.
    Required,
}

/// The mapping form of a [`Listener`].
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListenerMapping {
    /// The address.
    #[schemars(with = "Address")]
    address: SocketAddr,
    /// TLS of the listener. Without it, connections are not encrypted.
    #[serde(default)]
    tls: Option<ListenerTls>,
}

impl From<SocketAddr> for Listener {
    fn from(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }
}

impl Serialize for Listener {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { address, tls } = self.clone();
        match tls {
            None => address.serialize(serializer),
            tls => ListenerMapping { address, tls }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Listener {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListenerVisitor)
    }
}

struct ListenerVisitor;

impl<'de> Visitor<'de> for ListenerVisitor {
    type Value = Listener;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an address, or a mapping with an address")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Listener, E> {
        let address: Result<SocketAddr, _> = text.parse();
        address.map(Listener::from).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Listener, A::Error> {
        let ListenerMapping { address, tls } =
            ListenerMapping::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Listener { address, tls })
    }
}

impl JsonSchema for Listener {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Listener".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let address = generator.subschema_for::<Address>();
        let mapping = generator.subschema_for::<ListenerMapping>();
        json_schema!({ "anyOf": [address, mapping] })
    }
}
