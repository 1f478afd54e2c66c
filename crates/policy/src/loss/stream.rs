//! Remembers the blocks of earlier prompts, to tell which blocks of a prompt came before.
//!
//! The hash of a block names all blocks before it as well. So the blocks that a prompt adds are kept
//! as one run, under the first of them, and a prompt is followed from run to run. That costs a lookup
//! for each run and a comparison for each block. A table of single blocks costs several lookups for
//! each block, mostly in memory that no cache holds, and made requests of 64 KB twice as expensive.

use std::collections::HashMap;

/// Blocks for each of which a generation may have one run: it bounds the memory of runs where prompts
/// add few blocks.
const BLOCKS_PER_RUN: usize = 8;

/// Remembers the most recent blocks of a stream, and which of them were computed.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The newest blocks.
    young: Generation,
    /// The ones before.
    old: Generation,
    /// Maximum number of blocks of a generation.
    blocks_max: usize,
}

/// Runs by their first blocks.
#[derive(Clone, Debug, Default)]
struct Generation {
    runs: HashMap<u64, Run>,
    /// The number of blocks of all runs.
    blocks: usize,
}

/// Successive blocks of a prompt.
#[derive(Clone, Debug)]
struct Run {
    blocks: Box<[u64]>,
    /// The number of leading blocks that were computed.
    computed: usize,
}

impl Run {
    /// The number of leading blocks that `prompt` begins with.
    fn matching(&self, prompt: &[u64]) -> usize {
        self.blocks.iter().zip(prompt).take_while(|(own, other)| own == other).count()
    }
}

impl Generation {
    fn put(&mut self, run: Run) {
        if let Some(first) = run.blocks.first() {
            self.blocks += run.blocks.len();
            let before = self.runs.insert(*first, run);
            self.blocks -= before.map_or(0, |run| run.blocks.len());
        }
    }

    /// Takes out the leading blocks of a run with which `prompt` begins.
    fn take(&mut self, prompt: &[u64]) -> Option<Run> {
        let run = self.runs.remove(prompt.first()?)?;
        self.blocks -= run.blocks.len();
        let (taken, left) = run.blocks.split_at(run.matching(prompt));
        self.put(Run { blocks: left.into(), computed: run.computed.saturating_sub(taken.len()) });
        Some(Run { blocks: taken.into(), computed: run.computed.min(taken.len()) })
    }
}

impl Stream {
    /// A stream that remembers at most `blocks_max` blocks and at least the latest half of this
    /// number, or fewer if prompts add fewer than 8 blocks each on average.
    pub fn new(blocks_max: usize) -> Self {
        let blocks_max = blocks_max / 2;
        Self { young: Generation::default(), old: Generation::default(), blocks_max }
    }

    /// Adds the blocks of a new prompt. Returns how many of its leading blocks came before, and how
    /// many of them were computed.
    pub fn record_arrival(&mut self, prompt: &[u64]) -> (u32, u32) {
        let prompt = &prompt[..prompt.len().min(self.blocks_max)];
        let (seen, computed) = self.renew(prompt);
        self.age(prompt);
        (seen as u32, computed as u32)
    }

    /// Records that the blocks of a prompt have been computed.
    pub fn computed(&mut self, prompt: &[u64]) {
        let prompt = &prompt[..prompt.len().min(self.blocks_max)];
        self.renew(prompt);
        let mut rest = prompt;
        while let Some(run) = rest.first().and_then(|first| self.young.runs.get_mut(first)) {
            let matching = run.matching(rest);
            run.computed = run.computed.max(matching);
            rest = &rest[matching..];
        }
        self.age(prompt);
    }

    /// Makes all blocks of a prompt young, those that were not young as one run. Returns how many of
    /// its leading blocks were there, and how many of them were computed.
    fn renew(&mut self, prompt: &[u64]) -> (usize, usize) {
        let (mut seen, mut computed) = (0, 0);
        let mut follow = |length: usize, of_it: usize| {
            computed += if computed == seen { of_it } else { 0 };
            seen += length;
            seen
        };
        let mut young = 0;
        while let Some(run) = prompt.get(young).and_then(|first| self.young.runs.get(first)) {
            let matching = run.matching(&prompt[young..]);
            young = follow(matching, run.computed.min(matching));
        }
        let mut known = young;
        while let Some(run) = self.old.take(&prompt[known..]) {
            known = follow(run.blocks.len(), run.computed);
        }
        let added = prompt[young..].into();
        self.young.put(Run { blocks: added, computed: computed.saturating_sub(young) });
        (seen, computed)
    }

