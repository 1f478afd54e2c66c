//! A simulated engine that makes random changes, and an index of its true content.

use splitrail_kv::{
    EngineHash, HashSeed, Index, IndexConfig, KvEvent, SnapshotRun, SplitMix64, StoredBlock, Tier,
    WorkerKey,
};

use crate::mirror::Mirror;

pub(super) const BLOCK_SIZE: u32 = 2;
pub(super) const RANKS: [u16; 2] = [0, 1];

/// A deterministic random number generator.
pub(super) struct RandomNumbers(pub(super) SplitMix64);

impl RandomNumbers {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.0.next_u64() >> 20) as usize % bound
    }
}

pub(super) struct Engine {
    pub(super) truth: Index,
    random: RandomNumbers,
    mirror: Mirror,
}

impl Engine {
    pub(super) fn new(seed: u64, mirror: Mirror) -> Self {
        let truth = Index::new(IndexConfig {
            model: "m".to_owned(),
            block_size: BLOCK_SIZE,
            seed: HashSeed(7),
            max_blocks_per_worker: 1 << 16,
        });
        mirror.update(|state| {
            state.expect(RANKS.into_iter());
            RANKS.iter().for_each(|rank| state.set_current(*rank, true));
        });
        Self { truth, random: RandomNumbers(SplitMix64::new(seed)), mirror }
    }

    /// Whether the mirror can take events, which it can once a router has sent the hash settings.
    pub(super) fn is_mirrored(&self) -> bool {
        *self.mirror.epoch().borrow() > 0
    }

    /// Makes `events` random changes. Does nothing before the mirror can take events: a real engine
    /// would replay earlier events later, which this one cannot.
    pub(super) fn work(&mut self, events: usize) {
        if !self.is_mirrored() {
            return;
        }
        for _ in 0..events {
            let rank = RANKS[self.random.below(RANKS.len())];
            let event = self.event(rank);
            self.truth.apply(WorkerKey { worker: 0, rank }, &event);
            let mut rest = std::slice::from_ref(&event);
            while !rest.is_empty() {
                rest = self.mirror.update(|state| state.apply(rank, 1.5, rest).1);
            }
        }
    }

    /// Restarts the engine with an empty cache.
    pub(super) fn restart(&mut self, rank: u16) {
        self.truth.clear_worker(WorkerKey { worker: 0, rank });
        self.mirror.update(|state| state.reset(rank, "engine_restarted"));
    }

    fn held(&self, rank: u16) -> Vec<EngineHash> {
        let runs = self.truth.snapshot(WorkerKey { worker: 0, rank });
        let names =
            |run: SnapshotRun| run.names.iter().map(|named| named.engine).collect::<Vec<_>>();
        runs.flat_map(names).collect()
    }

    fn event(&mut self, rank: u16) -> KvEvent {
        let held = self.held(rank);
        let tier = if self.random.below(6) == 0 { Tier::Host } else { Tier::Device };
        match self.random.below(40) {
            0 => KvEvent::Cleared,
            1..=14 if !held.is_empty() => {
                let count = 1 + self.random.below(8);
                let hashes = (0..count).map(|_| held[self.random.below(held.len())]).collect();
                KvEvent::Removed { hashes, tier }
            }
            // Blocks whose parent is not stored, or stored later.
            15 => {
                let unknown = EngineHash(self.random.below(50) as u64);
                self.stored(Some(unknown), tier)
            }
            16..=30 if !held.is_empty() => {
                let parent = held[self.random.below(held.len())];
                self.stored(Some(parent), tier)
            }
            _ => self.stored(None, tier),
        }
    }

    fn stored(&mut self, parent: Option<EngineHash>, tier: Tier) -> KvEvent {
        let mut before = parent.unwrap_or(EngineHash(0));
        let count = 1 + self.random.below(12);
        let blocks = (0..count).map(|_| {
            let tokens = vec![self.random.below(3) as u32, 1];
            let digits = before.0 ^ u64::from(tokens[0] + 1) << 40;
            let named = digits.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
            // Sometimes a name that is already used for another block.
            before = EngineHash(if self.random.below(60) == 0 { 7 } else { named });
            StoredBlock { hash: before, tokens, opaque: false }
        });
        let blocks = blocks.collect();
        KvEvent::Stored { parent, blocks, adapter: None, salt: None, tier }
    }
}
