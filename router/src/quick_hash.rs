//! A hash for keys that no client chooses: numbers of our own, addresses of workers.

use std::hash::{BuildHasher, Hasher};

/// Makes the hash of one key. It keeps nobody from choosing keys that meet.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuickHash;

/// One key's hash.
#[derive(Debug, Default)]
pub struct KeyHash(u64);

impl BuildHasher for QuickHash {
    type Hasher = KeyHash;

    fn build_hasher(&self) -> KeyHash {
        KeyHash::default()
    }
}

impl Hasher for KeyHash {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // Tables look at the upper bits and at the lower ones; these have seen less of the key.
        self.0 ^ (self.0 >> 32)
    }
}
