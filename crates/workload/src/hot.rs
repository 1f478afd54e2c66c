//! What the router remembers of recent prompts of a model, for prewarming.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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

/// The share of `limits.request_memory_max`, in tenths, from which what is remembered gives way to
/// requests: none of them is refused because of it.
const MEMORY_TENTHS_MAX: usize = 9;

/// The hot prefixes of one model. Empty unless the model is prewarmed.
#[derive(Debug)]
pub struct HotStore {
    kept: Mutex<Option<KeptPrefixes>>,
    /// Whether `kept` is there, for readers that take no lock.
    is_on: AtomicBool,
    /// The first blocks of the prompts whose token ids are being computed or wait for that.
    learning: Mutex<Vec<BlockHash>>,
    /// Held by the one prompt whose token ids are being computed.
    turn: Turn,
    began: Instant,
}

#[derive(Debug)]
struct KeptPrefixes {
    bytes_max: usize,
    remembered: Option<RememberedPrefixes>,
}

#[derive(Debug)]
struct RememberedPrefixes {
    prefixes: HotPrefixes,
    /// The budget of all requests.
    memory: Arc<MemoryBudget>,
    memory_max_bytes: usize,
    charge: Charge,
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
    pub fn configure(&self, model: &Model) {
        let bytes_max = model.prewarm.memory_max_bytes;
        let mut kept = self.kept();
        match &*kept {
            Some(kept) if model.prewarm.enabled && kept.bytes_max == bytes_max => {}
            _ => {
                *kept =
                    model.prewarm.enabled.then_some(KeptPrefixes { bytes_max, remembered: None })
            }
        }
        self.is_on.store(kept.is_some(), Relaxed);
    }

