//! A cache of the words that a thread has encoded recently, and their tokens.
//!
//! Each word belongs to one shelf, which keeps the words that were put there last: the memory is that of the
//! shelves, whatever clients send. All clients share the shelves: how long a word takes reveals,
//! weakly, whether a request on the same thread had it recently (docs/security.md).

use std::hint::select_unpredictable;

use splitrail_kv::prefetch::prefetch;
use xxhash_rust::xxh3::xxh3_64;

/// Shelves of short words, of two words and 64 bytes each.
const SHORT_SHELVES: usize = 1 << 14;
/// Shelves of other words, of one each, with up to so many bytes of text and so many tokens.
const LONG_SHELVES: usize = 1 << 10;
const LONG_BYTES: usize = 64;
const LONG_TOKENS: usize = 24;
/// What fits into a key, and beside it.
const SHORT_BYTES: usize = 15;
pub(super) const SHORT_TOKENS: usize = 3;
/// Vocabularies have numbers below this one.
pub(super) const NUMBERS: u32 = 1 << 30;

/// Masks of a key's first bytes.
const FIRST_BYTES: [[u64; 2]; SHORT_BYTES + 1] = {
    let mut masks = [[0; 2]; SHORT_BYTES + 1];
    let mut len = 1;
    while len <= SHORT_BYTES {
        masks[len] = masks[len - 1];
        masks[len][(len - 1) / 8] = masks[len][(len - 1) / 8] << 8 | 0xff;
        len += 1;
    }
    masks
};

/// A word of a text: where it stands, and what finds it, in halves: what is written by halves and
/// read as a whole waits for itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Word {
    /// The first bytes; of a long word a hash.
    low: u64,
    /// The others, and how many they are in all; of a long word 0.
    high: u64,
    shelf: u32,
    from: u32,
    to: u32,
}

impl Word {
    /// The word that stands there; none if it is empty or the text ends before it.
    #[inline(always)]
    pub(super) fn new(number: u32, text: &[u8], (from, to): (u32, u32)) -> Option<Self> {
        let len = to.checked_sub(from)? as usize;
        let (low, high) = match text.get(from as usize..)?.first_chunk::<16>() {
            Some(chunk) if (1..=SHORT_BYTES).contains(&len) => Self::key(*chunk, len),
            _ => Self::rare_key(text.get(from as usize..to as usize)?)?,
        };
        let folded = low ^ high.rotate_left(32) ^ u64::from(number);
        let shelf = (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        Some(Self { low, high, shelf, from, to })
    }

    /// That of a long word, or of one at the end of the text. An empty one has none.
    #[cold]
    #[inline(never)]
    fn rare_key(bytes: &[u8]) -> Option<(u64, u64)> {
        if bytes.len() > SHORT_BYTES {
            return Some((xxh3_64(bytes), 0));
        }
        let mut chunk = [0; 16];
        chunk[..bytes.len()].copy_from_slice(bytes);
        (!bytes.is_empty()).then(|| Self::key(chunk, bytes.len()))
    }

    #[inline(always)]
    fn key(chunk: [u8; 16], len: usize) -> (u64, u64) {
        let chunk = u128::from_le_bytes(chunk);
        let [low, high] = FIRST_BYTES[len];
        (chunk as u64 & low, (chunk >> 64) as u64 & high | (len as u64) << 56)
    }

    /// Its bytes, in the text that it is of.
    pub(super) fn bytes<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.from as usize..self.to as usize]
    }
}

/// A word whose bytes are its key.
#[derive(Clone, Copy)]
struct Short {
    low: u64,
    high: u64,
    /// Whose tokens these are, four times, and how many: of most words one, two or three.
    number_and_count: u32,
    ids: [u32; SHORT_TOKENS],
}

impl Short {
    #[inline]
    fn is(&self, number: u32, word: &Word) -> bool {
        let number = u64::from(self.number_and_count >> 2 ^ number);
        (self.low ^ word.low) | (self.high ^ word.high) | number == 0
    }
}

/// Nobody's.
const EMPTY: Short = Short { low: 0, high: 0, number_and_count: 0, ids: [0; SHORT_TOKENS] };

/// The last word first. As long as a line of the processor's cache, and on one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Shelf([Short; 2]);

#[derive(Clone)]
struct Long {
    number: u32,
    bytes: Box<[u8]>,
    ids: Box<[u32]>,
}

/// What one thread remembers.
pub(super) struct Recent {
    short: Box<[Shelf; SHORT_SHELVES]>,
    long: Box<[Option<Long>; LONG_SHELVES]>,
}

impl Recent {
    /// Nothing yet.
    pub(super) fn new() -> Option<Self> {
        Some(Self { short: shelves(Shelf([EMPTY; 2]))?, long: shelves(None)? })
    }

    /// Has a word's shelf fetched, which is then near when the word is asked for.
    #[inline]
    pub(super) fn prefetch(&self, word: &Word) {
        prefetch(&self.short[word.shelf as usize % SHORT_SHELVES]);
    }

    /// Tokens of a short word, and how many of them are its own, if they are here.
    #[inline]
    pub(super) fn short(&self, number: u32, word: &Word) -> Option<(&[u32; SHORT_TOKENS], usize)> {
        let Shelf(shelf) = &self.short[word.shelf as usize % SHORT_SHELVES];
        let (first, second) = (shelf[0].is(number, word), shelf[1].is(number, word));
        // Which of the two it is nobody can foresee.
        let short = select_unpredictable(first, &shelf[0], &shelf[1]);
        (first | second).then_some((&short.ids, (short.number_and_count & 3) as usize))
    }

    /// Tokens of a word that is not among the short ones, if they are here.
    pub(super) fn long(&self, number: u32, word: &Word, bytes: &[u8]) -> Option<&[u32]> {
        let long = self.long[word.shelf as usize % LONG_SHELVES].as_ref()?;
        (long.number == number && *long.bytes == *bytes).then_some(&*long.ids)
    }

    /// Remembers a word's tokens, which are not here.
    pub(super) fn keep(&mut self, number: u32, word: &Word, bytes: &[u8], ids: &[u32]) {
        if bytes.len() <= SHORT_BYTES && (1..=SHORT_TOKENS).contains(&ids.len()) {
            let mut kept = [0; SHORT_TOKENS];
            kept[..ids.len()].copy_from_slice(ids);
            let number_and_count = number << 2 | ids.len() as u32;
            let Shelf(shelf) = &mut self.short[word.shelf as usize % SHORT_SHELVES];
            shelf[1] = shelf[0];
            shelf[0] = Short { low: word.low, high: word.high, number_and_count, ids: kept };
        } else if bytes.len() <= LONG_BYTES && ids.len() <= LONG_TOKENS {
            let long = Long { number, bytes: bytes.into(), ids: ids.into() };
            self.long[word.shelf as usize % LONG_SHELVES] = Some(long);
        }
    }
}

/// An array that is never on a stack, for which it is too large.
fn shelves<T: Clone, const COUNT: usize>(empty: T) -> Option<Box<[T; COUNT]>> {
    vec![empty; COUNT].into_boxed_slice().try_into().ok()
}
