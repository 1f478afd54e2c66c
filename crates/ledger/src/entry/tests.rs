//! Tests of a prompt's entry.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use splitrail_kv::Overlap;

use super::*;
use crate::leg::{Expectation, LegKind};

fn leg(kind: LegKind, prompt_tokens: Option<u32>, overlap_blocks: u32) -> LegFacts {
    let overlap = Overlap { blocks: overlap_blocks, by_tier: [overlap_blocks, 0, 0, 0] };
    let expected = Expectation { prompt_tokens, overlap, block_size: 16, ..Expectation::default() };
    LegFacts::new(kind, "w", expected)
}

fn usage(prompt_tokens: u32, cached_tokens: Option<u32>) -> EngineUsage {
    EngineUsage { prompt_tokens, completion_tokens: Some(4), cached_tokens }
}

#[test]
fn the_leg_that_did_the_prompt_says_what_was_cached() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, Some(1142), 0));
    entry.prefill_reported(Some(1142), Some(64));
    entry.decode_sent(leg(LegKind::Decode, Some(1142), 10));
    // vLLM 0.22 reports the whole prompt as cached on the decode leg.
    entry.decode_reported(usage(1142, Some(1142)));
    let cached = entry.cached().unwrap();
    assert_eq!(cached, CachedTokens { tokens: 64, source: Origin::EnginePrefill });
    let legs: Vec<_> = entry.legs().map(|(_, figures)| figures.unwrap()).collect();
    assert_eq!((legs[0].tokens.hit(), legs[0].tokens.local_compute), (64, 1078));
    assert_eq!((legs[1].tokens.hit(), legs[1].tokens.external_kv_transfer), (160, 982));
}

#[test]
fn a_silent_prefill_leaves_the_estimate_and_a_decode_first_hit_the_engines_figure() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, None, 4));
    entry.prefill_reported(None, None);
    entry.decode_sent(leg(LegKind::Decode, None, 0));
    assert_eq!(entry.cached(), None);
    entry.decode_reported(usage(100, Some(100)));
    assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 64, source: Origin::Estimate });
    let mut alone = Entry::default();
    alone.decode_sent(leg(LegKind::Decode, Some(100), 9));
    alone.decode_reported(usage(100, Some(0)));
    assert_eq!(alone.cached().unwrap(), CachedTokens { tokens: 0, source: Origin::EngineDecode });
}

#[test]
fn a_discarded_attempt_wastes_its_prompt_once() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
    // It is not known whether the engine has done any work.
    entry.discard("engine_failed");
    entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
    entry.prefill_reported(Some(100), Some(32));
    entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
    entry.worked(LegKind::Decode);
    entry.discard("decode_lost");
    entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
    entry.worked(LegKind::Decode);
    entry.close("decode_lost");
    // Later events do not change a closed entry.
    entry.discard("decode_lost");
    let wasted: Vec<_> = entry.discarded.iter().map(DiscardedLeg::wasted_prompt_tokens).collect();
    assert_eq!(wasted, [0, 100, 0, 100]);
    assert_eq!(entry.legs().count(), 0);
    assert_eq!(entry.cached(), None);
}

#[test]
fn a_prompt_that_is_turned_away_has_figures_and_no_legs() {
    let mut entry = Entry::default();
    entry.decode_sent(leg(LegKind::Decode, Some(100), 2));
    entry.worked(LegKind::Decode);
    let told = entry.end_decode_below_threshold(Some(EngineUsage {
        completion_tokens: Some(0),
        ..usage(100, Some(16))
    }));
    entry.discard("below_threshold");
    assert_eq!(entry.discarded[0].wasted_prompt_tokens(), 0, "the engine has run nothing");
    entry.answer_below_threshold(told.unwrap());
    assert_eq!((entry.prompt_tokens(), entry.completion_tokens), (Some(100), Some(0)));
    assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 16, source: Origin::EngineDecode });
    assert_eq!(entry.legs().count(), 0);
}

