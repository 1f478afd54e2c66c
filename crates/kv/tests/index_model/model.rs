//! The naive model: physical copies per worker, with prefixes in full.

use std::collections::BTreeMap;

use splitrail_kv::{AppliedBlocks, KvEvent, Overlap, StoredBlock, Tier, WorkerKey};

use crate::{BLOCK_SIZE, LIMIT};

pub(crate) type Spaces = (Option<&'static str>, Option<&'static str>);

/// Salt and adapter.
pub(crate) const SPACES: [Spaces; 4] =
    [(None, None), (Some("x"), None), (None, Some("x")), (Some(""), Some("x"))];
/// More than a run's set of holders can store in place.
pub(crate) const WORKERS: [WorkerKey; 7] = [
    WorkerKey { worker: 0, rank: 0 },
    WorkerKey { worker: 0, rank: 1 },
    WorkerKey { worker: 1, rank: 0 },
    WorkerKey { worker: 7, rank: 65_535 },
    WorkerKey { worker: 2, rank: 0 },
    WorkerKey { worker: 3, rank: 0 },
    WorkerKey { worker: 4, rank: 0 },
];

/// Everything on which a block's KV depends, in full.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Prefix {
    space: Spaces,
    /// Tokens, and whether the block depends on more than tokens.
    blocks: Vec<(Vec<u32>, bool)>,
}

/// An event whose parent has not arrived.
#[derive(Clone, Debug)]
struct Waiting {
    parent: u64,
    blocks: Vec<StoredBlock>,
    tier: Tier,
    removed: Vec<u64>,
}

/// By engine hash: the content and its copies by tier.
pub(crate) type Held = BTreeMap<u64, (Prefix, BTreeMap<Tier, u32>)>;

/// What every worker holds (no worker without blocks), and the waiting events.
#[derive(Default)]
pub(crate) struct Model(pub(crate) BTreeMap<WorkerKey, Held>, BTreeMap<WorkerKey, Vec<Waiting>>);

