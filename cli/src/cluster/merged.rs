//! One worker as several replicas see it.

use std::collections::BTreeMap;

use splitrail_settings::natural_order::Natural;

use super::snapshot::WorkerSnapshot;

/// A worker, with the states in which replicas see it.
#[derive(Clone, Debug)]
pub(crate) struct MergedWorker<'s> {
    pub(crate) model: &'s str,
    pub(crate) id: &'s str,
    /// The place of each replica that knows the worker, and what it says. Never empty.
    pub(crate) seen: Vec<(usize, &'s WorkerSnapshot)>,
}

/// The place of a role in tables: in the order of a request's legs.
pub(crate) fn role_place(role: &str) -> usize {
    const ROLES: [&str; 3] = ["prefill", "decode", "both"];
    ROLES.iter().position(|known| *known == role).unwrap_or(ROLES.len())
}

/// Whether a worker in this state gets new work.
pub(crate) fn takes_work(state: &str) -> bool {
    matches!(state, "joining" | "warming" | "serving")
}

/// The workers of several replicas, ordered by model, role and id; each list has the place of its
/// replica.
pub(crate) fn merge<'s>(
    lists: impl IntoIterator<Item = (usize, &'s [WorkerSnapshot])>,
) -> Vec<MergedWorker<'s>> {
    let mut workers: BTreeMap<(&str, usize, Natural<'_>), MergedWorker<'s>> = BTreeMap::new();
    let mut roles: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (replica, list) in lists {
        for worker in list {
            // If replicas disagree on a role, the first one decides the order.
            let role = roles.entry((&worker.model, &worker.id));
            let role = *role.or_insert_with(|| role_place(&worker.role));
            let merged = workers.entry((&worker.model, role, Natural(&worker.id)));
            let merged = merged.or_insert_with(|| MergedWorker {
                model: &worker.model,
                id: &worker.id,
                seen: Vec::new(),
            });
            merged.seen.push((replica, worker));
        }
    }
    workers.into_values().collect()
}

impl<'s> MergedWorker<'s> {
    /// What the replicas say, each text once, in the order of the replicas. If they differ, each
    /// text has the number of replicas that say so.
    pub(crate) fn texts(&self, text: impl Fn(&'s WorkerSnapshot) -> String) -> String {
        let mut counts: Vec<(String, usize)> = Vec::new();
        for (_, worker) in &self.seen {
            let text = text(worker);
            match counts.iter_mut().find(|(other, _)| *other == text) {
                Some((_, count)) => *count += 1,
                None => counts.push((text, 1)),
            }
        }
        match &counts[..] {
            [(only, _)] => only.clone(),
            several => {
                let all = self.seen.len();
                let parts = several.iter().map(|(text, count)| format!("{text} {count}/{all}"));
                parts.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// The sum of a figure that each replica has for itself.
    pub(crate) fn sum(&self, figure: impl Fn(&WorkerSnapshot) -> u64) -> u64 {
        self.seen.iter().fold(0, |sum, (_, worker)| sum.saturating_add(figure(worker)))
    }

    /// The largest of a figure of the engine, which all replicas read from the same engine, at
    /// different times.
    pub(crate) fn largest(&self, figure: impl Fn(&WorkerSnapshot) -> Option<f64>) -> Option<f64> {
        self.seen.iter().filter_map(|(_, worker)| figure(worker)).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_that_differ_are_counted_and_requests_are_summed() {
        let worker = |id: &str, role: &str, state: &str, requests| WorkerSnapshot {
            model: "m".into(),
            id: id.into(),
            role: role.into(),
            state: state.into(),
            requests,
            ..Default::default()
        };
        let first = [worker("a-decode", "decode", "serving", 2), worker("p", "prefill", "down", 0)];
        let second =
            [worker("p", "prefill", "down", 1), worker("a-decode", "decode", "draining", 3)];
        let merged = merge([(0, &first[..]), (2, &second[..])]);
        let ids: Vec<_> = merged.iter().map(|worker| worker.id).collect();
        assert_eq!(ids, ["p", "a-decode"]);
        assert_eq!(merged[0].texts(|worker| worker.state.clone()), "down");
        assert_eq!(merged[1].texts(|worker| worker.state.clone()), "serving 1/2, draining 1/2");
        assert_eq!(merged[1].sum(|worker| worker.requests), 5);
        assert_eq!(merged[1].seen[1].0, 2);
    }
}
