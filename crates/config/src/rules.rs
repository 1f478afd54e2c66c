//! Rules that the schema cannot express: those that span several keys, and those about files and
//! addresses.
//!
//! The rules read single keys of the tree and skip values that the schema check has refused, so
//! that one wrong key does not hide other mistakes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;

mod access;
mod connector;
mod discovery;
mod engine_tls;
mod fleet;
mod flow;
mod jwt;
mod limits;
mod listener_tls;
mod peer_fetch;
mod prewarm;
mod quotas;
mod read_back;
mod tokenizer;
mod tracing;
mod workers;

use super::model::{
    Connector, Flow, Listen, Listener, Network, Policy, Secret, SpeculativeIndexConfig,
    TokenizerConfig,
};
use super::short_forms::WorkerPlace;
use crate::value::{typed, typed_or};
use splitrail_engine::fields::is_router_only;
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::Node;
use splitrail_settings::words::shown;
use workers::Workers;

/// Maximum number of characters of a name that clients send as `model`.
const NAME_MAX: usize = 256;

/// Reports every violation of a rule in the tree under `root`, in which short forms are written
/// out: `places` says of each model where its workers are written.
pub(super) fn check(
    root: &Node,
    places: &[Vec<WorkerPlace>],
    base_dir: &Path,
    report: &mut ProblemReport,
) {
    let bound = listen(root, report);
    listener_tls::check(root, base_dir, report);
    for section in ["ledger", "record", "audit", "access_log"] {
        file_of_lines(root, section, base_dir, report);
    }
    access::check(root, base_dir, report);
    tracing::check(root, base_dir, report);
    fleet::check(root, base_dir, report);
    limits::check(root, report);
    prewarm::check_memory(root, report);
    quotas::check(root, base_dir, report);
    let mut names = Names { seen: HashMap::new() };
    let models = root.get("models").map(Node::items).unwrap_or_default();
    for (index, model) in models.iter().enumerate() {
        let path = format!("models[{index}]");
        names.check(model, &path, report);
        let places = places.get(index).map_or(&[][..], Vec::as_slice);
        let mut workers = Workers::check(model, &path, places, report);
        Workers::check_own(model, places, &bound, report);
        discovery::check(model, &path, base_dir, &mut workers, report);
        connector::check(model, &path, places, report);
        peer_fetch::check(model, &path, report);
        prewarm::check(root, model, &path, report);
        flow::check(model, &path, &workers, report);
        policy(model, &path, &workers, report);
        read_back::check(root, model, &path, report);
        tokenizer::check(model, &path, base_dir, report);
        secret(model, &path, base_dir, report);
        engine_tls::check(model, &path, base_dir, report);
        pass_unknown(model, &path, report);
    }
}

/// Reports every violation of a rule by a worker that joins a model with this flow and connector.
pub(super) fn check_worker(
    worker: &Node,
    path: &str,
    joins: Option<(Flow, Connector)>,
    report: &mut ProblemReport,
) {
    let place = WorkerPlace::mapping(path);
    Workers::check_one(worker, &place, report);
    if let Some((flow, connector)) = joins {
        connector::worker(worker, &place, Some(flow), connector, report);
    }
}

