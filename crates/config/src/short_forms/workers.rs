//! Lists of URLs: each becomes a worker whose id is the letter of its role and a number.
//!
//! The number is the place in the list. In a router that runs, an address keeps its id when others
//! come and go ([`KnownIds`]): what was learned, booked and counted stays with the right engine.

use std::collections::{HashMap, HashSet};

use splitrail_settings::endpoint;
use splitrail_settings::tree::{Entry, Node, Value};

use crate::model::{Config, Role};

/// The ids that a running configuration has given to the addresses in its lists.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownIds {
    /// By model, role and normalised address.
    ids: HashMap<(String, &'static str, String), String>,
}

impl KnownIds {
    /// The ids that `config` has given.
    pub(crate) fn of(config: &Config) -> Self {
        let of_model = |model: &crate::model::Model| {
            let name = model.name.clone();
            let derived = model.workers.iter().filter(|worker| is_derived(worker.role, &worker.id));
            derived
                .filter_map(move |worker| {
                    let address = endpoint::parse_http(&worker.url).ok()?;
                    Some(((name.clone(), worker.role.name(), address), worker.id.clone()))
                })
                .collect::<Vec<_>>()
        };
        Self { ids: config.models.iter().flat_map(of_model).collect() }
    }

    fn get(&self, model: &str, role: Role, url: &str) -> Option<&str> {
        let address = endpoint::parse_http(url).ok()?;
        self.ids.get(&(model.to_owned(), role.name(), address)).map(String::as_str)
    }
}

/// Whether an id may have been given to an address in a list of this role.
fn is_derived(role: Role, id: &str) -> bool {
    id.strip_prefix(letter(role)).is_some_and(|number| {
        number.parse::<u32>().is_ok_and(|parsed| parsed.to_string() == number)
    })
}

/// The first letter of the ids of a role.
fn letter(role: Role) -> char {
    match role {
        Role::Prefill => 'p',
        Role::Decode => 'd',
        Role::Both => 'w',
    }
}

/// Gives ids to the addresses in the lists of one model.
struct Ids<'k> {
    model: String,
    known: &'k KnownIds,
    /// The ids that no new address may have: those that are written down, those of known addresses,
    /// and those of addresses that are in the running configuration and no more in this one, whose
    /// last requests may still run.
    taken: HashSet<String>,
    given: HashSet<String>,
}

impl<'k> Ids<'k> {
    fn new(model: &Node, known: &'k KnownIds) -> Self {
        let name = model.get("name").and_then(Node::text).unwrap_or_default();
        let written = model.get("workers").map(Node::items).unwrap_or_default().iter();
        let written = written.filter_map(|worker| worker.get("id")?.text());
        let of_model = known.ids.iter().filter(|((model, ..), _)| model == name);
        let given: HashSet<_> = written.map(str::to_owned).collect();
        let taken = of_model.map(|(_, id)| id.clone()).chain(given.iter().cloned()).collect();
        Self { model: name.to_owned(), known, taken, given }
    }

    /// The id that an address has already; otherwise the letter of its role and the lowest number
    /// that is free.
    fn give(&mut self, role: Role, url: &str) -> String {
        let known = self.known.get(&self.model, role, url);
        let id = match known.filter(|id| !self.given.contains(*id)) {
            Some(known) => known.to_owned(),
            None => {
                let free = |id: &String| !self.taken.contains(id) && !self.given.contains(id);
                let mut ids = (0_u32..).map(|number| format!("{}{number}", letter(role)));
                ids.find(free).unwrap_or_default()
            }
        };
        self.given.insert(id.clone());
        id
    }
}

/// Where a worker is written, for messages.
#[derive(Clone, Debug)]
pub(crate) struct WorkerPlace {
    path: String,
    is_url: bool,
}

impl WorkerPlace {
    /// A worker that is written as a mapping at `path`.
    pub(crate) fn mapping(path: impl Into<String>) -> Self {
        Self { path: path.into(), is_url: false }
    }

    /// The path of the worker.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The path of one of the worker's keys: the worker itself, if all that is written is a URL.
    pub(crate) fn key(&self, key: &str) -> String {
        if self.is_url { self.path.clone() } else { format!("{}.{key}", self.path) }
    }

    /// Whether all that is written of the worker is its URL.
    pub(crate) fn is_url(&self) -> bool {
        self.is_url
    }
}

/// Writes the lists of URLs of `model` out as `workers`. Returns where each worker is written.
/// Lists that the schema does not allow stay where they are.
pub(super) fn expand(model: &mut Node, path: &str, known: &KnownIds) -> Vec<WorkerPlace> {
    let (mut all, mut places, mut first) = (Vec::new(), Vec::new(), None);
    let mut ids = Ids::new(model, known);
    for (list, role) in
        [("workers", Role::Both), ("prefill", Role::Prefill), ("decode", Role::Decode)]
    {
        if !model.get(list).is_some_and(|node| is_allowed(node, list == "workers")) {
            continue;
        }
        let Some(Entry { value: node, .. }) = model.take(list) else { continue };
        first.get_or_insert(node.at);
        let Value::Seq(items) = node.value else { continue };
        for (index, item) in items.into_iter().enumerate() {
            let path = format!("{path}.{list}[{index}]");
            let is_url = item.text().is_some();
            all.push(match item.text() {
                Some(url) => from_url(&item, url, role, ids.give(role, url)),
                None => item,
            });
            places.push(WorkerPlace { path, is_url });
        }
    }
    if let Some(at) = first {
        model.insert("workers", Node::new(at, Value::Seq(all)));
    }
    places
}

/// Whether the schema allows a list of workers; mappings are allowed under `workers` only, and
/// checked one by one there.
fn is_allowed(list: &Node, mappings: bool) -> bool {
    matches!(list.value, Value::Seq(_))
        && (mappings || list.items().iter().all(|item| item.text().is_some()))
}

fn from_url(item: &Node, url: &str, role: Role, id: String) -> Node {
    let text = |text: String| Node::new(item.at, Value::Str(text));
    let mut worker = Node::new(item.at, Value::Map(Vec::new()));
    worker.insert("id", text(id));
    worker.insert("role", text(role.name().to_owned()));
    worker.insert("url", text(url.to_owned()));
    worker
}
