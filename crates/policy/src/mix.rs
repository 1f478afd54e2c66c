//! A hash of numbers, for choices that must be the same wherever they are made.

/// The finalizer of SplitMix64: numbers that differ a little become numbers that have nothing
/// in common.
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
