//! A hash of a whole configuration.

use super::model::Config;

impl Config {
    /// A hash of 48 bits, which a metric can represent exactly. Equal configurations have the same
    /// hash, even if their files differ in form; different ones almost never do. Secrets are hashed
    /// as the references in the file, not by their value.
    #[must_use]
    pub fn digest(&self) -> u64 {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        // Members are serialised in the order of their declaration.
        let text = serde_json::to_vec(self).unwrap_or_default();
        // FNV-1a is the same for all versions and machines; the hash of the standard library is
        // not.
        let hash =
            text.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
        ((hash >> 48) ^ hash) & ((1 << 48) - 1)
    }
}
