//! Strips: the block hashes of a chain in order, divided into runs.
//!
//! A block's place in its strip never changes, however the strip is divided into runs later; so
//! workers refer to places.

use std::ops::Range;

use super::finder::Finder;
use super::sync::{AtomicU64, Ordering};
use super::words::{Address, Allocator, capacity_of};

/// The place of a block: its strip, and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub(super) strip: u32,
    pub(super) offset: u32,
}

#[derive(Debug, Default)]
struct Strip {
    at: u32,
    /// Number of blocks in use, from the first.
    len: u32,
    /// Number of blocks for which memory was last allocated.
    asked: u32,
    /// The starts of its runs, in order; empty for a free strip.
    pieces: Pieces,
}

/// The runs of a strip; usually one.
#[derive(Debug, Default)]
enum Pieces {
    #[default]
    None,
    One([(u32, u32); 1]),
    Many(Vec<(u32, u32)>),
}

impl Pieces {
    fn as_slice(&self) -> &[(u32, u32)] {
        match self {
            Self::None => &[],
            Self::One(piece) => piece,
            Self::Many(pieces) => pieces,
        }
    }
}

/// All strips, by number.
#[derive(Debug, Default)]
pub(super) struct Strips {
    strips: Vec<Strip>,
    free: Vec<u32>,
    /// The table from hashes to strips, once tracing was requested.
    finder: Option<Finder>,
}

impl Strips {
    /// Adds a strip of `len` blocks, which is not divided into runs yet.
    pub(super) fn add(
        &mut self,
        words: &mut Allocator,
        hashes: impl Iterator<Item = u64>,
        len: u32,
    ) -> u32 {
        let at = words.allocate(len as usize);
        fill(words.slice(at, len as usize), hashes);
        let strip = Strip { at: at.0, len, asked: len, pieces: Pieces::None };
        let number = match self.free.pop() {
            Some(free) => {
                self.strips[free as usize] = strip;
                free
            }
            None => {
                reserve_some(&mut self.strips);
                self.strips.push(strip);
                self.strips.len() as u32 - 1
            }
        };
        self.enter(words, number, 0..len);
        number
    }

    /// Enters all hashes in a table, and from now on every new one.
    pub(super) fn build_finder(&mut self, words: &Allocator) {
        let blocks = self.strips.iter().map(|strip| strip.len as usize).sum();
        // The old table is freed first, so that both never exist at the same time.
        self.finder = None;
        let mut finder = Finder::with_room(blocks, self.count());
        for strip in 0..self.count() {
            let Strip { at, len, .. } = self.strips[strip as usize];
            finder.add(strip, loaded(words.slice(Address(at), len as usize)));
        }
        self.finder = Some(finder);
    }

