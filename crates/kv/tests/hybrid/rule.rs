//! The index against the rule, over random layouts, prompts, evictions and clears.

use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index as Pick;
use splitrail_kv::GroupRule;

use crate::engine::Engine;
use crate::twin::Twin;

/// Tokens per block of the spine.
const BLOCK_SIZE: u32 = 4;
/// The number of the spine's group: not the first, as in most models.
const SPINE: u32 = 1;

#[derive(Clone, Debug)]
enum Op {
    /// A prompt is computed: each other group keeps what it needs before these depths, unless groups
    /// keep all blocks. `is_again`: although the spine holds the prompt.
    Compute {
        prompt: Vec<u8>,
        resumed: Vec<Pick>,
        is_again: bool,
    },
    /// A copy is evicted from some group.
    Evict {
        copy: Pick,
    },
    /// A block is evicted from all groups.
    EvictEverywhere {
        copy: Pick,
    },
    Clear,
}

/// A prompt as a number for each token: few different ones, so that prompts share prefixes. Prompts
/// part at the end of a block of the spine: of smaller blocks before that, events do not say that
/// two prompts share them.
fn prompt() -> impl Strategy<Value = Vec<u8>> {
    (vec((0..2_u8, 1..3_usize), 0..6), 0..BLOCK_SIZE as usize).prop_map(|(forks, less)| {
        let stretch = |(fork, blocks)| std::iter::repeat_n(fork, blocks * BLOCK_SIZE as usize);
        let mut prompt: Vec<u8> = forks.into_iter().flat_map(stretch).collect();
        prompt.truncate(prompt.len().saturating_sub(less));
        prompt
    })
}

fn op() -> impl Strategy<Value = Op> {
    let compute = (prompt(), vec(any::<Pick>(), 0..3), any::<bool>());
    prop_oneof![
        6 => compute.prop_map(|(prompt, resumed, is_again)| Op::Compute { prompt, resumed, is_again }),
        6 => any::<Pick>().prop_map(|copy| Op::Evict { copy }),
        2 => any::<Pick>().prop_map(|copy| Op::EvictEverywhere { copy }),
        1 => Just(Op::Clear),
    ]
}

fn group() -> impl Strategy<Value = (GroupRule, u32)> {
    let window =
        |size: u32| (2..5 * size).prop_map(move |tokens| (GroupRule::Window { tokens }, size));
    prop_oneof![
        3 => window(BLOCK_SIZE),
        1 => window(2 * BLOCK_SIZE),
        1 => window(BLOCK_SIZE / 2),
        1 => window(1),
        2 => Just((GroupRule::State, BLOCK_SIZE)),
        1 => (1..5 * BLOCK_SIZE).prop_map(|tokens| (GroupRule::Chunk { tokens }, BLOCK_SIZE)),
        1 => (1..3_u32).prop_map(|blocks| {
            (GroupRule::Chunk { tokens: blocks * BLOCK_SIZE }, BLOCK_SIZE)
        }),
        1 => Just((GroupRule::Prefix, BLOCK_SIZE)),
    ]
}

/// The engine's hash of the first `end` tokens of a prompt.
fn hash_at(prompt: &[u8], end: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    prompt[..end as usize].hash(&mut hasher);
    hasher.finish()
}

struct Both {
    engine: Engine,
    twin: Twin,
    others: Vec<(u32, GroupRule, u32)>,
    /// Whether groups keep all blocks, as with an unlimited retention.
    keeps_all: bool,
}

impl Both {
    fn new(groups: Vec<(GroupRule, u32)>, keeps_all: bool) -> Self {
        let (mut engine, mut twin, mut others) = (Engine::default(), Twin::default(), Vec::new());
        engine.learn(SPINE, GroupRule::Prefix, BLOCK_SIZE);
        twin.learn(SPINE, GroupRule::Prefix, BLOCK_SIZE);
        for (number, (rule, size)) in (0..).filter(|number| *number != SPINE).zip(groups) {
            engine.learn(number, rule, size);
            twin.learn(number, rule, size);
            // Every engine names all its groups with the first blocks.
            engine.stored(number, 0, 0, &[]);
            others.push((number, rule, size));
        }
        engine.flush();
        Self { engine, twin, others, keeps_all }
    }

