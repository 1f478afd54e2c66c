//! A cache of the words that a thread has encoded recently, with their tokens.
//!
//! Each word belongs to one bucket, which keeps the words that were stored there last: the size of
//! the cache is fixed, whatever clients send. All clients share the buckets: how long a word takes
//! reveals, weakly, whether a recent request on the same thread contained the word
//! (docs/security.md).

use std::hint::select_unpredictable;

use splitrail_kv::prefetch::prefetch;
use xxhash_rust::xxh3::xxh3_64;

/// Number of buckets for short words, with two words and 64 bytes each.
const SHORT_BUCKETS: usize = 1 << 14;
/// Number of buckets for other words, with one word each of at most `LONG_BYTES` of text and
/// `LONG_TOKENS` tokens.
const LONG_BUCKETS: usize = 1 << 10;
const LONG_BYTES: usize = 64;
const LONG_TOKENS: usize = 24;
/// Maximum length in bytes of a word that fits into a key, and maximum number of its tokens.
const SHORT_BYTES: usize = 15;
pub(super) const SHORT_TOKENS: usize = 3;
/// The numbers of vocabularies are below this value.
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

/// A word of a text: its position and its key. The key is stored in halves, because the processor
/// stalls when it reads a whole value that was written in halves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Word {
    /// The first bytes; for a long word, a hash.
    low: u64,
    /// The other bytes and the length; for a long word 0.
    high: u64,
    bucket: u32,
    from: u32,
    to: u32,
}

impl Word {
    /// The word from byte `from` up to, but not including, byte `to`; `None` if it is empty or
    /// extends over the end of the text.
    #[inline(always)]
    pub(super) fn new(number: u32, text: &[u8], from: u32, to: u32) -> Option<Self> {
        let len = to.checked_sub(from)? as usize;
        let (low, high) = match text.get(from as usize..)?.first_chunk::<16>() {
            Some(chunk) if (1..=SHORT_BYTES).contains(&len) => Self::key(*chunk, len),
            _ => Self::rare_key(text.get(from as usize..to as usize)?)?,
        };
        let folded = low ^ high.rotate_left(32) ^ u64::from(number);
        let bucket = (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        Some(Self { low, high, bucket, from, to })
    }

    /// The key of a long word, or of a word at the end of the text; `None` if the word is empty.
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

    /// The word's bytes in its text.
    pub(super) fn bytes<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.from as usize..self.to as usize]
    }
}

/// A short word, whose bytes are its key, with its tokens.
#[derive(Clone, Copy)]
struct ShortWord {
    low: u64,
    high: u64,
    /// Four times the vocabulary's number plus the number of tokens, which is 1 to 3.
    number_and_count: u32,
    ids: [u32; SHORT_TOKENS],
}

impl ShortWord {
    #[inline]
    fn is(&self, number: u32, word: &Word) -> bool {
        let number = u64::from(self.number_and_count >> 2 ^ number);
        (self.low ^ word.low) | (self.high ^ word.high) | number == 0
    }
}

/// An empty entry.
const EMPTY: ShortWord = ShortWord { low: 0, high: 0, number_and_count: 0, ids: [0; SHORT_TOKENS] };

/// Two words, the one stored last first. One cache line in size and alignment.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([ShortWord; 2]);

#[derive(Clone)]
struct LongWord {
    number: u32,
    bytes: Box<[u8]>,
    ids: Box<[u32]>,
}

/// The cache of one thread.
pub(super) struct RecentWords {
    short: Box<[Bucket; SHORT_BUCKETS]>,
    long: Box<[Option<LongWord>; LONG_BUCKETS]>,
}

impl RecentWords {
    /// An empty cache.
    pub(super) fn new() -> Option<Self> {
        Some(Self { short: buckets(Bucket([EMPTY; 2]))?, long: buckets(None)? })
    }

    /// Prefetches a word's bucket, so that a look-up soon after is fast.
    #[inline]
    pub(super) fn prefetch(&self, word: &Word) {
        prefetch(&self.short[word.bucket as usize % SHORT_BUCKETS]);
    }

    /// The tokens of a short word, and how many of them are valid, if the word is cached.
    #[inline]
    pub(super) fn short(&self, number: u32, word: &Word) -> Option<(&[u32; SHORT_TOKENS], usize)> {
        let Bucket(bucket) = &self.short[word.bucket as usize % SHORT_BUCKETS];
        let (first, second) = (bucket[0].is(number, word), bucket[1].is(number, word));
        // The processor cannot predict which of the two entries matches.
        let short = select_unpredictable(first, &bucket[0], &bucket[1]);
        (first | second).then_some((&short.ids, (short.number_and_count & 3) as usize))
    }

    /// The tokens of a word that is not short, if the word is cached.
    pub(super) fn long(&self, number: u32, word: &Word, bytes: &[u8]) -> Option<&[u32]> {
        let long = self.long[word.bucket as usize % LONG_BUCKETS].as_ref()?;
        (long.number == number && *long.bytes == *bytes).then_some(&*long.ids)
    }

    /// Caches a word that is not in the cache.
    pub(super) fn keep(&mut self, number: u32, word: &Word, bytes: &[u8], ids: &[u32]) {
        if bytes.len() <= SHORT_BYTES && (1..=SHORT_TOKENS).contains(&ids.len()) {
            let mut kept = [0; SHORT_TOKENS];
            kept[..ids.len()].copy_from_slice(ids);
            let number_and_count = number << 2 | ids.len() as u32;
            let Bucket(bucket) = &mut self.short[word.bucket as usize % SHORT_BUCKETS];
            bucket[1] = bucket[0];
            bucket[0] = ShortWord { low: word.low, high: word.high, number_and_count, ids: kept };
        } else if bytes.len() <= LONG_BYTES && ids.len() <= LONG_TOKENS {
            let long = LongWord { number, bytes: bytes.into(), ids: ids.into() };
            self.long[word.bucket as usize % LONG_BUCKETS] = Some(long);
        }
    }
}

/// An array on the heap, which is too large to be built on a stack.
fn buckets<T: Clone, const COUNT: usize>(empty: T) -> Option<Box<[T; COUNT]>> {
    vec![empty; COUNT].into_boxed_slice().try_into().ok()
}