#[test]
fn a_prefill_that_serves_a_second_decode_leg_is_not_wasted_by_the_first() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
    entry.prefill_reported(Some(100), Some(0));
    entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
    entry.discard_decode("engine_unreachable");
    entry.decode_sent(leg(LegKind::Decode, Some(100), 0));
    entry.decode_reported(usage(100, None));
    assert_eq!(entry.legs().count(), 2);
    let [unsent] = &*entry.discarded else { panic!("{entry:?}") };
    assert_eq!((unsent.reason, unsent.wasted_prompt_tokens()), ("engine_unreachable", 0));
}

#[test]
fn an_answer_that_went_on_elsewhere_has_the_first_legs_prompt_and_both_legs_work() {
    let mut entry = Entry::default();
    entry.decode_sent(leg(LegKind::Decode, Some(100), 2));
    entry.worked(LegKind::Decode);
    entry.decode_resumed(leg(LegKind::Decode, Some(107), 1));
    entry.decode_reported(usage(107, Some(96)));
    entry.whole_reply(EngineUsage { completion_tokens: Some(11), ..usage(100, None) });
    assert_eq!((entry.prompt_tokens(), entry.completion_tokens), (Some(100), Some(11)));
    // The first leg's cached tokens were not reported, and the second leg's hits do not count
    // for them.
    assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 32, source: Origin::Estimate });
    let legs: Vec<_> = entry.legs().map(|(_, figures)| figures.unwrap()).collect();
    assert_eq!((legs[0].prompt_tokens, legs[0].tokens.local_compute), (100, 68));
    assert_eq!((legs[1].prompt_tokens, legs[1].tokens.local_compute), (107, 11));
    entry.discard("decode_lost");
    let wasted: Vec<_> = entry.discarded.iter().map(DiscardedLeg::wasted_prompt_tokens).collect();
    assert_eq!(wasted, [100, 107]);
}

#[test]
fn a_reply_of_the_prefill_leg_has_the_figures_of_that_leg() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
    entry.prefill_reported(Some(100), Some(32));
    assert_eq!(entry.prompt_tokens(), Some(100));
    assert_eq!(entry.cached().unwrap(), CachedTokens { tokens: 32, source: Origin::EnginePrefill });
}

/// The prompt, generated and wasted tokens of an entry whose client has left.
fn left(entry: &mut Entry) -> [Option<u32>; 3] {
    entry.close("cancelled");
    let wasted = entry.discarded.iter().map(DiscardedLeg::wasted_prompt_tokens).sum();
    [entry.prompt_tokens(), entry.completion_tokens, Some(wasted)]
}

#[test]
fn a_client_that_leaves_has_had_what_arrived_and_the_prompt_that_an_engine_had_begun() {
    let sent = |entry: &mut Entry| entry.decode_sent(leg(LegKind::Decode, Some(100), 2));
    let mut waiting = Entry::default();
    sent(&mut waiting);
    assert_eq!(left(&mut waiting), [None, None, Some(0)], "no engine has begun");
    assert!(!waiting.counts("cancelled"));

    let mut begun = Entry::default();
    sent(&mut begun);
    begun.begun(LegKind::Decode);
    assert_eq!(left(&mut begun), [Some(100), Some(0), Some(0)]);

    let mut streaming = Entry::default();
    sent(&mut streaming);
    streaming.discard_decode("engine_failed");
    sent(&mut streaming);
    streaming.worked(LegKind::Decode);
    for tokens in [1, 3, 1] {
        streaming.received(tokens, None);
    }
    assert_eq!(left(&mut streaming), [Some(100), Some(5), Some(0)]);
    assert!(streaming.counted_by_router && streaming.counts("cancelled"));
    assert_eq!(streaming.cached().unwrap(), CachedTokens { tokens: 32, source: Origin::Estimate });

    let mut prefilled = Entry::default();
    prefilled.prefill_sent(leg(LegKind::Prefill, Some(100), 0));
    prefilled.prefill_reported(Some(101), Some(16));
    sent(&mut prefilled);
    assert_eq!(left(&mut prefilled), [Some(101), Some(0), Some(0)]);
    let of_engine = CachedTokens { tokens: 16, source: Origin::EnginePrefill };
    assert_eq!(prefilled.cached().unwrap(), of_engine);
    assert_eq!((prefilled.legs().count(), prefilled.discarded.len()), (1, 1));
}

