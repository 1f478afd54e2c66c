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

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitrail_engine::nixl::PinnedKv;
use splitrail_engine_client::{Engine, Receipt};
use splitrail_kv::BlockHash;
use splitrail_policy::WorkerIndex;
use splitrail_telemetry::Metrics;
use tokio::time::MissedTickBehavior;

use crate::breaker::Breaker;
use crate::{Served, Worker};
use splitrail_config::model::BreakerConfig;

mod release;
mod store;

use release::release_all;
pub use release::release_of;
pub use store::Found;
use store::{Bounds, Pin, Store, Why};

/// The bounds of one model's pins. A pin takes some 50 bytes for each block.
const BOUNDS: Bounds = Bounds { pins: 16_384, bytes: 64 << 20 };

/// The bound on a worker's pinned blocks if the engine does not report how many blocks it has.
const UNKNOWN_BLOCKS_MAX: u64 = 1024;

/// Engines compute a remainder that is shorter than this (vLLM's `kv_recompute_threshold`), so
/// reading pays only from this number of tokens on.
pub const READ_MIN_TOKENS: u32 = 64;

/// Interval at which pins that have ended, or whose worker is lost, are removed.
const SWEEP: Duration = Duration::from_millis(500);

/// After a failed read, a prefill worker gets no read for a while: an engine without the flag never
/// answers a leg that is to read.
const PAUSES: BreakerConfig = BreakerConfig { failures: 1, cooldown: Duration::from_secs(30) };

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

/// KV that a decode leg has left pinned, with what is known of its tokens.
pub struct Left {
    /// What the engine said of it.
    pub kv: PinnedKv,
    /// The worker that keeps it.
    pub holder: Arc<Worker>,
    /// The first token of the prompt.
    pub first_token: u32,
    /// The hashes of the full blocks whose tokens are known; none, if the KV cannot be read back
    /// exactly.
    pub hashes: Vec<BlockHash>,
    /// When the engine's reply began to arrive: the blocks were not pinned later.
    pub since: Instant,
}

