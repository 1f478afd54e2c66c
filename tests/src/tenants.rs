//! A cluster with tenants, and the keys of its clients.

use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::{Value, json};
use splitrail_access::keys::{Grant, generate};
use splitrail_config::keys::{KeyEntry, OperatorRole};
use tempfile::TempDir;

use crate::client::Reply;
use crate::trial::COMPLETIONS;
use crate::{Client, Cluster, Spec};

/// A file of keys.
pub struct Keys {
    folder: TempDir,
    entries: Vec<KeyEntry>,
}

impl Keys {
    /// A file without keys.
    pub fn empty() -> Self {
        let keys = Self { folder: tempfile::tempdir().expect("a folder"), entries: Vec::new() };
        keys.write();
        keys
    }

    /// A folder that lives as long as the keys.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("keys.yaml")
    }

    /// Adds a key of a tenant; returns the key.
    pub fn tenant(&mut self, tenant: &str) -> String {
        self.add(&Grant::Tenant(tenant.into()), None)
    }

    /// Adds a key of a tenant that stopped being valid.
    pub fn expired(&mut self, tenant: &str) -> String {
        self.add(&Grant::Tenant(tenant.into()), Some("2020-01-01".to_owned()))
    }

    /// Adds a key of an operator; returns the key.
    pub fn role(&mut self, role: OperatorRole) -> String {
        self.add(&Grant::Role(role), None)
    }

    fn add(&mut self, grant: &Grant, expires: Option<String>) -> String {
        let (key, entry) = generate(grant, expires, None, SystemTime::now()).expect("a key");
        self.entries.push(entry);
        self.write();
        key
    }

    /// Revokes the key that was added at this place.
    pub fn revoke(&mut self, place: usize) {
        self.entries.remove(place);
        self.write();
    }

    fn write(&self) {
        let text = json!({ "keys": self.entries }).to_string();
        std::fs::write(self.path(), text).expect("a file of keys");
    }

    /// The section `auth` that names this file.
    pub fn auth(&self) -> String {
        format!("auth: [ {{ kind: keys, file: {:?} }} ]", self.path().display().to_string())
    }
}

/// Starts a cluster whose clients need keys of these tenants (the lines of a YAML list).
pub async fn start(keys: &Keys, tenants: &str, spec: Spec) -> Cluster {
    let top = format!("{}\n{}\n{}", keys.auth(), tenants, spec.top);
    Cluster::start(Spec { top, ..spec }).await
}

/// The header with a key.
pub fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

/// Sends a body with a key.
pub async fn post(client: &Client, path: &str, key: &str, body: &Value) -> Reply {
    client.post_with(path, &[("authorization", &bearer(key))], body.to_string()).await
}

/// Sends a completion with a key.
pub async fn complete(client: &Client, key: &str, body: &Value) -> Reply {
    post(client, COMPLETIONS, key, body).await
}

/// The cached tokens in a reply.
pub fn cached(reply: &Reply) -> u64 {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached tokens")
}