    /// Forgets what is old if there are enough young blocks, which are the old ones from now on.
    fn age(&mut self, latest: &[u64]) {
        let runs_max = self.blocks_max / BLOCKS_PER_RUN;
        if self.young.blocks > self.blocks_max || self.young.runs.len() > runs_max {
            self.old = std::mem::take(&mut self.young);
            // So that neither generation has more than its share.
            self.renew(latest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};

    use proptest::prelude::*;

    use super::*;

    /// The hashes of a prompt, each of which names what is before it.
    fn hashes(blocks: &[u8]) -> Vec<u64> {
        let next = |hash: &mut u64, block: &u8| {
            let mut hasher = DefaultHasher::new();
            (*hash, *block).hash(&mut hasher);
            *hash = hasher.finish();
            Some(*hash)
        };
        blocks.iter().scan(1, next).collect()
    }

    #[test]
    fn a_stream_knows_what_came_and_what_was_computed() {
        let prompt = hashes(&[0; 12]);
        let mut stream = Stream::new(1_000);
        assert_eq!(stream.record_arrival(&prompt[..10]), (0, 0));
        assert_eq!(stream.record_arrival(&prompt), (10, 0));
        stream.computed(&prompt[..10]);
        assert_eq!(stream.record_arrival(&prompt), (12, 10));
        let branch = hashes(&[0, 0, 0, 1]);
        assert_eq!(stream.record_arrival(&branch), (3, 3));
        stream.computed(&branch);
        assert_eq!(stream.record_arrival(&branch), (4, 4));
        assert_eq!(stream.record_arrival(&[]), (0, 0));
    }

    #[test]
    fn prompts_of_single_blocks_take_no_more_runs_than_their_bound() {
        let mut stream = Stream::new(1_600);
        for block in 0..10_000 {
            stream.record_arrival(&[block]);
            assert!(stream.young.runs.len() <= 100 && stream.old.runs.len() <= 100);
        }
        assert_eq!(
            (9_900..10_000).filter(|block| stream.record_arrival(&[*block]) == (1, 0)).count(),
            100
        );
    }

    fn prompts() -> impl Strategy<Value = Vec<(Vec<u8>, bool)>> {
        let prompt = proptest::collection::vec(0u8..2, 0..12);
        proptest::collection::vec((prompt, any::<bool>()), 1..60)
    }

    proptest! {
        #[test]
        fn a_stream_answers_as_a_table_of_all_blocks(prompts in prompts()) {
            let mut stream = Stream::new(1 << 20);
            let mut table: BTreeMap<u64, bool> = BTreeMap::new();
            for (prompt, computed) in prompts {
                let prompt = hashes(&prompt);
                let leading = |wanted: &dyn Fn(&bool) -> bool| {
                    prompt.iter().take_while(|block| table.get(block).is_some_and(wanted)).count()
                };
                let expected = (leading(&|_| true) as u32, leading(&|computed| *computed) as u32);
                prop_assert_eq!(stream.record_arrival(&prompt), expected);
                prompt.iter().for_each(|block| *table.entry(*block).or_default() |= computed);
                if computed {
                    stream.computed(&prompt);
                }
            }
        }

        #[test]
        fn a_stream_keeps_its_bound_and_the_recent_half(prompts in prompts(), half in 100usize..200) {
            let mut stream = Stream::new(2 * half);
            let mut recent: Vec<Vec<u64>> = Vec::new();
            for (prompt, _) in prompts {
                // Prompts that add enough blocks each.
                let prompt = hashes(&[prompt, vec![2; 9]].concat());
                stream.record_arrival(&prompt);
                recent.push(prompt.clone());
                for generation in [&stream.young, &stream.old] {
                    let blocks: usize = generation.runs.values().map(|run| run.blocks.len()).sum();
                    prop_assert_eq!(generation.blocks, blocks);
                    prop_assert!(blocks <= half);
                }
            }
            let mut known: BTreeSet<u64> = BTreeSet::new();
            for prompt in recent.iter().rev() {
                known.extend(prompt);
                if known.len() > half {
                    break;
                }
                prop_assert_eq!(stream.clone().record_arrival(prompt).0 as usize, prompt.len());
            }
        }
    }
}