impl ReadBack {
    fn store(&self) -> MutexGuard<'_, Store<Kept>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers pinned KV. Releases pins that will not be read: this one if it cannot be, those
    /// that it supersedes, and the oldest ones beyond the bounds.
    pub fn keep(served: &Arc<Served>, metrics: &Arc<Metrics>, left: Left) {
        let Left { kv, holder, first_token, mut hashes, since } = left;
        let block_size = served.pool.block_size();
        let is_exact = kv.check(block_size).is_ok();
        // The engine has not computed the KV of more tokens than this.
        hashes.truncate((kv.tokens() / block_size.max(1)) as usize);
        if !is_exact || served.pool.read_back.is_distrusted() {
            hashes.clear();
        }
        let pin = Pin {
            hashes: hashes.into(),
            holder: holder.index,
            blocks: u32::try_from(kv.blocks()).unwrap_or(u32::MAX),
            ends: since + usable(served.config.read_back_pin),
            payload_bytes: kv.bytes(),
            payload: Kept {
                kv,
                process: holder.process(),
                holder: Arc::clone(&holder),
                first_token,
            },
        };
        let blocks_max = blocks_max(served, &holder);
        let out = served.pool.read_back.store().keep(pin, blocks_max);
        release::several(served, metrics, out);
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

    /// Takes pinned KV, to be read by a prefill leg.
    pub fn take(served: &Arc<Served>, metrics: &Arc<Metrics>, found: Found) -> Option<Reading> {
        let pin = served.pool.read_back.store().take(found)?;
        Some(Reading {
            blocks: found.blocks,
            pin: Some(pin),
            receipt: None,
            served: Arc::clone(served),
            metrics: Arc::clone(metrics),
        })
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

/// Pinned KV that a prefill leg is about to read. If it is dropped before any byte of the leg was
/// sent, another leg may read it. Otherwise it is left alone, since an engine may be reading it.
pub struct Reading {
    blocks: usize,
    pin: Option<Pin<Kept>>,
    receipt: Option<Receipt>,
    served: Arc<Served>,
    metrics: Arc<Metrics>,
}

impl Reading {
    /// Number of leading blocks of the prompt that are read.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The worker that keeps the blocks.
    pub fn holder(&self) -> Option<&Arc<Worker>> {
        self.pin.as_ref().map(|pin| &pin.payload.holder)
    }

    /// The prefill leg's `kv_transfer_params`, as JSON.
    pub fn json(&self) -> Option<String> {
        let block_size = self.served.pool.block_size();
        self.pin.as_ref()?.payload.kv.read_json(self.blocks, block_size)
    }

    /// The parameters are in the body to which `receipt` belongs.
    pub fn is_in(&mut self, receipt: Receipt) {
        self.receipt = Some(receipt);
    }

    /// Gives the pin up after a failure. Returns whether the leg may have been sent.
    pub fn was_sent(mut self) -> bool {
        self.give_up()
    }

    /// Puts the pin back if no byte of the leg was sent. Otherwise it is left alone. Returns whether
    /// the leg may have been sent.
    fn give_up(&mut self) -> bool {
        let Some(pin) = self.pin.take() else { return true };
        let was_sent = self.receipt.as_ref().is_some_and(|receipt| !receipt.take_back());
        match was_sent {
            true => self.ended("left"),
            false => self.served.pool.read_back.store().put(pin),
        }
        was_sent
    }

    /// The prefill engine has answered: the pin has been read or is released.
    pub fn done(mut self) {
        self.pin = None;
        self.ended("read");
    }

    fn ended(&self, end: &str) {
        let labels = [self.served.name(), end];
        self.metrics.read_back_pins.with_label_values(&labels).inc();
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let _was_sent = self.give_up();
    }
}

/// What is known of read-back with one worker.
#[derive(Debug)]
pub struct Support {
    /// Whether the engine keeps KV pinned after decode legs: 0 is unknown, 1 is no, 2 is yes.
    pins: AtomicU8,
    /// Whether prefill legs that were to read have failed lately.
    reads: Breaker,
}

impl Default for Support {
    fn default() -> Self {
        Self { pins: AtomicU8::new(0), reads: Breaker::new(PAUSES) }
    }
}

impl Support {
    /// Whether the engine keeps KV pinned after decode legs; `None` before its first reply.
    pub fn pins(&self) -> Option<bool> {
        match self.pins.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records what a decode leg's reply says. Returns whether this is news.
    pub fn set_pins(&self, pins: bool) -> bool {
        let known = 1 + u8::from(pins);
        self.pins.swap(known, Relaxed) != known
    }

    /// Whether a prefill leg on the worker may read.
    pub fn may_read(&self, now: Instant) -> bool {
        self.reads.allows(now)
    }

    /// Records that a prefill leg that reads is sent.
    pub fn begin(&self, now: Instant) {
        self.reads.begin(now);
    }

    /// Records how it ended. Returns whether reads pause from now on.
    pub fn ended(&self, is_ok: bool, now: Instant) -> bool {
        match is_ok {
            true => {
                self.reads.succeed();
                false
            }
            false => self.reads.fail(now),
        }
    }

    /// Forgets all of this, because the engine is or may be another process.
    pub fn forget(&self) {
        self.pins.store(0, Relaxed);
        self.reads.succeed();
    }
}

/// Releases all pins of a pool that is served no more, in the background.
pub(crate) fn stop(served: &Arc<Served>, metrics: &Arc<Metrics>) {
    if served.pool.read_back.pins() > 0 {
        let (stopping, metrics) = (Arc::clone(served), Arc::clone(metrics));
        served.releases.run(async move { release_all(&stopping, &metrics).await });
    }
}

/// The part of a pin's time in which it may be read. A tenth is kept as a margin, and at least six
/// seconds, since engines refuse a read in the last five.
fn usable(pin: Duration) -> Duration {
    const LEAST: Duration = Duration::from_secs(6);
    pin.saturating_sub((pin / 10).max(LEAST))
}

/// The number of blocks that a worker may keep pinned.
fn blocks_max(served: &Served, holder: &Worker) -> u64 {
    let total = holder.load(Instant::now()).and_then(|load| load.total_blocks);
    let percent = u64::from(served.config.read_back_pinned_percent_max);
    total.map_or(UNKNOWN_BLOCKS_MAX, |blocks| blocks as u64 * percent / 100)
}

/// Removes pins that have ended and pins whose worker is lost, until the task is aborted.
pub(crate) async fn run(served: Arc<Served>, metrics: Arc<Metrics>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        sweep(&served, &metrics, Instant::now());
    }
}

fn sweep(served: &Arc<Served>, metrics: &Arc<Metrics>, now: Instant) {
    let is_on = served.config.read_back;
    let (over, lost) = {
        let mut store = served.pool.read_back.store();
        if store.is_empty() {
            return;
        }
        let over = store.expire(now);
        let lost = store.retain(|pin| match pin.payload.is_lost() {
            true => Some(Why::Holder),
            false => (!is_on).then_some(Why::Stopped),
        });
        (over, lost)
    };
    metrics.read_back_pins.with_label_values(&[served.name(), "expired"]).inc_by(over as u64);
    release::several(served, metrics, lost);
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_tenth_of_a_pin_s_time_is_kept_and_at_least_six_seconds() {
        assert_eq!(usable(480 * S), 432 * S);
        assert_eq!(usable(40 * S), 34 * S);
        assert_eq!(usable(3 * S), Duration::ZERO);
    }

    #[test]
    fn a_worker_whose_reads_fail_gets_none_for_a_while() {
        let (support, now) = (Support::default(), Instant::now());
        assert!(support.may_read(now) && support.pins().is_none());
        support.begin(now);
        assert!(support.ended(false, now));
        assert!(!support.may_read(now + 29 * S) && support.may_read(now + 30 * S));
        support.begin(now + 30 * S);
        assert!(!support.may_read(now + 30 * S), "one trial at a time");
        support.ended(true, now + 31 * S);
        assert!(support.may_read(now + 31 * S));
        assert!(support.set_pins(true) && !support.set_pins(true));
        assert_eq!(support.pins(), Some(true));
        support.ended(false, now);
        support.forget();
        assert!(support.may_read(now) && support.pins().is_none());
    }
}
