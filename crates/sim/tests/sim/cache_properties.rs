//! Invariants of the cache for any order of requests.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use splitrail_sim::cache::{CacheEvent, KvCache, Medium, Namespace, Sequence};

const BLOCK_SIZE: usize = 4;
const TOTAL_BLOCKS: u32 = 16;

#[derive(Debug, Clone)]
enum Action {
    /// A prompt of one of a few token patterns, so that prefixes are shared.
    Admit {
        pattern: u32,
        tokens: usize,
        salted: bool,
    },
    /// One more token for one of the running sequences.
    Grow(usize),
    Release(usize),
    Clear,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..3u32, 1..30usize, any::<bool>())
            .prop_map(|(pattern, tokens, salted)| Action::Admit { pattern, tokens, salted }),
        6 => any::<usize>().prop_map(Action::Grow),
        3 => any::<usize>().prop_map(Action::Release),
        1 => Just(Action::Clear),
    ]
}

fn sequence(pattern: u32, tokens: usize, salted: bool) -> Sequence {
    let tokens = (0..tokens as u32).map(|index| index % (pattern + 1)).collect();
    let salt = salted.then(|| "s".to_owned());
    Sequence::new(tokens, Namespace { salt, ..Namespace::default() }, BLOCK_SIZE, 0)
}

fn follow(mirror: &mut BTreeMap<u64, usize>, host: &mut BTreeSet<u64>, events: Vec<CacheEvent>) {
    for event in events {
        match event {
            CacheEvent::Stored(stored) if stored.medium == Medium::Host => {
                assert_eq!((stored.tokens.len(), stored.hashes.len()), (BLOCK_SIZE, 1));
                assert!(host.insert(stored.hashes[0]), "it is announced once");
                assert!(mirror.contains_key(&stored.hashes[0]), "before it leaves the device");
            }
            CacheEvent::Removed { hash, medium: Medium::Host } => assert!(host.remove(&hash)),
            CacheEvent::Stored(stored) => {
                assert_eq!(stored.tokens.len(), stored.hashes.len() * BLOCK_SIZE);
                assert_eq!(stored.extra_keys.len(), stored.hashes.len());
                assert!(stored.parent.is_none_or(|parent| mirror.contains_key(&parent)));
                for hash in stored.hashes {
                    *mirror.entry(hash).or_default() += 1;
                }
            }
            CacheEvent::Removed { hash, .. } => {
                let copies = mirror.get_mut(&hash).unwrap();
                *copies -= 1;
                if *copies == 0 {
                    mirror.remove(&hash);
                }
            }
            CacheEvent::GroupStored { .. } | CacheEvent::GroupRemoved { .. } => {}
            CacheEvent::Cleared => {
                mirror.clear();
                host.clear();
            }
        }
    }
}

proptest! {
    #[test]
    fn events_reproduce_the_cache_and_no_block_is_lost(
        actions in prop::collection::vec(action(), 1..120),
        host_blocks in 0usize..8,
    ) {
        let mut cache = KvCache::new(TOTAL_BLOCKS, BLOCK_SIZE).with_host_blocks(host_blocks);
        let mut host = BTreeSet::new();
        let mut running: Vec<Sequence> = Vec::new();
        let mut mirror = BTreeMap::new();
        for action in actions {
            match action {
                Action::Admit { pattern, tokens, salted } => {
                    let mut new = sequence(pattern, tokens, salted);
                    let free = cache.free_blocks();
                    let expected = cache.hit_blocks(&new);
                    match cache.admit(&mut new, 0) {
                        Some(hits) => {
                            prop_assert_eq!(hits, expected);
                            prop_assert!(hits * BLOCK_SIZE < tokens);
                            prop_assert_eq!(new.blocks().len(), tokens.div_ceil(BLOCK_SIZE));
                            cache.register(&mut new, tokens);
                            running.push(new);
                        }
                        None => prop_assert_eq!(cache.free_blocks(), free),
                    }
                }
                Action::Grow(pick) if !running.is_empty() => {
                    let at = pick % running.len();
                    let tokens = running[at].tokens().len() + 1;
                    if cache.grow(&mut running[at], tokens) {
                        running[at].push(7);
                        cache.register(&mut running[at], tokens);
                    }
                }
                Action::Release(pick) if !running.is_empty() => {
                    let mut done = running.swap_remove(pick % running.len());
                    cache.release(&mut done);
                }
                Action::Clear => prop_assert_eq!(cache.clear(), running.is_empty()),
                _ => {}
            }
            follow(&mut mirror, &mut host, cache.take_events());
            prop_assert_eq!(host.len(), cache.host_blocks());
            prop_assert!(host.len() <= host_blocks);
            prop_assert_eq!(&mirror, &cache.resident().collect::<BTreeMap<_, _>>());
            let mut held: Vec<u32> = running.iter().flat_map(|s| s.blocks()).copied().collect();
            held.sort_unstable();
            held.dedup();
            prop_assert_eq!(held.len() + cache.free_blocks(), cache.usable_blocks());
        }
    }
}