    /// Whether prompts are remembered.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Remembers a prompt. Returns whether its token ids are wanted, for [`Self::learn`]: those of one
    /// prompt with the same first block are, until [`Self::learning_ended`]. `memory` is the budget of
    /// all requests, of at most `memory_max_bytes`.
    pub fn record(
        &self,
        prompt: RecentPrompt<'_>,
        memory: &Arc<MemoryBudget>,
        memory_max_bytes: usize,
    ) -> bool {
        let (now_ms, block_size) = (self.now_ms(), prompt.block_size as usize);
        let mut kept = self.kept();
        let Some(KeptPrefixes { bytes_max, remembered }) = &mut *kept else { return false };
        if remembered.as_ref().is_none_or(|known| known.prefixes.block_size() != block_size) {
            let bounds = HotBounds { bytes_max: *bytes_max, ..BOUNDS };
            let prefixes = HotPrefixes::new(bounds, block_size);
            let (memory, charge) = (Arc::clone(memory), memory.charge());
            *remembered = Some(RememberedPrefixes { prefixes, memory, memory_max_bytes, charge });
        }
        let Some(remembered) = remembered else { return false };
        remembered.memory_max_bytes = memory_max_bytes;
        let lacks_ids = remembered.prefixes.record(now_ms, prompt.model, prompt.hashes);
        remembered.settle(now_ms);
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
    pub fn learn(&self, hashes: &[BlockHash], ids: &[u32]) {
        let now_ms = self.now_ms();
        self.with(|remembered| {
            remembered.prefixes.learn(now_ms, hashes, ids);
            remembered.settle(now_ms);
        });
    }

    /// The token ids of the prompt with this first block are known, or cannot be had.
    pub fn learning_ended(&self, first: BlockHash) {
        self.learning().retain(|known| *known != first);
    }

    /// Forgets prefixes while all requests together hold almost as much memory as they may, which is
    /// `memory_max_bytes`.
    pub fn give_way(&self, memory_max_bytes: usize) {
        let now_ms = self.now_ms();
        self.with(|remembered| {
            remembered.memory_max_bytes = memory_max_bytes;
            let held_bytes = remembered.memory.held_bytes();
            let excess_bytes = held_bytes.saturating_sub(usable_bytes(memory_max_bytes));
            if excess_bytes > 0 {
                let left_bytes = remembered.prefixes.bytes().saturating_sub(excess_bytes);
                remembered.prefixes.shrink(now_ms, left_bytes);
                remembered.settle(now_ms);
            }
        });
    }

    /// The hottest prefixes whose tokens are known; see [`HotPrefixes::hottest`].
    pub fn hottest(&self, blocks_max: usize, prefixes_max: usize) -> Vec<HotPrefix> {
        let now_ms = self.now_ms();
        let hottest = |known: &mut RememberedPrefixes| {
            known.prefixes.hottest(now_ms, blocks_max, prefixes_max)
        };
        self.with(hottest).unwrap_or_default()
    }

    /// The tokens of a hot prefix; `None` if they are not known any more.
    pub fn tokens(&self, hashes: &[BlockHash]) -> Option<PrefixTokens> {
        self.with(|remembered| remembered.prefixes.tokens(hashes))?
    }

    /// A charge of so many bytes to the budget of all requests; `None` if requests need them, or
    /// nothing is remembered.
    pub fn charge(&self, bytes: usize) -> Option<Charge> {
        self.with(|remembered| {
            let mut charge = remembered.memory.charge();
            let fits = charge.grow(bytes, usable_bytes(remembered.memory_max_bytes));
            fits.then_some(charge)
        })?
    }

    /// Bytes of memory that are taken.
    pub fn bytes(&self) -> usize {
        self.with(|remembered| remembered.prefixes.bytes()).unwrap_or(0)
    }

    fn with<T>(&self, run: impl FnOnce(&mut RememberedPrefixes) -> T) -> Option<T> {
        self.kept().as_mut()?.remembered.as_mut().map(run)
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn learning(&self) -> MutexGuard<'_, Vec<BlockHash>> {
        self.learning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self) -> MutexGuard<'_, Option<KeptPrefixes>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RememberedPrefixes {
    /// Charges what the prefixes take. They give way to requests: what does not fit is forgotten.
    fn settle(&mut self, now_ms: u64) {
        let Self { prefixes, charge, memory_max_bytes, .. } = self;
        let (taken, charged) = (prefixes.bytes(), charge.bytes());
        if taken > charged && !charge.grow(taken - charged, usable_bytes(*memory_max_bytes)) {
            prefixes.shrink(now_ms, charged);
        }
        charge.shrink(charge.bytes().saturating_sub(prefixes.bytes()));
    }
}

/// The memory of all requests up to which prewarming may use some of it, in bytes.
fn usable_bytes(memory_max_bytes: usize) -> usize {
    memory_max_bytes / 10 * MEMORY_TENTHS_MAX
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
    fn hot_prefixes_are_charged_and_give_way_to_requests() {
        let (store, memory) = (HotStore::default(), Arc::new(MemoryBudget::default()));
        let record = |hashes: &[BlockHash], max_bytes| {
            let prompt = RecentPrompt { model: "m", hashes, block_size: 2 };
            store.record(prompt, &memory, max_bytes)
        };
        assert!(!record(&hashes(1, 10), 1 << 20) && store.bytes() == 0, "it is off");
        store.configure(&model(true));
        assert!(!record(&hashes(1, 10), 1 << 20), "used once");
        assert!(record(&hashes(1, 10), 1 << 20));
        assert!(!record(&hashes(1, 10), 1 << 20), "its ids are being computed");
        store.learn(&hashes(1, 10), &[7; 20]);
        assert_eq!(store.hottest(100, 100).len(), 1);
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
            store.record(prompt, &memory, 1 << 20);
        }
        store.learn(&hashes(1, 10), &[7; 40]);
        assert!(store.hottest(100, 100).is_empty(), "of this size, it was used once");
    }
    #[test]
    fn hot_prefixes_are_dropped_while_requests_need_the_memory() {
        let (store, memory) = (HotStore::default(), Arc::new(MemoryBudget::default()));
        store.configure(&model(true));
        let max_bytes = 100_000;
        for name in 0..50 {
            let prompt = RecentPrompt { model: "m", hashes: &hashes(name, 20), block_size: 2 };
            store.record(prompt, &memory, max_bytes);
        }
        let before = store.bytes();
        store.give_way(max_bytes);
        assert_eq!(store.bytes(), before, "there is enough");
        let mut request = memory.charge();
        assert!(request.grow(max_bytes - before - 1000, max_bytes));
        store.give_way(max_bytes);
        assert!(memory.held_bytes() <= 90_000 && store.bytes() > 0, "{}", store.bytes());
        assert!(store.charge(2000).is_none() && request.grow(10_000, max_bytes));
        store.give_way(max_bytes);
        assert_eq!((store.bytes(), memory.held_bytes()), (0, request.bytes()));
        drop(request);
        assert_eq!(store.charge(2000).map(|charge| charge.bytes()), Some(2000));
    }
}
