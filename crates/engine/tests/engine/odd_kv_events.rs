//! Events within a well-formed batch that cannot be used: they cost no others, and promise nothing.

use crate::kv_events::{Pack, decode, problem};
use proptest::prelude::*;
use splitrail_engine::kv_events::{
    DecodeLimits, DecodeProblem, EventBatch, SkippedEvents, decode_batch,
};
use splitrail_kv::{EngineHash, KvEvent, Tier};

/// A batch with this event between one that stores blocks and one that clears all.
fn between(odd: impl FnOnce(Pack) -> Pack) -> EventBatch {
    let before = Pack::batch(3).stored(0);
    decode(&odd(before).array(1).str("AllBlocksCleared").0)
}

#[test]
fn a_stored_event_that_cannot_be_used_is_left_out_and_counted() {
    let of = |hashes: &[i64], tokens: &[i64], block_size: i64| {
        between(|pack| {
            let pack = pack.array(5).str("BlockStored").ints(hashes).nil();
            pack.ints(tokens).int(block_size)
        })
    };
    let field = |name: &str, value: fn(Pack) -> Pack| between(|p| value(p.stored(1).str(name)));
    let odd = [
        // What vLLM sends of blocks that it offloads.
        of(&[1], &[], 0),
        of(&[1], &[], 2),
        of(&[1], &[1, 2, 3, 4], 2),
        of(&[1, 2], &[1, 2, 3], 2),
        of(&[], &[], 0),
        of(&[1], &[-1], 1),
        of(&[1], &[1 << 32], 1),
        of(&[1], &[1], -1),
        field("block_hashes", |p| p.array(1).bin(&[1, 2, 3])),
        field("block_hashes", |p| p.array(1).str("x")),
        field("block_hashes", |p| p.nil()),
        field("group_idx", |p| p.str("x")),
        field("group_idx", |p| p.int(-1)),
        field("medium", |p| p.int(3)),
        field("lora_name", |p| p.ints(&[1])),
        field("extra_keys", |p| p.str("x")),
        field("kv_cache_spec_kind", |p| p.int(1)),
        between(|pack| pack.array(1).str("BlockStored")),
        between(|pack| pack.array(2).str("BlockStored").map(1).str("x").nil()),
    ];
    for (case, batch) in odd.iter().enumerate() {
        assert_eq!(batch.events.len(), 2, "{case}");
        assert_eq!(batch.events[1], KvEvent::Cleared, "{case}");
        let unusable_events = 1;
        let expected = SkippedEvents { unusable_events, ..SkippedEvents::default() };
        assert_eq!(batch.skipped, expected, "{case}");
    }
}

#[test]
fn an_event_that_may_have_removed_blocks_leaves_none_of_them() {
    let tier_cleared = |medium: fn(Pack) -> Pack| {
        let payload = Pack::batch(1).map(2).str("type").str("TierBlocksCleared").str("medium");
        decode(&medium(payload).0).events
    };
    assert_eq!(tier_cleared(|p| p.str("CPU")), [KvEvent::TierCleared { tier: Tier::Host }]);
    assert_eq!(tier_cleared(|p| p.nil()), [KvEvent::Cleared]);
    let array = Pack::batch(1).array(3).str("TierBlocksCleared").str("GPU").nil();
    assert_eq!(decode(&array.0).events, [KvEvent::TierCleared { tier: Tier::Device }]);

    let unknown = |tag: &str, hashes: fn(Pack) -> Pack| {
        let payload = Pack::batch(1).map(2).str("type").str(tag).str("block_hashes");
        decode(&hashes(payload).0)
    };
    let dropped = vec![KvEvent::Dropped { hashes: vec![EngineHash(7)] }];
    for (tag, events, replaced_by_clear) in [
        ("BlockEvicted", dropped.clone(), 0),
        ("StoredBlocksDropped", dropped, 0),
        ("BlockStoredAgain", vec![], 0),
        ("blocks_added", vec![], 0),
    ] {
        let batch = unknown(tag, |p| p.ints(&[7]));
        assert_eq!(batch.events, events, "{tag}");
        let skipped = (batch.skipped.unknown_events, batch.skipped.replaced_by_clear);
        assert_eq!(skipped, (1, replaced_by_clear), "{tag}");
    }
    assert_eq!(unknown("BlockEvicted", |p| p.ints(&[])).events, []);

    let removed =
        |hashes: fn(Pack) -> Pack| decode(&hashes(Pack::batch(1).array(4).str("BlockRemoved")).0);
    for batch in [
        unknown("BlockEvicted", |p| p.nil()),
        decode(&Pack::batch(1).array(2).str("BlockEvicted").ints(&[7]).0),
        decode(&Pack::batch(1).map(1).str("type").str("Sleeping").0),
        decode(&Pack::batch(1).map(1).int(4).str("x").0),
        decode(&Pack::batch(1).array(2).int(4).int(5).0),
        decode(&Pack::batch(1).array(0).0),
    ] {
        assert_eq!(
            (&batch.events[..], batch.skipped.replaced_by_clear),
            (&[KvEvent::Cleared][..], 1)
        );
    }
    let one = vec![KvEvent::Dropped { hashes: vec![EngineHash(1)] }];
    for (batch, events) in [
        (removed(|p| p.nil().nil().nil()), vec![]),
        (removed(|p| p.int(1).nil().nil()), vec![]),
        (removed(|p| p.array(2).int(1).bin(&[1]).nil().nil()), one.clone()),
        (removed(|p| p.ints(&[1]).int(3).nil()), one.clone()),
        (removed(|p| p.ints(&[1]).nil().int(-1)), one),
    ] {
        assert_eq!((batch.events, batch.skipped.unusable_events), (events, 1));
        assert_eq!(batch.skipped.replaced_by_clear, 0);
    }
}

