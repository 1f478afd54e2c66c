//! Drops the blocks that a worker has computed with earlier loads of an adapter.

use std::ops::RangeInclusive;

use super::observe::NoObserver;
use super::worker::Worker;
use super::{Index, WorkerKey};
use crate::event::{BlockAdapter, EngineHash, StoredBlock};

impl Index {
    /// Notes to which load of an adapter stored blocks belong.
    pub(super) fn note_adapter(
        &mut self,
        worker: WorkerKey,
        adapter: Option<&BlockAdapter>,
        blocks: &[StoredBlock],
    ) {
        if let (Some(adapter), Some(known)) = (adapter, self.workers.get_mut(&worker)) {
            let Worker { adapters, names, .. } = known;
            let is_held = |hash: EngineHash| names.find(hash.0).is_some();
            adapters.note(adapter, blocks, names.len(), is_held);
        }
    }

    /// The highest number of a load of an adapter in the events of a worker, over all ranks; 0 if
    /// there is none.
    pub fn adapter_load(&self, worker: u32, adapter: &str) -> u64 {
        let ranks = self.workers.range(Self::ranks(worker));
        ranks.filter_map(|(_, rank)| rank.adapters.latest(adapter)).max().unwrap_or(0)
    }

    /// Drops what a worker holds of an adapter, in every rank, if it was computed with the load of this
    /// number or an earlier one; returns the number of copies. Of blocks that came from a snapshot, the
    /// adapter is not known: they stay.
    pub fn forget_adapter(&mut self, worker: u32, adapter: &str, through: u64) -> usize {
        let ranks = self.workers.range(Self::ranks(worker)).map(|(key, _)| *key);
        let ranks: Vec<WorkerKey> = ranks.collect();
        let mut dropped = 0;
        for key in ranks {
            let Some(rank) = self.workers.get_mut(&key) else { continue };
            let hashes = rank.adapters.take(adapter, through);
            dropped += self.drop_everywhere(key, &hashes, &mut NoObserver);
        }
        dropped
    }

    /// The keys of all ranks of a worker.
    pub(super) fn ranks(worker: u32) -> RangeInclusive<WorkerKey> {
        WorkerKey { worker, rank: 0 }..=WorkerKey { worker, rank: u16::MAX }
    }
}
