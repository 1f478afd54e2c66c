//! Rules about the workers of one model.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::model::{NO_EVENTS, Role};
use crate::short_forms::WorkerPlace;
use crate::value::typed;
use splitrail_settings::endpoint::{self, BadEndpoint};
use splitrail_settings::problem::{Place, ProblemReport};
use splitrail_settings::tree::{Node, Value};
use splitrail_settings::words::shown;

/// What the other rules need to know about a model's workers. A worker with an invalid role counts
/// as one of any role, so that its mistake is reported once.
#[derive(Default)]
pub(super) struct Workers<'n> {
    /// The number of workers.
    pub(super) count: usize,
    pub(super) can_prefill: bool,
    pub(super) can_decode: bool,
    /// A worker that can decode publishes KV events.
    pub(super) decode_publishes: bool,
    /// A worker that can decode is behind a shim.
    pub(super) decode_has_shim: bool,
    /// Any worker publishes KV events.
    pub(super) any_publishes: bool,
    ids: HashMap<&'n str, Place>,
    /// The position at which each host and port was first given.
    urls: HashMap<String, Place>,
    publishers: HashMap<String, Place>,
}

impl<'n> Workers<'n> {
    /// Checks the workers of `model` one by one and against each other.
    pub(super) fn check(
        model: &'n Node,
        path: &str,
        places: &[WorkerPlace],
        report: &mut ProblemReport,
    ) -> Self {
        let mut workers = Self::default();
        let list = model.get("workers").map(Node::items).unwrap_or_default();
        for (worker, place) in list.iter().zip(places) {
            workers.add(worker, place, report);
        }
        // Only lists that the schema does not allow are still there.
        if model.get("prefill").is_some() || model.get("decode").is_some() {
            workers.add_unknown();
            return workers;
        }
        workers.count = list.len();
        let is_empty = |key| match model.get(key).map(|node| &node.value) {
            None => Some(true),
            Some(Value::Seq(items)) => Some(items.is_empty()),
            Some(_) => None,
        };
        match (is_empty("workers"), is_empty("discovery")) {
            (Some(true), Some(true)) => {
                let at = model.get("workers").unwrap_or(model).at;
                let message = format!("`{path}` has no `workers`, and no `discovery` to find any");
                let hint = "add the engines' URLs: `prefill:` and `decode:`, or `workers:`";
                report.error(at, message, hint);
                workers.add_unknown();
            }
            (None, _) | (_, None) => workers.add_unknown(),
            _ => {}
        }
        workers
    }

    /// Counts workers of which nothing is known before they join, or whose settings are invalid, so
    /// that a mistake is reported once.
    pub(super) fn add_unknown(&mut self) {
        self.add_found(None, true, true);
    }

    /// Counts workers that a source will find. Counted as two, since their number is unknown.
    pub(super) fn add_found(&mut self, role: Option<Role>, publish: bool, shim: bool) {
        self.count = self.count.saturating_add(2);
        self.can_prefill |= role != Some(Role::Decode);
        self.can_decode |= role != Some(Role::Prefill);
        self.any_publishes |= publish;
        self.decode_publishes |= publish && role != Some(Role::Prefill);
        self.decode_has_shim |= shim && role != Some(Role::Prefill);
    }

    /// Checks that no worker of a model is the router itself, which listens at these addresses.
    pub(super) fn check_own(
        model: &Node,
        places: &[WorkerPlace],
        bound: &[(&str, SocketAddr)],
        report: &mut ProblemReport,
    ) {
        let list = model.get("workers").map(Node::items).unwrap_or_default();
        for (worker, place) in list.iter().zip(places) {
            let Some((node, url)) = text(worker, "url") else { continue };
            let engine = url.split_once("://").map_or(url, |(_, engine)| engine);
            let own = bound.iter().find(|(_, bound)| endpoint::leads_to(engine, *bound));
            let Some((listener, _)) = own else { continue };
            let key = place.key("url");
            let message = format!("`{key}` is this router's own `listen.{listener}`");
            report.error(node.at, message, "write the address of an engine");
        }
    }