#[test]
fn the_end_of_an_event_that_cannot_be_used_must_be_known() {
    let limits = DecodeLimits::default();
    let cut = Pack::batch(2).array(3).str("BlockStored").int(1);
    assert_eq!(problem(&cut.0, &limits), DecodeProblem::UnexpectedEnd);
    let mut reserved = Pack::batch(1).array(3).str("BlockStored").int(1).0;
    reserved.push(0xc1);
    assert!(decode_batch(&reserved, &limits).is_err());
    let number = Pack::batch(1).int(3);
    assert_eq!(problem(&number.0, &limits), DecodeProblem::WrongType { expected: "an array" });
    let rank = Pack::default().array(3).float(0.0).array(0).int(70_000);
    assert_eq!(problem(&rank.0, &limits), DecodeProblem::OutOfRange);
    let never = Pack::default().array(2).float(f64::NAN).array(0);
    assert_eq!(problem(&never.0, &limits), DecodeProblem::OutOfRange);
}

/// Any msgpack value, as bytes.
fn value() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        Just(Pack::default().nil().0),
        any::<i64>().prop_map(|value| Pack::default().int(value).0),
        any::<f64>().prop_map(|value| Pack::default().float(value).0),
        "[a-z_]{0,12}".prop_map(|text| Pack::default().str(&text).0),
        proptest::collection::vec(any::<u8>(), 0..12)
            .prop_map(|bytes| Pack::default().bin(&bytes).0),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        let array = |items: Vec<Vec<u8>>| {
            [Pack::default().array(items.len() as u32).0, items.concat()].concat()
        };
        proptest::collection::vec(inner, 0..5).prop_map(array)
    })
}

/// An event of any kind with any values in its fields, in either form.
fn odd_event() -> impl Strategy<Value = Vec<u8>> {
    let tag = prop_oneof![
        Just("BlockStored"),
        Just("BlockRemoved"),
        Just("TierBlocksCleared"),
        Just("BlockMoved"),
        Just("BlockAdded")
    ];
    let keys = proptest::sample::subsequence(
        vec![
            "block_hashes",
            "token_ids",
            "parent_block_hash",
            "block_size",
            "medium",
            "group_idx",
            "extra_keys",
        ],
        0..7,
    );
    let map = (tag.clone(), keys, proptest::collection::vec(value(), 7)).prop_map(
        |(tag, keys, values)| {
            let start = Pack::default().map(keys.len() as u32 + 1).str("type").str(tag);
            let add = |mut pack: Pack, (key, value): (&&str, &Vec<u8>)| {
                pack = pack.str(key);
                pack.0.extend(value);
                pack
            };
            keys.iter().zip(&values).fold(start, add).0
        },
    );
    let array = (tag, proptest::collection::vec(value(), 0..9)).prop_map(|(tag, values)| {
        let start = Pack::default().array(values.len() as u32 + 1).str(tag);
        [start.0, values.concat()].concat()
    });
    prop_oneof![map, array]
}

proptest! {
#![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

#[test]
fn an_odd_event_never_changes_what_the_others_of_its_batch_do(odd in odd_event()) {
    let around = |odd: &[u8], events| {
        let mut pack = Pack::batch(events).stored(0);
        pack.0.extend(odd);
        pack.array(2).str("BlockRemoved").ints(&[11]).0
    };
    let others = decode(&around(&[], 2)).events;
    let batch = decode(&around(&odd, 3));
    prop_assert_eq!(batch.events.first(), others.first());
    prop_assert_eq!(batch.events.last(), others.last());
    let SkippedEvents { unknown_events, unusable_events, other_groups, empty_events, .. } = batch.skipped;
    let is_counted = unknown_events + unusable_events + other_groups + empty_events > 0;
    prop_assert!(batch.events.len() == 3 || (batch.events.len() == 2 && is_counted));
}}

#[test]
fn an_adapter_has_the_number_of_its_load_and_0_if_the_engine_names_it_otherwise() {
    let load = |pack: fn(Pack) -> Pack| {
        let payload = pack(Pack::batch(1).stored(2).str("lora_id")).str("lora_name").str("l");
        match &decode(&payload.0).events[0] {
            KvEvent::Stored { adapter: Some(adapter), .. } => adapter.load,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(load(|pack| pack.int(7)), 7);
    assert_eq!(load(|pack| pack.str("5f1c")), 0);
    assert_eq!(load(Pack::nil), 0);
}
