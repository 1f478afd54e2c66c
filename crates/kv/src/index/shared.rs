//! The memory of the prefix index that its readers and its writer share.

use std::sync::Arc;

use super::heads::Heads;
use super::resume_points::ResumePoints;
use super::run::Run;
use super::sync::{AtomicU64, SwapCell};
use super::words::Words;
use super::worker_key::WorkerKey;

/// Number of runs in one chunk.
pub(super) const RUNS_PER_CHUNK: usize = if cfg!(loom) { 4 } else { 256 };

/// Everything that a reader needs. The state is replaced as a whole when it grows, or when a worker
/// joins or leaves, which is rare; runs and words change in place.
#[derive(Clone, Debug)]
pub(super) struct IndexState {
    pub(super) words: Words,
    pub(super) runs: Vec<Arc<[Run]>>,
    pub(super) heads: Arc<Heads>,
    pub(super) slots: Arc<Slots>,
    /// One bit per slot in use. Bits are cleared in place, so a worker that leaves disappears
    /// immediately.
    pub(super) live: Arc<[AtomicU64]>,
    /// The workers that have cache groups besides the spine, sorted.
    pub(super) resume_points: Arc<[(WorkerKey, Arc<ResumePoints>)]>,
    /// The value of [`SharedIndex::reused`] when this state was published.
    pub(super) reused: u64,
}

impl IndexState {
    #[inline]
    pub(super) fn run(&self, run: u32) -> Option<&Run> {
        let (chunk, place) = (run as usize / RUNS_PER_CHUNK, run as usize % RUNS_PER_CHUNK);
        self.runs.get(chunk)?.get(place)
    }

    /// The run that begins with a block, without checking the version.
    #[inline]
    pub(super) fn find(&self, hash: u64) -> Option<(u32, &Run)> {
        let begins = |run| self.run(run).is_some_and(|run| run.begins_with(hash));
        let run = self.heads.find(hash, begins)?;
        Some((run, self.run(run)?))
    }

    /// Whether a run that is missing in one of the two states is missing in the other, too.
    pub(super) fn finds_the_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.heads, &other.heads) && self.runs.len() == other.runs.len()
    }
}

/// The index's numbers for workers: small, so that sets of workers are bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Slots {
    /// The worker of each slot; `None` if the slot is free or its worker is being removed.
    pub(super) keys: Vec<Option<WorkerKey>>,
    /// The slots in use, sorted by worker.
    pub(super) by_key: Vec<(WorkerKey, u16)>,
    /// For each slot, the number of workers that have had it.
    pub(super) owners: Vec<u32>,
}

impl Slots {
    pub(super) fn of(&self, worker: WorkerKey) -> Option<u16> {
        let at = self.by_key.binary_search_by_key(&worker, |(key, _)| *key).ok()?;
        Some(self.by_key[at].1)
    }

    /// Number of words of a set of slots.
    pub(super) fn words(&self) -> usize {
        self.keys.len().div_ceil(64)
    }

    /// A copy with a further worker, in a free slot.
    pub(super) fn with(&self, worker: WorkerKey, slot: u16) -> Self {
        let mut slots = self.clone();
        let place = usize::from(slot);
        if slots.keys.len() <= place {
            slots.keys.resize(place + 1, None);
            slots.owners.resize(place + 1, 0);
        }
        slots.owners[place] = slots.owners[place].wrapping_add(1);
        slots.keys[place] = Some(worker);
        let at = slots.by_key.partition_point(|(key, _)| *key < worker);
        slots.by_key.insert(at, (worker, slot));
        slots
    }

    /// A copy without a worker.
    pub(super) fn without(&self, worker: WorkerKey) -> Self {
        let mut slots = self.clone();
        if let Some(slot) = self.of(worker) {
            let place = usize::from(slot);
            slots.keys[place] = None;
            slots.by_key.retain(|(key, _)| *key != worker);
        }
        slots
    }
}

/// The current state, as readers find it.
#[derive(Debug)]
pub(super) struct SharedIndex {
    pub(super) state: SwapCell<IndexState>,
    /// How often a number of a slot or of a chunk was reused. The counter is raised before anything
    /// is written there: a reader with an earlier state cannot know what the number means now.
    pub(super) reused: AtomicU64,
}
