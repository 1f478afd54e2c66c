//! Tests of a leg's figures.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn overlap(by_tier: [u32; Tier::COUNT]) -> Overlap {
    Overlap { blocks: by_tier.iter().sum(), by_tier }
}

#[test]
fn hits_are_spread_over_the_tiers_that_the_index_knows_fastest_first() {
    let expected = Expectation {
        overlap: overlap([2, 3, 0, 1]),
        block_size: 16,
        prompt_tokens: Some(200),
        ..Expectation::default()
    };
    assert_eq!(expected.by_tier(expected.cached_tokens(200)), [32, 48, 0, 16]);
    assert_eq!(expected.by_tier(40), [32, 8, 0, 0]);
    // Hits that are not in the index count as found in the engine's own memory.
    assert_eq!(expected.by_tier(128), [64, 48, 0, 16]);
}

#[test]
fn hits_behind_what_the_worker_held_itself_were_fetched() {
    let expected = Expectation {
        overlap: overlap([7, 0, 0, 0]),
        fetched_blocks: 5,
        block_size: 16,
        ..Expectation::default()
    };
    for (cached_tokens, fetched) in [(0, 0), (32, 0), (48, 16), (112, 80), (128, 80)] {
        assert_eq!(expected.fetched_tokens(cached_tokens), fetched, "{cached_tokens}");
    }
    let nothing = Expectation { fetched_blocks: 0, ..expected };
    assert_eq!(nothing.fetched_tokens(112), 0);
}

#[test]
fn tokens_that_a_source_computed_for_the_request_are_not_cached_tokens() {
    let expected = Expectation {
        overlap: overlap([7, 0, 0, 0]),
        fetched_blocks: 5,
        recomputed_tokens: 48,
        block_size: 16,
        prompt_tokens: Some(200),
        ..Expectation::default()
    };
    let told = |recomputed_tokens, cached_tokens| {
        let expected = Expectation { recomputed_tokens, ..expected };
        let leg = LegFacts {
            cached_tokens: Some(cached_tokens),
            ..LegFacts::new(LegKind::Prefill, "p0", expected)
        };
        let tokens = leg.figures(None).unwrap().tokens;
        assert_eq!((tokens.hit(), tokens.total()), (cached_tokens, 200), "as the engine said");
        assert_eq!(leg.reported_cached_tokens(), Some(tokens.cached()));
        (tokens.cached(), tokens.recomputed)
    };
    // Two blocks are the worker's own, two came from the source's cache, and three were computed.
    for (cached, expected) in [
        (0, (0, 0)),
        (32, (32, 0)),
        (64, (64, 0)),
        (80, (64, 16)),
        (112, (64, 48)),
        (128, (80, 48)),
    ] {
        assert_eq!(told(48, cached), expected, "{cached}");
    }
    assert_eq!(told(0, 112), (112, 0));
    // The source had lost more than the worker lacked.
    assert_eq!(told(112, 112), (32, 80));
}

#[test]
fn several_samples_do_not_count_the_blocks_that_the_first_one_computed() {
    let told = |kind, overlap_blocks, reported| {
        let expected = Expectation {
            overlap: overlap([overlap_blocks, 0, 0, 0]),
            block_size: 16,
            several_samples: true,
            ..Expectation::default()
        };
        let leg = LegFacts {
            prompt_tokens: Some(100),
            cached_tokens: reported,
            ..LegFacts::new(kind, "w", expected)
        };
        let figures = leg.figures(None).unwrap();
        (figures.tokens.cached(), figures.source)
    };
    let decode = |overlap_blocks, reported| told(LegKind::Decode, overlap_blocks, reported);
    assert_eq!(decode(0, Some(96)), (0, Origin::Estimate));
    assert_eq!(decode(2, Some(96)), (32, Origin::Estimate));
    assert_eq!(decode(2, None), (32, Origin::Estimate));
    // What the engine can have had before is its own figure, and so is 0.
    assert_eq!(decode(6, Some(96)), (96, Origin::EngineDecode));
    assert_eq!(decode(6, Some(0)), (0, Origin::EngineDecode));
    // A prefill leg computes one sample only.
    assert_eq!(told(LegKind::Prefill, 0, Some(96)), (96, Origin::EnginePrefill));
}

#[test]
fn a_leg_that_receives_kv_has_no_say_on_what_it_had_cached() {
    let leg = LegFacts {
        receives: true,
        prompt_tokens: Some(1142),
        cached_tokens: Some(1142),
        ..LegFacts::new(LegKind::Decode, "d0", Expectation::default())
    };
    let figures = leg.figures(None).unwrap();
    assert_eq!(figures.tokens.external_kv_transfer, 1142);
    assert_eq!((figures.source, figures.prompt_source), (Origin::Estimate, Origin::EngineDecode));
}

#[test]
fn an_upper_bound_is_no_estimate() {
    let expected = Expectation {
        overlap: overlap([3, 0, 0, 0]),
        overlap_is_upper_bound: true,
        block_size: 16,
        prompt_tokens: Some(100),
        ..Expectation::default()
    };
    let cached = |reported| {
        let cached_tokens = reported;
        let leg = LegFacts::new(LegKind::Prefill, "p0", expected);
        let figures = LegFacts { cached_tokens, ..leg }.figures(None).unwrap();
        (figures.tokens.hit(), figures.tokens.local_compute, figures.source)
    };
    assert_eq!(cached(None), (0, 100, Origin::Estimate));
    assert_eq!(cached(Some(32)), (32, 68, Origin::EnginePrefill));
}

