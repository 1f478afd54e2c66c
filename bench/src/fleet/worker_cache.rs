//! The blocks of a worker: a few common prompts, which many workers hold, and conversations that
//! continue these prompts, which no other worker holds.

use splitrail_proto::v1::{Run, SnapshotPart};

use crate::splitmix::mix;

/// Number of common prompts.
const COMMON_PROMPTS: u64 = 32;
/// Number of common prompts that each worker holds.
const HELD_PROMPTS: u64 = 4;
/// Number of blocks by which a conversation continues a common prompt.
const CONVERSATION_BLOCKS: usize = 96;
/// Number of blocks from which a message is full, as in real shims.
const PART_BLOCKS: usize = 4096;
/// Maximum number of blocks of a run, as in real shims.
const RUN_BLOCKS: usize = 1024;

/// The cache of one worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerCache {
    /// The number of the worker, from 0.
    pub(super) worker: u64,
    /// Number of KV blocks. A quarter of them belong to common prompts.
    pub(super) blocks: usize,
}

impl WorkerCache {
    /// The messages of a snapshot that contains all changes up to `sequence`.
    pub(super) fn parts(self, mirror_id: &str, sequence: u64) -> Vec<SnapshotPart> {
        let mut parts: Vec<SnapshotPart> = Vec::new();
        let (mut runs, mut blocks) = (Vec::new(), 0);
        let part = |runs: Vec<Run>| SnapshotPart {
            mirror_id: mirror_id.to_owned(),
            sequence,
            rank: 0,
            runs,
            last: false,
            rank_names: 0,
        };
        for run in self.runs() {
            if blocks >= PART_BLOCKS {
                parts.push(part(std::mem::take(&mut runs)));
                blocks = 0;
            }
            blocks += run.hashes.len();
            runs.push(run);
        }
        parts.push(SnapshotPart { last: true, ..part(runs) });
        parts
    }

    /// The blocks in runs. Each run follows the run with its parent, as in real shims.
    fn runs(self) -> impl Iterator<Item = Run> {
        let common_len = self.blocks / 4 / HELD_PROMPTS as usize;
        let common = move |place: u64| (self.worker * 7 + place * 8) % COMMON_PROMPTS;
        let prompts = (0..HELD_PROMPTS).flat_map(move |place| {
            let seed = mix(common(place));
            (0..common_len).step_by(RUN_BLOCKS).map(move |from| {
                let to = common_len.min(from + RUN_BLOCKS);
                run(from.checked_sub(1).map(|before| block(seed, before)), seed, from..to)
            })
        });
        let left = self.blocks - common_len * HELD_PROMPTS as usize;
        let conversations = (0..left).step_by(CONVERSATION_BLOCKS).map(move |from| {
            let number = (from / CONVERSATION_BLOCKS) as u64;
            let parent = block(mix(common(number % HELD_PROMPTS)), common_len - 1);
            let seed = mix(mix(self.worker + COMMON_PROMPTS) ^ number);
            run(Some(parent), seed, 0..CONVERSATION_BLOCKS.min(left - from))
        });
        prompts.chain(conversations)
    }
}

fn run(parent: Option<u64>, seed: u64, places: std::ops::Range<usize>) -> Run {
    let hashes: Vec<u64> = places.map(|place| block(seed, place)).collect();
    // For the same content, an engine's names are the same on all workers.
    let names = hashes.iter().map(|hash| mix(*hash)).collect();
    Run { parent, hashes, names, named: Vec::new() }
}

/// The hash of a block of the chain with a seed.
fn block(seed: u64, place: usize) -> u64 {
    mix(seed.wrapping_add(place as u64))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_cache_has_as_many_blocks_as_it_should_in_chains_that_hang_together() {
        let caches = [0, 1, 999].map(|worker| WorkerCache { worker, blocks: 16_384 });
        for cache in caches {
            let parts = cache.parts("m", 3);
            assert!(parts.iter().rev().skip(1).all(|part| !part.last));
            assert!(parts.last().is_some_and(|part| part.last));
            let mut seen = HashSet::new();
            for run in parts.iter().flat_map(|part| &part.runs) {
                assert!(run.parent.is_none_or(|parent| seen.contains(&parent)));
                assert!(run.hashes.iter().all(|hash| seen.insert(*hash)));
                assert_eq!(run.hashes.len(), run.names.len());
            }
            assert_eq!(seen.len(), cache.blocks);
        }
    }

    #[test]
    fn workers_share_prompts_and_no_conversations() {
        let hashes = |worker| -> HashSet<u64> {
            let parts = WorkerCache { worker, blocks: 16_384 }.parts("m", 0);
            parts.into_iter().flat_map(|part| part.runs).flat_map(|run| run.hashes).collect()
        };
        let (first, eighth) = (hashes(0), hashes(8));
        assert_eq!(first.intersection(&eighth).count(), 16_384 / 4);
        assert_eq!(first.intersection(&hashes(1)).count(), 0);
    }
}
