//! What must be equal on all workers of a model.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::list::{Findings, hands_over, named};
use crate::facts::WorkerFacts;
use crate::finding::FindingKind;

pub(super) fn check(found: &mut Findings<'_>, workers: &[WorkerFacts]) {
    let reached: Vec<&WorkerFacts> = workers.iter().filter(|worker| worker.is_reached()).collect();
    let block_sizes = by_value(&reached, |worker| worker.engine.block_size);
    if block_sizes.len() > 1 {
        let what = format!("block sizes differ: {}", listed(&block_sizes));
        found.add(FindingKind::BlockSizesDiffer, what);
    }
    if found.model.connector.hands_over() {
        let dtypes = by_value(&reached, |worker| worker.engine.kv_dtype.clone());
        let layouts = by_value(&reached, |worker| worker.engine.kv_layout.clone());
        for (what, values) in [("data types", dtypes), ("layouts", layouts)] {
            if values.len() > 1 {
                let what = format!("{what} of the KV differ: {}", listed(&values));
                found.add(FindingKind::KvFormatsDiffer, what);
            }
        }
    }
    let name = &found.model.name;
    let contexts = by_value(&reached, |worker| worker.engine.model(name)?.context_tokens);
    if contexts.len() > 1 {
        let what = format!("the longest sequences differ, in tokens: {}", listed(&contexts));
        found.add(FindingKind::ContextsDiffer, what);
    }
    if hands_over(found.model) && found.model.connector.hands_over() {
        let versions = by_value(&reached, |worker| worker.engine.version.clone());
        if versions.len() > 1 {
            let what = format!("versions of engines that hand over differ: {}", listed(&versions));
            found.add(FindingKind::VersionsDiffer, what);
        }
    }
}

fn by_value<T: Ord>(
    workers: &[&WorkerFacts],
    value: impl Fn(&WorkerFacts) -> Option<T>,
) -> BTreeMap<T, Vec<String>> {
    let mut values: BTreeMap<T, Vec<String>> = BTreeMap::new();
    for worker in workers {
        if let Some(value) = value(worker) {
            values.entry(value).or_default().push(worker.config.id.clone());
        }
    }
    values
}

/// `32 (p0, p1), 16 (d0)`.
fn listed<T: Display>(values: &BTreeMap<T, Vec<String>>) -> String {
    let value = |(value, ids): (&T, &Vec<String>)| format!("{value} ({})", named(ids));
    values.iter().map(value).collect::<Vec<_>>().join(", ")
}
