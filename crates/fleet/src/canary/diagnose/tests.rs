//! The diagnosis of canaries: which cause a difference in tokens or blocks is reported as.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn both(chat: &[u32], plain: &[u32]) -> CanaryTokens {
    CanaryTokens { chat: Some(chat.to_vec()), plain: Some(plain.to_vec()) }
}

const CHAT: [u32; 6] = [1, 9, 10, 11, 2, 12];
const PLAIN: [u32; 4] = [1, 9, 10, 11];

#[test]
fn tokens_name_what_differs() {
    let ours = both(&CHAT, &PLAIN);
    let other_text = [1, 8, 8, 11];
    for (engines, cause) in [
        (both(&CHAT, &PLAIN), None),
        // BOS is doubled by the template, omitted, or omitted only from plain text.
        (both(&[&[1], &CHAT[..]].concat(), &PLAIN), Some(Cause::SpecialTokens)),
        (both(&CHAT[1..], &PLAIN[1..]), Some(Cause::SpecialTokens)),
        (both(&CHAT, &PLAIN[1..]), Some(Cause::SpecialTokens)),
        // An EOS at the end, or both.
        (both(&CHAT, &[&PLAIN[..], &[2]].concat()), Some(Cause::SpecialTokens)),
        (both(&CHAT, &[&[7], &PLAIN[..], &[2]].concat()), Some(Cause::SpecialTokens)),
        (both(&[1, 9, 10, 11, 3, 12], &PLAIN), Some(Cause::Template)),
        (both(&[1, 5, 6, 7, 9, 10, 11, 2, 12], &PLAIN), Some(Cause::Template)),
        (both(&CHAT, &other_text), Some(Cause::Vocabulary)),
        (both(&[1, 8, 8, 11, 2, 12], &other_text), Some(Cause::Vocabulary)),
        (CanaryTokens { chat: None, plain: Some(PLAIN.to_vec()) }, None),
        (CanaryTokens::default(), None),
    ] {
        assert_eq!(tokens(&ours, &engines), cause, "{engines:?}");
    }
    assert!(!is_compared(&ours, &CanaryTokens::default()));
    assert!(is_compared(&ours, &CanaryTokens { chat: None, plain: Some(Vec::new()) }));
}

#[test]
fn without_tokens_the_count_is_a_hint() {
    assert_eq!(count(true, 100, Some(100)), None);
    assert_eq!(count(true, 100, None), None);
    assert_eq!(count(true, 100, Some(101)), Some(Cause::SpecialTokens));
    assert_eq!(count(true, 100, Some(90)), Some(Cause::Template));
    assert_eq!(count(false, 100, Some(90)), Some(Cause::Vocabulary));
}

/// Blocks that are found as expected.
const GOOD: CanaryBlocks = CanaryBlocks {
    wanted: 3,
    found: 3,
    unsalted: false,
    other_adapter: false,
    other_special: false,
    block_size: 16,
    engine_block_size: Some(16),
    cached_tokens: Some(0),
    is_truncated: false,
    lacks_full_attention: false,
    witnessed: EventCounts {
        events: 1,
        stored: 3,
        parentless: 0,
        malformed: 0,
        over_limit: 0,
        other_rank: 0,
    },
};
const NONE: EventCounts = EventCounts { stored: 0, ..GOOD.witnessed };

#[test]
fn blocks_that_are_found_agree_whatever_else_is_said() {
    assert_eq!(blocks(&GOOD), CanaryResult::Agree);
    // Hybrid engines report another size than that of the blocks they announce.
    assert_eq!(blocks(&CanaryBlocks { engine_block_size: Some(528), ..GOOD }), CanaryResult::Agree);
    let mixed = EventCounts { malformed: 7, parentless: 2, other_rank: 1, ..GOOD.witnessed };
    assert_eq!(blocks(&CanaryBlocks { witnessed: mixed, ..GOOD }), CanaryResult::Agree);
    assert_eq!(blocks(&CanaryBlocks { cached_tokens: None, ..GOOD }), CanaryResult::Agree);
}

#[test]
fn blocks_that_are_not_found_name_why() {
    let lost = CanaryBlocks { found: 0, witnessed: NONE, ..GOOD };
    for (seen, cause) in [
        (CanaryBlocks { unsalted: true, ..lost }, Cause::Salt),
        (CanaryBlocks { cached_tokens: Some(48), ..GOOD }, Cause::Salt),
        (CanaryBlocks { other_adapter: true, ..lost }, Cause::Adapter),
        (CanaryBlocks { other_special: true, ..lost }, Cause::SpecialTokens),
        (CanaryBlocks { engine_block_size: Some(32), ..lost }, Cause::BlockSize),
        (
            CanaryBlocks { witnessed: EventCounts { malformed: 1, ..NONE }, ..lost },
            Cause::BlockSize,
        ),
        (CanaryBlocks { witnessed: EventCounts::default(), ..lost }, Cause::EventsAbsent),
        (CanaryBlocks { witnessed: EventCounts { other_rank: 1, ..NONE }, ..lost }, Cause::Rank),
        (
            CanaryBlocks { witnessed: EventCounts { parentless: 3, ..NONE }, ..lost },
            Cause::UnknownParent,
        ),
        (CanaryBlocks { lacks_full_attention: true, ..lost }, Cause::NoFullAttention),
        (lost, Cause::Unmatched),
        // Events of other requests say nothing about the canary's blocks.
        (CanaryBlocks { found: 0, ..GOOD }, Cause::Unmatched),
    ] {
        assert_eq!(blocks(&seen), CanaryResult::Differ(cause), "{seen:?}");
    }
}

#[test]
fn missing_blocks_with_other_possible_reasons_are_no_mismatch() {
    let part = CanaryBlocks { found: 1, ..GOOD };
    assert_eq!(blocks(&part), CanaryResult::Unclear(UnclearReason::Evicted));
    let full = CanaryBlocks { found: 0, is_truncated: true, ..GOOD };
    assert_eq!(blocks(&full), CanaryResult::Unclear(UnclearReason::OverLimit));
    let short = CanaryBlocks { wanted: 0, found: 0, ..GOOD };
    assert_eq!(blocks(&short), CanaryResult::Unclear(UnclearReason::ContextTooShort));
}

proptest! {
    #[test]
    fn a_few_tokens_at_the_ends_are_special_and_no_change_within_is(
        cluster in prop::collection::vec(10u32..50, 3..40), before in 0usize..3, after in 0usize..3,
        at in 0usize..40,
    ) {
        let whole = [vec![1; before], cluster.clone(), vec![2; after]].concat();
        let expected = match before + after {
            0 => Difference::None,
            1 | 2 => Difference::Ends,
            _ => Difference::Other,
        };
        prop_assert_eq!(difference(&cluster, &whole), expected);
        prop_assert_eq!(difference(&whole, &cluster), expected);
        let mut changed = cluster.clone();
        let at = at % cluster.len();
        changed[at] += 100;
        prop_assert_eq!(difference(&cluster, &changed), Difference::Other);
    }
}
