//! Rules about the fleet listener and the networks of workers.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use super::listener_tls::Section;
use super::networks;
use crate::model::{ClientWorkers, FleetConfig, FleetTls, Secret};
use crate::scalar::parse_duration;
use crate::tls::{Protocols, TlsPaths};
use crate::value::typed;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::{Node, Value};
use splitrail_settings::words::shown;

/// Reports every violation of a rule about `fleet` and `listen.fleet`.
pub(super) fn check(root: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let section = root.get("fleet");
    let listener = root.get("listen").and_then(|listen| {
        let address: SocketAddr = typed::<Option<SocketAddr>>(listen, "fleet").flatten()?;
        Some((listen.get("fleet")?.at, address))
    });
    match listener {
        Some((at, address)) => proven(section, at, address, report),
        None => open_models(root, report),
    }
    let Some(section) = section else { return };
    if let Some(list) = section.get("networks") {
        networks(list, "fleet.networks", report);
    }
    durations(section, report);
    tokens(section, base_dir, report);
    token_models(root, section, report);
    if listener.is_some() {
        models_without_token(root, section, report);
    }
    tls(section, base_dir, report);
    if listener.is_none() {
        // Null and an empty list count as absent.
        let given = |node: &&Node| match &node.value {
            Value::Null => false,
            Value::Seq(items) => !items.is_empty(),
            _ => true,
        };
        let keys = ["token", "tokens", "tls"].into_iter();
        for node in keys.filter_map(|key| section.get(key)).filter(given) {
            let message = "the fleet has no listener that would need this".to_owned();
            report.warn(node.at, message, "add `listen.fleet: IP:PORT`, or delete it");
        }
    }
}

/// Checks that shims must authenticate: a program that can attach can direct prompts to any address
/// that it is allowed to name.
fn proven(section: Option<&Node>, at: Place, address: SocketAddr, report: &mut ProblemReport) {
    let key = |key: &str| {
        let node = section.and_then(|fleet| fleet.get(key));
        node.filter(|node| node.value != Value::Null)
    };
    let tls = key("tls");
    let tokens = key("tokens").filter(|tokens| !tokens.items().is_empty());
    let client_ca = tls.and_then(|tls| tls.get("client_ca"));
    let client_ca = client_ca.filter(|node| node.value != Value::Null);
    let Some(credential) = key("token").or(tokens).or(client_ca) else {
        let hint = "add `fleet.tokens: [{ token: { kind: file, path: ... }, workers: [...] }]`, or \
                    `fleet.tls` with a `client_ca`";
        if address.ip().is_loopback() {
            let message = "`listen.fleet` lets every program on this host attach as a worker";
            report.warn(at, message.to_owned(), hint);
        } else {
            let message = "`listen.fleet` would let anybody who reaches it attach as a worker";
            report.error(at, message.to_owned(), hint);
        }
        return;
    };
    if address.ip().is_loopback() {
        return;
    }
    if let Some(token) = key("token").or(tokens)
        && tls.is_none()
    {
        let message = "the token of shims travels in clear text, and who reads it can attach";
        report.warn(token.at, message.to_owned(), "add `fleet.tls` with `cert` and `key`");
    }
    let names = tls.and_then(|tls| tls.get("client_workers")).and_then(Node::text);
    let is_shared = key("token").is_some() || tokens.is_none() || tokens.is_some_and(any_worker);
    if is_shared && names != Some("dns_names") {
        let message = "all shims share a credential: one of them can attach as any other";
        let hint = "bind tokens to worker ids with `fleet.tokens`, or certificates with \
                    `fleet.tls.client_workers: dns_names`";
        report.warn(credential.at, message.to_owned(), hint);
    }
}

/// Whether an entry of `fleet.tokens` is valid for all workers.
fn any_worker(tokens: &Node) -> bool {
    let workers = tokens.items().iter().filter_map(|token| token.get("workers"));
    workers.flat_map(Node::items).any(|worker| worker.text() == Some("*"))
}

/// Warns about models that need shims although there is no fleet listener to attach to. A shim that
/// is not attached mirrors no blocks, so that its gate always answers no.
fn open_models(root: &Node, report: &mut ProblemReport) {
    for (index, model) in root.get("models").map(Node::items).unwrap_or_default().iter().enumerate()
    {
        let sources = model.get("discovery").map(Node::items).unwrap_or_default();
        let is_shim = |source: &&Node| source.get("kind").and_then(Node::text) == Some("shim");
        let has_shim = |node: &&Node| typed::<bool>(node, "shim") == Some(true);
        let workers = model.get("workers").map(Node::items).unwrap_or_default();
        let behind = sources.iter().chain(workers).find(has_shim).map(|node| (node, "names shims"));
        let waits = sources.iter().find(is_shim).map(|node| (node, "waits for shims"));
        if let Some((node, does)) = waits.or(behind) {
            let message =
                format!("`models[{index}]` {does}, which have no fleet listener to attach to");
            report.warn(node.at, message, "add `listen.fleet: IP:PORT`");
        }
    }
}

fn durations(section: &Node, report: &mut ProblemReport) {
    let defaults = FleetConfig::default();
    let duration = |key: &str, default: Duration| match section.get(key) {
        Some(node) => node.text().and_then(|text| parse_duration(text).ok()),
        None => Some(default),
    };
    let (Some(interval), Some(stale)) = (
        duration("load_interval", defaults.load_interval),
        duration("load_stale_after", defaults.load_stale_after),
    ) else {
        return;
    };
    if stale < interval * 2 {
        let message =
            "`fleet.load_stale_after` is less than two of `fleet.load_interval`".to_owned();
        let hint = "a single report that comes late would count: five intervals are usual";
        let node = section.get("load_stale_after").unwrap_or(section);
        report.error(node.at, message, hint);
    }
}