#[test]
fn the_engine_s_figure_tells_whether_the_offer_was_read() {
    let expected = Expectation {
        overlap: overlap([3, 0, 0, 0]),
        block_size: 16,
        prompt_tokens: Some(300),
        ..Expectation::default()
    };
    let offer = ReadBackOffer { worker: "d0".into(), tokens: 240 };
    let leg = |cached_tokens| LegFacts {
        prompt_tokens: Some(300),
        cached_tokens: Some(cached_tokens),
        read_back: Some(offer.clone()),
        ..LegFacts::new(LegKind::Prefill, "p0", expected)
    };
    let parts = |cached| {
        let tokens = leg(cached).figures(None).unwrap().tokens;
        (tokens.hit(), tokens.read_back, tokens.local_compute)
    };
    assert_eq!(parts(240), (48, 192, 60));
    assert_eq!(parts(48), (48, 0, 252), "the engine has computed the rest");
    assert_eq!(parts(256), (256, 0, 44), "the engine held more than the offer");
    let silent = LegFacts { cached_tokens: None, ..leg(0) };
    assert_eq!(silent.figures(None).unwrap().tokens.read_back, 0, "nothing is known of it");
}

#[test]
fn a_prefix_that_the_leg_took_itself_is_apart_from_its_own_hits() {
    let parts = |cached_tokens, recomputed_tokens| {
        let expected = Expectation {
            overlap: overlap([3, 0, 0, 0]),
            recomputed_tokens,
            block_size: 16,
            prompt_tokens: Some(300),
            ..Expectation::default()
        };
        let leg = LegFacts {
            prompt_tokens: Some(300),
            cached_tokens,
            fetch_offer: Some(240),
            ..LegFacts::new(LegKind::Prefill, "p0", expected)
        };
        let tokens = leg.figures(None).unwrap().tokens;
        assert_eq!((tokens.total(), tokens.peer_fetched), (300, tokens.fetched));
        let told = leg.reported_cached_tokens();
        assert!(told.is_none() || told == Some(tokens.cached()));
        [tokens.hit(), tokens.fetched, tokens.local_compute, tokens.cached()]
    };
    assert_eq!(parts(Some(240), 0), [48, 192, 60, 240]);
    assert_eq!(parts(Some(240), 32), [48, 192, 60, 208], "the source has computed some");
    assert_eq!(parts(Some(240), 240), [48, 192, 60, 48], "and more than the worker lacked");
    assert_eq!(parts(Some(48), 32), [48, 0, 252, 48], "the engine has computed the rest");
    assert_eq!(parts(Some(256), 32), [256, 0, 44, 256], "the engine held more than that");
    assert_eq!(parts(None, 32), [48, 0, 252, 48], "nothing is known of it");
}

proptest! {
    #[test]
    fn the_parts_of_each_leg_sum_to_the_prompt(
        prompt_tokens in proptest::option::of(0u32..5000),
        elsewhere in proptest::option::of(0u32..5000),
        known in proptest::option::of(0u32..5000),
        cached_tokens in proptest::option::of(0u32..6000),
        by_tier in proptest::array::uniform4(0u32..100),
        fetched_blocks in 0u32..120,
        recomputed_tokens in 0u32..5000,
        block_size in 0u32..40,
        receives: bool, bypasses_cache: bool,
        offered in proptest::option::of(0u32..100), one_shot: bool,
    ) {
        let expected = Expectation {
            prompt_tokens: known, overlap: overlap(by_tier), fetched_blocks,
            recomputed_tokens, block_size, bypasses_cache, comparable: true,
            ..Expectation::default()
        };
        let offered = offered.filter(|_| !receives).map(|blocks| blocks * block_size);
        let offer = |tokens| ReadBackOffer { worker: "d".into(), tokens };
        let leg = LegFacts {
            prompt_tokens, cached_tokens, receives,
            read_back: offered.filter(|_| !one_shot).map(offer),
            fetch_offer: offered.filter(|_| one_shot),
            ..LegFacts::new(LegKind::Decode, "w", expected)
        };
        let figures = leg.figures(elsewhere.map(|tokens| (tokens, Origin::EnginePrefill)));
        prop_assert_eq!(figures.is_some(), prompt_tokens.or(elsewhere).or(known).is_some());
        let Some(figures) = figures else { return Ok(()) };
        prop_assert_eq!(figures.tokens.total(), figures.prompt_tokens);
        let before = figures.tokens.peer_fetched - figures.tokens.fetched;
        prop_assert!(before <= figures.tokens.hit().min(fetched_blocks * block_size));
        prop_assert!(figures.tokens.recomputed <= figures.tokens.peer_fetched);
        prop_assert!(figures.tokens.recomputed <= recomputed_tokens);
        if let (Some(reported), false) = (cached_tokens, receives) {
            let told = figures.tokens.not_computed();
            prop_assert_eq!(told, reported.min(figures.prompt_tokens));
            prop_assert_eq!(figures.source, Origin::EngineDecode);
        }
        let other = if receives { figures.tokens.local_compute } else { figures.tokens.external_kv_transfer };
        prop_assert_eq!(other, 0);
    }
}
