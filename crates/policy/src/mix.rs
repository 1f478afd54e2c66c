//! A hash of numbers, for pseudo-random choices that must be reproducible everywhere.

/// The finalizer of SplitMix64: similar inputs give unrelated outputs.
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
