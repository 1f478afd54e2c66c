//! SplitMix64: pseudo-random numbers that are the same on every machine. The keys of block hashes,
//! seeded decisions and simulations come from it, so it must never change.

/// The finalizer of SplitMix64: similar inputs give unrelated outputs, and different inputs
/// different ones.
#[must_use]
pub const fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The sequence of numbers that SplitMix64 makes of a seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// By how much the state grows with each number. Threads that share a counter of this step share
    /// one sequence.
    pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// The sequence of this seed. The state after a number is the seed of the rest.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        mix(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_published_generator() {
        // As java.util.SplittableRandom and the reference in C give them for this seed.
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        let mut numbers = SplitMix64::new(1_234_567);
        assert_eq!(expected.map(|_| numbers.next_u64()), expected);
    }
}
