//! Settings of traces.

use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Secret;
use crate::scalar;
use splitrail_settings::endpoint::{self, BadEndpoint};

/// Traces of requests.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TracingConfig {
    /// [Export of spans](traces.md) by the OpenTelemetry protocol. Without it, requests are not
    /// traced.
    pub otlp: Option<OtlpConfig>,
}

/// Export of spans to a collector.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OtlpConfig {
    /// The collector, `http://HOST:PORT` or `https://HOST:PORT` (usually 4317 for gRPC, 4318 for
    /// HTTP). With `protocol: http`, the path is `/v1/traces` unless there is one.
    pub endpoint: String,
    /// How spans are sent.
    #[serde(default)]
    pub protocol: OtlpProtocol,
    /// Headers sent with the spans, such as a credential.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub headers: Vec<OtlpHeader>,
    /// The authorities of the collector's certificate (PEM). Default: the system's.
    #[serde(default)]
    pub ca: Option<PathBuf>,
    /// The share of requests without a trace context that are traced, at random. Others follow
    /// their client.
    #[serde(default = "sample_ratio")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample_ratio: f64,
    /// `service.name` in traces.
    #[serde(default = "service_name")]
    #[schemars(length(min = 1, max = 128))]
    pub service_name: String,
    /// Maximum time for the collector to take a batch.
    #[serde(
        default = "timeout",
        deserialize_with = "scalar::duration",
        serialize_with = "scalar::duration_text"
    )]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub timeout: Duration,
    /// Maximum spans that wait for the collector. Further ones are dropped and counted.
    #[serde(default = "queue_spans_max")]
    #[schemars(range(min = 512, max = 1_000_000))]
    pub queue_spans_max: usize,
}

/// The protocol of an exporter.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OtlpProtocol {
    /// OTLP/gRPC.
    #[default]
    Grpc,
    /// OTLP/HTTP with protobuf bodies.
    Http,
}

/// A header for the collector.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OtlpHeader {
    /// The name, in lower case.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[a-z0-9_.-]+$"))]
    pub name: String,
    /// The value.
    pub value: Secret,
}

/// Where spans are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpTarget {
    /// `http://HOST:PORT` or `https://HOST:PORT`.
    pub origin: String,
    /// The path for OTLP/HTTP.
    pub path: String,
}

impl OtlpTarget {
    /// Whether the connection uses TLS.
    pub fn uses_tls(&self) -> bool {
        self.origin.starts_with("https:")
    }

    /// Host and port.
    pub fn authority(&self) -> &str {
        self.origin.split_once("://").map_or("", |(_, authority)| authority)
    }
}

impl OtlpConfig {
    /// The parts of `endpoint`.
    ///
    /// # Errors
    /// What is wrong with it, and what to write instead, without the text.
    pub fn target(&self) -> Result<OtlpTarget, BadEndpoint> {
        const PATH: &str = "/v1/traces";
        let scheme_end = self.endpoint.find("://").map_or(0, |at| at + "://".len());
        let path_at = self.endpoint[scheme_end..].find('/').map(|at| at + scheme_end);
        let (origin, path) = self.endpoint.split_at(path_at.unwrap_or(self.endpoint.len()));
        let path = match (self.protocol, path) {
            (_, "" | "/") => PATH,
            (OtlpProtocol::Http, path) if is_path(path) => path,
            (OtlpProtocol::Http, _) => {
                let hint = "write a path of letters, digits and `-._~/%`";
                return Err(BadEndpoint { why: "has an invalid path".into(), hint: hint.into() });
            }
            (OtlpProtocol::Grpc, _) => {
                let hint = "OTLP/gRPC has no path: delete it, or write `protocol: http`";
                return Err(BadEndpoint { why: "has a path".into(), hint: hint.into() });
            }
        };
        let origin = endpoint::parse_http(origin)?;
        Ok(OtlpTarget { origin, path: path.to_owned() })
    }
}

fn is_path(path: &str) -> bool {
    path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~/%:@".contains(&byte))
}

impl TracingConfig {
    /// Joins relative paths with the folder of the file.
    pub fn anchor(&mut self, base_dir: &Path) {
        let Some(otlp) = &mut self.otlp else { return };
        otlp.headers.iter_mut().for_each(|header| header.value.anchor(base_dir));
        otlp.ca.iter_mut().for_each(|path| *path = base_dir.join(&*path));
    }
}

fn sample_ratio() -> f64 {
    1.0
}

fn service_name() -> String {
    "splitrail".to_owned()
}

fn timeout() -> Duration {
    Duration::from_secs(10)
}

fn queue_spans_max() -> usize {
    16_384
}
