//! A hash of a whole configuration.

use super::model::Config;

impl Config {
    /// 48 bits that are the same for equal configurations, whatever their files look like, and
    /// hardly ever for others: a metric holds them exactly. Secrets are in it as the references
    /// that they are.
    #[must_use]
    pub fn digest(&self) -> u64 {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        // Members come in the order in which they are declared.
        let text = serde_json::to_vec(self).unwrap_or_default();
        // FNV-1a: stable over versions and machines, as the standard library's is not.
        let hash =
            text.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
        ((hash >> 48) ^ hash) & ((1 << 48) - 1)
    }
}