fn tokens(section: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let shared = section.get("token").map(|node| ("fleet.token".to_owned(), node));
    let secret = typed::<Option<Secret>>(section, "token").flatten();
    token(shared.zip(secret), base_dir, report);
    let bound = section.get("tokens").map(Node::items).unwrap_or_default();
    for (index, entry) in bound.iter().enumerate() {
        let node = entry.get("token").map(|node| (format!("fleet.tokens[{index}].token"), node));
        token(node.zip(typed::<Secret>(entry, "token")), base_dir, report);
        for id in entry.get("workers").map(Node::items).unwrap_or_default() {
            let text = id.text().unwrap_or_default();
            if text.strip_suffix('*').unwrap_or(text).contains('*') {
                let message =
                    format!("`fleet.tokens[{index}].workers` has a `*` that is not at the end");
                report.error(id.at, message, "an id, or how ids begin: `prefill-*`");
            }
        }
    }
}

/// Checks the models of `fleet.tokens`. Warns about tokens without any if several models accept shims:
/// such a token is valid for the workers of another model that have the same ids.
fn token_models(root: &Node, section: &Node, report: &mut ProblemReport) {
    let models = root.get("models").map(Node::items).unwrap_or_default();
    let name = |model: &Node| model.get("name").and_then(Node::text).map(str::to_owned);
    let names: Vec<String> = models.iter().filter_map(name).collect();
    // The shim of a worker that a model lists can attach, too.
    let accepts_shims = |model: &&Node| {
        let items = |key| model.get(key).map(Node::items).unwrap_or_default();
        let is_shim = |source: &Node| source.get("kind").and_then(Node::text) == Some("shim");
        items("discovery").iter().any(is_shim)
            || ["workers", "prefill", "decode"].iter().any(|key| !items(key).is_empty())
    };
    let are_several = models.iter().filter(accepts_shims).count() > 1;
    let entries = section.get("tokens").map(Node::items).unwrap_or_default();
    for (index, entry) in entries.iter().enumerate() {
        let listed = entry.get("models").filter(|models| models.value != Value::Null);
        let Some(listed) = listed else {
            if are_several {
                let message = format!(
                    "`fleet.tokens[{index}]` is valid for workers of every model that accepts shims"
                );
                report.warn(entry.at, message, "bind it to models with `models: [NAME]`");
            }
            continue;
        };
        for model in listed.items() {
            let text = model.text().unwrap_or_default();
            if !names.iter().any(|name| name == text) {
                let message = format!(
                    "`fleet.tokens[{index}].models` names `{}`, which is no model",
                    shown(text)
                );
                report.error(model.at, message, "the `name` of one of `models`");
            }
        }
    }
}

/// Warns about models that wait for shims although no token is valid for their workers.
fn models_without_token(root: &Node, section: &Node, report: &mut ProblemReport) {
    let is_given = |node: &&Node| node.value != Value::Null;
    let entries = section.get("tokens").map(Node::items).unwrap_or_default();
    let listed: Option<Vec<_>> =
        entries.iter().map(|entry| entry.get("models").filter(is_given)).collect();
    // Without an entry, or with one for every model, a token says nothing about models.
    let Some(listed) = listed.filter(|listed| !listed.is_empty()) else { return };
    if section.get("token").is_some_and(|token| is_given(&token)) {
        return;
    }
    for (index, model) in root.get("models").map(Node::items).unwrap_or_default().iter().enumerate()
    {
        let sources = model.get("discovery").map(Node::items).unwrap_or_default();
        let is_shim = |source: &&Node| source.get("kind").and_then(Node::text) == Some("shim");
        let name = model.get("name").and_then(Node::text);
        let is_bound = listed.iter().flat_map(|models| models.items()).any(|of| of.text() == name);
        if let Some(source) = sources.iter().find(is_shim)
            && !is_bound
        {
            let message = format!(
                "`models[{index}]` waits for shims, but no token of `fleet.tokens` is valid for its \
                 workers"
            );
            report.warn(source.at, message, "name the model under `models` of one of the tokens");
        }
    }
}

fn token(found: Option<((String, &Node), Secret)>, base_dir: &Path, report: &mut ProblemReport) {
    let Some(((key, node), mut secret)) = found else { return };
    secret.anchor(base_dir);
    if let Err(error) = secret.resolve_lines() {
        let hint = match secret {
            Secret::File { .. } => {
                "the file must be readable by the router and hold one token to a line"
            }
            Secret::Env { .. } => "set the variable where the router runs, and for checks as well",
        };
        report.error(node.at, format!("`{key}`: {error}"), hint);
    }
}

fn tls(section: &Node, base_dir: &Path, report: &mut ProblemReport) {
    let Some(node) = section.get("tls") else { return };
    let Some(Some(tls)) = typed::<Option<FleetTls>>(section, "tls") else { return };
    if tls.client_workers == ClientWorkers::DnsNames && tls.client_ca.is_none() {
        let at = node.get("client_workers").unwrap_or(node).at;
        let message = "`fleet.tls.client_workers` needs certificates of shims".to_owned();
        report.error(at, message, "add `fleet.tls.client_ca`");
    }
    let section = Section { path: "fleet.tls", node, base_dir };
    section.files(TlsPaths::from(&tls), Protocols::Http2, report);
}
