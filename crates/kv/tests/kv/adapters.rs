//! An engine's blocks of an earlier load of an adapter are dropped, and no others.

use std::collections::BTreeMap;

use proptest::prelude::*;
use splitrail_kv::{
    BlockAdapter, EngineHash, HashSeed, Index, IndexConfig, KvEvent, Namespace, Overlaps,
    StoredBlock, Tier, WorkerKey, chain_hashes,
};

const SEED: HashSeed = HashSeed(7);
const ADAPTERS: [Option<&str>; 3] = [None, Some("a"), Some("ab")];
const RANKS: [WorkerKey; 2] = [WorkerKey { worker: 0, rank: 0 }, WorkerKey { worker: 0, rank: 1 }];

fn index() -> Index {
    let model = "m".to_owned();
    Index::new(IndexConfig { model, block_size: 1, seed: SEED, max_blocks_per_worker: 1 << 20 })
}

/// What an engine that hashes blocks by the load, too, does next.
#[derive(Clone, Debug)]
enum Step {
    /// A prompt of one of the adapters is computed on a rank.
    Compute { rank: usize, adapter: usize, prompt: Vec<u32> },
    /// Evicts blocks of a prompt from its end, until `left` are left.
    Evict { rank: usize, adapter: usize, prompt: Vec<u32>, left: usize },
    /// The adapter is loaded again, from elsewhere, and the router learns of it.
    Load { adapter: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let prompt = || prop::collection::vec(0u32..2, 1..5);
    let place = || (0..RANKS.len(), 0..ADAPTERS.len());
    let compute = (place(), prompt()).prop_map(|((rank, adapter), prompt)| Step::Compute {
        rank,
        adapter,
        prompt,
    });
    let evict = (place(), prompt(), 0usize..4)
        .prop_map(|((rank, adapter), prompt, left)| Step::Evict { rank, adapter, prompt, left });
    let load = (1..ADAPTERS.len()).prop_map(|adapter| Step::Load { adapter });
    prop::collection::vec(prop_oneof![6 => compute, 2 => evict, 1 => load], 1..60)
}

/// The engine's name of a prompt's last block.
fn name(adapter: usize, load: u64, prompt: &[u32]) -> u64 {
    let parts =
        [adapter as u64, load].into_iter().chain(prompt.iter().map(|token| 1 + u64::from(*token)));
    parts.fold(prompt.len() as u64, |name, part| (name ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn block(adapter: usize, load: u64, prompt: &[u32]) -> StoredBlock {
    let hash = EngineHash(name(adapter, load, prompt));
    StoredBlock { hash, tokens: prompt.last().copied().into_iter().collect(), opaque: false }
}

/// The number of leading blocks of a prompt that the index says a rank holds.
fn found(index: &Index, rank: usize, adapter: usize, prompt: &[u32]) -> usize {
    let adapter = ADAPTERS[adapter];
    let namespace = Namespace { salt: None, model: "m", adapter, block_size: 1 };
    let (mut hashes, mut overlaps) = (Vec::new(), Overlaps::new());
    chain_hashes(&namespace, SEED, prompt, &mut hashes);
    index.find(&hashes, &mut overlaps);
    overlaps.get(RANKS[rank]).blocks as usize
}

proptest! {
    #[test]
    fn what_is_found_of_an_adapter_is_what_its_present_load_has_computed(steps in steps()) {
        let (mut index, mut loads) = (index(), [0u64, 1, 1]);
        // For each rank and adapter, how many copies the engine holds of a prompt's last block.
        let mut held: BTreeMap<(usize, usize, Vec<u32>), u32> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Compute { rank, adapter, prompt } => {
                    let load = loads[adapter];
                    let cached = found(&index, rank, adapter, &prompt);
                    let new = cached + 1..=prompt.len();
                    let blocks = new.clone().map(|to| block(adapter, load, &prompt[..to]));
                    let stored = KvEvent::Stored {
                        parent: (cached > 0)
                            .then(|| EngineHash(name(adapter, load, &prompt[..cached]))),
                        blocks: blocks.collect(),
                        adapter: ADAPTERS[adapter]
                            .map(|name| BlockAdapter { name: name.to_owned(), load }),
                        salt: None,
                        tier: Tier::Device,
                    };
                    index.apply(RANKS[rank], &stored);
                    for to in new {
                        *held.entry((rank, adapter, prompt[..to].to_vec())).or_default() += 1;
                    }
                }
                Step::Evict { rank, adapter, prompt, left } => {
                    let key = |to: usize| (rank, adapter, prompt[..to].to_vec());
                    let gone = (left + 1..=prompt.len()).rev();
                    let gone: Vec<usize> = gone.filter(|to| held.contains_key(&key(*to))).collect();
                    let hashes = gone.iter().map(|to| {
                        EngineHash(name(adapter, loads[adapter], &prompt[..*to]))
                    });
                    let hashes = hashes.collect();
                    index.apply(RANKS[rank], &KvEvent::Removed { hashes, tier: Tier::Device });
                    for to in gone {
                        let copies = held.entry(key(to)).or_default();
                        *copies -= 1;
                        if *copies == 0 {
                            held.remove(&key(to));
                        }
                    }
                }
                Step::Load { adapter } => {
                    let name = ADAPTERS[adapter].unwrap();
                    let known = index.adapter_load(0, name);
                    prop_assert!(known == 0 || known == loads[adapter]);
                    index.forget_adapter(0, name, loads[adapter]);
                    loads[adapter] += 1;
                    held.retain(|(_, of, _), _| *of != adapter);
                }
            }
            index.check().unwrap();
            for rank in 0..RANKS.len() {
                for adapter in 0..ADAPTERS.len() {
                    for prompt in [[0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 1]] {
                        let own = (1..=4).take_while(|to| {
                            held.contains_key(&(rank, adapter, prompt[..*to].to_vec()))
                        });
                        prop_assert_eq!(found(&index, rank, adapter, &prompt), own.count());
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_of_a_load_that_is_later_than_the_one_that_is_forgotten_stay() {
    let mut index = index();
    for load in [1, 2] {
        let adapter = Some(BlockAdapter { name: "a".to_owned(), load });
        let blocks = vec![block(1, load, &[load as u32])];
        let (parent, salt, tier) = (None, None, Tier::Device);
        index.apply(RANKS[0], &KvEvent::Stored { parent, blocks, adapter, salt, tier });
    }
    assert_eq!(index.adapter_load(0, "a"), 2);
    assert_eq!(index.forget_adapter(0, "a", 1), 1);
    assert_eq!((found(&index, 0, 1, &[1]), found(&index, 0, 1, &[2])), (0, 1));
    assert_eq!(index.forget_adapter(1, "a", 9), 0, "another worker");
}

#[test]
fn what_is_noted_of_adapters_does_not_grow_with_blocks_that_are_gone() {
    let mut index = index();
    let mut bytes = 0;
    for round in 0..20_000u32 {
        let adapter = Some(BlockAdapter { name: "a".to_owned(), load: 1 });
        let blocks = vec![block(1, 1, &[round])];
        let hashes = blocks.iter().map(|block| block.hash).collect();
        let (parent, salt, tier) = (None, None, Tier::Device);
        index.apply(RANKS[0], &KvEvent::Stored { parent, blocks, adapter, salt, tier });
        bytes = bytes.max(index.bytes());
        if round > 0 {
            index.apply(RANKS[0], &KvEvent::Removed { hashes, tier });
        }
    }
    assert!(bytes < 100_000, "{bytes} bytes");
    assert_eq!(found(&index, 0, 1, &[0]), 1);
    assert_eq!(index.forget_adapter(0, "a", 1), 1);
}
