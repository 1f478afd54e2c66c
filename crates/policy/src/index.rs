//! Types of indices, so that indices into different lists are not confused.

use std::ops::{Index, IndexMut};

use serde::Serialize;

/// The number of a worker in the roster of its model. Numbers ascend in the order in which workers
/// join, and no number is given twice: it is no place in a list once a worker has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct WorkerIndex(pub u32);

impl WorkerIndex {
    /// The number of the worker at this place of a list that no worker has left.
    pub fn at(place: usize) -> Self {
        Self(place as u32)
    }

    /// The place of the worker in a list that no worker has left.
    pub fn place(self) -> usize {
        self.0 as usize
    }
}

/// The place of a candidate in the list that a policy is given. It indexes this list, and every
/// list that has an item for each of the candidates in the same order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct CandidateIndex(pub usize);

impl CandidateIndex {
    /// All places of a list of so many candidates.
    pub fn all(count: usize) -> impl ExactSizeIterator<Item = Self> + Clone {
        (0..count).map(Self)
    }
}

impl<T> Index<CandidateIndex> for [T] {
    type Output = T;

    fn index(&self, candidate: CandidateIndex) -> &T {
        &self[candidate.0]
    }
}

impl<T> Index<CandidateIndex> for Vec<T> {
    type Output = T;

    fn index(&self, candidate: CandidateIndex) -> &T {
        &self[candidate.0]
    }
}

impl<T> IndexMut<CandidateIndex> for Vec<T> {
    fn index_mut(&mut self, candidate: CandidateIndex) -> &mut T {
        &mut self[candidate.0]
    }
}