    /// Checks a worker by itself.
    pub(super) fn check_one(worker: &'n Node, place: &WorkerPlace, report: &mut ProblemReport) {
        Self::default().add(worker, place, report);
    }

    fn add(&mut self, worker: &'n Node, place: &WorkerPlace, report: &mut ProblemReport) {
        let role = typed::<Role>(worker, "role");
        // An engine whose events are not written down is asked for them.
        let events = text(worker, "kv_events").filter(|(_, address)| *address != NO_EVENTS);
        let is_asked = worker.get("kv_events").is_none_or(|node| node.value == Value::Null);
        let publishes = events.is_some() || is_asked;
        self.can_prefill |= role != Some(Role::Decode);
        self.can_decode |= role != Some(Role::Prefill);
        self.any_publishes |= publishes;
        self.decode_publishes |= publishes && role != Some(Role::Prefill);
        let shim = typed::<bool>(worker, "shim") == Some(true);
        self.decode_has_shim |= shim && role != Some(Role::Prefill);

        if let Some((at, url)) = address(worker, "url", endpoint::parse_http, place, report) {
            let hint = "one entry per engine; one that does both parts belongs into `workers`";
            // One port serves either scheme.
            let engine = url.split_once("://").map_or(url.as_str(), |(_, engine)| engine);
            let engine = endpoint::with_one_loopback(engine);
            let address = Address { key: &engine, text: &url, at };
            unique(&mut self.urls, address, &place.key("url"), hint, report);
        }
        if let Some((node, id)) = text(worker, "id") {
            if let Some(first) = self.ids.get(id) {
                let key = place.key("id");
                let message = format!("`{key}` \"{}\" {}", shown(id), taken(*first));
                report.error(node.at, message, "ids are unique within a model");
            } else {
                self.ids.insert(id, node.at);
            }
        }
        let tcp = |text: &str| endpoint::parse(text, "tcp");
        if events.is_some()
            && let Some((at, publisher)) = address(worker, "kv_events", tcp, place, report)
        {
            let hint = "each engine publishes its own events: give each its own port";
            let key = place.key("kv_events");
            let socket = publisher.split_once("://").map_or(publisher.as_str(), |(_, at)| at);
            let socket = endpoint::with_one_loopback(socket);
            let address = Address { key: &socket, text: &publisher, at };
            unique(&mut self.publishers, address, &key, hint, report);
        }
        address(worker, "kv_replay", tcp, place, report);
        if let Some((node, _)) = text(worker, "kv_replay")
            && events.is_none()
        {
            let key = place.key("kv_replay");
            let message = format!("`{key}` is of no use without `kv_events`");
            report.error(node.at, message, "add `kv_events`, or delete it");
        }
    }
}

fn text<'n>(worker: &'n Node, key: &str) -> Option<(&'n Node, &'n str)> {
    let node = worker.get(key)?;
    Some((node, node.text()?))
}

/// The normalised address under `key`, if it is present and valid.
fn address(
    worker: &Node,
    key: &str,
    parse: impl Fn(&str) -> Result<String, BadEndpoint>,
    place: &WorkerPlace,
    report: &mut ProblemReport,
) -> Option<(Place, String)> {
    let (node, address) = text(worker, key)?;
    match parse(address) {
        Ok(address) => Some((node.at, address)),
        Err(BadEndpoint { why, hint }) => {
            report.error(node.at, format!("`{}` {why}", place.key(key)), hint);
            None
        }
    }
}

/// An address in a file.
struct Address<'a> {
    /// The part that no two entries may have in common.
    key: &'a str,
    /// The address as messages name it.
    text: &'a str,
    at: Place,
}

/// Reports an address whose `key` was seen before. Returns whether it is new.
fn unique(
    seen: &mut HashMap<String, Place>,
    address: Address<'_>,
    path: &str,
    hint: &str,
    report: &mut ProblemReport,
) {
    let Address { key, text, at } = address;
    match seen.get(key) {
        Some(first) => report.error(at, format!("`{path}` {text} {}", taken(*first)), hint),
        None => _ = seen.insert(key.to_owned(), at),
    }
}

fn taken(first: Place) -> String {
    format!("is already taken at {}:{}", first.line, first.column)
}
