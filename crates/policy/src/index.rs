//! Types of indices, so that indices into different lists are not confused.

use std::ops::{Index, IndexMut};

use serde::Serialize;

/// The number of a worker in the roster of its model. Numbers are assigned in the order in which
/// workers join and are never reused, so a number is not a list position once a worker has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct WorkerIndex(pub u32);

impl WorkerIndex {
    /// The number of the worker at this position of a list from which no worker was removed.
    pub fn at(place: usize) -> Self {
        Self(place as u32)
    }

    /// The position of the worker in a list from which no worker was removed.
    pub fn place(self) -> usize {
        self.0 as usize
    }
}

/// The position of a candidate in the list that a policy gets. It indexes this list and every list
/// with one item per candidate in the same order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct CandidateIndex(pub usize);

impl CandidateIndex {
    /// All positions of a list of `count` candidates.
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