    /// The strips that may contain a hash, if there is a table.
    pub(super) fn with_hash(&self, hash: u64) -> impl Iterator<Item = u32> + '_ {
        self.finder.iter().flat_map(move |finder| finder.strips(hash))
    }

    /// Enters new blocks of a strip in the table.
    fn enter(&mut self, words: &Allocator, strip: u32, blocks: Range<u32>) {
        let Some(finder) = &mut self.finder else {
            return;
        };
        if !finder.has_room(blocks.len(), strip) {
            return self.build_finder(words);
        }
        let at = Address(self.strips[strip as usize].at).plus(blocks.start);
        finder.add(strip, loaded(words.slice(at, blocks.len())));
    }

    /// Removes blocks of a strip from the table before the blocks are removed.
    fn withdraw(&mut self, words: &Allocator, strip: u32, blocks: Range<u32>) {
        if let Some(finder) = &mut self.finder
            && !blocks.is_empty()
        {
            let at = Address(self.strips[strip as usize].at).plus(blocks.start);
            finder.remove(strip, loaded(words.slice(at, blocks.len())));
        }
    }

    pub(super) fn address(&self, strip: u32) -> Address {
        Address(self.strips[strip as usize].at)
    }

    /// Number of blocks of a strip.
    pub(super) fn len(&self, strip: u32) -> u32 {
        self.strips[strip as usize].len
    }

    pub(super) fn pieces(&self, strip: u32) -> &[(u32, u32)] {
        self.strips[strip as usize].pieces.as_slice()
    }

    /// The run that contains a place; the run may have become shorter since.
    #[inline]
    pub(super) fn run_at(&self, place: Place) -> Option<u32> {
        match &self.strips.get(place.strip as usize)?.pieces {
            Pieces::None => None,
            Pieces::One([(_, run)]) => Some(*run),
            Pieces::Many(pieces) => {
                let after = pieces.partition_point(|(start, _)| *start <= place.offset);
                Some(pieces[after.checked_sub(1)?].1)
            }
        }
    }

    #[inline]
    pub(super) fn hash(&self, words: &Allocator, place: Place) -> u64 {
        self.words(words, place, 1)[0].load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn words<'a>(&self, words: &'a Allocator, from: Place, len: u32) -> &'a [AtomicU64] {
        words.slice(self.address(from.strip).plus(from.offset), len as usize)
    }

    /// Notes that a run begins at a place.
    pub(super) fn begin(&mut self, strip: u32, start: u32, run: u32) {
        let pieces = &mut self.strips[strip as usize].pieces;
        match pieces {
            Pieces::None => *pieces = Pieces::One([(start, run)]),
            Pieces::One([one]) => {
                let mut many = vec![*one, (start, run)];
                many.sort_unstable();
                *pieces = Pieces::Many(many);
            }
            Pieces::Many(many) => {
                let at = many.partition_point(|piece| piece.0 < start);
                many.insert(at, (start, run));
            }
        }
    }

    /// Notes that a run was removed. Frees the strip with its last run; otherwise returns whether
    /// the run was the strip's end.
    pub(super) fn end(&mut self, words: &mut Allocator, strip: u32, run: u32) -> bool {
        let this = &mut self.strips[strip as usize];
        match &mut this.pieces {
            Pieces::Many(many) if many.len() > 1 => {
                let was_last = many.last().is_some_and(|piece| piece.1 == run);
                many.retain(|piece| piece.1 != run);
                if let [one] = many[..] {
                    this.pieces = Pieces::One([one]);
                }
                was_last
            }
            _ => {
                let (at, asked, len) = (this.at, this.asked, this.len);
                self.withdraw(words, strip, 0..len);
                words.free(Address(at), asked as usize);
                self.strips[strip as usize] = Strip::default();
                self.free.push(strip);
                false
            }
        }
    }

    /// Extends a strip to `len` blocks; returns the words to be freed if the strip had to move.
    pub(super) fn grow(
        &mut self,
        words: &mut Allocator,
        strip: u32,
        len: u32,
        hashes: impl Iterator<Item = u64>,
    ) -> Option<(Address, usize)> {
        let old_len = self.len(strip);
        let asked = self.strips[strip as usize].asked as usize;
        let moved =
            if capacity_of(asked) < len as usize { self.move_to(words, strip, len) } else { None };
        let at = self.address(strip).plus(old_len);
        fill(words.slice(at, (len - old_len) as usize), hashes);
        self.strips[strip as usize].len = len;
        self.enter(words, strip, old_len..len);
        moved
    }

    /// Shortens a strip to its first `len` blocks, and moves it if that frees half of its memory.
    pub(super) fn cut(
        &mut self,
        words: &mut Allocator,
        strip: u32,
        len: u32,
    ) -> Option<(Address, usize)> {
        self.withdraw(words, strip, len..self.len(strip).max(len));
        let this = &mut self.strips[strip as usize];
        this.len = len;
        if capacity_of(this.asked as usize) < 2 * capacity_of(len as usize) {
            return None;
        }
        self.move_to(words, strip, len)
    }

    /// Maximum number of strips that existed at the same time.
    pub(super) fn count(&self) -> u32 {
        self.strips.len() as u32
    }

    /// The words of a strip, if it is in use.
    pub(super) fn extent(&self, strip: u32) -> Option<(Address, usize)> {
        let this = &self.strips[strip as usize];
        let in_use = !matches!(this.pieces, Pieces::None);
        in_use.then_some((Address(this.at), this.asked as usize))
    }

    pub(super) fn set_address(&mut self, strip: u32, at: Address) {
        self.strips[strip as usize].at = at.0;
    }

    /// Memory of the strips in bytes, without the words.
    pub(super) fn bytes(&self) -> usize {
        let many = |strip: &Strip| match &strip.pieces {
            Pieces::Many(pieces) => pieces.capacity() * size_of::<(u32, u32)>(),
            _ => 0,
        };
        self.strips.capacity() * size_of::<Strip>()
            + self.free.capacity() * size_of::<u32>()
            + self.finder.as_ref().map_or(0, Finder::bytes)
            + self.strips.iter().map(many).sum::<usize>()
    }

    fn move_to(&mut self, words: &mut Allocator, strip: u32, len: u32) -> Option<(Address, usize)> {
        let Strip { at, len: old_len, asked, .. } = self.strips[strip as usize];
        let new = words.allocate(len as usize);
        let kept = old_len.min(len) as usize;
        let from = words.slice(Address(at), kept);
        fill(words.slice(new, kept), loaded(from));
        let this = &mut self.strips[strip as usize];
        (this.at, this.asked) = (new.0, len);
        Some((Address(at), asked as usize))
    }
}

fn loaded(words: &[AtomicU64]) -> impl Iterator<Item = u64> + '_ {
    words.iter().map(|word| word.load(Ordering::Relaxed))
}

/// Reserves room for one more item and for a quarter of the present number: doubling would leave
/// half of the memory unused when blocks come and go.
pub(super) fn reserve_some<T>(items: &mut Vec<T>) {
    if items.len() == items.capacity() {
        items.reserve_exact(items.len() / 4 + 16);
    }
}

fn fill(words: &[AtomicU64], hashes: impl Iterator<Item = u64>) {
    for (word, hash) in words.iter().zip(hashes) {
        word.store(hash, Ordering::Release);
    }
}
