//! Settings of the access log.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Rotation;

/// The access log: one line for each request of a client, without content.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AccessLogConfig {
    /// Whether requests are logged.
    pub enabled: bool,
    /// The share of requests ending with `ok` that are logged, at random. All others are logged.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample_ratio: f64,
    /// The file, one per router. Default: the standard output of `splitrail serve`.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
}

impl Default for AccessLogConfig {
    fn default() -> Self {
        Self { enabled: true, sample_ratio: 1.0, path: None, rotate: Rotation::default() }
    }
}
