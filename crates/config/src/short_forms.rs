//! Short forms of a model's keys, and keys that follow from others.
//!
//! Both are written out in the tree of the file before the rules check it, so that rules and router
//! know one form: workers are mappings with an id, the tokenizer is a folder, and each model has a
//! flow and a connector. What an operator has written is never changed.

use std::path::Path;

use splitrail_settings::problem::ProblemReport;
use splitrail_settings::tree::Node;
use splitrail_settings::words::shown;

mod derived;
mod hub;
mod tokenizer;
mod workers;

pub(crate) use hub::Hub;
pub(crate) use workers::{KnownIds, WorkerPlace};

/// What writing out the short forms has found.
#[derive(Debug, Default)]
pub(crate) struct Expansion {
    /// For each model, where each of its workers is written.
    pub(crate) places: Vec<Vec<WorkerPlace>>,
    /// For each model, what was derived for it, in a sentence.
    pub(crate) notes: Vec<String>,
}

/// Writes out the short forms of all models under `root`. Relative paths start at `base_dir`;
/// tokenizers that are named are looked up in `hub`, and addresses without ids in `known`. What
/// cannot be written out stays as it is.
pub(crate) fn expand(
    root: &mut Node,
    base_dir: &Path,
    (hub, known): (&Hub, &KnownIds),
    report: &mut ProblemReport,
) -> Expansion {
    let mut expanded = Expansion::default();
    let models = root.get_mut("models").map(Node::items_mut).unwrap_or_default();
    for (index, model) in models.iter_mut().enumerate() {
        let path = format!("models[{index}]");
        expanded.places.push(workers::expand(model, &path, known));
        let mut notes = Vec::new();
        notes.extend(tokenizer::expand(model, &path, base_dir, hub, report));
        notes.extend(derived::expand(model, &path, report));
        if let (Some(name), false) = (model.get("name").and_then(Node::text), notes.is_empty()) {
            expanded.notes.push(format!("model {}: {}", shown(name), notes.join("; ")));
        }
    }
    expanded
}

#[cfg(test)]
mod tests;
