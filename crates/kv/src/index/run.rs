//! A run: consecutive blocks of one chain and the workers that hold them, in one cache line.
//!
//! # How readers and the writer work together
//!
//! There is one writer. Each of its stores leads from one valid state of a run to another valid
//! one, and the version is raised after each. A reader reads the version, reads what it needs, and
//! reads the version again: if the version is unchanged, the reader has seen one state; otherwise
//! it reads the run again. So a writer that is paused at any point delays no reader.
//!
//! Valid states overlap on purpose: a worker may for a moment be both a full and a partial holder
//! (then it counts as full), and a partial holder's number of blocks may reach to the run's end or
//! beyond it (then it holds the whole run).

use super::sync::{AtomicU32, AtomicU64, Ordering, fence};
use super::words::Address;

/// The part of a run that readers use. Fields are changed only through methods, which raise the
/// version.
#[repr(align(64))]
#[derive(Debug)]
pub(super) struct Run {
    version: AtomicU32,
    /// Number of blocks.
    len: AtomicU32,
    /// The address of its blocks' hashes.
    strip: AtomicU32,
    /// Hash of the first block.
    first: AtomicU64,
    /// Hash of the last block: if it is equal, everything before is equal as well.
    last: AtomicU64,
    /// Workers that hold all of it in their fastest tier: a [`FullHolders`].
    full: AtomicU64,
    /// Workers that hold a prefix of it: a [`List`] of [`PartialHolder`].
    partial: AtomicU64,
    /// Where holders' blocks are not in the fastest tier: a [`List`] of [`Stretch`].
    tiers: AtomicU64,
}

/// The fields of a run that a reader reads first.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) version: u32,
    pub(super) len: u32,
    pub(super) strip: Address,
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) full: FullHolders,
    pub(super) partial: List,
    pub(super) tiers: List,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            version: AtomicU32::new(0),
            len: AtomicU32::new(0),
            strip: AtomicU32::new(Address::NONE.0),
            first: AtomicU64::new(0),
            last: AtomicU64::new(0),
            full: AtomicU64::new(FullHolders::EMPTY.0),
            partial: AtomicU64::new(List::EMPTY.0),
            tiers: AtomicU64::new(List::EMPTY.0),
        }
    }
}

impl Run {
    /// Reads the fields; they are consistent only if [`Run::unchanged`] is true afterwards.
    #[inline]
    pub(super) fn view(&self) -> View {
        View {
            version: self.version.load(Ordering::Acquire),
            len: self.len.load(Ordering::Acquire),
            strip: Address(self.strip.load(Ordering::Acquire)),
            first: self.first.load(Ordering::Acquire),
            last: self.last.load(Ordering::Acquire),
            full: FullHolders(self.full.load(Ordering::Acquire)),
            partial: List(self.partial.load(Ordering::Acquire)),
            tiers: List(self.tiers.load(Ordering::Acquire)),
        }
    }

    /// Whether everything read since the view with that version belongs to one state.
    #[inline]
    pub(super) fn unchanged(&self, version: u32) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// Whether its first block has this hash, without checking the version.
    #[inline]
    pub(super) fn begins_with(&self, hash: u64) -> bool {
        self.first.load(Ordering::Acquire) == hash
    }

    pub(super) fn len(&self) -> u32 {
        self.len.load(Ordering::Relaxed)
    }

    pub(super) fn first(&self) -> u64 {
        self.first.load(Ordering::Relaxed)
    }

    pub(super) fn full(&self) -> FullHolders {
        FullHolders(self.full.load(Ordering::Relaxed))
    }

    pub(super) fn partial(&self) -> List {
        List(self.partial.load(Ordering::Relaxed))
    }

    pub(super) fn tiers(&self) -> List {
        List(self.tiers.load(Ordering::Relaxed))
    }

    pub(super) fn set_len(&self, len: u32, last: u64) {
        self.len.store(len, Ordering::Release);
        self.raise();
        // Until here length and last hash disagree, and readers compare block by block.
        self.last.store(last, Ordering::Release);
        self.raise();
    }

    pub(super) fn set_strip(&self, at: Address) {
        self.strip.store(at.0, Ordering::Release);
        self.raise();
    }

    pub(super) fn set_full(&self, full: FullHolders) {
        self.full.store(full.0, Ordering::Release);
        self.raise();
    }

    pub(super) fn set_partial(&self, list: List) {
        self.partial.store(list.0, Ordering::Release);
        self.raise();
    }

