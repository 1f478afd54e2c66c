//! The ids of pieces of text, kept: what was tokenised once is looked up when it comes again,
//! so that a turn of a conversation pays for its new text only.
//!
//! A piece is found by all of its text and by whose it is: the time that a request takes tells
//! nobody what another tenant has sent. Two generations bound the memory: what was not asked
//! for while a generation filled up goes with the one before it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use xxhash_rust::xxh3::xxh3_64;

/// Whoever has a number of their own shares nothing with others here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tenant(pub u64);

/// Locks that are taken one at a time, each for some of the pieces.
const SHARDS: usize = 16;
/// What a piece takes beside its text and ids.
const OVERHEAD_BYTES: usize = 128;

/// Pieces and their ids.
#[derive(Debug)]
pub(super) struct Memo {
    shards: [Mutex<Shard>; SHARDS],
    /// Of one generation of a shard.
    max_bytes: usize,
}

/// Whose a piece is, and a hash of it. The map's own hash is keyed: nobody can choose where
/// their pieces go.
type Key = (Tenant, u64);

#[derive(Debug)]
struct Piece {
    text: Box<str>,
    ids: Box<[u32]>,
}

impl Piece {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&*self.ids) + OVERHEAD_BYTES
    }
}

#[derive(Debug, Default)]
struct Shard {
    young: HashMap<Key, Arc<Piece>>,
    old: HashMap<Key, Arc<Piece>>,
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
    /// Nothing yet, and never more than so many bytes.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { shards: Default::default(), max_bytes: max_bytes / SHARDS / 2 }
    }

    /// Appends a piece's ids, which `make` appends if they are not here.
    pub(super) fn append(
        &self,
        tenant: Tenant,
        text: &str,
        ids: &mut Vec<u32>,
        make: impl FnOnce(&mut Vec<u32>) -> Option<()>,
    ) -> Option<()> {
        let key = (tenant, xxh3_64(text.as_bytes()));
        let shard = &self.shards[(key.1 >> 32) as usize % SHARDS];
        let lock = || shard.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lock().get(key, self.max_bytes);
        if let Some(piece) = found.filter(|piece| *piece.text == *text) {
            ids.extend_from_slice(&piece.ids);
            return Some(());
        }
        let had = ids.len();
        make(ids)?;
        let piece = Piece { text: text.into(), ids: ids[had..].into() };
        if piece.bytes() <= self.max_bytes / 2 {
            lock().put(key, Arc::new(piece), self.max_bytes);
        }
        Some(())
    }

    /// Bytes of what is here.
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
    use super::*;

    /// The ids of a text, and whether they had to be made.
    fn ask(memo: &Memo, tenant: u64, text: &str) -> (Vec<u32>, bool) {
        let (mut ids, mut made) = (vec![7], false);
        let make = |ids: &mut Vec<u32>| {
            made = true;
            ids.extend(text.bytes().map(u32::from));
            Some(())
        };
        memo.append(Tenant(tenant), text, &mut ids, make).unwrap();
        (ids, made)
    }

    #[test]
    fn a_piece_is_made_once_for_each_tenant() {
        let memo = Memo::new(1 << 20);
        assert_eq!(ask(&memo, 1, "ab"), (vec![7, 97, 98], true));
        assert_eq!(ask(&memo, 1, "ab"), (vec![7, 97, 98], false));
        assert_eq!(ask(&memo, 2, "ab"), (vec![7, 97, 98], true), "and tells others nothing");
        assert_eq!(memo.append(Tenant(1), "x", &mut Vec::new(), |_| None), None);
        assert!(ask(&memo, 1, "x").1, "what failed is not kept");
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let memo = Memo::new(1 << 18);
        let often = "often used".repeat(20);
        ask(&memo, 0, &often);
        for number in 0..4000 {
            ask(&memo, 0, &format!("{number:200}"));
            assert!(!ask(&memo, 0, &often).1, "{number}");
            assert!(memo.bytes() <= 1 << 18);
        }
        assert!(memo.bytes() > 1 << 16, "most of the room is in use");
        ask(&memo, 0, &"x".repeat(1 << 18));
        assert!(memo.bytes() <= 1 << 18, "what is too long is not kept");
    }
}
