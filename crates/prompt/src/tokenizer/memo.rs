//! A cache of the ids of prefixes: for a turn of a conversation, only the new text is tokenised.
//!
//! A text is cached in pieces, each under the whole text up to its end. So an entry needs only the
//! hashes of the blocks that the piece fills, which is a tenth of its text and ids. A prefix is
//! found by the root of its chain and by a keyed hash of 128 bits of its text: the duration of a
//! request reveals nothing, through this cache, about prompts with another salt. (Words are cached
//! for each thread for all clients; see `words/recent.rs`.) Two generations bound the memory:
//! entries that were not used while a generation filled up are dropped with the previous
//! generation.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use splitrail_kv::{BlockHash, Chain};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use rustc_hash::FxBuildHasher;

/// Number of independently locked parts of the cache.
const SHARDS: usize = 16;
/// Size in bytes of an entry without its hashes and ids.
const OVERHEAD_BYTES: usize = 160;

/// The cache of prefixes.
#[derive(Debug)]
pub(super) struct Memo {
    shards: [Mutex<Shard>; SHARDS],
    /// Maximum size in bytes of one generation of a shard.
    max_bytes: usize,
    /// A random number of this process, so that the place of an entry cannot be predicted. The hash
    /// is not cryptographic: whoever finds two texts with the same hash could have prompts with the
    /// same root placed by the wrong blocks, as with two blocks of equal block hashes, which have
    /// half as many bits.
    seed: u64,
}

/// The hash of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    low: u64,
    high: u64,
}

impl Key {
    /// The key of the prefix with one more piece. Different keys stay different after the same
    /// piece: one half is the seed of the next hash, and the other is added to it.
    #[must_use]
    pub(super) fn with(self, piece: &str) -> Self {
        let hash = xxh3_128_with_seed(piece.as_bytes(), self.low);
        let high =
            ((hash >> 64) as u64).wrapping_add(self.high.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { low: hash as u64, high }
    }
}

/// What a piece appends to a chain.
#[derive(Debug)]
struct Piece {
    tokens: usize,
    hashes: Box<[BlockHash]>,
    rest: Box<[u32]>,
}

impl Piece {
    fn bytes(&self) -> usize {
        size_of_val(&*self.hashes) + size_of_val(&*self.rest) + OVERHEAD_BYTES
    }
}

#[derive(Debug, Default)]
struct Shard {
    young: HashMap<Key, Arc<Piece>, FxBuildHasher>,
    old: HashMap<Key, Arc<Piece>, FxBuildHasher>,
    young_bytes: usize,
}

impl Shard {
    fn get(&mut self, key: Key, max_bytes: usize) -> Option<Arc<Piece>> {
        if let Some(piece) = self.young.get(&key) {
            return Some(Arc::clone(piece));
        }
        let piece = self.old.remove(&key)?;
        self.put(key, Arc::clone(&piece), max_bytes);
        Some(piece)
    }

    fn put(&mut self, key: Key, piece: Arc<Piece>, max_bytes: usize) {
        let bytes = piece.bytes();
        if self.young_bytes + bytes > max_bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += bytes;
        if let Some(before) = self.young.insert(key, piece) {
            self.young_bytes -= before.bytes();
        }
    }
}

impl Memo {
    /// An empty cache of at most this many bytes.
    pub(super) fn new(max_bytes: usize) -> Self {
        let seed = RandomState::new().hash_one(0);
        Self { shards: Default::default(), max_bytes: max_bytes / SHARDS / 2, seed }
    }

    /// The key of the empty prefix for chains with this root. Texts with different ids before them
    /// must have different values of `kind`.
    pub(super) fn start(&self, chain: &Chain, kind: bool) -> Key {
        Key { low: self.seed ^ u64::from(kind), high: chain.root().0 }
    }