    pub(super) fn set_tiers(&self, list: List) {
        self.tiers.store(list.0, Ordering::Release);
        self.raise();
    }

    /// Turns it into a run of other blocks, which no worker holds. No reader is directed here
    /// meanwhile, and one that still reads it notices the raised version.
    pub(super) fn renew(&self, strip: Address, len: u32, first: u64, last: u64) {
        self.raise();
        self.first.store(first, Ordering::Release);
        self.raise();
        self.full.store(FullHolders::EMPTY.0, Ordering::Release);
        self.partial.store(List::EMPTY.0, Ordering::Release);
        self.tiers.store(List::EMPTY.0, Ordering::Release);
        self.set_strip(strip);
        self.set_len(len, last);
    }

    /// Raises the version, after a change of the run's words.
    pub(super) fn raise(&self) {
        let next = self.version.load(Ordering::Relaxed).wrapping_add(1);
        self.version.store(next, Ordering::Release);
    }
}

/// The set of workers that hold a whole run: up to four slots in place, or a row of bits in the
/// words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FullHolders(pub(super) u64);

/// Slot numbers are below this value.
pub(super) const SLOTS_MAX: u16 = ROW;
const ROW: u16 = 0xfffe;
const NO_SLOT: u16 = 0xffff;
/// Number of slots that fit in place.
pub(super) const IN_PLACE: usize = 4;

impl FullHolders {
    pub(super) const EMPTY: Self = Self(u64::MAX);

    pub(super) fn of(slots: &[u16]) -> Self {
        let mut lanes = [NO_SLOT; IN_PLACE];
        lanes[..slots.len()].copy_from_slice(slots);
        Self(lanes.iter().rev().fold(0, |word, lane| word << 16 | u64::from(*lane)))
    }

    pub(super) fn row(at: Address, words: usize) -> Self {
        Self(u64::from(ROW) << 48 | (words as u64) << 32 | u64::from(at.0))
    }

    /// The address of its bits and their number of words, if they are not in place.
    #[inline]
    pub(super) fn as_row(self) -> Option<(Address, usize)> {
        let is_row = (self.0 >> 48) as u16 == ROW;
        is_row.then_some((Address(self.0 as u32), (self.0 >> 32) as usize & 0xffff))
    }

    /// The slots in place.
    #[inline]
    pub(super) fn slots(self) -> impl Iterator<Item = u16> {
        (0..IN_PLACE).map(move |lane| (self.0 >> (16 * lane)) as u16).filter(|slot| *slot < ROW)
    }
}

/// A list in the words (address and number of words), or a single [`PartialHolder`] in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct List(pub(super) u64);

const SINGLE: u64 = 1 << 63;

impl List {
    pub(super) const EMPTY: Self = Self(0);

    pub(super) fn of(at: Address, count: usize) -> Self {
        Self((count as u64) << 32 | u64::from(at.0))
    }

    pub(super) fn single(partial: PartialHolder) -> Self {
        Self(SINGLE | partial.0)
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    #[inline]
    pub(super) fn as_single(self) -> Option<PartialHolder> {
        (self.0 & SINGLE != 0).then_some(PartialHolder(self.0 & !SINGLE))
    }

    /// Address and length of a list that is not a single entry.
    #[inline]
    pub(super) fn extent(self) -> (Address, usize) {
        (Address(self.0 as u32), (self.0 >> 32) as usize)
    }
}

/// A worker that holds the first blocks of a run: its slot in the upper half, their number in the
/// lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartialHolder(pub(super) u64);

impl PartialHolder {
    pub(super) fn new(slot: u16, blocks: u32) -> Self {
        Self(u64::from(slot) << 32 | u64::from(blocks))
    }

    #[inline]
    pub(super) fn slot(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    pub(super) fn blocks(self) -> u32 {
        self.0 as u32
    }
}

/// From block `start` of a run on, a worker's fastest tier is this, up to its next stretch. A
/// worker's stretches are adjacent and in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch(pub(super) u64);

impl Stretch {
    pub(super) fn new(slot: u16, tier: u8, start: u32) -> Self {
        Self(u64::from(slot) << 40 | u64::from(tier) << 32 | u64::from(start))
    }

    pub(super) fn slot(self) -> u16 {
        (self.0 >> 40) as u16
    }

    pub(super) fn tier(self) -> u8 {
        (self.0 >> 32) as u8
    }

    pub(super) fn start(self) -> u32 {
        self.0 as u32
    }
}
