//! The key of a worker in the index.

use std::fmt;

/// A worker as the index sees it: one cache. The ranks of a data-parallel
/// engine have a cache each, so each is a worker of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerKey {
    /// The worker's number in the fleet.
    pub worker: u32,
    /// Its data-parallel rank; 0 where there is only one.
    pub rank: u16,
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}