#[test]
fn a_client_that_leaves_has_the_engines_figures_as_far_as_the_engine_has_reported_them() {
    let streaming = || {
        let mut entry = Entry::default();
        entry.decode_sent(leg(LegKind::Decode, None, 2));
        entry.worked(LegKind::Decode);
        entry
    };
    let mut unknown = streaming();
    unknown.received(2, None);
    assert_eq!(left(&mut unknown), [None, Some(2), Some(0)]);
    assert!(unknown.counts("cancelled"), "what is not known is not free");

    let mut totals = streaming();
    totals.received(1, None);
    totals.received(1, Some(usage(90, None)));
    totals.received(1, None);
    assert_eq!(left(&mut totals), [Some(90), Some(5), Some(0)]);

    // A message begins with zeros if its engine does not know the figures yet.
    let mut opened = streaming();
    opened.received(0, Some(usage(0, None)));
    opened.received(1, None);
    assert_eq!(left(&mut opened), [None, Some(1), Some(0)]);

    let mut ended = streaming();
    ended.received(3, None);
    ended.decode_reported(usage(90, Some(16)));
    assert_eq!(left(&mut ended), [Some(90), Some(4), Some(0)]);
    assert!(!ended.counted_by_router);

    let mut moved = streaming();
    moved.received(7, None);
    moved.tokens_kept(5);
    moved.decode_resumed(leg(LegKind::Decode, Some(105), 0));
    moved.discard_decode("engine_failed");
    moved.decode_resumed(leg(LegKind::Decode, Some(105), 0));
    moved.received(2, None);
    assert_eq!(left(&mut moved)[1], Some(7), "what was generated again counts once");
}

#[derive(Clone, Copy, Debug)]
enum LedgerStep {
    PrefillSent,
    PrefillWorked,
    PrefillReported(Option<u32>, Option<u32>),
    DecodeSent,
    DecodeWorked,
    DecodeBegun,
    Received(u32),
    Resumed,
    DecodeReported(u32, Option<u32>),
    DiscardDecode,
    Discard,
}

fn step() -> impl Strategy<Value = LedgerStep> {
    let count = || proptest::option::of(0u32..500);
    prop_oneof![
        Just(LedgerStep::PrefillSent),
        Just(LedgerStep::PrefillWorked),
        (count(), count()).prop_map(|(prompt, cached)| LedgerStep::PrefillReported(prompt, cached)),
        Just(LedgerStep::DecodeSent),
        Just(LedgerStep::DecodeWorked),
        Just(LedgerStep::DecodeBegun),
        (0u32..9).prop_map(LedgerStep::Received),
        Just(LedgerStep::Resumed),
        (0u32..500, count())
            .prop_map(|(prompt, cached)| LedgerStep::DecodeReported(prompt, cached)),
        Just(LedgerStep::DiscardDecode),
        Just(LedgerStep::Discard),
    ]
}

fn take(entry: &mut Entry, step: LedgerStep, known: Option<u32>) -> usize {
    match step {
        LedgerStep::PrefillSent => entry.prefill_sent(leg(LegKind::Prefill, known, 3)),
        LedgerStep::PrefillWorked => entry.worked(LegKind::Prefill),
        LedgerStep::PrefillReported(prompt, cached) => entry.prefill_reported(prompt, cached),
        LedgerStep::DecodeSent => entry.decode_sent(leg(LegKind::Decode, known, 2)),
        LedgerStep::DecodeWorked => entry.worked(LegKind::Decode),
        LedgerStep::DecodeBegun => entry.begun(LegKind::Decode),
        LedgerStep::Received(tokens) => entry.received(tokens, None),
        LedgerStep::Resumed => entry.decode_resumed(leg(LegKind::Decode, known, 1)),
        LedgerStep::DecodeReported(prompt, cached) => entry.decode_reported(usage(prompt, cached)),
        LedgerStep::DiscardDecode => entry.discard_decode("x"),
        LedgerStep::Discard => entry.discard("x"),
    }
    usize::from(matches!(
        step,
        LedgerStep::PrefillSent | LedgerStep::DecodeSent | LedgerStep::Resumed
    ))
}