    fn compute(&mut self, prompt: &[u8], resumed: &[Pick], is_again: bool) {
        let tokens = prompt.len() as u32;
        // What an engine holds already it stores again only as a further copy.
        let held = match is_again {
            true => 0,
            false => self.twin.spine_tokens(SPINE, BLOCK_SIZE, tokens, |end| hash_at(prompt, end)),
        };
        let parent = |start: u32| if start == 0 { 0 } else { hash_at(prompt, start) };
        let hashes =
            |ends: &[u32]| ends.iter().map(|end| hash_at(prompt, *end)).collect::<Vec<_>>();
        let ends = |size: u32| (1..=tokens / size).map(move |block| block * size);
        let stored = hashes(&ends(BLOCK_SIZE).filter(|end| *end > held).collect::<Vec<_>>());
        self.engine.stored(SPINE, parent(held), tokens - held, &stored);
        self.twin.store(SPINE, &stored);
        let align = self.others.iter().map(|(.., size)| *size).fold(BLOCK_SIZE, u32::max);
        let points = resumed.iter().map(|pick| pick.index((tokens / align) as usize + 1));
        let points: Vec<u32> = points.map(|point| point as u32 * align).collect();
        for (number, rule, size) in self.others.clone() {
            let reach = match rule {
                GroupRule::Prefix | GroupRule::Chunk { .. } => u32::MAX,
                GroupRule::Window { tokens } => (tokens - 1).div_ceil(size) * size,
                GroupRule::State => size,
            };
            let is_kept = |end: &u32| {
                let is_before = |point: &u32| *end <= *point && *point - *end < reach;
                self.keeps_all || reach == u32::MAX || points.iter().any(is_before)
            };
            let covered = tokens / size * size;
            let start = held / size * size;
            let kept = ends(size).filter(|end| *end > start).filter(is_kept);
            let stored = hashes(&kept.collect::<Vec<_>>());
            self.engine.stored(number, parent(start), covered - start, &stored);
            self.twin.store(number, &stored);
        }
        self.engine.flush();
    }

    fn evict(&mut self, group: u32, hash: u64) {
        self.engine.removed(group, &[hash]);
        self.twin.remove(group, hash);
        self.engine.flush();
    }

    fn apply(&mut self, op: &Op) {
        let copies = self.twin.copies();
        match op {
            Op::Compute { prompt, resumed, is_again } => {
                self.compute(prompt, resumed, *is_again);
            }
            Op::Evict { copy } | Op::EvictEverywhere { copy } if !copies.is_empty() => {
                let (group, hash) = *copy.get(&copies);
                let everywhere = matches!(op, Op::EvictEverywhere { .. });
                let of = copies.into_iter().filter(|(_, other)| everywhere && *other == hash);
                for (group, hash) in of.chain((!everywhere).then_some((group, hash))) {
                    self.evict(group, hash);
                }
            }
            Op::Evict { .. } | Op::EvictEverywhere { .. } => {}
            Op::Clear => {
                self.engine.clear();
                self.twin.clear();
            }
        }
    }

    fn compare(&self, prompt: &[u8]) -> Result<(), TestCaseError> {
        let tokens = prompt.len() as u32;
        let ends = (1..=tokens / BLOCK_SIZE).map(|block| hash_at(prompt, block * BLOCK_SIZE));
        let found = self.engine.find(tokens, &ends.collect::<Vec<_>>());
        let cached = |drops_in| self.twin.cached(tokens, drops_in, |end| hash_at(prompt, end));
        prop_assert_eq!(found.usable_tokens, cached(None), "of {:?}", prompt);
        prop_assert_eq!(found.without_last_block, cached(Some(SPINE)), "of {:?}", prompt);
        prop_assert!(found.spine_tokens >= found.usable_tokens);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_worker_uses_of_each_prompt_what_the_rule_says(
        groups in vec(group(), 1..4),
        keeps_all in any::<bool>(),
        ops in vec(op(), 1..24),
        others in vec(prompt(), 3),
    ) {
        let mut both = Both::new(groups, keeps_all);
        for op in &ops {
            both.apply(op);
            for prompt in ops.iter().filter_map(prompt_of).chain(&others) {
                both.compare(prompt)?;
            }
        }
    }
}

fn prompt_of(op: &Op) -> Option<&Vec<u8>> {
    match op {
        Op::Compute { prompt, .. } => Some(prompt),
        _ => None,
    }
}
