//! What one worker holds: the side of the index that its events write.

use super::WorkerKey;
use super::holders::Holders;
use super::table::{Table, shrink};
use crate::event::{EngineHash, Tier};
use crate::hash::BlockHash;

/// What stands behind an engine hash. Equal contents are the same KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) hash: BlockHash,
    /// The block before it; `None` for a prompt's first block.
    pub(super) parent: Option<BlockHash>,
    /// Place in the prompt, counted in blocks from 0.
    pub(super) position: u32,
    /// The block, or one before it, depends on more than its hash covers.
    pub(super) opaque: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) content: Content,
    /// Physical copies per tier; never all zero.
    pub(super) copies: [u32; Tier::COUNT],
}

/// What became of one stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreOutcome {
    Stored,
    /// Stored, and other content under the same engine hash was dropped for it.
    Replaced,
    OverLimit,
}

/// One worker's engine hashes. Every change goes to [`Holders`] in the same
/// call, so the two sides cannot drift apart.
#[derive(Clone, Debug)]
pub(super) struct WorkerMap {
    key: WorkerKey,
    entries: Table<EngineHash, Entry>,
    /// Per tier, the entries with a copy there.
    counts: [usize; Tier::COUNT],
}

impl WorkerMap {
    pub(super) fn new(key: WorkerKey) -> Self {
        Self { key, entries: Table::default(), counts: [0; Tier::COUNT] }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn counts(&self) -> [usize; Tier::COUNT] {
        self.counts
    }

    pub(super) fn content(&self, engine: EngineHash) -> Option<Content> {
        self.entries.get(&engine).map(|entry| entry.content)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, &Entry)> {
        self.entries.iter().map(|(engine, entry)| (*engine, entry))
    }

    /// Adds `copies` physical copies (at least one) of a block in `tier`.
    pub(super) fn store(
        &mut self,
        holders: &mut Holders,
        limit: usize,
        (engine, content): (EngineHash, Content),
        (tier, copies): (Tier, u32),
    ) -> StoreOutcome {
        let mut outcome = StoreOutcome::Stored;
        match self.entries.get(&engine) {
            Some(entry) if entry.content == content => {}
            Some(_) => {
                // Only a restart that nobody noticed explains this: what the
                // hash meant before is gone.
                self.forget(holders, engine);
                outcome = StoreOutcome::Replaced;
            }
            None if self.entries.len() >= limit => return StoreOutcome::OverLimit,
            None => {}
        }
        let entry =
            self.entries.entry(engine).or_insert(Entry { content, copies: [0; Tier::COUNT] });
        let held = &mut entry.copies[tier as usize];
        let first = *held == 0;
        *held = held.saturating_add(copies);
        if first {
            self.counts[tier as usize] += 1;
            if !content.opaque {
                holders.add(content.hash, self.key, tier);
            }
        }
        outcome
    }

    /// Takes one physical copy away; false where the worker had none in `tier`.
    pub(super) fn remove(&mut self, holders: &mut Holders, engine: EngineHash, tier: Tier) -> bool {
        let Some(entry) = self.entries.get_mut(&engine) else {
            return false;
        };
        let held = &mut entry.copies[tier as usize];
        if *held == 0 {
            return false;
        }
        *held -= 1;
        if *held > 0 {
            return true;
        }
        self.counts[tier as usize] -= 1;
        if !entry.content.opaque {
            holders.remove(entry.content.hash, self.key, tier);
        }
        if entry.copies == [0; Tier::COUNT] {
            self.entries.remove(&engine);
            shrink(&mut self.entries);
        }
        true
    }

    /// Drops an engine hash with all its copies.
    fn forget(&mut self, holders: &mut Holders, engine: EngineHash) {
        let Some(entry) = self.entries.remove(&engine) else {
            return;
        };
        for tier in held_tiers(&entry) {
            self.counts[tier as usize] -= 1;
        }
        self.release(holders, &entry);
    }

    /// Drops everything, in time proportional to what is held; returns how many
    /// engine hashes that was.
    pub(super) fn clear(self, holders: &mut Holders) -> usize {
        for entry in self.entries.values() {
            self.release(holders, entry);
        }
        self.entries.len()
    }

    fn release(&self, holders: &mut Holders, entry: &Entry) {
        if entry.content.opaque {
            return;
        }
        for tier in held_tiers(entry) {
            holders.remove(entry.content.hash, self.key, tier);
        }
    }
}

/// The tiers in which an entry has a copy.
pub(super) fn held_tiers(entry: &Entry) -> impl Iterator<Item = Tier> {
    Tier::ALL.into_iter().filter(|&tier| entry.copies[tier as usize] > 0)
}
