//! TLS towards the engines of a model.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// TLS towards engines: the authorities that must have signed their certificates, and the router's
/// own certificate. The files are PEM files, read at the start and at each reload.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTls {
    /// The authorities of engines' certificates. Default: the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The router's certificate for engines, followed by the intermediate certificates. Needs
    /// `key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// The private key of `cert`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The name or IP address in the engines' certificates. Default: the host of each worker's URL.
    /// Set it if workers are found by address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub server_name: Option<String>,
}

impl EngineTls {
    /// Joins relative paths with the folder of the file.
    pub(crate) fn anchor(&mut self, base_dir: &Path) {
        let paths = [&mut self.ca, &mut self.cert, &mut self.key];
        paths.into_iter().flatten().for_each(|path| *path = base_dir.join(&*path));
    }
}
