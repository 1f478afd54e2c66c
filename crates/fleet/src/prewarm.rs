//! Prewarming: what the router remembers of recent prompts of a model, and how far a worker is.
//!
//! Which workers are prewarmed, and with what, is decided where requests are sent (`flow::prewarm`).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;
use splitrail_api::memory_budget::{Charge, MemoryBudget};
use splitrail_config::model::Model;
use splitrail_kv::{BlockHash, HotBounds, HotPrefix, HotPrefixes, PrefixTokens};

/// A turn that one task has and others wait for, in the order in which they came.
type Turn = tokio::sync::Mutex<()>;

/// The bounds of what is remembered besides its memory: a prefix that was used twice at the same
/// time is hot for four minutes.
const BOUNDS: HotBounds =
    HotBounds { bytes_max: 0, runs_max: 16_384, half_life_ms: 10 * 60 * 1000 };

/// Maximum number of prompts whose token ids are being computed or wait for that.
const LEARNING_MAX: usize = 16;

/// The hot prefixes of one model. Empty unless the model is prewarmed.
#[derive(Debug)]
pub struct HotStore {
    kept: Mutex<Option<Kept>>,
    /// Whether `kept` is there, for readers that take no lock.
    is_on: AtomicBool,
    /// The first blocks of the prompts whose token ids are being computed or wait for that.
    learning: Mutex<Vec<BlockHash>>,
    /// Held by the one prompt whose token ids are being computed.
    turn: Turn,
    began: Instant,
}

#[derive(Debug)]
struct Kept {
    bytes_max: usize,
    prefixes: Option<(HotPrefixes, Charge)>,
}

/// A prompt that is remembered.
#[derive(Clone, Copy)]
pub struct RecentPrompt<'a> {
    /// The name by which engines know the model or adapter.
    pub model: &'a str,
    /// The hashes of its full blocks.
    pub hashes: &'a [BlockHash],
    /// Tokens per block.
    pub block_size: u32,
}

impl Default for HotStore {
    fn default() -> Self {
        let (is_on, learning, turn) = Default::default();
        Self { kept: Mutex::new(None), is_on, learning, turn, began: Instant::now() }
    }
}

impl HotStore {
    /// Applies the settings of a model. What was remembered with others is dropped.
    pub(super) fn configure(&self, model: &Model) {
        let bytes_max = model.prewarm.memory_max_bytes;
        let mut kept = self.kept();
        match &*kept {
            Some(kept) if model.prewarm.enabled && kept.bytes_max == bytes_max => {}
            _ => *kept = model.prewarm.enabled.then_some(Kept { bytes_max, prefixes: None }),
        }
        self.is_on.store(kept.is_some(), Relaxed);
    }

    /// Whether prompts are remembered.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Remembers a prompt. Returns whether its token ids are wanted, for [`Self::learn`]: those of one
    /// prompt with the same first block are, until [`Self::learning_ended`]. `memory` is the budget of
    /// all requests, and its bound.
    pub fn record(
        &self,
        prompt: RecentPrompt<'_>,
        (memory, memory_max_bytes): (&Arc<MemoryBudget>, usize),
    ) -> bool {
        let (now_ms, block_size) = (self.now_ms(), prompt.block_size as usize);
        let mut kept = self.kept();
        let Some(Kept { bytes_max, prefixes }) = &mut *kept else { return false };
        if prefixes.as_ref().is_none_or(|(prefixes, _)| prefixes.block_size() != block_size) {
            let bounds = HotBounds { bytes_max: *bytes_max, ..BOUNDS };
            *prefixes = Some((HotPrefixes::new(bounds, block_size), memory.charge()));
        }
        let Some((prefixes, charge)) = prefixes else { return false };
        let lacks_ids = prefixes.record(now_ms, prompt.model, prompt.hashes);
        settle(prefixes, charge, now_ms, memory_max_bytes);
        let Some(first) = prompt.hashes.first().filter(|_| lacks_ids) else { return false };
        let mut learning = self.learning();
        let is_wanted = learning.len() < LEARNING_MAX && !learning.contains(first);
        if is_wanted {
            learning.push(*first);
        }
        is_wanted
    }

    /// The turn to compute token ids, of which there is one.
    pub fn turn(&self) -> &Turn {
        &self.turn
    }

    /// Takes over the token ids of a prompt.
    pub fn learn(&self, hashes: &[BlockHash], ids: &[u32], memory_max_bytes: usize) {
        let now_ms = self.now_ms();
        let mut kept = self.kept();
        let prefixes = kept.as_mut().and_then(|kept| kept.prefixes.as_mut());
        if let Some((prefixes, charge)) = prefixes {
            prefixes.learn(now_ms, hashes, ids);
            settle(prefixes, charge, now_ms, memory_max_bytes);
        }
    }

    /// The token ids of the prompt with this first block are known, or cannot be had.
    pub fn learning_ended(&self, first: BlockHash) {
        self.learning().retain(|known| *known != first);
    }

