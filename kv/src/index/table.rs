//! The hash table of the index: deterministic, and giving memory back.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A map whose keys are hashes already.
pub(super) type Table<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

/// Tables below this capacity are never shrunk: nothing to gain.
const SHRINK_FLOOR: usize = 64;

/// Mixes a 64-bit key with one wide multiplication.
///
/// The standard hasher is keyed at random, which this crate must not be; and
/// engines may number their blocks in sequence, so the key alone will not do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0 ^ value ^ MULTIPLIER) * u128::from(MULTIPLIER);
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// Gives memory back once a table is three quarters empty.
///
/// Half of what remains stays free, so the cost per removal is constant on
/// average and a table which shrinks and grows again does not thrash.
pub(super) fn shrink<K: Eq + Hash, V>(table: &mut Table<K, V>) {
    if table.capacity() > SHRINK_FLOOR + table.len() * 4 {
        table.shrink_to(table.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_drained_table_gives_its_memory_back() {
        let mut table: Table<u64, u64> = Table::default();
        for key in 0..100_000 {
            table.insert(key, key);
        }
        let full = table.capacity();
        for key in 0..99_990 {
            table.remove(&key);
            shrink(&mut table);
        }
        assert!(full >= 100_000);
        assert!(table.capacity() <= SHRINK_FLOOR + 4 * table.len());
        assert!((99_990..100_000).all(|key| table[&key] == key));
    }

    #[test]
    fn keys_in_sequence_spread_over_low_and_high_bits() {
        let hash = |key: u64| {
            let mut hasher = KeyHasher::default();
            hasher.write_u64(key);
            hasher.finish()
        };
        let low: std::collections::BTreeSet<_> = (0..256).map(|key| hash(key) & 0xff).collect();
        let high: std::collections::BTreeSet<_> = (0..256).map(|key| hash(key) >> 56).collect();
        assert!(low.len() > 100, "{} low bytes", low.len());
        assert!(high.len() > 100, "{} high bytes", high.len());
    }
}
