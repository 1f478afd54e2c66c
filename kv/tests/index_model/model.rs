//! The naive model: physical copies per worker, prefixes spelled out.

use std::collections::BTreeMap;

use splitrail_kv::{Applied, KvEvent, Overlap, Tier, WorkerKey};

use crate::{BLOCK_SIZE, LIMIT};

pub(crate) type Spaces = (Option<&'static str>, Option<&'static str>);

/// Salt and adapter.
pub(crate) const SPACES: [Spaces; 4] =
    [(None, None), (Some("x"), None), (None, Some("x")), (Some(""), Some("x"))];
pub(crate) const WORKERS: [WorkerKey; 4] = [
    WorkerKey { worker: 0, rank: 0 },
    WorkerKey { worker: 0, rank: 1 },
    WorkerKey { worker: 1, rank: 0 },
    WorkerKey { worker: 7, rank: 65_535 },
];

/// All that a block's KV depends on, spelled out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Prefix {
    space: Spaces,
    blocks: Vec<Vec<u32>>,
    opaque: bool,
}

/// By engine hash: the content and its copies by tier.
pub(crate) type Held = BTreeMap<u64, (Prefix, BTreeMap<Tier, u32>)>;

/// What every worker holds; no worker without blocks.
#[derive(Default)]
pub(crate) struct Model(pub(crate) BTreeMap<WorkerKey, Held>);

impl Model {
    pub(crate) fn apply(&mut self, worker: WorkerKey, event: &KvEvent, space: Spaces) -> Applied {
        let mut applied = Applied::default();
        let held = self.0.entry(worker).or_default();
        match event {
            KvEvent::Stored { parent, blocks, tier, .. } => {
                let mut before = match parent {
                    None => Some(Prefix { space, blocks: Vec::new(), opaque: false }),
                    Some(parent) => held.get(&parent.0).map(|(prefix, _)| prefix.clone()),
                };
                for block in blocks {
                    let Some(mut prefix) = before.take() else {
                        applied.orphaned += 1;
                        continue;
                    };
                    if block.tokens.len() != BLOCK_SIZE {
                        applied.malformed += 1;
                        continue;
                    }
                    prefix.blocks.push(block.tokens.clone());
                    prefix.opaque |= block.opaque;
                    before = Some(prefix.clone());
                    if held.get(&block.hash.0).is_some_and(|(old, _)| *old != prefix) {
                        held.remove(&block.hash.0);
                        applied.replaced += 1;
                    } else if !held.contains_key(&block.hash.0) && held.len() == LIMIT {
                        applied.over_limit += 1;
                        continue;
                    }
                    let entry = held.entry(block.hash.0).or_insert((prefix, BTreeMap::new()));
                    *entry.1.entry(*tier).or_default() += 1;
                    applied.stored += 1;
                }
            }
            KvEvent::Removed { hashes, tier } => {
                for hash in hashes {
                    let copies = held.get_mut(&hash.0).and_then(|(_, tiers)| tiers.get_mut(tier));
                    match copies {
                        Some(copies) if *copies > 0 => {
                            *copies -= 1;
                            applied.removed += 1;
                        }
                        _ => applied.unknown += 1,
                    }
                    held.retain(|_, (_, tiers)| tiers.values().any(|copies| *copies > 0));
                }
            }
            KvEvent::Cleared => applied.removed = std::mem::take(held).len(),
        }
        self.0.retain(|_, held| !held.is_empty());
        applied
    }

    pub(crate) fn remove_worker(&mut self, worker: u32) {
        self.0.retain(|key, _| key.worker != worker);
    }

    pub(crate) fn overlap(&self, worker: WorkerKey, space: Spaces, prompt: &[Vec<u32>]) -> Overlap {
        let mut overlap = Overlap::default();
        let Some(held) = self.0.get(&worker) else {
            return overlap;
        };
        for depth in 1..=prompt.len() {
            let wanted = Prefix { space, blocks: prompt[..depth].to_vec(), opaque: false };
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

    /// The prompts worth asking for: every prefix held anywhere, one block longer.
    pub(crate) fn prompts(&self) -> Vec<(Spaces, Vec<Vec<u32>>)> {
        let mut prompts: Vec<_> = self
            .0
            .values()
            .flat_map(|held| held.values())
            .map(|(prefix, _)| (prefix.space, prefix.blocks.clone()))
            .collect();
        prompts.sort();
        prompts.dedup();
        for (_, blocks) in &mut prompts {
            blocks.push(vec![0, 1]);
        }
        prompts
    }
}
