//! The memory that readers read: words in chunks, addressed by number.
//!
//! Everything of variable length that a reader may need (block hashes, sets of workers, lists of
//! partial holders) is an extent of words here. Extents are reused as soon as they are freed: a
//! reader that still reads one gets words with another meaning, which it notices afterwards by the
//! run's version ([`super::run`]). So no reader ever waits, and no memory is retained for readers.

use std::sync::Arc;

use super::sync::{AtomicU64, Ordering};

/// Number of words in the largest chunk, and so in the longest extent.
pub(super) const CHUNK_WORDS: usize = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 16;
/// Number of words in the first chunk.
const FIRST_CHUNK_WORDS: usize = if cfg!(test) { 1 << 4 } else { 1 << 10 };
/// Maximum number of chunks that an address can name.
const CHUNKS_MAX: usize = 1 << (u32::BITS - CHUNK_BITS);

/// Maximum number of words in use; leaves room for fragmentation.
pub(super) const WORDS_MAX: usize = CHUNKS_MAX * CHUNK_WORDS / 8 * 7;

/// The start of an extent: the chunk's number and the word's position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address(pub(super) u32);

impl Address {
    pub(super) const NONE: Self = Self(u32::MAX);

    fn new(chunk: usize, place: usize) -> Self {
        Self(((chunk as u32) << CHUNK_BITS) | place as u32)
    }

    fn chunk(self) -> usize {
        (self.0 >> CHUNK_BITS) as usize
    }

    fn place(self) -> usize {
        self.0 as usize & (CHUNK_WORDS - 1)
    }

    /// The address `words` further, in the same extent.
    pub(super) fn plus(self, words: u32) -> Self {
        Self(self.0 + words)
    }
}

/// The chunks, from a reader's point of view.
#[derive(Clone, Debug, Default)]
pub(super) struct Words {
    chunks: Vec<Arc<[AtomicU64]>>,
    /// Maximum number of chunks that existed at the same time.
    numbers_used: usize,
    /// How often a chunk got the number of a dropped one.
    pub(super) reused: u64,
}

impl Words {
    /// The words of an extent; `None` if the address is out of date.
    #[inline]
    pub(super) fn get(&self, at: Address, words: usize) -> Option<&[AtomicU64]> {
        self.chunks.get(at.chunk())?.get(at.place()..)?.get(..words)
    }
}

/// Allocates extents; used by the writer.
#[derive(Debug)]
pub(super) struct Allocator {
    pub(super) words: Words,
    /// For each size class, the first free extent; each has the address of the next in its first
    /// word.
    free: [Address; CLASSES],
    /// One bit for each class that has free extents.
    free_classes: u128,
    /// Unused words of the last chunk.
    rest: (Address, usize),
    /// Number of words in free extents and in `rest`.
    free_words: usize,
    all_words: usize,
    /// Set if chunks were added since it was last read; true if one of them has a reused number.
    grown: Option<bool>,
}

/// Sizes up to this many words have a class each.
const EXACT: usize = 16;
/// Above that, each doubling is divided into eight classes, so at most an eighth is wasted.
const STEPS: usize = 8;
const CLASSES: usize = EXACT + (CHUNK_BITS as usize - 4) * STEPS;

fn class_of(words: usize) -> usize {
    debug_assert!((1..=CHUNK_WORDS).contains(&words));
    if words <= EXACT {
        return words - 1;
    }
    let octave = (usize::BITS - 1 - (words - 1).leading_zeros()) as usize;
    let step = ((words - 1) >> (octave - 3)) - STEPS;
    EXACT + (octave - 4) * STEPS + step
}

fn class_words(class: usize) -> usize {
    if class < EXACT {
        return class + 1;
    }
    let (octave, step) = ((class - EXACT) / STEPS + 4, (class - EXACT) % STEPS);
    (STEPS + step + 1) << (octave - 3)
}

/// The number of words that an extent of `words` actually has.
pub(super) fn capacity_of(words: usize) -> usize {
    class_words(class_of(words))
}

impl Default for Allocator {
    fn default() -> Self {
        Self {
            words: Words::default(),
            free: [Address::NONE; CLASSES],
            free_classes: 0,
            rest: (Address::NONE, 0),
            free_words: 0,
            all_words: 0,
            grown: None,
        }
    }
}

impl Allocator {
    /// Allocates an extent of at least `words` words (see [`capacity_of`]), with any content.
    pub(super) fn allocate(&mut self, words: usize) -> Address {
        let class = class_of(words);
        let fitting = self.free_classes >> class << class;
        if fitting != 0 {
            let found = fitting.trailing_zeros() as usize;
            let at = self.pop(found);
            self.give(at.plus(class_words(class) as u32), class_words(found) - class_words(class));
            return at;
        }
        let needed = class_words(class);
        if self.rest.1 < needed {
            self.add_chunk(needed);
        }
        let (at, left) = self.rest;
        self.rest = (at.plus(needed as u32), left - needed);
        self.free_words -= needed;
        at
    }

    /// Frees an extent that was allocated with `words`.
    pub(super) fn free(&mut self, at: Address, words: usize) {
        let class = class_of(words);
        self.push(at, class);
        self.free_words += class_words(class);
    }

