//! How the transfer groups of a model compare, such as the revisions of a deployment that is updated.

use std::collections::BTreeMap;

use super::states_of;
use crate::cluster::{LegTimesSnapshot, MergedWorker, WorkerSnapshot};
use crate::table::{Column, lines};

/// A line for each transfer group of the models that have more than one; none if there are no such
/// models. The figures are those of the present workers since they joined, over all replicas.
pub(super) fn group_lines(workers: &[MergedWorker<'_>]) -> Vec<String> {
    let titles = [
        Column::text("model", 30),
        Column::text("transfer group", 24),
        Column::text("prefill", 40),
        Column::text("decode", 40),
        Column::text("both", 40),
        Column::figure("cached"),
        Column::figure("prefill leg"),
        Column::figure("first token of last leg"),
    ];
    let mut models: BTreeMap<&str, BTreeMap<&str, Vec<&MergedWorker<'_>>>> = BTreeMap::new();
    for worker in workers {
        let group = worker.seen[0].1.transfer_group.as_deref().unwrap_or("-");
        models.entry(worker.model).or_default().entry(group).or_default().push(worker);
    }
    models.retain(|_, groups| groups.len() > 1);
    let rows = models.iter().flat_map(|(model, groups)| {
        groups.iter().map(|(group, workers)| {
            let mut row = vec![(*model).to_owned(), (*group).to_owned()];
            let states = |role| states_of(workers.iter().copied(), role);
            row.extend(["prefill", "decode", "both"].map(states));
            row.push(cached(workers));
            row.push(mean_ms(workers, |worker| worker.legs.prefill));
            row.push(mean_ms(workers, |worker| worker.legs.decode));
            row
        })
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() { Vec::new() } else { lines(&titles, &rows) }
}

fn seen<'s>(workers: &[&MergedWorker<'s>]) -> impl Iterator<Item = &'s WorkerSnapshot> {
    workers.iter().flat_map(|worker| worker.seen.iter().map(|(_, seen)| *seen))
}

/// The share of the prompt tokens that engines had cached.
fn cached(workers: &[&MergedWorker<'_>]) -> String {
    let prompt_tokens: u64 = seen(workers).map(|worker| worker.hits.prompt_tokens).sum();
    let hit_tokens: u64 = seen(workers).map(|worker| worker.hits.hit_tokens).sum();
    match prompt_tokens {
        0 => "-".to_owned(),
        _ => format!("{:.0} %", hit_tokens as f64 / prompt_tokens as f64 * 100.0),
    }
}

fn mean_ms(
    workers: &[&MergedWorker<'_>],
    legs: impl Fn(&WorkerSnapshot) -> LegTimesSnapshot,
) -> String {
    let count: u64 = seen(workers).map(|worker| legs(worker).count).sum();
    let seconds: f64 = seen(workers).map(|worker| legs(worker).seconds).sum();
    match count {
        0 => "-".to_owned(),
        _ => format!("{:.0} ms", seconds / count as f64 * 1e3),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::merge;

    #[test]
    fn groups_are_compared_if_a_model_has_several() {
        let worker = |id: &str, role: &str, group: &str| -> WorkerSnapshot {
            let (hits, legs) = match role {
                "prefill" => (90, json!({ "prefill": { "count": 2, "seconds": 0.5 } })),
                _ => (0, json!({ "decode": { "count": 4, "seconds": 0.1 } })),
            };
            serde_json::from_value(json!({
                "model": "m", "id": id, "role": role, "state": "serving", "transfer_group": group,
                "hits": { "prompt_tokens": hits * 2, "hit_tokens": hits }, "legs": legs,
            }))
            .unwrap()
        };
        let list = [
            worker("p0", "prefill", "a"),
            worker("p1", "prefill", "a"),
            worker("d0", "decode", "a"),
            worker("d1", "decode", "b"),
        ];
        let text = group_lines(&merge([(0, &list[..])]));
        assert_eq!(text.len(), 3, "{text:#?}");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let expected = "m a 2 serving 1 serving - 50 % 250 ms 25 ms";
        assert_eq!(words(&text[1]), words(expected), "{text:#?}");
        assert_eq!(words(&text[2]), words("m b - 1 serving - - - 25 ms"), "{text:#?}");
        assert_eq!(group_lines(&merge([(0, &list[..3])])), [] as [String; 0]);
    }
}
