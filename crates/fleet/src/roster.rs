//! A snapshot of a model's workers, from which decisions are made.

use std::sync::Arc;

use super::hosts::Hosts;
use super::worker::Worker;
use splitrail_policy::WorkerIndex;

/// The workers of a model, as they were when it was asked for. It never changes; who comes or
/// goes makes a new one.
#[derive(Debug)]
pub struct Roster {
    /// In the order in which they came, which is that of their numbers.
    workers: Vec<Arc<Worker>>,
    /// Where hand-offs may come from.
    pub hosts: Hosts,
}

impl Roster {
    /// Of these workers, whose numbers ascend.
    pub fn new(workers: Vec<Arc<Worker>>) -> Self {
        debug_assert!(workers.is_sorted_by_key(|worker| worker.index), "ordered by number");
        let hosts = Hosts::new(workers.iter().map(|worker| &worker.authority));
        Self { workers, hosts }
    }

    /// The workers.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<Worker>> {
        self.workers.iter()
    }

    /// The worker of a number.
    pub fn get(&self, index: WorkerIndex) -> Option<&Arc<Worker>> {
        let at = self.workers.binary_search_by_key(&index, |worker| worker.index).ok()?;
        Some(&self.workers[at])
    }

    /// The worker of a name.
    pub fn named(&self, id: &str) -> Option<&Arc<Worker>> {
        self.workers.iter().find(|worker| worker.id() == id)
    }

    /// Their count.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// The same with one more, which came last.
    pub(super) fn with(&self, worker: Arc<Worker>) -> Self {
        Self::new(self.workers.iter().cloned().chain([worker]).collect())
    }

    /// The same without one.
    pub(super) fn without(&self, index: WorkerIndex) -> Self {
        let others = self.workers.iter().filter(|worker| worker.index != index);
        Self::new(others.cloned().collect())
    }
}
