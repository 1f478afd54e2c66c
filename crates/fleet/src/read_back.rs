//! Read-back: what a decode worker generated is read by the prefill leg of the next turn, instead of
//! being computed there.
//!
//! Engines with NIXL's `bidirectional_kv_xfer` keep the KV of a finished decode leg pinned for some
//! time. The router remembers where it is, by the block hashes of the exact tokens. There is no
//! conversation id: any prompt that shares enough leading blocks may read, once.
//!
//! Two different prompts with an equal chain of hashes would read each other's KV. The chance is
//! 2^-64 for each pair of blocks, and `hash_seed` must be set (a rule of the configuration), so that
//! nobody can search for such prompts. The prefill leg is checked afterwards as well: its engine
//! reports the tokens of the prompt, and their hashes must be those of the router.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use splitrail_engine::nixl::PinnedKv;
use splitrail_engine_client::Engine as _;
use splitrail_kv::BlockHash;
use splitrail_policy::WorkerIndex;

use crate::Worker;

mod reading;
mod release;
mod store;
mod support;
mod sweep;

pub use reading::{Left, Reading};
pub use release::release_of;
pub use store::Found;
use store::{Bounds, Store};
pub use support::Support;
pub(crate) use sweep::{run, stop};

/// The bounds of one model's pins. A pin takes some 50 bytes for each block.
const BOUNDS: Bounds = Bounds { pins: 16_384, bytes: 64 << 20 };

/// Engines compute a remainder that is shorter than this (vLLM's `kv_recompute_threshold`), so
/// reading pays only from this number of tokens on.
pub const READ_MIN_TOKENS: u32 = 64;

/// What a reader of a pin needs.
#[derive(Debug)]
struct Kept {
    kv: PinnedKv,
    holder: Arc<Worker>,
    /// The process of the engine that keeps the blocks.
    process: u64,
    /// The first token of the prompt, for the request that releases the blocks.
    first_token: u32,
}

impl Kept {
    fn is_lost(&self) -> bool {
        self.holder.gone.is_cancelled() || self.holder.process() != self.process
    }
}

/// The pinned KV of one model's workers.
#[derive(Debug)]
pub struct ReadBack {
    store: Mutex<Store<Kept>>,
    /// Whether KV was read for other tokens than its own. Nothing is read then.
    is_distrusted: AtomicBool,
}

impl Default for ReadBack {
    fn default() -> Self {
        Self { store: Mutex::new(Store::new(BOUNDS)), is_distrusted: AtomicBool::new(false) }
    }
}

impl ReadBack {
    fn store(&self) -> MutexGuard<'_, Store<Kept>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a prefill leg on `reader` can read of a prompt, given as the hashes of its leading blocks
    /// without the last token.
    pub fn find(&self, now: Instant, prompt: &[BlockHash], reader: &Worker) -> Option<Found> {
        if prompt.is_empty() || self.is_distrusted() || !reader.read_back.may_read(now) {
            return None;
        }
        let may_read = |holder, kept: &Kept| holder != reader.index && !kept.is_lost();
        self.store().find(now, prompt, may_read)
    }

    /// Reads nothing any more, until the pool is replaced: the tokens of router and engines differ.
    pub fn distrust(&self) {
        self.is_distrusted.store(true, Relaxed);
    }

    /// Whether nothing is read any more.
    pub fn is_distrusted(&self) -> bool {
        self.is_distrusted.load(Relaxed)
    }

    /// Number of blocks that a worker keeps pinned, as far as the router knows them.
    pub fn pinned_blocks(&self, holder: WorkerIndex) -> u64 {
        self.store().blocks(holder)
    }

    /// Number of pins of all workers.
    pub fn pins(&self) -> usize {
        self.store().len()
    }
}
