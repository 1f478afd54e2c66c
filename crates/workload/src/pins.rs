//! Which pinned KV can be read back, by the block hashes of its tokens. It has no clock: callers
//! pass the time.
//!
//! A chained block hash stands for all tokens before it. So two prompts share exactly as many leading
//! blocks as they share leading hashes, and the deepest shared block is found by bisection.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use splitrail_kv::BlockHash;
use splitrail_policy::WorkerIndex;

/// Bytes of memory for each block of a pin: its hash, and its entry in the index.
const BLOCK_BYTES: usize = 48;
/// Bytes of memory for each pin besides its blocks and its payload.
const PIN_BYTES: usize = 256;
/// Maximum number of pins that are left to their end and still counted for their workers.
const LEFT_MAX: usize = 4096;
/// Maximum number of pins that are tried for one prompt.
const TRIED_MAX: usize = 8;

/// KV that a worker keeps pinned.
#[derive(Debug)]
pub struct Pin<T> {
    /// The hashes of the full blocks of its tokens.
    pub hashes: Box<[BlockHash]>,
    /// The worker that keeps the blocks.
    pub holder: WorkerIndex,
    /// The number of the process of the worker's engine: another one keeps nothing.
    pub process: u32,
    /// The number of blocks that the worker keeps.
    pub blocks: u32,
    /// From when on the blocks must not be read.
    pub ends: Instant,
    /// When the worker's engine frees the blocks by itself: not before `ends`.
    pub freed: Instant,
    /// Bytes of memory that `payload` takes besides its own size.
    pub payload_bytes: usize,
    /// What a reader needs.
    pub payload: T,
}

impl<T> Pin<T> {
    fn bytes(&self) -> usize {
        self.hashes.len() * BLOCK_BYTES + self.payload_bytes + size_of::<T>() + PIN_BYTES
    }
}

/// The bounds of a store.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum number of pins.
    pub pins: usize,
    /// Maximum number of bytes of memory, as charged for each pin.
    pub bytes: usize,
}

/// Why a pin left the store without having been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinEnd {
    /// The pin has no full block of known tokens.
    Unusable,
    /// A later pin has all of its tokens, and more.
    Superseded,
    /// The bound on pinned blocks of its worker, or a bound of the store.
    Bound,
    /// Its worker left, or is another process now.
    Holder,
    /// The router stops, or read-back was switched off.
    Stopped,
}

impl PinEnd {
    /// The reason in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unusable => "unusable",
            Self::Superseded => "superseded",
            Self::Bound => "bound",
            Self::Holder => "holder",
            Self::Stopped => "stopped",
        }
    }
}

/// Blocks of a pin that is read no more and not released either, because an engine may be reading
/// it, its release has failed, or its engine is about to free it.
#[derive(Debug)]
struct UnreadablePin {
    holder: WorkerIndex,
    process: u32,
    blocks: u32,
    freed: Instant,
}

/// What a prompt can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadablePin {
    id: u64,
    /// The worker that keeps the blocks.
    pub holder: WorkerIndex,
    /// The number of leading blocks that prompt and pin share.
    pub blocks: usize,
}

impl ReadablePin {
    /// The number of the pin.
    pub fn pin(self) -> u64 {
        self.id
    }
}

/// The pins of each worker, with a number of blocks.
type Holders = BTreeMap<WorkerIndex, (BTreeSet<u64>, u64)>;

/// Pinned KV that can be read back.
#[derive(Debug)]
pub struct Store<T> {
    bounds: Bounds,
    /// By number: the oldest is first.
    pins: BTreeMap<u64, Pin<T>>,
    /// Each block of each pin.
    index: BTreeSet<(BlockHash, u64)>,
    /// The last full block of each pin.
    tails: BTreeSet<(BlockHash, u64)>,
    /// The pins of each worker, with the number of their blocks and of those that are left.
    holders: Holders,
    /// The oldest is first.
    left: VecDeque<UnreadablePin>,
    /// Whether no pin is added any more.
    is_closed: bool,
    bytes: usize,
    count: u64,
}

