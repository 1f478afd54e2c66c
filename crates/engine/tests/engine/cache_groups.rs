//! Events of the cache groups of hybrid models.

use splitrail_engine::kv_events::{DecodeLimits, Decoder};
use splitrail_kv::{CacheGroup, EngineHash, GroupRule, KvEvent, Tier};

use crate::kv_events::{Pack, stored};

/// An event that a group stores two blocks, of which it names these.
fn of_group(pack: Pack, group: i64, kind: &str, window: Option<i64>, hashes: &[i64]) -> Pack {
    let pack = pack.map(8).str("type").str("BlockStored").str("block_hashes").ints(hashes);
    let pack = pack.str("parent_block_hash").nil().str("token_ids").ints(&[1, 2, 3, 4]);
    let pack = pack.str("block_size").int(2).str("group_idx").int(group);
    let pack = pack.str("kv_cache_spec_kind").str(kind).str("kv_cache_spec_sliding_window");
    match window {
        Some(tokens) => pack.int(tokens),
        None => pack.nil(),
    }
}

#[test]
fn groups_beside_full_attention_are_followed_and_come_after_it_in_a_batch() {
    let mut decoder = Decoder::new(DecodeLimits::default());
    let pack = of_group(Pack::batch(7), 0, "sliding_window", Some(5), &[12]);
    let pack = of_group(pack, 1, "mamba", None, &[]);
    let pack = of_group(pack, 2, "full_attention", None, &[11, 12]);
    let pack = of_group(pack, 3, "full_attention", None, &[11, 12]);
    let pack = of_group(pack, 4, "chunked_local_attention", None, &[11]);
    let removed =
        |pack: Pack, group| pack.array(4).str("BlockRemoved").ints(&[12]).nil().int(group);
    let batch = decoder.decode(&removed(removed(pack, 2), 0).0).unwrap();
    let beside = |number, rule, hashes: &[u64]| KvEvent::GroupStored {
        group: CacheGroup { number, rule, block_size: 2 },
        parent: None,
        tokens: 4,
        hashes: hashes.iter().copied().map(EngineHash).collect(),
    };
    let hashes = vec![EngineHash(12)];
    assert_eq!(stored(&batch.events[0]).0.len(), 2, "the spine");
    assert_eq!(
        batch.events[1..],
        [
            KvEvent::Removed { hashes: hashes.clone(), tier: Tier::Device },
            beside(0, GroupRule::Window { tokens: 5 }, &[12]),
            beside(1, GroupRule::State, &[]),
            beside(3, GroupRule::Prefix, &[11, 12]),
            beside(4, GroupRule::Chunk { tokens: 8192 }, &[11]),
            KvEvent::GroupRemoved { group: 0, hashes },
        ]
    );
    let skipped = batch.skipped;
    assert_eq!(
        skipped.followed_groups.to_string(),
        "full_attention, sliding_window, chunked_local_attention, mamba"
    );
    assert!(skipped.unfollowed_groups.is_empty() && skipped.other_groups == 0);
}

#[test]
fn groups_without_full_attention_are_named() {
    let mut decoder = Decoder::new(DecodeLimits::default());
    let mut named = |group, kind: &str| {
        let alone = of_group(Pack::batch(1), group, kind, Some(5), &[12]);
        decoder.decode(&alone.0).unwrap().skipped.unfollowed_groups.to_string()
    };
    // The batch of full attention may come last.
    assert_eq!([0, 1].map(|group| named(group, "sliding_window")), ["", ""]);
    assert_eq!(named(0, "sliding_window"), "no_full_attention");
    assert_eq!(named(2, "full_attention"), "");
    assert_eq!([0, 1].map(|group| named(group, "sliding_window")), ["", ""]);
}

#[test]
fn a_removal_without_a_group_is_one_of_all_groups() {
    let mut decoder = Decoder::new(DecodeLimits::default());
    let removed = Pack::batch(1).array(3).str("BlockRemoved").ints(&[11]).nil().0;
    let stored = of_group(Pack::batch(1), 0, "full_attention", None, &[11, 12]);
    decoder.decode(&stored.0).unwrap();
    let hashes = vec![EngineHash(11)];
    let tier = Tier::Device;
    let one = KvEvent::Removed { hashes: hashes.clone(), tier };
    assert_eq!(decoder.decode(&removed).unwrap().events, [one]);
    decoder.decode(&of_group(Pack::batch(1), 1, "mamba", None, &[12]).0).unwrap();
    assert_eq!(decoder.decode(&removed).unwrap().events, [KvEvent::Dropped { hashes }]);
}

#[test]
fn the_beginning_of_a_block_is_left_out_and_named_if_a_state_is_kept_there() {
    let mut decoder = Decoder::new(DecodeLimits::default());
    let part = |group, kind| {
        let pack = Pack::batch(1).map(7).str("type").str("BlockStored");
        let pack = pack.str("block_hashes").ints(&[13]).str("parent_block_hash").nil();
        let pack = pack.str("token_ids").ints(&[1]).str("block_size").int(1);
        pack.str("group_idx").int(group).str("kv_cache_spec_kind").str(kind)
    };
    for (group, kind, named) in [(2, "full_attention", ""), (1, "mamba", "mamba_in_parts")] {
        decoder.decode(&of_group(Pack::batch(1), group, kind, None, &[11, 12]).0).unwrap();
        let batch = decoder.decode(&part(group, kind).0).unwrap();
        assert_eq!((batch.events.len(), batch.skipped.other_groups), (0, 1), "{kind}");
        assert_eq!(batch.skipped.unfollowed_groups.to_string(), named);
    }
}
