//! Workers that send invalid events: the index stays within its bounds, reports what it refuses,
//! and stays consistent.
//!
//! Twenty thousand events, some of thousands of blocks; `SPLITRAIL_HOSTILE_EVENTS=10000000` with
//! `--release` for ten million.
#![allow(clippy::unwrap_used)]

mod counting;

use splitrail_kv::{
    BlockHash, BlockName, CacheGroup, EngineHash, GroupRule, HashSeed, HashedBlock, Index,
    IndexConfig, KvEvent, Overlaps, RunNames, SnapshotRun, StoredBlock, Tier, WorkerKey,
};

use crate::counting::allocated;

const LIMIT: usize = 512;
const WORKERS: u32 = 16;
const BLOCK_SIZE: u32 = 4;
/// Maximum number of bytes per block of a worker, in whatever way it is held, including blocks that
/// wait for their parent and memory that was freed and not returned yet.
const BYTES_PER_BLOCK: usize = 600;
/// Memory that does not depend on the number of blocks: the first chunks, tables, waiting events.
const BYTES_PER_WORKER: usize = 1 << 20;

struct PseudoRandom(u64);

impl PseudoRandom {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 33) as usize) % bound
    }

    /// One of a few names, any name, or an extreme one.
    fn name(&mut self) -> EngineHash {
        EngineHash(match self.below(8) {
            0..5 => self.next() % 2000,
            5 => [0, 1, u64::MAX, u64::MAX - 1, 1 << 63, u64::from(u32::MAX)][self.below(6)],
            _ => self.next(),
        })
    }

    fn tokens(&mut self) -> Vec<u32> {
        let count = match self.below(40) {
            0 => [0, 1, 3, 5, 10_000][self.below(5)],
            _ => BLOCK_SIZE as usize,
        };
        let token = if self.below(4) == 0 { self.next() as u32 } else { self.below(3) as u32 };
        vec![token; count]
    }

    fn tier(&mut self) -> Tier {
        Tier::ALL[self.below(6).saturating_sub(2)]
    }

    fn event(&mut self) -> KvEvent {
        let count = match self.below(400) {
            0 => 3000,
            _ => self.below(6),
        };
        match self.below(100) {
            0..60 => {
                let block = |_| StoredBlock {
                    hash: self.name(),
                    tokens: self.tokens(),
                    opaque: self.below(30) == 0,
                };
                let blocks = (0..count).map(block).collect();
                let parent = (self.below(3) > 0).then(|| self.name());
                let salt = (self.below(10) == 0).then(|| self.below(5).to_string());
                KvEvent::Stored { parent, blocks, adapter: None, salt, tier: self.tier() }
            }
            60..70 => {
                let rule = match self.below(3) {
                    0 => GroupRule::Prefix,
                    1 => GroupRule::Window { tokens: self.below(40) as u32 },
                    _ => GroupRule::State,
                };
                let block_size = [0, 1, 2, 3, BLOCK_SIZE, 2 * BLOCK_SIZE][self.below(6)];
                let numbers = if self.below(50) == 0 { 300 } else { 3 };
                let number = self.below(numbers) as u32;
                let tokens = [0, 8, 40, u32::MAX][self.below(4)];
                KvEvent::GroupStored {
                    group: CacheGroup { number, rule, block_size },
                    parent: (self.below(3) > 0).then(|| self.name()),
                    tokens,
                    hashes: (0..count).map(|_| self.name()).collect(),
                }
            }
            70..80 => {
                let hashes = (0..count * 3).map(|_| self.name()).collect();
                KvEvent::GroupRemoved { group: self.below(4) as u32, hashes }
            }
            80..99 => {
                let hashes = (0..count * 3).map(|_| self.name()).collect();
                KvEvent::Removed { hashes, tier: self.tier() }
            }
            _ if self.below(20) == 0 => KvEvent::Cleared,
            _ if self.below(20) == 0 => KvEvent::TierCleared { tier: self.tier() },
            _ if self.below(20) == 0 => {
                KvEvent::Dropped { hashes: (0..count).map(|_| self.name()).collect() }
            }
            _ => KvEvent::Removed { hashes: Vec::new(), tier: Tier::Device },
        }
    }

    /// Runs that a malicious shim might send.
    fn runs(&mut self) -> Vec<SnapshotRun> {
        let mut run = || {
            let hashes: Vec<_> =
                (0..self.below(40)).map(|_| BlockHash(self.next() % 500)).collect();
            let named = |at| BlockName {
                at: if self.below(50) == 0 { u32::MAX } else { at as u32 },
                engine: self.name(),
                copies: [[1, 0, 0, 0], [0, 2, 0, 0], [u32::MAX; 4], [0; 4]][self.below(9) / 3],
            };
            let names: Vec<_> = (0..hashes.len()).map(named).collect();
            let names = match self.below(2) {
                0 => RunNames::Each(names),
                _ => RunNames::Plain(names.iter().map(|named| named.engine).collect()),
            };
            let parent = (self.below(2) > 0).then(|| BlockHash(self.next() % 500));
            SnapshotRun { parent, hashes, names }
        };
        (0..5).map(|_| run()).collect()
    }
}

