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

use splitrail_engine::connectors::nixl::PinnedKv;
use splitrail_kv::BlockHash;
use splitrail_policy::{KvFormat, WorkerIndex};
use splitrail_workload::pins::ReadablePin;
use splitrail_workload::pins::{Bounds, Store};

use crate::Worker;
use crate::peer_fetch::has_room;
use crate::state::WorkerState;

mod reading;
mod release;
mod support;
mod sweep;

pub use reading::{NewPin, PinReading, blocks_max};
pub use release::release_of;
pub use support::ReadBackSupport;
pub(crate) use sweep::{run, stop};

/// The bounds of one model's pins. A pin takes some 50 bytes for each block.
const BOUNDS: Bounds = Bounds { pins: 16_384, bytes: 64 << 20 };

/// What a reader of a pin needs.
#[derive(Debug)]
struct PinPayload {
    kv: PinnedKv,
    holder: Arc<Worker>,
    /// The process of the engine that keeps the blocks: an engine that was only out of reach has them
    /// still.
    process: u32,
    /// The `adapter_changes` of the holder's engine when its reply arrived.
    adapter_changes: u32,
    /// The first token of the prompt, for the request that releases the blocks.
    first_token: u32,
}

impl PinPayload {
    /// Whether the engine may still keep the blocks, be its worker in the fleet or not. Another process
    /// in its place has none of them, and an engine that is to release them there waits for the process
    /// that is gone.
    fn is_there(&self) -> bool {
        self.holder.health.presence.restarts() == self.process
    }

    /// Whether a prefill leg may read the blocks now. A holder that gets no new work gets no new readers
    /// either, since its engine may be about to be stopped. Nor does one that has loaded an adapter from
    /// another path since, as the blocks may have been computed with the one before.
    fn is_readable(&self) -> bool {
        let is_of_loads = self.holder.engine.facts.adapter_changes() == self.adapter_changes;
        is_of_loads
            && self.is_there()
            && self.holder.state().takes_work()
            && !self.holder.is_quarantined()
    }

    /// Whether no prefill leg will read the blocks. A holder that is out of reach may come back.
    fn is_lost(&self) -> bool {
        !self.is_readable() && (!self.is_there() || self.holder.state() != WorkerState::Down)
    }
}

/// The pins that the workers of a pool can read for one prompt.
pub(crate) struct ReadablePins<'a> {
    read_back: &'a ReadBack,
    prompt: &'a [BlockHash],
    /// The best pin of any worker.
    best: ReadablePin,
    /// How its holder stores KV.
    best_format: KvFormat,
}

impl ReadablePins<'_> {
    /// The pin that this worker can read. A worker does not read from itself, so it may be another
    /// pin than the best one.
    pub(crate) fn for_reader(&self, now: Instant, reader: &Worker) -> Option<ReadablePin> {
        let can_read = reader.transfer.read_back.may_read(now) && has_room(reader, now);
        if !reader.takes_part_in_kv_routing() || !can_read {
            return None;
        }
        let is_possible = self.best.holder != reader.index
            && self.best_format.fits(reader.engine.facts.kv_format());
        match is_possible {
            true => Some(self.best),
            false => self.read_back.find(now, self.prompt, reader),
        }
    }
}

/// The pinned KV of one model's workers.
#[derive(Debug)]
pub struct ReadBack {
    store: Mutex<Store<PinPayload>>,
    /// Whether KV was read for other tokens than its own. Nothing is read then.
    is_distrusted: AtomicBool,
}

impl Default for ReadBack {
    fn default() -> Self {
        Self { store: Mutex::new(Store::new(BOUNDS)), is_distrusted: AtomicBool::new(false) }
    }
}

impl ReadBack {
    fn store(&self) -> MutexGuard<'_, Store<PinPayload>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pins that prefill legs can read for a prompt, given as the hashes of the leading blocks
    /// that they may read; `None` if there is nothing.
    pub(crate) fn readable_pins<'a>(
        &'a self,
        now: Instant,
        prompt: &'a [BlockHash],
    ) -> Option<ReadablePins<'a>> {
        if prompt.is_empty() || self.is_distrusted() {
            return None;
        }
        let is_kept = |_, kept: &PinPayload| kept.is_readable();
        let store = self.store();
        let best = store.find(now, prompt, is_kept)?;
        let holder = store.payload(best).map(|kept| &kept.holder);
        let best_format = holder.map(|holder| holder.engine.facts.kv_format()).unwrap_or_default();
        Some(ReadablePins { read_back: self, prompt, best, best_format })
    }

    /// What a prefill leg on `reader` can read of a prompt, given as the hashes of its leading blocks
    /// without the last token.
    pub fn find(&self, now: Instant, prompt: &[BlockHash], reader: &Worker) -> Option<ReadablePin> {
        let can_read = reader.transfer.read_back.may_read(now) && has_room(reader, now);
        if prompt.is_empty() || self.is_distrusted() || !can_read {
            return None;
        }
        let may_read = |holder, kept: &PinPayload| {
            let is_other = holder != reader.index && kept.is_readable();
            is_other && kept.holder.stores_kv_as(reader)
        };
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

    /// Number of blocks that a worker keeps pinned, as far as the router knows them, with those that
    /// engines may be reading.
    pub fn pinned_blocks(&self, holder: WorkerIndex) -> u64 {
        self.store().blocks(holder)
    }
}
