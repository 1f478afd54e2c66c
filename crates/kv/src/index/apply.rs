//! Applies the events of workers to the index.

use std::collections::BTreeSet;

use super::cache_groups::GroupBlocks;
use super::observe::{Change, ChangeCallback, NoObserver, Observer};
use super::{AppliedBlocks, Index, TokenBlocks, WorkerKey};
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};

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
                    None => {
                        let adapter = adapter.as_ref().map(|adapter| adapter.name.as_str());
                        Some(self.root(salt.as_deref(), adapter))
                    }
                    Some(parent) => self.hash_of(worker, *parent),
                };
                let mut applied = match before {
                    Some(before) => {
                        let run = TokenBlocks { blocks, tier: *tier };
                        self.store_tokens(worker, *parent, before, run, observer)
                    }
                    None => self.keep_aside(worker, *parent, blocks, *tier),
                };
                self.note_adapter(worker, adapter.as_ref(), blocks);
                applied += self.join(worker, observer);
                self.place_late(worker, blocks);
                applied
            }
            KvEvent::Removed { hashes, tier } => {
                self.remove_telling(worker, hashes, *tier, observer)
            }
            KvEvent::GroupStored { group, parent, tokens, hashes } => {
                let (group, parent, tokens) = (*group, *parent, *tokens);
                self.store_in_group(worker, GroupBlocks { group, parent, tokens, hashes })
            }
            KvEvent::GroupRemoved { group, hashes } => {
                self.remove_from_group(worker, *group, hashes)
            }
            KvEvent::Dropped { hashes } => {
                let removed = self.drop_everywhere(worker, hashes, observer);
                AppliedBlocks { removed, ..AppliedBlocks::default() }
            }
            KvEvent::TierCleared { tier } => {
                if let Some(groups) = self.hybrids.get_mut(&worker)
                    && *tier == Tier::Device
                {
                    groups.clear();
                }
                let removed = self.clear_tier(worker, *tier, observer);
                AppliedBlocks { removed, ..AppliedBlocks::default() }
            }
            KvEvent::Cleared => {
                if let Some(groups) = self.hybrids.get_mut(&worker) {
                    groups.clear();
                }
                let removed = self.clear_telling(worker, observer);
                AppliedBlocks { removed, ..AppliedBlocks::default() }
            }
        }
    }

    /// Drops all blocks of the spine, reporting the change.
    fn clear_telling(&mut self, worker: WorkerKey, observer: &mut impl Observer) -> usize {
        let removed = self.clear_spine(worker);
        if removed > 0 {
            observer.see(Change::Cleared);
        }
        removed
    }

    /// Removes all copies of the named blocks, in every tier and cache group; returns the number of
    /// those of the spine.
    pub(super) fn drop_everywhere(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        observer: &mut impl Observer,
    ) -> usize {
        if let Some(groups) = self.hybrids.get_mut(&worker) {
            groups.drop_blocks(hashes);
        }
        self.drop_blocks(worker, hashes, observer)
    }

    /// Removes all copies of the named blocks, and the waiting events that name one of them; returns
    /// the number of copies.
    fn drop_blocks(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        observer: &mut impl Observer,
    ) -> usize {
        if let Some(known) = self.workers.get_mut(&worker)
            && !known.waiting_events.is_empty()
        {
            let dropped: BTreeSet<_> = hashes.iter().collect();
            let is_dropped = |block: &StoredBlock| dropped.contains(&block.hash);
            known.waiting_events.drop_if(|waiting| waiting.blocks.iter().any(is_dropped));
        }
        Tier::ALL.into_iter().map(|tier| self.drop_copies(worker, hashes, tier, observer)).sum()
    }

    /// Removes all copies of a worker's blocks from a tier; returns their number.
    fn clear_tier(&mut self, worker: WorkerKey, tier: Tier, observer: &mut impl Observer) -> usize {
        let Some(known) = self.workers.get_mut(&worker) else {
            return 0;
        };
        known.waiting_events.drop_if(|waiting| waiting.tier == tier);
        if known.counts[tier as usize] == 0 && !known.names.is_empty() {
            return 0;
        }
        let is_plain = known.copies.is_empty() && known.waiting_events.is_empty();
        if is_plain && tier == Tier::Device {
            return self.clear_telling(worker, observer);
        }
        let is_in_tier = |lane| known.copies(lane)[tier as usize] > 0;
        let names = known.names.iter().filter(|(lane, ..)| is_in_tier(*lane));
        let names: Vec<_> = names.map(|(_, name, _)| EngineHash(name)).collect();
        self.drop_copies(worker, &names, tier, observer)
    }

    /// Removes all copies of the named blocks from a tier; returns their number.
    fn drop_copies<O: Observer>(
        &mut self,
        worker: WorkerKey,
        hashes: &[EngineHash],
        tier: Tier,
        observer: &mut O,
    ) -> usize {
        let mut removed = 0;
        for hash in hashes {
            let known = self.workers.get_mut(&worker);
            let further = known.map_or(0, |known| known.take_further_copies(*hash, tier));
            removed += further as usize;
            // Without an observer, which follows events alone, a snapshot may have said any number.
            for _ in 0..if O::LISTENS { further } else { 0 } {
                observer.see(Change::Removed { names: &[*hash], tier });
            }
        }
        removed + self.remove_telling(worker, hashes, tier, observer).removed
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