fn index(limit: usize) -> Index {
    let (model, seed) = ("m".to_owned(), HashSeed(7));
    Index::new(IndexConfig { model, block_size: BLOCK_SIZE, seed, max_blocks_per_worker: limit })
}

fn key(worker: u32) -> WorkerKey {
    WorkerKey { worker, rank: 0 }
}

// One test, since the allocator counts for the whole process.
#[test]
fn hostile_events_stay_under_the_bound_and_leave_nothing_behind() {
    let events = std::env::var("SPLITRAIL_HOSTILE_EVENTS");
    let events: usize = events.map_or(20_000, |events| events.parse().unwrap());
    nonsense(events);
    one_block_under_many_names();
    tokens_that_wait_for_no_parent();
}

fn nonsense(events: usize) {
    let before = allocated();
    let mut index = index(LIMIT);
    let (mut random, mut overlaps) = (PseudoRandom(88_172_645_463_325_252), Overlaps::new());
    let bound = WORKERS as usize * (LIMIT * BYTES_PER_BLOCK + BYTES_PER_WORKER);
    let mut highest = 0;
    for number in 0..events {
        let worker = key(random.below(WORKERS as usize) as u32);
        index.apply(worker, &random.event());
        if number % 5000 == 0 {
            index.restore(worker, random.runs());
            let prompt: Vec<_> = (0..50).map(|_| BlockHash(random.next() % 500)).collect();
            index.find(&prompt, &mut overlaps);
        }
        if number % 100 == 0 {
            let held = allocated().saturating_sub(before);
            highest = highest.max(held);
            assert!(held <= bound, "{held} of {bound} bytes after {number} events");
        }
        if number % (events / 10) == 0 {
            assert_eq!(index.check(), Ok(()), "after {number} events");
        }
    }
    for worker in 0..WORKERS {
        assert!(index.block_counts(key(worker)).iter().all(|blocks| *blocks <= LIMIT));
        index.remove_worker(worker);
    }
    assert_eq!((index.workers().count(), index.distinct_blocks()), (0, 0));
    assert_eq!(index.check(), Ok(()));
    // The remaining memory does not depend on how much was used before.
    let left = allocated().saturating_sub(before);
    assert!(left <= highest / 2 + BYTES_PER_WORKER, "{left} bytes left of {highest}");
}

/// A worker that gives one block as many names as allowed: neither memory nor time grows out of
/// proportion.
fn one_block_under_many_names() {
    const NAMES: u64 = 20_000;
    let mut index = index(NAMES as usize);
    for name in 0..NAMES {
        let block = HashedBlock { engine: EngineHash(name), hash: BlockHash(1) };
        assert_eq!(index.store(key(0), None, &[block], Tier::Device).stored, 1);
    }
    assert!(index.bytes() <= NAMES as usize * BYTES_PER_BLOCK + BYTES_PER_WORKER);
    for name in 0..NAMES {
        let applied = index.remove(key(0), &[EngineHash(name)], Tier::Device);
        assert_eq!(applied.removed, 1);
    }
    assert_eq!((index.distinct_blocks(), index.check()), (0, Ok(())));
}

/// Blocks of a wrong size are never indexed, so their tokens need not be kept while they wait for a
/// parent.
fn tokens_that_wait_for_no_parent() {
    let before = allocated();
    let mut index = index(LIMIT);
    for name in 0..64 {
        let block = StoredBlock { hash: EngineHash(name), tokens: vec![0; 1 << 20], opaque: false };
        let (parent, blocks) = (Some(EngineHash(1 << 40)), vec![block]);
        let (salt, adapter, tier) = (None, None, Tier::Device);
        index.apply(key(0), &KvEvent::Stored { parent, blocks, adapter, salt, tier });
    }
    let held = allocated().saturating_sub(before);
    assert!(held <= BYTES_PER_WORKER, "{held} bytes wait");
}