    /// The words of an extent that is in use.
    pub(super) fn slice(&self, at: Address, words: usize) -> &[AtomicU64] {
        self.words.get(at, words).unwrap_or_default()
    }

    /// Whether chunks were added since the last call; if so, whether one has the number of a
    /// dropped chunk.
    pub(super) fn take_grown(&mut self) -> Option<bool> {
        std::mem::take(&mut self.grown)
    }

    /// Number of words in extents that are in use.
    pub(super) fn used_words(&self) -> usize {
        self.all_words - self.free_words
    }

    /// Number of words that are not in use.
    pub(super) fn free_words(&self) -> usize {
        self.free_words
    }

    /// Treats all existing words as not in use, and allocates only from new chunks; returns the
    /// numbers of the old chunks, whose words stay until they are dropped.
    pub(super) fn retire(&mut self) -> Vec<usize> {
        let words = std::mem::take(&mut self.words);
        let chunks = words.chunks.len();
        let old: Vec<usize> = (0..chunks).filter(|at| !words.chunks[*at].is_empty()).collect();
        *self = Self { words, ..Self::default() };
        old
    }

    /// Frees chunks to which no reader is directed any more; their numbers can be reused.
    pub(super) fn drop_chunks(&mut self, chunks: &[usize]) {
        for chunk in chunks {
            self.words.chunks[*chunk] = Arc::new([]);
        }
        while self.words.chunks.last().is_some_and(|chunk| chunk.is_empty()) {
            self.words.chunks.pop();
        }
    }

    /// Memory of the words in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.all_words * size_of::<u64>()
    }

    fn push(&mut self, at: Address, class: usize) {
        self.slice(at, 1)[0].store(u64::from(self.free[class].0), Ordering::Release);
        self.free[class] = at;
        self.free_classes |= 1 << class;
    }

    fn pop(&mut self, class: usize) -> Address {
        let at = self.free[class];
        let next = self.slice(at, 1)[0].load(Ordering::Relaxed);
        self.free[class] = Address(next as u32);
        if self.free[class] == Address::NONE {
            self.free_classes &= !(1 << class);
        }
        self.free_words -= class_words(class);
        at
    }

    /// Puts words without a class of their own into the free lists.
    fn give(&mut self, mut at: Address, mut words: usize) {
        while words > 0 {
            let mut class = class_of(words);
            if class_words(class) > words {
                class -= 1;
            }
            self.push(at, class);
            self.free_words += class_words(class);
            at = at.plus(class_words(class) as u32);
            words -= class_words(class);
        }
    }

    fn add_chunk(&mut self, needed: usize) {
        let (at, left) = std::mem::replace(&mut self.rest, (Address::NONE, 0));
        self.free_words -= left;
        self.give(at, left);
        let vacant = self.words.chunks.iter().position(|chunk| chunk.is_empty());
        let chunk = vacant.unwrap_or(self.words.chunks.len());
        assert!(chunk < CHUNKS_MAX, "more blocks than `is_full` allows");
        // An eighth of the present number, so that at most this much is unused.
        let words = self.all_words.next_power_of_two() / 8;
        let words = words.clamp(FIRST_CHUNK_WORDS, CHUNK_WORDS).max(needed.next_power_of_two());
        let new = (0..words).map(|_| AtomicU64::new(0)).collect();
        match vacant {
            Some(vacant) => self.words.chunks[vacant] = new,
            None => self.words.chunks.push(new),
        }
        let is_old = chunk < self.words.numbers_used;
        self.words.numbers_used = self.words.numbers_used.max(chunk + 1);
        self.words.reused += u64::from(is_old);
        self.rest = (Address::new(chunk, 0), words);
        self.free_words += words;
        self.all_words += words;
        self.grown = Some(is_old || self.grown.unwrap_or(false));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_sizes_and_waste_at_most_an_eighth() {
        for words in 1..=CHUNK_WORDS {
            let capacity = capacity_of(words);
            assert!(capacity >= words && capacity - words <= words / 8, "{words}: {capacity}");
            assert_eq!(class_of(capacity), class_of(words));
        }
        assert!(class_of(CHUNK_WORDS) < CLASSES && CLASSES <= 128);
        assert_eq!(class_words(class_of(CHUNK_WORDS)), CHUNK_WORDS);
    }

    #[test]
    fn extents_never_overlap_and_are_reused() {
        let mut allocator = Allocator::default();
        let mut held: Vec<(Address, usize)> = Vec::new();
        let mut state = 7_u64;
        for round in 0..4000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = (state >> 33) as usize;
            if round % 3 == 2 && !held.is_empty() {
                let (at, words) = held.swap_remove(draw % held.len());
                allocator.free(at, words);
            } else {
                let words = 1 + draw % 700;
                held.push((allocator.allocate(words), words));
            }
        }
        let used: usize = held.iter().map(|(_, words)| capacity_of(*words)).sum();
        assert_eq!(allocator.used_words(), used);
        let mut ranges: Vec<_> =
            held.iter().map(|(at, words)| (at.0, at.0 + capacity_of(*words) as u32)).collect();
        ranges.sort_unstable();
        assert!(ranges.is_sorted_by(|before, after| before.1 <= after.0));
        for (at, words) in held.drain(..) {
            allocator.free(at, words);
        }
        assert_eq!((allocator.used_words(), allocator.free_words()), (0, allocator.all_words));
    }
}
