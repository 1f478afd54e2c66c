//! A snapshot of a model's workers, from which decisions are made.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::worker::Worker;
use splitrail_engine_client::hosts::Hosts;
use splitrail_policy::WorkerIndex;

/// How long after the last worker of a transfer group has joined its workers count as those that
/// replace the others. An engine may take minutes until it is ready and the next one is replaced.
const REPLACES_FOR: Duration = Duration::from_secs(15 * 60);

/// The workers of a model at one instant. A roster never changes: adding or removing a worker makes
/// a new one.
#[derive(Debug)]
pub struct Roster {
    /// In the order in which the workers were added, which is ascending by number.
    workers: Vec<Arc<Worker>>,
    /// Those of each transfer group.
    groups: Vec<Vec<Arc<Worker>>>,
    /// The hosts that hand-offs may come from.
    pub hosts: Hosts,
}

impl Roster {
    /// A roster of these workers, which must be ordered by number.
    pub fn new(workers: Vec<Arc<Worker>>) -> Self {
        debug_assert!(workers.is_sorted_by_key(|worker| worker.index), "ordered by number");
        let hosts = Hosts::new(workers.iter().map(|worker| &worker.address.authority));
        let mut groups: Vec<Vec<Arc<Worker>>> = Vec::new();
        for worker in workers.iter().filter(|worker| worker.config.transfer_group.is_some()) {
            match groups.iter_mut().find(|group| group[0].is_of_group_of(worker)) {
                Some(group) => group.push(Arc::clone(worker)),
                None => groups.push(vec![Arc::clone(worker)]),
            }
        }
        Self { workers, groups, hosts }
    }

    /// The workers, ordered by number.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<Worker>> {
        self.workers.iter()
    }

    /// The worker with this number.
    pub fn get(&self, index: WorkerIndex) -> Option<&Arc<Worker>> {
        let at = self.workers.binary_search_by_key(&index, |worker| worker.index).ok()?;
        Some(&self.workers[at])
    }

    /// The worker with this id.
    pub fn named(&self, id: &str) -> Option<&Arc<Worker>> {
        self.workers.iter().find(|worker| worker.id() == id)
    }

    /// A worker of the transfer group whose workers are taking the place of others: the group of which the
    /// first worker has joined last, if one of its workers has joined lately. Workers that were there
    /// when the router started replace none, and neither does one that comes back to its group.
    pub fn incoming(&self, now: Instant) -> Option<&Worker> {
        let ends = self.groups.iter().filter_map(|group| {
            let first = group.iter().min_by_key(|worker| worker.joined())?;
            Some((first, group.iter().map(|worker| worker.joined()).max()?))
        });
        let (first, last) = ends.max_by_key(|(first, _)| (first.joined(), first.index))?;
        let is_new = now.saturating_duration_since(last) < REPLACES_FOR;
        (is_new && !first.is_initial_member()).then_some(first)
    }

    /// The number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Whether there are no workers.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// A roster with one more worker, whose number must be the highest.
    pub(super) fn with(&self, worker: Arc<Worker>) -> Self {
        Self::new(self.workers.iter().cloned().chain([worker]).collect())
    }

    /// A roster without the worker of this number.
    pub(super) fn without(&self, index: WorkerIndex) -> Self {
        let others = self.workers.iter().filter(|worker| worker.index != index);
        Self::new(others.cloned().collect())
    }
}
