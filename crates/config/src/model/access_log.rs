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
    /// The share of requests that end well and are logged, chosen at random. All other requests are
    /// logged.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample_ratio: f64,
    /// The file that gets the lines, as JSON. Each router needs its own file. Without a path, the
    /// lines are log lines of the target `access` on stderr, in the format of the log.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
}

impl Default for AccessLogConfig {
    fn default() -> Self {
        Self { enabled: false, sample_ratio: 1.0, path: None, rotate: Rotation::default() }
    }
}
