//! A worker of the index whose blocks are given by hashes: tokens are made from them.

use std::collections::BTreeMap;

use splitrail_kv::{
    BlockHash, CacheGroup, EngineHash, GroupRule, HashSeed, Index, IndexConfig, KvEvent, Namespace,
    Overlaps, StoredBlock, Tier, WorkerKey, chain_hashes,
};

const WORKER: WorkerKey = WorkerKey { worker: 3, rank: 0 };
const SEED: HashSeed = HashSeed(7);

/// An index with one worker. As a decoder does, it applies the events of a batch's spine first.
#[derive(Default)]
pub(crate) struct Engine {
    groups: BTreeMap<u32, CacheGroup>,
    pub(crate) spine: Option<u32>,
    index: Option<Index>,
    /// Events of the batch for groups other than the spine.
    later: Vec<KvEvent>,
}

/// What the index says of a prompt.
pub(crate) struct Found {
    pub(crate) usable_tokens: u32,
    /// What the engine uses if it drops the last block that it finds in the spine.
    pub(crate) without_last_block: u32,
    /// What full attention holds of the prompt without its last token.
    pub(crate) spine_tokens: u32,
}

impl Engine {
    /// The first group of full attention is the spine.
    pub(crate) fn learn(&mut self, number: u32, rule: GroupRule, block_size: u32) {
        let group = CacheGroup { number, rule, block_size };
        if rule == GroupRule::Prefix && self.spine.is_none() {
            self.spine = Some(number);
            let config = IndexConfig {
                model: "m".into(),
                block_size,
                seed: SEED,
                max_blocks_per_worker: 1 << 16,
            };
            self.index = Some(Index::new(config));
        }
        self.groups.insert(number, group);
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.index().config().block_size
    }

    fn index(&self) -> &Index {
        self.index.as_ref().unwrap()
    }

    fn tokens(&self, hash: u64) -> Vec<u32> {
        let mut tokens = vec![0; self.block_size() as usize];
        (tokens[0], tokens[1]) = (hash as u32, (hash >> 32) as u32);
        tokens
    }

    pub(crate) fn stored(&mut self, number: u32, parent: u64, tokens: u32, hashes: &[u64]) {
        let parent = Some(EngineHash(parent)).filter(|parent| parent.0 != 0);
        if self.spine != Some(number) {
            let (group, hashes) = (self.groups[&number], hashes.iter().copied().map(EngineHash));
            let hashes = hashes.collect();
            return self.later.push(KvEvent::GroupStored { group, parent, tokens, hashes });
        }
        let block = |hash: &u64| {
            let (hash, tokens) = (EngineHash(*hash), self.tokens(*hash));
            StoredBlock { hash, tokens, opaque: false }
        };
        let blocks = hashes.iter().map(block).collect();
        let (adapter, salt, tier) = (None, None, Tier::Device);
        self.apply(&KvEvent::Stored { parent, blocks, adapter, salt, tier });
    }

    pub(crate) fn removed(&mut self, group: u32, hashes: &[u64]) {
        let hashes = hashes.iter().copied().map(EngineHash).collect();
        match self.spine == Some(group) {
            true => self.apply(&KvEvent::Removed { hashes, tier: Tier::Device }),
            false => self.later.push(KvEvent::GroupRemoved { group, hashes }),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.flush();
        self.apply(&KvEvent::Cleared);
    }

    /// Ends a batch.
    pub(crate) fn flush(&mut self) {
        for event in std::mem::take(&mut self.later) {
            self.apply(&event);
        }
    }

    fn apply(&mut self, event: &KvEvent) {
        self.index.as_mut().unwrap().apply(WORKER, event);
        self.index().check().unwrap();
    }

    /// Looks up a prompt whose blocks have these hashes.
    pub(crate) fn find(&self, prompt_tokens: u32, hashes: &[u64]) -> Found {
        let block_size = self.block_size();
        let tokens: Vec<u32> = hashes.iter().flat_map(|hash| self.tokens(*hash)).collect();
        let namespace = Namespace { salt: None, model: "m", adapter: None, block_size };
        let (mut chain, mut overlaps) = (Vec::<BlockHash>::new(), Overlaps::new());
        chain_hashes(&namespace, SEED, &tokens, &mut chain);
        let resumed_max = prompt_tokens.saturating_sub(1) / block_size;
        self.index().reader().find_resumed(&chain, resumed_max, &mut overlaps);
        let overlap = overlaps.get(WORKER);
        assert_eq!(overlap.by_tier, [overlap.blocks, 0, 0, 0]);
        let last = prompt_tokens.saturating_sub(1) / block_size;
        Found {
            usable_tokens: overlap.blocks.min(last) * block_size,
            without_last_block: overlaps.with_and_without_last_block(WORKER)[1].blocks * block_size,
            spine_tokens: overlaps.spine_blocks(WORKER).min(last) * block_size,
        }
    }
}
