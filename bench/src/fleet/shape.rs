//! What a worker's cache holds: a few prompts that many workers share, and conversations
//! behind them that are its own.

use splitrail_proto::v1::{Run, SnapshotPart};

/// Prompts that there are in common, and how many of them each worker holds.
const COMMON: u64 = 32;
const HELD: u64 = 4;
/// Blocks of a conversation behind a common prompt.
const CONVERSATION: usize = 96;
/// Blocks of one message, and of one run in it, as shims send them.
const PART_BLOCKS: usize = 4096;
const RUN_BLOCKS: usize = 1024;

/// One worker's cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    /// Which worker's.
    pub(super) worker: u64,
    /// KV blocks in it; a quarter of them are of common prompts.
    pub(super) blocks: usize,
}

impl Cache {
    /// Its snapshot, as of a change.
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

    /// The least deep first, as shims have them.
    fn runs(self) -> impl Iterator<Item = Run> {
        let common_len = self.blocks / 4 / HELD as usize;
        let common = move |place: u64| (self.worker * 7 + place * 8) % COMMON;
        let prompts = (0..HELD).flat_map(move |place| {
            let seed = mix(common(place));
            (0..common_len).step_by(RUN_BLOCKS).map(move |from| {
                let to = common_len.min(from + RUN_BLOCKS);
                run(from.checked_sub(1).map(|before| block(seed, before)), seed, from..to)
            })
        });
        let left = self.blocks - common_len * HELD as usize;
        let conversations = (0..left).step_by(CONVERSATION).map(move |from| {
            let number = (from / CONVERSATION) as u64;
            let parent = block(mix(common(number % HELD)), common_len - 1);
            let seed = mix(mix(self.worker + COMMON) ^ number);
            run(Some(parent), seed, 0..CONVERSATION.min(left - from))
        });
        prompts.chain(conversations)
    }
}

fn run(parent: Option<u64>, seed: u64, places: std::ops::Range<usize>) -> Run {
    let hashes: Vec<u64> = places.map(|place| block(seed, place)).collect();
    // An engine's names are the same on all workers for the same content.
    let names = hashes.iter().map(|hash| mix(*hash)).collect();
    Run { parent, hashes, names, named: Vec::new() }
}

/// The hash of a chain's block.
fn block(seed: u64, place: usize) -> u64 {
    mix(seed.wrapping_add(place as u64))
}

/// The finalizer of SplitMix64: no two numbers have the same.
pub(super) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_cache_has_as_many_blocks_as_it_should_in_chains_that_hang_together() {
        let caches = [0, 1, 999].map(|worker| Cache { worker, blocks: 16_384 });
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
            let parts = Cache { worker, blocks: 16_384 }.parts("m", 0);
            parts.into_iter().flat_map(|part| part.runs).flat_map(|run| run.hashes).collect()
        };
        let (first, eighth) = (hashes(0), hashes(8));
        assert_eq!(first.intersection(&eighth).count(), 16_384 / 4);
        assert_eq!(first.intersection(&hashes(1)).count(), 0);
    }
}