    /// The hottest prefixes whose tokens are known; see [`HotPrefixes::hottest`].
    pub fn hottest(&self, blocks_max: usize) -> Vec<HotPrefix> {
        let now_ms = self.now_ms();
        let of = |(prefixes, _): &(HotPrefixes, Charge)| prefixes.hottest(now_ms, blocks_max);
        let kept = self.kept();
        kept.as_ref().and_then(|kept| kept.prefixes.as_ref().map(of)).unwrap_or_default()
    }

    /// The tokens of a hot prefix; `None` if they are not known any more.
    pub fn tokens(&self, hashes: &[BlockHash]) -> Option<PrefixTokens> {
        self.kept().as_ref()?.prefixes.as_ref()?.0.tokens(hashes)
    }

    /// Bytes of memory that are taken.
    pub fn bytes(&self) -> usize {
        let of = |kept: &Kept| kept.prefixes.as_ref().map_or(0, |(prefixes, _)| prefixes.bytes());
        self.kept().as_ref().map_or(0, of)
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn learning(&self) -> MutexGuard<'_, Vec<BlockHash>> {
        self.learning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Option<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Charges what prefixes take. They give way to requests: what does not fit is forgotten.
fn settle(prefixes: &mut HotPrefixes, charge: &mut Charge, now_ms: u64, memory_max_bytes: usize) {
    let (taken, charged) = (prefixes.bytes(), charge.bytes());
    if taken > charged && !charge.grow(taken - charged, memory_max_bytes) {
        prefixes.shrink(now_ms, charged);
    }
    charge.shrink(charge.bytes().saturating_sub(prefixes.bytes()));
}

/// How far a worker is prewarmed since its last start.
#[derive(Debug, Default)]
pub struct PrewarmState {
    /// 0: not prewarmed. 1: being prewarmed. 2: done.
    phase: AtomicU32,
    prefixes: AtomicU32,
    tokens: AtomicU64,
}

/// How far a worker is prewarmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PrewarmView {
    /// Whether it goes on.
    pub running: bool,
    /// The number of prefixes that the worker has taken over.
    pub prefixes: u32,
    /// The number of their tokens that it did not hold before.
    pub tokens: u64,
}

impl PrewarmState {
    /// Records that prewarming begins.
    pub fn begin(&self) {
        self.prefixes.store(0, Relaxed);
        self.tokens.store(0, Relaxed);
        self.phase.store(1, Relaxed);
    }

    /// Records that the worker has taken over a prefix.
    pub fn took(&self, tokens: u64) {
        self.prefixes.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
    }

    /// Records that prewarming is over.
    pub fn end(&self) {
        self.phase.store(2, Relaxed);
    }

    /// What was taken over since the worker's last start; `None` if it has not been prewarmed.
    pub fn view(&self) -> Option<PrewarmView> {
        let phase = self.phase.load(Relaxed);
        (phase > 0).then(|| PrewarmView {
            running: phase == 1,
            prefixes: self.prefixes.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn model(enabled: bool) -> Model {
        let text = format!(
            r#"{{"name": "m", "workers": [], "prewarm": {{"enabled": {enabled}, "memory_max": "64KiB"}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn hashes(name: u64, blocks: u64) -> Vec<BlockHash> {
        (0..blocks).map(|block| BlockHash(name << 32 | block)).collect()
    }

    #[test]
    fn what_is_remembered_is_charged_and_gives_way_to_requests() {
        let (store, memory) = (HotStore::default(), Arc::new(MemoryBudget::default()));
        let record = |hashes: &[BlockHash], max_bytes| {
            let prompt = RecentPrompt { model: "m", hashes, block_size: 2 };
            store.record(prompt, (&memory, max_bytes))
        };
        assert!(!record(&hashes(1, 10), 1 << 20) && store.bytes() == 0, "it is off");
        store.configure(&model(true));
        assert!(!record(&hashes(1, 10), 1 << 20), "used once");
        assert!(record(&hashes(1, 10), 1 << 20));
        assert!(!record(&hashes(1, 10), 1 << 20), "its ids are being computed");
        store.learn(&hashes(1, 10), &[7; 20], 1 << 20);
        assert_eq!(store.hottest(100).len(), 1);
        assert_eq!(memory.held_bytes(), store.bytes());
        let before = store.bytes();
        record(&hashes(2, 100), before + 10);
        assert!(store.bytes() <= before && memory.held_bytes() == store.bytes());
        for name in 3..1000 {
            record(&hashes(name, 20), 1 << 20);
            assert!(store.bytes() <= 64 << 10 && memory.held_bytes() == store.bytes());
        }
        store.configure(&model(true));
        assert!(store.bytes() > 0, "the settings are the same");
        store.configure(&model(false));
        assert_eq!((store.bytes(), memory.held_bytes()), (0, 0));
    }

    #[test]
    fn blocks_of_another_size_replace_all_others() {
        let (store, memory) = (HotStore::default(), Arc::new(MemoryBudget::default()));
        store.configure(&model(true));
        for block_size in [2, 2, 4] {
            let prompt = RecentPrompt { model: "m", hashes: &hashes(1, 10), block_size };
            store.record(prompt, (&memory, 1 << 20));
        }
        store.learn(&hashes(1, 10), &[7; 40], 1 << 20);
        assert!(store.hottest(100).is_empty(), "of this size, it was used once");
    }
}
