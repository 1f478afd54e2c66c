//! Numbers that look random and are the same in every run.

use splitrail_kv::SplitMix64;

/// Mixes the bits of a number. Different numbers give different results.
pub(crate) fn mix(number: u64) -> u64 {
    SplitMix64::new(number).next_u64()
}