proptest! {
    #[test]
    fn after_any_events_each_leg_is_counted_once_as_used_or_wasted(
        steps in proptest::collection::vec(step(), 0..24),
        known in proptest::option::of(0u32..500),
        outcome in prop_oneof![Just("ok"), Just("cancelled"), Just("decode_lost")],
    ) {
        let mut entry = Entry::default();
        let sent: usize = steps.iter().map(|step| take(&mut entry, *step, known)).sum();
        entry.close(outcome);
        for late in [LedgerStep::PrefillSent, LedgerStep::DecodeReported(7, Some(7)), LedgerStep::Discard] {
            take(&mut entry, late, known);
        }
        prop_assert_eq!(entry.legs().count() + entry.discarded.len(), sent);
        prop_assert!(outcome != "decode_lost" || entry.legs().count() == 0);
        if outcome == "cancelled" {
            prop_assert_eq!(entry.completion_tokens.is_some(), entry.counts(outcome));
        }
        for (leg, figures) in entry.legs() {
            let Some(figures) = figures else { continue };
            prop_assert_eq!(figures.tokens.total(), figures.prompt_tokens);
            prop_assert!(leg.receives || figures.tokens.external_kv_transfer == 0);
        }
        for discarded in &entry.discarded {
            let wasted = discarded.wasted_prompt_tokens();
            prop_assert!(wasted == 0 || (discarded.leg.worked && !discarded.leg.receives));
        }
        if let Some(cached) = entry.cached() {
            prop_assert!(cached.tokens <= entry.prompt_tokens().unwrap());
        }
    }
}

#[test]
fn what_a_failed_attempt_has_left_in_a_cache_is_no_hit() {
    let cached_on = |worker: &str| {
        let mut entry = Entry::default();
        let prefill = |worker: &str, overlap_blocks| LegFacts {
            worker: worker.into(),
            ..leg(LegKind::Prefill, Some(239), overlap_blocks)
        };
        // The first attempt computes the prompt on p0, which held one block of it, and fails then.
        entry.prefill_sent(prefill("p0", 1));
        entry.prefill_reported(Some(239), Some(16));
        entry.decode_sent(leg(LegKind::Decode, Some(239), 0));
        entry.discard("engine_failed");
        entry.prefill_sent(prefill("p0", 14));
        entry.discard("engine_failed");
        entry.prefill_sent(prefill(worker, 14));
        entry.prefill_reported(Some(239), Some(224));
        let (_, figures) = entry.legs().next().unwrap();
        let tokens = figures.unwrap().tokens;
        assert_eq!(tokens.hit() + tokens.local_compute, 239);
        let told = entry.prefill.as_ref().unwrap().reported_cached_tokens();
        let cached = entry.cached().unwrap();
        assert_eq!(told, Some(cached.tokens), "in the headers of a stream");
        cached
    };
    let of_engine = CachedTokens { tokens: 224, source: Origin::EnginePrefill };
    assert_eq!(cached_on("p1"), of_engine, "another worker's cache is its own");
    assert_eq!(cached_on("p0"), CachedTokens { tokens: 16, source: Origin::EarlierAttempt });
}

#[test]
fn cached_tokens_are_at_most_the_prompt_whatever_engines_report() {
    let mut entry = Entry::default();
    entry.prefill_sent(leg(LegKind::Prefill, None, 0));
    entry.prefill_reported(Some(300), Some(200));
    entry.discard("engine_failed");
    entry.prefill_sent(leg(LegKind::Prefill, None, 0));
    entry.prefill_reported(Some(100), Some(250));
    assert_eq!(entry.cached(), Some(CachedTokens { tokens: 100, source: Origin::EarlierAttempt }));
}
