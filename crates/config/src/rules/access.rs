//! Rules about `auth`, `tenants` and `defaults`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::jwt;
use crate::keys;
use crate::model::{Auth, ClientCertificates, Listen, Listener, ListenerTls, Secret};
use crate::value::typed;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::Node;
use splitrail_settings::words::shown;

/// Reports every violation of a rule about who may use the router.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let tenants = tenants(root, report);
    let auth = root.get("auth").map(Node::items).unwrap_or_default();
    for (index, node) in auth.iter().enumerate() {
        credential(node, index, base_dir, &tenants, report);
    }
    jwt::check_issuers(auth, report);
    default_tenant(root, &tenants, report);
    salt_key(root, base_dir, report);
    open_listeners(root, auth, report);
    if auth.is_empty()
        && let Some(node) = root.get("tenants").filter(|node| !node.items().is_empty())
        && default_name(root).is_none()
    {
        let message = "`tenants` has no effect: no request names a tenant".to_owned();
        report.warn(node.at, message, "add `auth: [{ kind: keys, file: keys.yaml }]`");
    }
}

/// The names and identities of the tenants.
fn tenants<'n>(root: &'n Node, report: &mut ProblemReport) -> HashSet<&'n str> {
    let served = served_names(root);
    let mut names: HashMap<&str, usize> = HashMap::new();
    let tenants = root.get("tenants").map(Node::items).unwrap_or_default();
    for (index, tenant) in tenants.iter().enumerate() {
        let identities = tenant.get("identities").map(Node::items).unwrap_or_default();
        for node in tenant.get("name").into_iter().chain(identities) {
            let Some(name) = node.text() else { continue };
            if let Some(other) = names.insert(name, index) {
                let name = shown(name);
                let message =
                    format!("`tenants[{index}]` and `tenants[{other}]` are both \"{name}\"");
                report.error(node.at, message, "a credential must name one tenant");
            }
        }
        for model in tenant.get("models").map(Node::items).unwrap_or_default() {
            let Some(name) = model.text().filter(|name| !served.contains(name)) else { continue };
            let message =
                format!("`tenants[{index}].models`: no model is called \"{}\"", shown(name));
            report.error(model.at, message, "a name, an alias or an adapter of `models`");
        }
    }
    names.into_keys().collect()
}

/// The names that clients may send as `model`.
fn served_names(root: &Node) -> HashSet<&str> {
    let models = root.get("models").map(Node::items).unwrap_or_default();
    let further = |model| {
        let lists =
            ["aliases", "adapters"].into_iter().filter_map(move |key| Node::get(model, key));
        lists.flat_map(Node::items)
    };
    let all = models.iter().flat_map(|model| model.get("name").into_iter().chain(further(model)));
    all.filter_map(Node::text).collect()
}

fn credential(
    node: &Node,
    index: usize,
    base_dir: &Path,
    tenants: &HashSet<&str>,
    report: &mut ProblemReport,
) {
    match node.get("kind").and_then(Node::text) {
        Some("keys") => {
            let Some(file) = typed::<PathBuf>(node, "file") else { return };
            let at = node.get("file").unwrap_or(node).at;
            key_file(&base_dir.join(file), index, at, tenants, report);
        }
        Some("jwt") => {
            jwt::check(node, &format!("auth[{index}]"), base_dir, report);
            let named = node.get("tenants").map(Node::items).unwrap_or_default();
            for node in named {
                let Some(name) = node.text().filter(|name| !tenants.contains(name)) else {
                    continue;
                };
                let message =
                    format!("`auth[{index}].tenants`: no tenant is called \"{}\"", shown(name));
                report.error(node.at, message, "the name of one of `tenants`");
            }
        }
        // The rule about certificates is one about listeners.
        _ => {}
    }
}

