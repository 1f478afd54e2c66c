//! The diagnosis of canaries: which cause a difference in tokens or blocks is reported as.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn both(chat: &[u32], plain: &[u32]) -> Tokens {
    Tokens { chat: Some(chat.to_vec()), plain: Some(plain.to_vec()) }
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
        (Tokens { chat: None, plain: Some(PLAIN.to_vec()) }, None),
        (Tokens::default(), None),
    ] {
        assert_eq!(tokens(&ours, &engines), cause, "{engines:?}");
    }
    assert!(!is_compared(&ours, &Tokens::default()));
    assert!(is_compared(&ours, &Tokens { chat: None, plain: Some(Vec::new()) }));
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
const GOOD: Blocks = Blocks {
    wanted: 3,
    found: 3,
    unsalted: false,
    other_adapter: false,
    other_special: false,
    block_size: 16,
    engine_block_size: Some(16),
    cached_tokens: Some(0),
    is_truncated: false,
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
    assert_eq!(blocks(&GOOD), Verdict::Agree);
    // Hybrid engines report another size than that of the blocks they announce.
    assert_eq!(blocks(&Blocks { engine_block_size: Some(528), ..GOOD }), Verdict::Agree);
    let mixed = EventCounts { malformed: 7, parentless: 2, other_rank: 1, ..GOOD.witnessed };
    assert_eq!(blocks(&Blocks { witnessed: mixed, ..GOOD }), Verdict::Agree);
    assert_eq!(blocks(&Blocks { cached_tokens: None, ..GOOD }), Verdict::Agree);
}

#[test]
fn blocks_that_are_not_found_name_why() {
    let lost = Blocks { found: 0, witnessed: NONE, ..GOOD };
    for (seen, cause) in [
        (Blocks { unsalted: true, ..lost }, Cause::Salt),
        (Blocks { cached_tokens: Some(48), ..GOOD }, Cause::Salt),
        (Blocks { other_adapter: true, ..lost }, Cause::Adapter),
        (Blocks { other_special: true, ..lost }, Cause::SpecialTokens),
        (Blocks { engine_block_size: Some(32), ..lost }, Cause::BlockSize),
        (Blocks { witnessed: EventCounts { malformed: 1, ..NONE }, ..lost }, Cause::BlockSize),
        (Blocks { witnessed: EventCounts::default(), ..lost }, Cause::EventsAbsent),
        (Blocks { witnessed: EventCounts { other_rank: 1, ..NONE }, ..lost }, Cause::Rank),
        (Blocks { witnessed: EventCounts { parentless: 3, ..NONE }, ..lost }, Cause::UnknownParent),
        (lost, Cause::Unmatched),
        // Events of other requests say nothing about the canary's blocks.
        (Blocks { found: 0, ..GOOD }, Cause::Unmatched),
    ] {
        assert_eq!(blocks(&seen), Verdict::Differ(cause), "{seen:?}");
    }
}

#[test]
fn missing_blocks_with_other_possible_reasons_are_no_mismatch() {
    let part = Blocks { found: 1, ..GOOD };
    assert_eq!(blocks(&part), Verdict::Unclear("evicted"));
    let full = Blocks { found: 0, is_truncated: true, ..GOOD };
    assert_eq!(blocks(&full), Verdict::Unclear("over_limit"));
    let short = Blocks { wanted: 0, found: 0, ..GOOD };
    assert_eq!(blocks(&short), Verdict::Unclear("context_too_short"));
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
