//! The key of a worker in the index.

use std::fmt;

/// A worker in the index, that is one cache. The ranks of a data-parallel engine have a cache each,
/// so each rank is a worker of its own here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerKey {
    /// The worker's number in the fleet.
    pub worker: u32,
    /// The data-parallel rank; 0 if there is only one.
    pub rank: u16,
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}