    /// Appends the result of the last piece before `key` to a chain; `make` appends it if it is not
    /// cached.
    pub(super) fn append(
        &self,
        key: Key,
        chain: &mut Chain,
        make: impl FnOnce(&mut Chain) -> Option<()>,
    ) -> Option<()> {
        let shard = &self.shards[(key.high >> 32) as usize % SHARDS];
        let lock = || shard.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lock().get(key, self.max_bytes);
        if let Some(Piece { tokens, hashes, rest }) = found.as_deref() {
            chain.append_done(*tokens, hashes, rest);
            return Some(());
        }
        let (tokens, blocks) = (chain.tokens(), chain.hashes().len());
        make(chain)?;
        let piece = Piece {
            tokens: chain.tokens() - tokens,
            hashes: chain.hashes()[blocks..].into(),
            rest: chain.rest().into(),
        };
        if piece.bytes() <= self.max_bytes / 2 {
            lock().put(key, Arc::new(piece), self.max_bytes);
        }
        Some(())
    }

    /// Size in bytes of all entries.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        let of = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap();
            shard.young.values().chain(shard.old.values()).map(|piece| piece.bytes()).sum::<usize>()
        };
        self.shards.iter().map(of).sum()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use splitrail_kv::{HashSeed, Namespace};

    use super::*;

    fn chain(salt: &str) -> Chain {
        let namespace = Namespace { salt: Some(salt), model: "m", adapter: None, block_size: 4 };
        Chain::new(&namespace, HashSeed(7))
    }

    /// Tokenises a text of two pieces, and returns whether each of them had to be made.
    fn ask(memo: &Memo, salt: &str, kind: bool, text: [&str; 2]) -> (Chain, [bool; 2]) {
        let mut chain = chain(salt);
        let mut key = memo.start(&chain, kind);
        let made = text.map(|piece| {
            let mut made = false;
            let ids: Vec<u32> = piece.bytes().map(u32::from).collect();
            key = key.with(piece);
            let make = |chain: &mut Chain| {
                made = true;
                chain.append(&ids);
                Some(())
            };
            memo.append(key, &mut chain, make).unwrap();
            made
        });
        (chain, made)
    }

    #[test]
    fn a_piece_is_tokenised_once_per_prefix_and_tenant() {
        let memo = Memo::new(1 << 20);
        for (salt, kind, text, wanted) in [
            ("a", false, ["one two", " three"], [true, true]),
            ("a", false, ["one two", " three"], [false, false]),
            ("a", false, ["one two", " four"], [false, true]),
            ("a", false, ["one too", " three"], [true, true]),
            ("b", false, ["one two", " three"], [true, true]),
            ("a", true, ["one two", " three"], [true, true]),
            ("b", false, ["one two", " four"], [false, true]),
        ] {
            let (got, made) = ask(&memo, salt, kind, text);
            assert_eq!(made, wanted, "{salt} {kind} {text:?}");
            let mut all = chain(salt);
            all.append(&text.concat().bytes().map(u32::from).collect::<Vec<_>>());
            assert_eq!(
                (got.hashes(), got.rest(), got.tokens()),
                (all.hashes(), all.rest(), all.tokens())
            );
        }
        let mut chain = chain("a");
        let key = memo.start(&chain, false).with("x");
        assert_eq!(memo.append(key, &mut chain, |_| None), None);
        assert!(ask(&memo, "a", false, ["x", "y"]).1[0], "a failure is not cached");
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_entries_in_use() {
        let memo = Memo::new(1 << 18);
        let often = ["often ", "used"];
        ask(&memo, "a", false, often);
        for number in 0..4000 {
            ask(&memo, "a", false, [&format!("{number:200}"), ""]);
            assert_eq!(ask(&memo, "a", false, often).1, [false; 2], "{number}");
            assert!(memo.bytes() <= 1 << 18);
        }
        assert!(memo.bytes() > 1 << 16, "most of the memory is in use");
        ask(&memo, "a", false, [&"x".repeat(1 << 18), ""]);
        assert!(memo.bytes() <= 1 << 18, "an entry that is too large is not cached");
    }
}
