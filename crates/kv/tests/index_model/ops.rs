//! Random operations, most of them like those of a real engine.

use proptest::collection::vec;
use proptest::prelude::*;
use splitrail_kv::{BlockAdapter, EngineHash, KvEvent, StoredBlock, Tier, WorkerKey};

use crate::BLOCK_SIZE;
use crate::model::{Model, SPACES, Spaces, WORKERS};

/// How an operation chooses an engine hash before the state is known.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pick {
    Any(u64),
    Held(prop::sample::Index),
}

impl Pick {
    /// `None` if a held hash is wanted and nothing is held.
    fn resolve(self, model: &Model, worker: WorkerKey) -> Option<EngineHash> {
        let at = match self {
            Self::Any(hash) => return Some(EngineHash(hash)),
            Self::Held(at) => at,
        };
        let held: Vec<_> = model.0.get(&worker)?.keys().collect();
        Some(EngineHash(**at.get(&held)))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NewBlock {
    tokens: Vec<u32>,
    /// An arbitrary hash, which may equal another block's; otherwise the block has a hash of its
    /// own.
    hash: Option<u64>,
    opaque: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Store { worker: usize, parent: Option<Pick>, blocks: Vec<NewBlock>, space: usize, tier: Tier },
    Remove { worker: usize, picks: Vec<Pick>, tier: Tier },
    Drop { worker: usize, picks: Vec<Pick> },
    ClearTier { worker: usize, tier: Tier },
    Clear { worker: usize },
    RemoveWorker { worker: u32 },
    Restore { from: usize, to: usize },
}

pub(crate) fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![4 => Just(Tier::Device), 2 => Just(Tier::Host), 1 => Just(Tier::Remote)]
}

pub(crate) fn pick() -> impl Strategy<Value = Pick> {
    let held = || any::<prop::sample::Index>().prop_map(Pick::Held);
    prop_oneof![12 => held(), 1 => (0_u64..6).prop_map(Pick::Any)]
}

pub(crate) fn new_block() -> impl Strategy<Value = NewBlock> {
    let tokens = prop_oneof![15 => vec(0_u32..2, BLOCK_SIZE), 1 => vec(0_u32..2, 0..4)];
    let hash = prop_oneof![5 => Just(None), 1 => (0_u64..6).prop_map(Some)];
    let opaque = prop::bool::weighted(0.05);
    (tokens, hash, opaque).prop_map(|(tokens, hash, opaque)| NewBlock { tokens, hash, opaque })
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS.len();
    let parent = prop_oneof![1 => Just(None), 2 => pick().prop_map(Some)];
    let store = (worker(), parent, vec(new_block(), 1..7), 0..SPACES.len(), tier()).prop_map(
        |(worker, parent, blocks, space, tier)| Op::Store { worker, parent, blocks, space, tier },
    );
    let remove = (worker(), vec(pick(), 1..5), tier())
        .prop_map(|(worker, picks, tier)| Op::Remove { worker, picks, tier });
    prop_oneof![
        12 => store,
        7 => remove,
        1 => worker().prop_map(|worker| Op::Clear { worker }),
        1 => (worker(), tier()).prop_map(|(worker, tier)| Op::ClearTier { worker, tier }),
        1 => (worker(), vec(pick(), 1..3)).prop_map(|(worker, picks)| Op::Drop { worker, picks }),
        1 => prop_oneof![Just(0_u32), Just(1), Just(9)].prop_map(|worker| Op::RemoveWorker { worker }),
        1 => (worker(), worker()).prop_map(|(from, to)| Op::Restore { from, to }),
    ]
}

/// An engine's hash of a block from its content and position, as engines compute it.
pub(crate) fn honest_hash(before: EngineHash, block: &NewBlock, space: usize) -> EngineHash {
    let digits = block.tokens.iter().fold(1, |all, token| all * 3 + u64::from(*token));
    let mixed = before.0.wrapping_mul(1_000_003) ^ (digits * 8 + space as u64);
    EngineHash(mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63)
}

pub(crate) fn event(model: &Model, op: &Op) -> Option<(WorkerKey, KvEvent, Spaces)> {
    match op {
        Op::Store { worker, parent, blocks, space, tier } => {
            let worker = WORKERS[*worker];
            let parent = parent.and_then(|parent| parent.resolve(model, worker));
            let (salt, adapter) = SPACES[*space];
            let mut before = parent.unwrap_or(EngineHash(0));
            let blocks = blocks.iter().map(|block| {
                let honest = honest_hash(before, block, if parent.is_none() { *space } else { 0 });
                before = block.hash.map_or(honest, EngineHash);
                StoredBlock { hash: before, tokens: block.tokens.clone(), opaque: block.opaque }
            });
            let event = KvEvent::Stored {
                parent,
                blocks: blocks.collect(),
                adapter: adapter.map(|name| BlockAdapter { name: name.to_owned(), load: 1 }),
                salt: salt.map(str::to_owned),
                tier: *tier,
            };
            Some((worker, event, SPACES[*space]))
        }
        Op::Remove { worker, picks, tier } => {
            let worker = WORKERS[*worker];
            let hashes = picks.iter().filter_map(|pick| pick.resolve(model, worker)).collect();
            Some((worker, KvEvent::Removed { hashes, tier: *tier }, SPACES[0]))
        }
        Op::Clear { worker } => Some((WORKERS[*worker], KvEvent::Cleared, SPACES[0])),
        Op::ClearTier { worker, tier } => {
            Some((WORKERS[*worker], KvEvent::TierCleared { tier: *tier }, SPACES[0]))
        }
        Op::Drop { worker, picks } => {
            let worker = WORKERS[*worker];
            let hashes = picks.iter().filter_map(|pick| pick.resolve(model, worker)).collect();
            Some((worker, KvEvent::Dropped { hashes }, SPACES[0]))
        }
        Op::RemoveWorker { .. } | Op::Restore { .. } => None,
    }
}
