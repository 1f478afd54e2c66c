//! Lists of URLs: each becomes a worker with an id that is made of its role and its address.

use splitrail_settings::endpoint;
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::{Entry, Node, Value};

use crate::model::Role;

/// Maximum number of characters of a worker's id.
const ID_MAX: usize = 128;

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
pub(super) fn expand(model: &mut Node, path: &str, report: &mut ProblemReport) -> Vec<WorkerPlace> {
    let (mut all, mut places, mut first) = (Vec::new(), Vec::new(), None);
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
                Some(url) => from_url(&item, url, role, &path, report),
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

fn from_url(item: &Node, url: &str, role: Role, path: &str, report: &mut ProblemReport) -> Node {
    let text = |text: &str| Node::new(item.at, Value::Str(text.to_owned()));
    let mut worker = Node::new(item.at, Value::Map(Vec::new()));
    // The rules report what is wrong with an address.
    if let Ok(address) = endpoint::parse_http(url) {
        let id = id(role, &address);
        if id.len() > ID_MAX {
            let message = format!("`{path}` is too long to be a worker's id");
            let hint = "write the worker under `workers`, with an `id`";
            report.error(item.at, message, hint);
        }
        worker.insert("id", text(&id));
    }
    worker.insert("role", text(role.name()));
    worker.insert("url", text(url));
    worker
}

/// The id of a worker of which only role and address are written: `prefill-10.0.0.1:8000`. It
/// stays the same as long as both do.
fn id(role: Role, address: &str) -> String {
    let authority = address.split_once("://").map_or(address, |(_, authority)| authority);
    let part = match role {
        Role::Both => "worker",
        role => role.name(),
    };
    // Ids have neither the brackets of IPv6 addresses nor the underscores of some host names.
    let plain = authority.chars().filter(|c| !matches!(c, '[' | ']'));
    let plain: String = plain.map(|c| if c == '_' { '-' } else { c }).collect();
    format!("{part}-{plain}")
}
