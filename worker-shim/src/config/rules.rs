//! Rules that the schema cannot express: formats of addresses, relations between keys, and files
//! and variables outside of the configuration.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use splitrail_settings::Secret;
use splitrail_settings::endpoint::{self, BadEndpoint};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::process::open_regular;
use splitrail_settings::tree::Node;
use splitrail_settings::words::shown;

/// Reports all violated rules of the tree under `root`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    if let Some(node) = root.get("advertise")
        && let Some(text) = node.text()
        && let Err(BadEndpoint { why, hint }) = endpoint::parse_http(text)
    {
        report.error(node.at, format!("`advertise` {why}"), hint);
    }
    for (key, scheme) in
        [("engine", "http"), ("bootstrap", "http"), ("kv_events", "tcp"), ("kv_replay", "tcp")]
    {
        if let Some(node) = root.get(key)
            && let Some(text) = node.text()
            && let Err(BadEndpoint { why, hint }) = endpoint::parse(text, scheme)
        {
            report.error(node.at, format!("`{key}` {why}"), hint);
        }
    }
    listen(root, report);
    routers(root, report);
    if let (Some(replay), None) = (root.get("kv_replay"), root.get("kv_events")) {
        let message = "`kv_replay` stands without `kv_events`".to_owned();
        report.error(replay.at, message, "name both, or neither: then the engine is asked");
    }
    for key in ["token", "engine_api_key"] {
        secret(root, key, base_dir, report);
    }
    tls(root, base_dir, report);
}

/// The typed value under `key`. `None` if it is absent or invalid.
fn typed<T: DeserializeOwned>(node: &Node, key: &str) -> Option<T> {
    serde_json::from_value(node.get(key)?.to_json()).ok()
}

fn listen(root: &Node, report: &mut ProblemReport) {
    let Some(address) = typed::<SocketAddr>(root, "listen") else { return };
    let at = root.get("listen").unwrap_or(root).at;
    if address.ip().is_unspecified() && root.get("advertise").is_none() {
        let message = format!("`listen` {address} does not say where routers reach it");
        let hint = "add `advertise: http://HOST:PORT`, with this host's address as routers see it";
        report.error(at, message, hint);
    }
}

fn routers(root: &Node, report: &mut ProblemReport) {
    let routers = root.get("router").map(Node::items).unwrap_or_default();
    if routers.is_empty() {
        let at = root.get("router").unwrap_or(root).at;
        let message = "`router` names no router".to_owned();
        report.error(at, message, "name each router's `listen.fleet`");
    }
    let mut seen: Vec<String> = Vec::new();
    for (index, node) in routers.iter().enumerate() {
        let Some(text) = node.text() else { continue };
        if text.contains("://") {
            let message = format!("`router[{index}]` has a scheme");
            report.error(node.at, message, "write `HOST:PORT`; `tls` decides how to connect");
            continue;
        }
        match endpoint::parse(&format!("http://{text}"), "http") {
            Err(BadEndpoint { why, .. }) => {
                let message = format!("`router[{index}]` {why}");
                report.error(node.at, message, "write `HOST:PORT`, a router's `listen.fleet`");
            }
            Ok(address) if seen.contains(&address) => {
                let message = format!("`router[{index}]` is here a second time");
                report.error(node.at, message, "name each router once");
            }
            Ok(address) => seen.push(address),
        }
    }
    let is_elsewhere = |text: &String| !endpoint::is_loopback(text.trim_start_matches("http://"));
    if let Some(token) = root.get("token").filter(|_| root.get("tls").is_none())
        && seen.iter().any(is_elsewhere)
    {
        let message = "`token` travels to routers in clear text".to_owned();
        report.warn(token.at, message, "add `tls: { ca: ... }`, and `fleet.tls` at the routers");
    }
}

fn secret(root: &Node, key: &str, base_dir: &Path, report: &mut ProblemReport) {
    let Some(Some(mut secret)) = typed::<Option<Secret>>(root, key) else { return };
    let at = root.get(key).unwrap_or(root).at;
    secret.anchor(base_dir);
    if let Err(error) = secret.resolve() {
        let hint = match secret {
            Secret::File { .. } => "the file must be readable here and hold the secret only",
            Secret::Env { .. } => "set the variable where the shim runs, and for checks as well",
        };
        report.error(at, format!("`{key}`: {error}"), hint);
    }
}

fn tls(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(section) = root.get("tls") else { return };
    for key in ["ca", "cert", "key"] {
        let Some(path) = typed::<PathBuf>(section, key) else { continue };
        if let Err(error) = open_regular(&base_dir.join(&path)) {
            let at = section.get(key).unwrap_or(section).at;
            let path = shown(&path.display().to_string());
            let message = format!("`tls.{key}` \"{path}\" cannot be read: {error}");
            report.error(at, message, "name a PEM file");
        }
    }
    if section.get("cert").is_some() != section.get("key").is_some() {
        let message = "`tls` has a certificate without its key, or a key alone".to_owned();
        report.error(section.at, message, "name `cert` and `key`, or neither");
    }
}
