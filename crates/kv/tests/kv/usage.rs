//! The values of overlaps, and the guarantees about figures.

use proptest::prelude::*;
use splitrail_kv::estimate_cached_tokens;

#[test]
fn the_last_token_is_always_computed() {
    // A fully cached prompt of 288 tokens in blocks of 32 reports 256.
    assert_eq!(estimate_cached_tokens(9, 288, 32), 256);
    assert_eq!(estimate_cached_tokens(9, 289, 32), 288);
    assert_eq!(estimate_cached_tokens(3, 288, 32), 96);
}

#[test]
fn an_empty_prompt_has_no_cached_tokens() {
    assert_eq!(estimate_cached_tokens(9, 0, 16), 0);
    assert_eq!(estimate_cached_tokens(9, 1, 1), 0);
    assert_eq!(estimate_cached_tokens(9, 100, 0), 0);
    assert_eq!(estimate_cached_tokens(0, 100, 16), 0);
}

proptest! {
    #[test]
    fn an_estimate_is_whole_blocks_of_the_overlap_and_less_than_the_prompt(
        overlap in any::<u32>(),
        prompt in prop_oneof![0_u32..1000, any::<u32>()],
        block_size in prop_oneof![1_u32..100, 1_u32..],
    ) {
        let cached = estimate_cached_tokens(overlap, prompt, block_size);
        prop_assert!(cached < prompt || (cached, prompt) == (0, 0));
        prop_assert_eq!(cached % block_size, 0);
        prop_assert!(cached / block_size <= overlap);
        // One more block would not fit, or is not held.
        let more = u64::from(cached) + u64::from(block_size);
        prop_assert!(cached / block_size == overlap || more >= u64::from(prompt));
    }
}
