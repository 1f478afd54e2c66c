//! Applies the events of workers to the index.

use super::observe::{Change, ChangeCallback, NoObserver, Observer};
use super::{AppliedBlocks, Index, TokenBlocks, WorkerKey};
use crate::event::{EngineHash, KvEvent, Tier};

impl Index {
    /// Applies one event of a worker. Events must be applied in the worker's order; after a gap,
    /// clear the worker and start from a snapshot or a replay.
    pub fn apply(&mut self, worker: WorkerKey, event: &KvEvent) -> AppliedBlocks {
        self.apply_telling(worker, event, &mut NoObserver)
    }

    /// Like [`Index::apply`], and reports each change to `observe`. Blocks that wait for their
    /// parent are reported when they join; blocks beyond a bound and invalid blocks are not
    /// reported.
    pub fn apply_observed(
        &mut self,
        worker: WorkerKey,
        event: &KvEvent,
        tell: &mut impl FnMut(Change<'_>),
    ) -> AppliedBlocks {
        self.apply_telling(worker, event, &mut ChangeCallback(tell))
    }

    fn apply_telling(
        &mut self,
        worker: WorkerKey,
        event: &KvEvent,
        observer: &mut impl Observer,
    ) -> AppliedBlocks {
        match event {
            KvEvent::Stored { parent, blocks, adapter, salt, tier } => {
                let before = match parent {
                    None => Some(self.root(salt.as_deref(), adapter.as_deref())),
                    Some(parent) => self.hash_of(worker, *parent),
                };
                let mut applied = match before {
                    Some(before) => {
                        let run = TokenBlocks { blocks, tier: *tier };
                        self.store_tokens(worker, *parent, before, run, observer)
                    }
                    None => self.keep_aside(worker, *parent, blocks, *tier),
                };
                applied += self.join(worker, observer);
                applied
            }
            KvEvent::Removed { hashes, tier } => {
                self.remove_telling(worker, hashes, *tier, observer)
            }
            KvEvent::Cleared => {
                let removed = self.clear_worker(worker);
                if removed > 0 {
                    observer.see(Change::Cleared);
                }
                AppliedBlocks { removed, ..AppliedBlocks::default() }
            }
        }
    }

    /// [`Index::remove`], reporting the names from which a copy was removed. Blocks that only
    /// waited for their parent were never reported.
    pub(super) fn remove_telling<O: Observer>(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        tier: Tier,
        observer: &mut O,
    ) -> AppliedBlocks {
        if !O::LISTENS {
            return self.remove(worker, hashes, tier);
        }
        let mut names = Vec::with_capacity(hashes.len());
        let applied = self.remove_each(worker, hashes, tier, |name| names.push(name));
        if !names.is_empty() {
            observer.see(Change::Removed { names: &names, tier });
        }
        applied
    }
}