impl<T> Store<T> {
    /// An empty store.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            pins: BTreeMap::new(),
            index: BTreeSet::new(),
            tails: BTreeSet::new(),
            holders: BTreeMap::new(),
            left: VecDeque::new(),
            is_closed: false,
            bytes: 0,
            count: 0,
        }
    }

    /// Adds a pin. Its worker may keep at most `blocks_max` blocks. Returns the pins that will not be
    /// read: those that this one supersedes, and the oldest ones beyond a bound.
    pub fn keep(&mut self, pin: Pin<T>, blocks_max: u64) -> Vec<(Pin<T>, PinEnd)> {
        if self.is_closed {
            return vec![(pin, PinEnd::Stopped)];
        }
        if pin.hashes.is_empty() {
            return vec![(pin, PinEnd::Unusable)];
        }
        if u64::from(pin.blocks) > blocks_max {
            return vec![(pin, PinEnd::Bound)];
        }
        let mut out = Vec::new();
        let mut within: Vec<u64> = Vec::new();
        for hash in &pin.hashes {
            within.extend(self.tails.range((*hash, 0)..=(*hash, u64::MAX)).map(|(_, id)| *id));
        }
        out.extend(
            within.into_iter().filter_map(|id| Some((self.remove(id)?, PinEnd::Superseded))),
        );
        let holder = pin.holder;
        out.extend(self.put(pin));
        while self.blocks(holder) > blocks_max {
            let oldest = self.holders.get(&holder).and_then(|(ids, _)| ids.first().copied());
            let Some(pin) = oldest.and_then(|id| self.remove(id)) else { break };
            out.push((pin, PinEnd::Bound));
        }
        while self.pins.len() > self.bounds.pins || self.bytes > self.bounds.bytes {
            let oldest = self.pins.first_key_value().map(|(id, _)| *id);
            let Some(pin) = oldest.and_then(|id| self.remove(id)) else { break };
            out.push((pin, PinEnd::Bound));
        }
        out
    }

    /// Adds a pin that was taken and not read. Returns it if the store is closed.
    pub fn put(&mut self, pin: Pin<T>) -> Option<(Pin<T>, PinEnd)> {
        if self.is_closed {
            return Some((pin, PinEnd::Stopped));
        }
        let id = self.count;
        self.count += 1;
        self.bytes += pin.bytes();
        let (ids, blocks) = self.holders.entry(pin.holder).or_default();
        ids.insert(id);
        *blocks += u64::from(pin.blocks);
        self.index.extend(pin.hashes.iter().map(|hash| (*hash, id)));
        self.tails.extend(pin.hashes.last().map(|hash| (*hash, id)));
        self.pins.insert(id, pin);
        None
    }

    /// Counts the blocks of a pin that is not in the store as kept until its engine frees them.
    pub fn leave(&mut self, pin: &Pin<T>) {
        let Pin { holder, process, blocks, freed, .. } = *pin;
        if self.left.len() >= LEFT_MAX
            && let Some(oldest) = self.left.pop_front()
        {
            uncount(&mut self.holders, oldest.holder, oldest.blocks);
        }
        self.holders.entry(holder).or_default().1 += u64::from(blocks);
        self.left.push_back(UnreadablePin { holder, process, blocks, freed });
    }

    /// Removes all pins, and adds none any more.
    pub fn close(&mut self) -> Vec<(Pin<T>, PinEnd)> {
        self.is_closed = true;
        self.retain(|_| Some(PinEnd::Stopped))
    }

    /// The pin that shares the most leading blocks with a prompt, of those that have not ended and
    /// that `may_read` allows. The newest one, if several share as many. Gives up after a few that
    /// have ended or are not allowed.
    pub fn find(
        &self,
        now: Instant,
        prompt: &[BlockHash],
        may_read: impl Fn(WorkerIndex, &T) -> bool,
    ) -> Option<ReadablePin> {
        // A pin with a block has all blocks before it. So there are pins that were not tried up to some
        // depth, and none beyond it.
        let mut tried = Vec::new();
        let mut depth = prompt.len();
        while tried.len() < TRIED_MAX {
            let newest = |hash: BlockHash| self.with(hash).rev().find(|id| !tried.contains(id));
            let blocks = prompt[..depth].partition_point(|hash| newest(*hash).is_some());
            let id = newest(*prompt.get(blocks.checked_sub(1)?)?)?;
            let pin = self.pins.get(&id)?;
            if pin.ends > now && may_read(pin.holder, &pin.payload) {
                return Some(ReadablePin { id, holder: pin.holder, blocks });
            }
            tried.push(id);
            depth = blocks;
        }
        None
    }

    /// What a pin that was found carries.
    pub fn payload(&self, found: ReadablePin) -> Option<&T> {
        self.pins.get(&found.id).map(|pin| &pin.payload)
    }

    /// Takes a pin out, to be read: it is found no more.
    pub fn take(&mut self, found: ReadablePin) -> Option<Pin<T>> {
        self.remove(found.id)
    }

    /// Removes the pins that have ended by now, which their workers have freed by themselves or are
    /// about to free. Their blocks count until they are freed.
    pub fn expire(&mut self, now: Instant) -> usize {
        let over: Vec<u64> =
            self.pins.iter().filter(|(_, pin)| pin.ends <= now).map(|(id, _)| *id).collect();
        let over: Vec<_> = over.into_iter().filter_map(|id| self.remove(id)).collect();
        over.iter().for_each(|pin| self.leave(pin));
        self.forget_left(|_, _, freed| freed <= now);
        over.len()
    }

    /// Counts the blocks of pins that were left no more whose worker, process and end satisfy `is_over`.
    pub fn forget_left(&mut self, is_over: impl Fn(WorkerIndex, u32, Instant) -> bool) {
        let holders = &mut self.holders;
        self.left.retain(|UnreadablePin { holder, process, blocks, freed }| {
            let is_over = is_over(*holder, *process, *freed);
            if is_over {
                uncount(holders, *holder, *blocks);
            }
            !is_over
        });
    }

    /// Removes the pins for which `is_lost` holds.
    pub fn retain(&mut self, is_lost: impl Fn(&Pin<T>) -> Option<PinEnd>) -> Vec<(Pin<T>, PinEnd)> {
        let lost: Vec<(u64, PinEnd)> =
            self.pins.iter().filter_map(|(id, pin)| Some((*id, is_lost(pin)?))).collect();
        lost.into_iter().filter_map(|(id, why)| Some((self.remove(id)?, why))).collect()
    }

    /// The number of blocks that a worker keeps.
    pub fn blocks(&self, holder: WorkerIndex) -> u64 {
        self.holders.get(&holder).map_or(0, |(_, blocks)| *blocks)
    }

    /// The number of pins.
    pub fn len(&self) -> usize {
        self.pins.len()
    }

    /// Whether there is no pin, and none was left.
    pub fn is_empty(&self) -> bool {
        self.pins.is_empty() && self.left.is_empty()
    }

    /// The pins that have a block, oldest first.
    fn with(&self, hash: BlockHash) -> impl DoubleEndedIterator<Item = u64> {
        self.index.range((hash, 0)..=(hash, u64::MAX)).map(|(_, id)| *id)
    }

    fn remove(&mut self, id: u64) -> Option<Pin<T>> {
        let pin = self.pins.remove(&id)?;
        self.bytes -= pin.bytes();
        for hash in &pin.hashes {
            self.index.remove(&(*hash, id));
        }
        if let Some(hash) = pin.hashes.last() {
            self.tails.remove(&(*hash, id));
        }
        if let Some((ids, _)) = self.holders.get_mut(&pin.holder) {
            ids.remove(&id);
        }
        uncount(&mut self.holders, pin.holder, pin.blocks);
        Some(pin)
    }
}

fn uncount(holders: &mut Holders, holder: WorkerIndex, blocks: u32) {
    if let Some((ids, sum)) = holders.get_mut(&holder) {
        *sum -= u64::from(blocks);
        if ids.is_empty() && *sum == 0 {
            holders.remove(&holder);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