impl Model {
    pub(crate) fn apply(
        &mut self,
        worker: WorkerKey,
        event: &KvEvent,
        space: Spaces,
    ) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        match event {
            KvEvent::Stored { parent, blocks, tier, .. } => {
                let before = match parent {
                    None => Some(Prefix { space, blocks: Vec::new() }),
                    Some(parent) => self.prefix(worker, parent.0),
                };
                match (before, parent) {
                    (Some(before), _) => applied = self.store(worker, before, blocks, *tier),
                    (None, Some(parent)) if !blocks.is_empty() => {
                        let (blocks, removed) = (blocks.clone(), Vec::new());
                        applied.aside = blocks.len();
                        let waiting = Waiting { parent: parent.0, blocks, tier: *tier, removed };
                        self.1.entry(worker).or_default().push(waiting);
                    }
                    (None, _) => {}
                }
                applied += self.join(worker);
            }
            KvEvent::Removed { hashes, tier } => {
                for hash in hashes {
                    let removed = self.remove(worker, hash.0, *tier);
                    applied.removed += usize::from(removed);
                    applied.unknown += usize::from(!removed);
                }
            }
            KvEvent::Dropped { hashes } => {
                let waiting = self.1.entry(worker).or_default();
                let is_dropped = |block: &StoredBlock| hashes.contains(&block.hash);
                waiting.retain(|waiting| !waiting.blocks.iter().any(is_dropped));
                for hash in hashes {
                    for tier in Tier::ALL {
                        while self.remove(worker, hash.0, tier) {
                            applied.removed += 1;
                        }
                    }
                }
            }
            KvEvent::TierCleared { tier } => {
                for (_, copies) in self.0.entry(worker).or_default().values_mut() {
                    applied.removed += copies.remove(tier).unwrap_or(0) as usize;
                }
                let held = self.0.entry(worker).or_default();
                held.retain(|_, (_, tiers)| tiers.values().any(|copies| *copies > 0));
                let waiting = self.1.entry(worker).or_default();
                waiting.retain(|waiting| waiting.tier != *tier);
            }
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {}
            KvEvent::Cleared => {
                applied.removed = self.0.remove(&worker).map_or(0, |held| held.len());
                self.1.remove(&worker);
            }
        }
        self.0.retain(|_, held| !held.is_empty());
        applied
    }

    fn prefix(&self, worker: WorkerKey, hash: u64) -> Option<Prefix> {
        self.0.get(&worker)?.get(&hash).map(|(prefix, _)| prefix.clone())
    }

    fn store(
        &mut self,
        worker: WorkerKey,
        mut prefix: Prefix,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        let held = self.0.entry(worker).or_default();
        let whole = blocks.iter().take_while(|block| block.tokens.len() == BLOCK_SIZE).count();
        if whole < blocks.len() {
            applied.malformed = 1;
            applied.orphaned = blocks.len() - whole - 1;
        }
        for (at, block) in blocks[..whole].iter().enumerate() {
            prefix.blocks.push((block.tokens.clone(), block.opaque));
            if held.get(&block.hash.0).is_some_and(|(old, _)| *old != prefix) {
                held.remove(&block.hash.0);
                applied.replaced += 1;
            } else if !held.contains_key(&block.hash.0) && held.len() == LIMIT {
                applied.over_limit = whole - at;
                break;
            }
            let entry = held.entry(block.hash.0).or_insert((prefix.clone(), BTreeMap::new()));
            *entry.1.entry(tier).or_default() += 1;
            applied.stored += 1;
        }
        applied
    }

    fn join(&mut self, worker: WorkerKey) -> AppliedBlocks {
        let mut applied = AppliedBlocks::default();
        loop {
            let waiting = self.1.get(&worker).map_or(&[][..], Vec::as_slice);
            let known = |waiting: &Waiting| self.prefix(worker, waiting.parent).is_some();
            let Some(at) = waiting.iter().position(known) else {
                return applied;
            };
            let Some(waiting) = self.1.get_mut(&worker).map(|all| all.remove(at)) else {
                return applied;
            };
            if let Some(before) = self.prefix(worker, waiting.parent) {
                applied += self.store(worker, before, &waiting.blocks, waiting.tier);
            }
            for hash in waiting.removed {
                self.remove(worker, hash, waiting.tier);
            }
        }
    }

    fn remove(&mut self, worker: WorkerKey, hash: u64, tier: Tier) -> bool {
        let held = self.0.entry(worker).or_default();
        if let Some((_, tiers)) = held.get_mut(&hash) {
            let copies = tiers.get_mut(&tier).filter(|copies| **copies > 0);
            let is_there = copies.is_some();
            if let Some(copies) = copies {
                *copies -= 1;
            }
            held.retain(|_, (_, tiers)| tiers.values().any(|copies| *copies > 0));
            return is_there;
        }
        let waits = |waiting: &&mut Waiting| {
            let stored = waiting.blocks.iter().filter(|block| block.hash.0 == hash).count();
            let removed = waiting.removed.iter().filter(|removed| **removed == hash).count();
            waiting.tier == tier && stored > removed
        };
        match self.1.entry(worker).or_default().iter_mut().find(waits) {
            Some(waiting) => waiting.removed.push(hash),
            None => return false,
        }
        true
    }

    pub(crate) fn forget(&mut self, worker: WorkerKey) {
        self.0.remove(&worker);
        self.1.remove(&worker);
    }

    pub(crate) fn remove_worker(&mut self, worker: u32) {
        self.0.retain(|key, _| key.worker != worker);
        self.1.retain(|key, _| key.worker != worker);
    }

    pub(crate) fn overlap(&self, worker: WorkerKey, space: Spaces, prompt: &[Vec<u32>]) -> Overlap {
        let mut overlap = Overlap::default();
        let Some(held) = self.0.get(&worker) else {
            return overlap;
        };
        for depth in 1..=prompt.len() {
            let blocks = prompt[..depth].iter().map(|tokens| (tokens.clone(), false));
            let wanted = Prefix { space, blocks: blocks.collect() };
            let fastest = held
                .values()
                .filter(|(prefix, _)| *prefix == wanted)
                .flat_map(|(_, tiers)| tiers.iter().filter(|(_, copies)| **copies > 0))
                .map(|(tier, _)| *tier)
                .min();
            let Some(tier) = fastest else { break };
            overlap.blocks += 1;
            overlap.by_tier[tier as usize] += 1;
        }
        overlap
    }

    pub(crate) fn block_counts(&self, worker: WorkerKey) -> [usize; Tier::COUNT] {
        let held = self.0.get(&worker);
        Tier::ALL.map(|tier| {
            let has = |tiers: &BTreeMap<Tier, u32>| tiers.get(&tier).is_some_and(|&n| n > 0);
            held.map_or(0, |held| held.values().filter(|(_, tiers)| has(tiers)).count())
        })
    }

    /// The prompts that are looked up: every prefix held by any worker, and one block more.
    pub(crate) fn prompts(&self) -> Vec<(Spaces, Vec<Vec<u32>>)> {
        let mut prompts: Vec<_> = self
            .0
            .values()
            .flat_map(|held| held.values())
            .map(|(prefix, _)| {
                let blocks = prefix.blocks.iter().map(|(tokens, _)| tokens.clone());
                (prefix.space, blocks.collect::<Vec<_>>())
            })
            .collect();
        prompts.sort();
        prompts.dedup();
        for (_, blocks) in &mut prompts {
            blocks.push(vec![0, 1]);
        }
        prompts
    }
}
