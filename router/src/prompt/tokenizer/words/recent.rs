//! Words that a thread has had lately, and their tokens.
//!
//! Each word has one place, and the last word that came there: the memory is what the table
//! takes, whoever sends what.

/// Places of short words, of 32 bytes each.
const SHORT_PLACES: usize = 1 << 14;
/// Places of other words, with up to so many bytes of text and so many tokens.
const LONG_PLACES: usize = 1 << 10;
const LONG_BYTES: usize = 64;
const LONG_TOKENS: usize = 24;
/// What fits into a key, and into a place beside it.
const SHORT_BYTES: usize = 15;
const SHORT_TOKENS: usize = 3;

/// A word, with what finds it.
pub(super) struct Word<'a> {
    pub(super) bytes: &'a [u8],
    /// Whose tokens are asked for.
    number: u32,
    /// The bytes and how many they are, if they fit; else a hash.
    key: u128,
    place: u64,
}

impl<'a> Word<'a> {
    /// The word that stands there in a text.
    pub(super) fn new(number: u32, text: &'a [u8], from: usize, to: usize) -> Self {
        let bytes = &text[from..to];
        let key = match (bytes.len(), text[from..].first_chunk::<16>()) {
            (len @ 1..=SHORT_BYTES, Some(chunk)) => {
                let kept = u128::MAX >> (128 - 8 * len as u32);
                (u128::from_le_bytes(*chunk) & kept) | (len as u128) << 120
            }
            (len @ 1..=SHORT_BYTES, None) => {
                let mut chunk = [0; 16];
                chunk[..len].copy_from_slice(bytes);
                chunk[15] = len as u8;
                u128::from_le_bytes(chunk)
            }
            _ => u128::from(xxhash_rust::xxh3::xxh3_64(bytes)),
        };
        let folded = key as u64 ^ ((key >> 64) as u64).rotate_left(32) ^ u64::from(number);
        let place = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        Self { bytes, number, key, place }
    }

    fn is_short(&self) -> bool {
        self.bytes.len() <= SHORT_BYTES
    }
}

/// A word whose bytes are its key.
#[derive(Clone, Copy)]
struct Short {
    key: u128,
    /// Whose tokens these are; of a place that is empty, nobody's.
    number: u32,
    ids: [u32; SHORT_TOKENS],
}

/// As many tokens as there are; the rest are no token.
const NO_TOKEN: u32 = u32::MAX;
const EMPTY: Short = Short { key: 0, number: 0, ids: [NO_TOKEN; SHORT_TOKENS] };

struct Long {
    number: u32,
    bytes: Box<[u8]>,
    ids: Box<[u32]>,
}

/// What one thread remembers.
pub(super) struct Recent {
    short: Vec<Short>,
    long: Vec<Option<Long>>,
}

impl Recent {
    /// Nothing, and no room for it yet: most threads have no words.
    pub(super) const fn new() -> Self {
        Self { short: Vec::new(), long: Vec::new() }
    }

    /// Appends the tokens of a word, if they are here.
    pub(super) fn append(&self, word: &Word<'_>, ids: &mut Vec<u32>) -> bool {
        if word.is_short() {
            let Some(place) = self.short.get(word.place as usize % SHORT_PLACES) else {
                return false;
            };
            if place.key == word.key && place.number == word.number {
                ids.push(place.ids[0]);
                ids.extend(place.ids[1..].iter().take_while(|id| **id != NO_TOKEN));
                return true;
            }
        }
        let long = self.long.get(word.place as usize % LONG_PLACES).and_then(Option::as_ref);
        let found = long.filter(|long| long.number == word.number && *long.bytes == *word.bytes);
        ids.extend_from_slice(found.map_or(&[], |long| &long.ids));
        found.is_some()
    }

    /// Remembers a word's tokens, which are not here.
    pub(super) fn keep(&mut self, word: &Word<'_>, ids: &[u32]) {
        if self.short.is_empty() {
            self.short = vec![EMPTY; SHORT_PLACES];
            self.long.resize_with(LONG_PLACES, || None);
        }
        if word.is_short() && (1..=SHORT_TOKENS).contains(&ids.len()) {
            let mut kept = [NO_TOKEN; SHORT_TOKENS];
            kept[..ids.len()].copy_from_slice(ids);
            let place = &mut self.short[word.place as usize % SHORT_PLACES];
            *place = Short { key: word.key, number: word.number, ids: kept };
        } else if word.bytes.len() <= LONG_BYTES && ids.len() <= LONG_TOKENS {
            let long = Long { number: word.number, bytes: word.bytes.into(), ids: ids.into() };
            self.long[word.place as usize % LONG_PLACES] = Some(long);
        }
    }
}
