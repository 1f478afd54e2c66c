//! A cluster with tenants, and the keys of its clients.

use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::{Value, json};
use splitrail_access::keys::{Grant, generate};
use splitrail_config::keys::{KeyEntry, Role};
use splitrail_tests::client::Reply;
use splitrail_tests::trial::COMPLETIONS;
use splitrail_tests::{Client, Cluster, Spec};
use tempfile::TempDir;

/// A file of keys.
pub(crate) struct Keys {
    folder: TempDir,
    entries: Vec<KeyEntry>,
}

impl Keys {
    pub(crate) fn new() -> Self {
        let keys = Self { folder: tempfile::tempdir().unwrap(), entries: Vec::new() };
        keys.write();
        keys
    }

    /// A folder that lives as long as the keys.
    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("keys.yaml")
    }

    /// Adds a key of a tenant; returns the key.
    pub(crate) fn tenant(&mut self, tenant: &str) -> String {
        self.add(&Grant::Tenant(tenant.into()), None)
    }

    /// Adds a key of a tenant that stopped being valid.
    pub(crate) fn expired(&mut self, tenant: &str) -> String {
        self.add(&Grant::Tenant(tenant.into()), Some("2020-01-01".to_owned()))
    }

    /// Adds a key of an operator; returns the key.
    pub(crate) fn role(&mut self, role: Role) -> String {
        self.add(&Grant::Role(role), None)
    }

    fn add(&mut self, grant: &Grant, expires: Option<String>) -> String {
        let (key, entry) = generate(grant, expires, None, SystemTime::now()).unwrap();
        self.entries.push(entry);
        self.write();
        key
    }

    /// Revokes the key that was added at this place.
    pub(crate) fn revoke(&mut self, place: usize) {
        self.entries.remove(place);
        self.write();
    }

    fn write(&self) {
        let text = json!({ "keys": self.entries }).to_string();
        std::fs::write(self.path(), text).unwrap();
    }

    /// The section `auth` that names this file.
    pub(crate) fn auth(&self) -> String {
        format!("auth: [ {{ kind: keys, file: {:?} }} ]", self.path().display().to_string())
    }
}

/// Starts a cluster whose clients need keys of these tenants (the lines of a YAML list).
pub(crate) async fn start(keys: &Keys, tenants: &str, spec: Spec) -> Cluster {
    let top = format!("{}\n{}\n{}", keys.auth(), tenants, spec.top);
    Cluster::start(Spec { top, ..spec }).await
}

/// The header with a key.
pub(crate) fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

/// Sends a body with a key.
pub(crate) async fn post(client: &Client, path: &str, key: &str, body: &Value) -> Reply {
    client.post_with(path, &[("authorization", &bearer(key))], body.to_string()).await
}

/// Sends a completion with a key.
pub(crate) async fn complete(client: &Client, key: &str, body: &Value) -> Reply {
    post(client, COMPLETIONS, key, body).await
}

/// The cached tokens in a reply.
pub(crate) fn cached(reply: &Reply) -> u64 {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}