/// Checks the listeners. Returns the key and the address of each.
fn listen(root: &Node, report: &mut ProblemReport) -> Vec<(&'static str, SocketAddr)> {
    let defaults = Listen::default();
    let section = root.get("listen");
    let mut bound: Vec<(&'static str, SocketAddr)> = Vec::new();
    for (key, default) in [
        ("http", Some(defaults.http)),
        ("grpc", defaults.grpc),
        ("fleet", defaults.fleet.map(Listener::from)),
        ("admin", Some(defaults.admin)),
        ("metrics", defaults.metrics),
    ] {
        let node = section.and_then(|section| section.get(key));
        let listener = match section {
            Some(section) => typed_or(section, key, default).flatten(),
            None => default,
        };
        let Some(Listener { address, .. }) = listener else { continue };
        let at = node.or(section).unwrap_or(root).at;
        if let Some((other, _)) = bound.iter().find(|(_, taken)| overlap(*taken, address)) {
            let message = format!("`listen.{key}` takes the port of `listen.{other}`");
            report.error(at, message, "give each its own port");
        }
        if key == "admin" && node.is_some() && !address.ip().is_loopback() {
            let message = "`listen.admin` can be reached from other hosts".to_owned();
            report.warn(at, message, "it shows workers and decisions: keep it off public networks");
        }
        bound.push((key, address));
    }
    let explains = section.and_then(|section| section.get("grpc_explain"));
    let is_on = section.and_then(|section| typed_or(section, "grpc_explain", false));
    let grpc = bound.iter().find(|(key, _)| *key == "grpc");
    if let (Some(node), Some(true)) = (explains, is_on) {
        match grpc {
            None => {
                let message = "`listen.grpc_explain` without `listen.grpc` does nothing".to_owned();
                report.warn(node.at, message, "give `listen.grpc` an address, or leave both out");
            }
            Some((_, address)) if !address.ip().is_loopback() => {
                let message = "every client of `listen.grpc` can see other clients' load and \
                               which prompts are cached";
                let hint = "leave `grpc_explain` out where clients reach this listener";
                report.warn(node.at, message.to_owned(), hint);
            }
            Some(_) => {}
        }
    }
    origins(section, report);
    bound
}

/// Checks the origins of pages: browsers send scheme, host and port, and nothing else.
fn origins(listen: Option<&Node>, report: &mut ProblemReport) {
    let list = listen.and_then(|listen| listen.get("http_origins"));
    for (index, node) in list.map(Node::items).unwrap_or_default().iter().enumerate() {
        let Some(origin) = node.text() else { continue };
        let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
        let is_host = |rest: &str| {
            !rest.is_empty() && !rest.contains(['/', '@', '?', '#']) && rest.to_lowercase() == rest
        };
        if origin != "*" && !rest.is_some_and(is_host) {
            let message = format!(
                "`listen.http_origins[{index}]` {origin:?} is no origin that a browser sends"
            );
            let hint = "write scheme, host and port: `https://chat.example`, or `*` for any page";
            report.error(node.at, message, hint);
        }
    }
}

fn file_of_lines(root: &Node, name: &str, base_dir: &Path, report: &mut ProblemReport) {
    let Some(section) = root.get(name) else { return };
    let Some(Some(path)) = typed::<Option<std::path::PathBuf>>(section, "path") else { return };
    let at = section.get("path").unwrap_or(section).at;
    let place = base_dir.join(&path);
    let shown = shown(&path.display().to_string());
    if path.as_os_str().is_empty() || place.is_dir() {
        let message = format!("`{name}.path` \"{shown}\" is not a file");
        report.error(at, message, format!("name a file in that folder, such as `{name}.jsonl`"));
    } else if !place.parent().is_some_and(Path::is_dir) {
        let message = format!("`{name}.path` \"{shown}\" is in a folder that does not exist");
        let hint = "make the folder; relative paths start at the configuration's folder";
        report.error(at, message, hint);
    }
}

/// Reports the items of a list that are not IP networks.
fn networks(list: &Node, path: &str, report: &mut ProblemReport) {
    for (index, node) in list.items().iter().enumerate() {
        let Some(text) = node.text().filter(|text| text.parse::<Network>().is_err()) else {
            continue;
        };
        let message = format!("`{path}[{index}]` \"{}\" is not an IP network", shown(text));
        report.error(node.at, message, "an address, or `10.0.0.0/8`");
    }
}

/// Whether two addresses cannot be bound at the same time.
fn overlap(first: SocketAddr, second: SocketAddr) -> bool {
    let takes = |one: SocketAddr, other: SocketAddr| {
        // `[::]` includes IPv4.
        one.ip().is_unspecified() && (one.is_ipv6() || other.is_ipv4())
    };
    first.port() == second.port()
        && first.port() != 0
        && (first.ip() == second.ip() || takes(first, second) || takes(second, first))
}

/// The names that clients may send as `model`. Each must belong to one model only.
struct Names {
    seen: HashMap<String, Place>,
}

impl Names {
    fn check(&mut self, model: &Node, path: &str, report: &mut ProblemReport) {
        if let Some(name) = model.get("name") {
            self.add(name, &format!("{path}.name"), report);
        }
        for key in ["aliases", "adapters"] {
            let items = model.get(key).map(Node::items).unwrap_or_default();
            for (index, item) in items.iter().enumerate() {
                self.add(item, &format!("{path}.{key}[{index}]"), report);
            }
        }
    }

    fn add(&mut self, node: &Node, path: &str, report: &mut ProblemReport) {
        let Some(name) = node.text() else { return };
        if name.trim() != name || name.chars().any(char::is_control) {
            let message = format!("`{path}` holds white space at an end, or a control character");
            report.error(node.at, message, "clients could hardly name it: take those out");
        }
        if name.is_empty() || name.chars().count() > NAME_MAX {
            // The schema checks the length of `name`, so this reports only aliases and adapters.
            if !path.ends_with(".name") {
                let message = format!("`{path}` is empty or too long");
                report.error(node.at, message, format!("from 1 to {NAME_MAX} characters"));
            }
        } else if let Some(first) = self.seen.get(name) {
            let message = format!(
                "`{path}` \"{}\" is already taken at {}:{}",
                shown(name),
                first.line,
                first.column
            );
            let hint = "names, aliases and adapters are unique over all models";
            report.error(node.at, message, hint);
        } else {
            self.seen.insert(name.to_owned(), node.at);
        }
    }
}

/// Reports fields in `pass_unknown` that only the router may set.
fn pass_unknown(model: &Node, path: &str, report: &mut ProblemReport) {
    let items = model.get("pass_unknown").map(Node::items).unwrap_or_default();
    for (index, item) in items.iter().enumerate() {
        if item.text().is_some_and(is_router_only) {
            let name = shown(item.text().unwrap_or_default());
            let message =
                format!("`{path}.pass_unknown[{index}]` \"{name}\" can be set by the router only");
            let hint = "it moves KV, or names a rank or a request: take it out of the list";
            report.error(item.at, message, hint);
        }
    }
}

fn policy(model: &Node, path: &str, workers: &Workers<'_>, report: &mut ProblemReport) {
    let Some(Policy::KvOverlap { .. }) = typed::<Policy>(model, "policy") else {
        return;
    };
    let at = model.get("policy").unwrap_or(model).at;
    if let Some(TokenizerConfig::None {}) = typed::<TokenizerConfig>(model, "tokenizer") {
        let message = format!("`{path}.policy` kv_overlap needs a tokenizer, and there is none");
        report.error(
            at,
            message,
            "add `tokenizer: { kind: huggingface, path: ... }`, or `tokenizer: engine`",
        );
    }
    let seen = match typed::<Flow>(model, "flow") {
        Some(Flow::Aggregated) => workers.decode_publishes,
        _ => workers.any_publishes,
    };
    if seen {
        return;
    }
    let message = format!("`{path}.policy` kv_overlap has no worker whose KV events it sees");
    let index = typed_or(model, "speculative_index", SpeculativeIndexConfig::default());
    if index.is_some_and(|index| index.approximate_ttl.is_zero()) {
        let hint = "add `kv_events: tcp://HOST:PORT` to the workers it chooses from, or give \
                    `speculative_index.approximate_ttl` some time";
        report.error(at, message, hint);
    } else {
        let hint = "it goes by what each worker has computed lately (`speculative_index.approximate_ttl`); add \
                    `kv_events: tcp://HOST:PORT` to the workers it chooses from to know";
        report.warn(at, message, hint);
    }
}

fn secret(model: &Node, path: &str, base_dir: &Path, report: &mut ProblemReport) {
    let Some(node) = model.get("engine_api_key") else {
        return;
    };
    let Some(Some(mut secret)) = typed::<Option<Secret>>(model, "engine_api_key") else {
        return;
    };
    secret.anchor(base_dir);
    if let Err(error) = secret.resolve() {
        let hint = match secret {
            Secret::File { .. } => "the file must be readable by the router and hold the key only",
            Secret::Env { .. } => "set the variable where the router runs, and for checks as well",
        };
        report.error(node.at, format!("`{path}.engine_api_key`: {error}"), hint);
    }
}