fn key_file(
    path: &Path,
    index: usize,
    at: Place,
    tenants: &HashSet<&str>,
    report: &mut ProblemReport,
) {
    let loaded = match keys::load(path) {
        Ok(loaded) => loaded,
        Err(problems) => {
            let first = problems.as_slice().first();
            let why = first.map(|first| format!("line {}: {}", first.line, first.message));
            let message = format!("`auth[{index}].file`: {}", why.unwrap_or_default());
            let hint = match path.exists() {
                true => "correct the file, or let the router's user read it",
                false => "make the file with `splitrail keys new --tenant NAME`",
            };
            report.error(at, message, hint);
            return;
        }
    };
    let unknown = |name: &&str| !tenants.contains(name);
    let named = loaded.keys.iter().filter_map(|key| key.tenant.as_deref());
    if let Some(name) = named.clone().find(unknown) {
        let message = format!("`auth[{index}].file`: no tenant is called \"{}\"", shown(name));
        // A key may be made before its tenant is written down. A running router accepts it, too.
        let hint = "its keys are refused (403): add it to `tenants`, or revoke them";
        report.warn(at, message, hint);
    }
    if loaded.keys.is_empty() {
        let message = format!("`auth[{index}].file` has no keys");
        report.warn(at, message, "add one with `splitrail keys new --tenant NAME`");
    }
}

fn default_name(root: &Node) -> Option<&Node> {
    root.get("defaults")?.get("tenant").filter(|node| node.text().is_some())
}

fn default_tenant(root: &Node, tenants: &HashSet<&str>, report: &mut ProblemReport) {
    let Some(node) = default_name(root) else { return };
    let Some(name) = node.text().filter(|name| !tenants.contains(name)) else { return };
    let message = format!("`defaults.tenant`: no tenant is called \"{}\"", shown(name));
    report.error(node.at, message, "add it to `tenants`");
}

fn salt_key(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(node) = root.get("cache_salt_key") else { return };
    let Some(Some(mut secret)) = typed::<Option<Secret>>(root, "cache_salt_key") else { return };
    secret.anchor(base_dir);
    if let Err(error) = secret.resolve() {
        let hint = "make one with `head -c 32 /dev/urandom | base64`";
        report.error(node.at, format!("`cache_salt_key`: {error}"), hint);
    }
}

/// Warns of listeners that other hosts can reach and that ask for no credential, and of credentials
/// that travel in clear text.
fn open_listeners(root: &Node, auth: &[Node], report: &mut ProblemReport) {
    let defaults = Listen::default();
    let section = root.get("listen");
    let clients = [("http", Some(defaults.http)), ("grpc", defaults.grpc)];
    for (key, default) in clients {
        let node = section.and_then(|section| section.get(key));
        let listener = match node {
            Some(_) => {
                section.and_then(|section| typed::<Option<Listener>>(section, key)).flatten()
            }
            None => default,
        };
        let Some(Listener { address, tls }) = listener else { continue };
        if address.ip().is_loopback() {
            continue;
        }
        let at = node.or(section).unwrap_or(root).at;
        let needs_certificate = |tls: &ListenerTls| {
            tls.client_ca.is_some() && tls.client_certificates != Some(ClientCertificates::Optional)
        };
        let is_proven = tls.as_ref().is_some_and(needs_certificate);
        if auth.is_empty() && !is_proven {
            let message = format!("anyone who reaches {address} can use the engines");
            report.warn(at, message, "add `auth` and `tenants`: docs/guides/secure.md");
        } else if tls.is_none() {
            let message = format!("credentials travel to {address} in clear text");
            let hint = "add `tls: { cert, key }` to the listener, or end TLS in front of it";
            report.warn(at, message, hint);
        }
    }
    let by_certificate =
        auth.iter().find(|node| matches!(typed_auth(node), Some(Auth::ClientCertificate { .. })));
    if let Some(node) = by_certificate {
        let has_ca = |key: &&str| {
            let listener = section.and_then(|section| section.get(key));
            listener.and_then(|node| node.get("tls")?.get("client_ca")).is_some()
        };
        if !["http", "grpc"].iter().any(has_ca) {
            let message =
                "`auth` accepts client certificates, which no listener asks for".to_owned();
            report.error(node.at, message, "add `client_ca` to `listen.http.tls`");
        }
    }
}

fn typed_auth(node: &Node) -> Option<Auth> {
    serde_json::from_value(node.to_json()).ok()
}
