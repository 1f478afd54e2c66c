//! Decoding of recorded and constructed KV event payloads.

use crate::support::{fixture, fixture_text, recorded_payloads, sglang_fixture};
use proptest::prelude::*;
use rmp::encode as mp;
use serde_json::Value;
use splitrail_engine::kv_events::{
    DecodeLimits, DecodeProblem, Decoder, EventBatch, OtherGroups, decode_batch,
};
use splitrail_kv::{BlockAdapter, EngineHash, KvEvent, StoredBlock, Tier};

pub(crate) fn decode(payload: &[u8]) -> EventBatch {
    decode_batch(payload, &DecodeLimits::default()).unwrap()
}

pub(crate) fn problem(payload: &[u8], limits: &DecodeLimits) -> DecodeProblem {
    decode_batch(payload, limits).unwrap_err().problem
}

/// A hash in the format of the recording tool.
fn recorded_hash(hash: &Value) -> EngineHash {
    match hash.get("__bytes_hex__") {
        None => EngineHash(hash.as_u64().unwrap()),
        Some(hex) => {
            let hex = hex.as_str().unwrap();
            assert_eq!(hex.len(), 64, "a digest has 32 bytes");
            EngineHash(u64::from_str_radix(&hex[48..], 16).unwrap())
        }
    }
}

/// The expected result for a recorded event that was decoded by another msgpack library.
fn expected(event: &Value) -> KvEvent {
    let hashes = || event["block_hashes"].as_array().unwrap().iter().map(recorded_hash);
    match event["type"].as_str().unwrap() {
        "AllBlocksCleared" => KvEvent::Cleared,
        "BlockRemoved" => KvEvent::Removed { hashes: hashes().collect(), tier: Tier::Device },
        "BlockStored" => {
            let tokens: Vec<u32> = serde_json::from_value(event["token_ids"].clone()).unwrap();
            let block_size = event["block_size"].as_u64().unwrap() as usize;
            let blocks = hashes().zip(tokens.chunks(block_size));
            let blocks = blocks
                .map(|(hash, tokens)| StoredBlock { hash, tokens: tokens.to_vec(), opaque: false })
                .collect();
            let parent = &event["parent_block_hash"];
            // Of the first block: the adapter, if any, and then the salt.
            let adapter = event["lora_name"].as_str();
            let salt = &event["extra_keys"][0][usize::from(adapter.is_some())];
            KvEvent::Stored {
                parent: (!parent.is_null()).then(|| recorded_hash(parent)),
                blocks,
                adapter: adapter.map(|name| BlockAdapter {
                    name: name.to_owned(),
                    load: event["lora_id"].as_u64().unwrap(),
                }),
                salt: salt.as_str().map(str::to_owned),
                tier: Tier::Device,
            }
        }
        other => panic!("no such event was recorded: {other}"),
    }
}

#[test]
fn the_salt_of_an_sglang_prompt_is_a_member_of_its_event() {
    let batch = decode(&sglang_fixture("stored_with_cache_salt.bin"));
    let [KvEvent::Stored { parent: None, blocks, salt, .. }] = &batch.events[..] else {
        panic!("{:?}", batch.events)
    };
    assert_eq!(salt.as_deref(), Some("tenant-a"));
    assert!(blocks.len() == 2 && blocks.iter().all(|block| !block.opaque));
}

#[test]
fn recorded_blocks_of_an_adapter_have_its_name_and_the_salt_of_their_prompt() {
    let seen = recorded_payloads("adapter").into_iter().flat_map(|payload| {
        let named = |event| match event {
            KvEvent::Stored { adapter, salt, blocks, .. } => {
                Some((adapter, salt, blocks.iter().any(|block| block.opaque)))
            }
            _ => None,
        };
        decode(&payload).events.into_iter().map(named)
    });
    let seen: Vec<_> = seen.map(|event| event.expect("only stored blocks")).collect();
    // The same prompt three times: to the adapter, to the adapter with a salt, and to the model.
    let adapter = || Some(BlockAdapter { name: "tiny-lora".to_owned(), load: 1 });
    let expected =
        [(adapter(), None, false), (adapter(), Some("s1".to_owned()), false), (None, None, false)];
    assert_eq!(seen, expected);
}

#[test]
fn recorded_batches_decode_to_what_was_recorded() {
    for (recording, batches, rank) in [("a", 29, 0), ("b", 11, 0), ("dp1", 4, 1), ("adapter", 3, 0)]
    {
        let mut decoder = Decoder::new(DecodeLimits::default());
        let lines = fixture_text(&format!("kv/{recording}/events.jsonl"));
        let mut seen = 0;
        for line in lines.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let tag = line["tag"].as_str().unwrap();
            let batch = decoder
                .decode(&fixture(&format!("kv/{recording}/{tag}.frame2.bin")))
                .unwrap_or_else(|error| panic!("{recording}/{tag}: {error}"));
            let events: Vec<_> =
                line["payload"][1].as_array().unwrap().iter().map(expected).collect();
            assert_eq!(batch.events, events, "{recording}/{tag}");
            // serde_json may round the last binary digit of a float differently.
            let timestamp_s = line["payload"][0].as_f64().unwrap();
            assert!((batch.timestamp_s - timestamp_s).abs() < 1e-6);
            assert_eq!(batch.rank, Some(rank));
            assert_eq!(batch.skipped, Default::default());
            seen += 1;
        }
        assert_eq!(seen, batches);
    }
}

#[test]
fn a_recorded_salt_is_delivered_on_the_first_block() {
    let salts: Vec<_> = recorded_payloads("a")
        .iter()
        .flat_map(|payload| decode(payload).events)
        .filter_map(|event| match event {
            KvEvent::Stored { salt, .. } => salt,
            _ => None,
        })
        .collect();
    assert_eq!(salts, ["tenant-a"]);
}

#[test]
fn every_truncation_of_a_recorded_payload_is_an_error() {
    for recording in ["a", "b", "dp1"] {
        for payload in recorded_payloads(recording) {
            for length in 0..payload.len() {
                let result = decode_batch(&payload[..length], &DecodeLimits::default());
                assert!(result.is_err(), "{recording}, {length} of {} bytes", payload.len());
            }
        }
    }
}

#[test]
fn bytes_after_a_batch_are_an_error() {
    let mut payload = recorded_payloads("a").swap_remove(0);
    payload.push(0xc0);
    assert_eq!(problem(&payload, &DecodeLimits::default()), DecodeProblem::TrailingBytes);
}

/// Writes msgpack values for tests.
#[derive(Default)]
pub(crate) struct Pack(pub(crate) Vec<u8>);

impl Pack {
    pub(crate) fn array(mut self, length: u32) -> Self {
        mp::write_array_len(&mut self.0, length).unwrap();
        self
    }
    pub(crate) fn map(mut self, length: u32) -> Self {
        mp::write_map_len(&mut self.0, length).unwrap();
        self
    }
    pub(crate) fn str(mut self, text: &str) -> Self {
        mp::write_str(&mut self.0, text).unwrap();
        self
    }
    pub(crate) fn int(mut self, value: i64) -> Self {
        mp::write_sint(&mut self.0, value).unwrap();
        self
    }
    pub(crate) fn ints(self, values: &[i64]) -> Self {
        let array = self.array(values.len() as u32);
        values.iter().fold(array, |pack, value| pack.int(*value))
    }
    pub(crate) fn nil(mut self) -> Self {
        mp::write_nil(&mut self.0).unwrap();
        self
    }
    pub(crate) fn float(mut self, value: f64) -> Self {
        mp::write_f64(&mut self.0, value).unwrap();
        self
    }
    pub(crate) fn bin(mut self, bytes: &[u8]) -> Self {
        mp::write_bin(&mut self.0, bytes).unwrap();
        self
    }
    /// An array-form batch of `events` events, the events to follow.
    pub(crate) fn batch(events: u32) -> Self {
        Self::default().array(2).float(1.5).array(events)
    }
    /// A map-form stored event of two blocks of two tokens, with `more` fields to
    /// follow.
    pub(crate) fn stored(self, more: u32) -> Self {
        self.map(5 + more)
            .str("type")
            .str("BlockStored")
            .str("block_hashes")
            .ints(&[11, 12])
            .str("parent_block_hash")
            .nil()
            .str("token_ids")
            .ints(&[1, 2, 3, 4])
            .str("block_size")
            .int(2)
    }
}

pub(crate) fn stored(event: &KvEvent) -> (&[StoredBlock], Option<&str>, Option<&str>, Tier) {
    match event {
        KvEvent::Stored { blocks, adapter, salt, tier, .. } => {
            let adapter = adapter.as_ref().map(|adapter| adapter.name.as_str());
            (blocks, adapter, salt.as_deref(), *tier)
        }
        other => panic!("not a stored event: {other:?}"),
    }
}

#[test]
fn array_events_of_older_engines_decode() {
    let payload = Pack::default().array(3).float(2.0).array(3);
    let payload = payload
        .array(9)
        .str("BlockStored")
        .ints(&[21, -1])
        .int(20)
        .ints(&[7, 8, 9, 10])
        .int(2)
        .nil()
        .str("GPU")
        .nil()
        .nil();
    let payload = payload.array(3).str("BlockRemoved").ints(&[21]).str("CPU_TIER1");
    let payload = payload.array(1).str("AllBlocksCleared").nil();
    let batch = decode(&payload.0);
    let block = |hash, tokens: [u32; 2]| StoredBlock {
        hash: EngineHash(hash),
        tokens: tokens.to_vec(),
        opaque: false,
    };
    let first = KvEvent::Stored {
        parent: Some(EngineHash(20)),
        blocks: vec![block(21, [7, 8]), block(u64::MAX, [9, 10])],
        adapter: None,
        salt: None,
        tier: Tier::Device,
    };
    let second = KvEvent::Removed { hashes: vec![EngineHash(21)], tier: Tier::Host };
    assert_eq!(batch.events, [first, second, KvEvent::Cleared]);
    assert_eq!((batch.timestamp_s, batch.rank), (2.0, None));
}

#[test]
fn array_events_without_later_fields_decode() {
    let payload = Pack::batch(2);
    let payload = payload.array(5).str("BlockStored").ints(&[1]).nil().ints(&[5]).int(1);
    let payload = payload.array(2).str("BlockRemoved").ints(&[1]);
    let batch = decode(&payload.0);
    assert_eq!(stored(&batch.events[0]).3, Tier::Device);
    assert_eq!(
        batch.events[1],
        KvEvent::Removed { hashes: vec![EngineHash(1)], tier: Tier::Device }
    );
}

#[test]
fn maps_decode_in_any_order_with_unknown_keys_and_events_counted() {
    let payload = Pack::default().map(4);
    let payload = payload.str("novelty").map(1).int(3).ints(&[1, 2]);
    let payload = payload.str("events").array(2);
    let payload = payload
        .map(6)
        .str("token_ids")
        .ints(&[1, 2])
        .str("novelty")
        .bin(&[0; 300])
        .str("block_size")
        .int(2)
        .str("block_hashes")
        .array(1)
        .bin(&[9, 0, 0, 0, 0, 0, 0, 1, 2])
        .str("medium")
        .str("somewhere")
        .str("type")
        .str("BlockStored");
    let payload = payload.map(2).str("type").str("BlocksAdded").str("block_hashes").nil();
    let payload = payload.str("data_parallel_rank").int(3).str("ts").int(12);
    let batch = decode(&payload.0);
    assert_eq!((batch.timestamp_s, batch.rank), (12.0, Some(3)));
    assert_eq!((batch.events.len(), batch.skipped.unknown_events), (1, 1));
    let (blocks, _, _, tier) = stored(&batch.events[0]);
    assert_eq!(blocks[0].hash, EngineHash(0x0102));
    assert_eq!(tier, Tier::Remote);
}

#[test]
fn media_map_to_tiers() {
    for (medium, tier) in [
        ("GPU", Tier::Device),
        ("CPU", Tier::Host),
        ("cpu_tier2", Tier::Host),
        ("DISK", Tier::Disk),
        ("NVMe", Tier::Disk),
        ("object-store", Tier::Remote),
        ("", Tier::Remote),
    ] {
        let payload = Pack::batch(1).stored(1).str("medium").str(medium);
        assert_eq!(stored(&decode(&payload.0).events[0]).3, tier, "{medium}");
    }
}

/// The two blocks of a stored event with these extra keys, after decoding.
fn with_extra(
    adapter: Option<&str>,
    extra: impl FnOnce(Pack) -> Pack,
) -> (Option<String>, [bool; 2]) {
    let payload = Pack::batch(1).stored(2).str("extra_keys").array(2);
    let payload = extra(payload).str("lora_name");
    let payload = match adapter {
        Some(adapter) => payload.str(adapter),
        None => payload.nil(),
    };
    let batch = decode(&payload.0);
    let (blocks, seen, salt, _) = stored(&batch.events[0]);
    assert_eq!(seen, adapter);
    (salt.map(str::to_owned), [blocks[0].opaque, blocks[1].opaque])
}

#[test]
fn salt_adapter_and_images_are_distinguished() {
    let salt = |salt: &str| Some(salt.to_owned());
    let one = |pack: Pack, text: &str| pack.array(1).str(text);
    assert_eq!(with_extra(None, |p| p.nil().nil()), (None, [false, false]));
    assert_eq!(with_extra(None, |p| p.array(0).array(0)), (None, [false, false]));
    assert_eq!(with_extra(None, |p| one(p, "s").nil()), (salt("s"), [false, false]));
    assert_eq!(with_extra(Some("l"), |p| one(one(p, "l"), "l")), (None, [false, false]));
    for order in [["l", "s"], ["s", "l"]] {
        let extra = |p: Pack| p.array(2).str(order[0]).str(order[1]).array(1).str("l");
        assert_eq!(with_extra(Some("l"), extra), (salt("s"), [false, false]));
    }
    let salt_named_as_adapter = |p: Pack| one(p.array(2).str("l").str("l"), "l");
    assert_eq!(with_extra(Some("l"), salt_named_as_adapter), (salt("l"), [false, false]));
    assert_eq!(with_extra(None, |p| one(p.nil(), "image")), (None, [false, true]));
    assert_eq!(with_extra(None, |p| p.array(2).str("s").str("image").nil()), (None, [true, false]));
    assert_eq!(with_extra(None, |p| p.array(1).ints(&[5, 6]).nil()), (None, [true, false]));
    assert_eq!(with_extra(None, |p| p.array(1).int(5).nil()), (None, [true, false]));
    assert_eq!(with_extra(None, |p| p.int(5).nil()), (None, [true, false]));
}

#[test]
fn a_text_on_a_block_that_does_not_start_a_prompt_is_no_salt() {
    let payload = Pack::batch(1)
        .map(6)
        .str("type")
        .str("BlockStored")
        .str("block_hashes")
        .ints(&[2])
        .str("parent_block_hash")
        .int(1)
        .str("token_ids")
        .ints(&[9])
        .str("block_size")
        .int(1)
        .str("extra_keys")
        .array(1)
        .array(1)
        .str("text");
    let batch = decode(&payload.0);
    let (blocks, _, salt, _) = stored(&batch.events[0]);
    assert_eq!((salt, blocks[0].opaque), (None, true));
}

#[test]
fn an_adapter_known_by_number_only_is_never_matched() {
    let payload = Pack::batch(1).stored(1).str("lora_id").int(1);
    let batch = decode(&payload.0);
    assert!(stored(&batch.events[0]).0.iter().all(|block| block.opaque));
}

#[test]
fn other_cache_groups_are_left_out_with_their_removals() {
    let of_group = |kind: &str, group: i64| {
        let stored = Pack::batch(2).stored(2).str("kv_cache_spec_kind").str(kind);
        let removed = stored.str("group_idx").int(group).map(3).str("type").str("BlockRemoved");
        removed.str("block_hashes").ints(&[11]).str("group_idx").int(group).0
    };
    let mut decoder = Decoder::new(DecodeLimits::default());
    let sliding = decoder.decode(&of_group("sliding_window", 1)).unwrap();
    assert_eq!((sliding.events.len(), sliding.skipped.other_groups), (0, 2));
    assert_eq!(sliding.skipped.unfollowed_groups, OtherGroups::named("sliding_window"));
    for kind in ["full_attention", "mla_attention"] {
        let full = decoder.decode(&of_group(kind, 0)).unwrap();
        assert_eq!((full.events.len(), full.skipped.other_groups), (2, 0));
    }
    for group in [1, 2, 256, 70_000] {
        let removal = Pack::batch(1).array(4).str("BlockRemoved").ints(&[11]).nil().int(group);
        assert_eq!(decoder.decode(&removal.0).unwrap().skipped.other_groups, 1, "{group}");
    }
}

#[test]
fn without_kinds_the_first_group_counts_and_no_other() {
    let stored = |group: i64| Pack::batch(1).stored(1).str("group_idx").int(group).0;
    let removed =
        |group: i64| Pack::batch(1).array(4).str("BlockRemoved").ints(&[11]).nil().int(group).0;
    let mut decoder = Decoder::new(DecodeLimits::default());
    let second = decode(&stored(1)).skipped.unfollowed_groups;
    assert_eq!((second, second.to_string()), (OtherGroups::named("1"), "1".to_owned()));
    let many = ["mamba", "chunked_local_attention", "of tomorrow", "3"].map(OtherGroups::named);
    let many = many.into_iter().fold(second, |all, group| all | group);
    assert_eq!(many.to_string(), "chunked_local_attention, mamba, other, 1, 3");
    assert_eq!(OtherGroups::from_bits(many.bits()), many);
    let mut counts = |payload: Vec<u8>| !decoder.decode(&payload).unwrap().events.is_empty();
    assert!(!counts(removed(0)), "nothing was stored for the group");
    assert!(counts(stored(0)) && !counts(stored(1)) && !counts(stored(300)));
    assert!(counts(removed(0)) && !counts(removed(1)) && !counts(removed(2)));
    // A group may be named by removals alone.
    assert!(counts(Pack::batch(1).stored(0).0));
    assert!(counts(removed(2)) && !counts(removed(1)));
}

#[test]
fn every_limit_holds() {
    let payload = Pack::batch(2).stored(0).stored(0).0;
    let fits = DecodeLimits {
        max_payload_bytes: payload.len(),
        max_events: 2,
        max_blocks_per_event: 2,
        max_blocks_per_batch: 4,
        max_depth: 0,
        ..DecodeLimits::default()
    };
    assert!(decode_batch(&payload, &fits).is_ok());
    let too_many = |limits, limit| {
        assert_eq!(problem(&payload, &limits), DecodeProblem::TooMany { limit });
    };
    let bytes = payload.len() - 1;
    too_many(DecodeLimits { max_payload_bytes: bytes, ..fits.clone() }, bytes);
    too_many(DecodeLimits { max_events: 1, ..fits.clone() }, 1);
    too_many(DecodeLimits { max_blocks_per_event: 1, ..fits.clone() }, 1);
    too_many(DecodeLimits { max_blocks_per_batch: 3, ..fits }, 1);
}

#[test]
fn nesting_has_a_bound_that_no_setting_lifts() {
    let mut payload = Pack::batch(0).0;
    payload[0] = 0x94; // Two unknown items follow.
    payload.push(0xc0);
    payload.extend(std::iter::repeat_n(0x91, 100_000));
    payload.push(0xc0);
    for max_depth in [0, 16, u8::MAX] {
        let limits = DecodeLimits { max_depth, ..DecodeLimits::default() };
        assert_eq!(problem(&payload, &limits), DecodeProblem::TooDeep);
    }
}

#[test]
fn claimed_lengths_reserve_nothing() {
    // Each header claims four billion items, which the payload cannot hold.
    for header in [0xdd_u8, 0xdf, 0xdb, 0xc6, 0xc9] {
        for prefix in [&[][..], &[0x93, 0x01], &[0x92, 0x01, 0x91, 0x95, 0xab]] {
            let mut payload = prefix.to_vec();
            if prefix.len() == 5 {
                payload.extend(b"BlockStored");
            }
            payload.extend([header, 0xff, 0xff, 0xff, 0xff]);
            assert!(decode_batch(&payload, &DecodeLimits::default()).is_err());
        }
    }
}

/// Whatever was decoded stays within all bounds.
fn within_bounds(batch: &EventBatch, limits: &DecodeLimits, payload: &[u8]) {
    assert!(batch.events.len() <= limits.max_events);
    let mut blocks = 0;
    let mut tokens = 0;
    for event in &batch.events {
        let in_event = match event {
            KvEvent::Stored { blocks, .. } => {
                tokens += blocks.iter().map(|block| block.tokens.len()).sum::<usize>();
                blocks.len()
            }
            KvEvent::Removed { hashes, .. }
            | KvEvent::Dropped { hashes }
            | KvEvent::GroupStored { hashes, .. }
            | KvEvent::GroupRemoved { hashes, .. } => hashes.len(),
            KvEvent::TierCleared { .. } | KvEvent::Cleared => 0,
        };
        assert!(in_event <= limits.max_blocks_per_event);
        blocks += in_event;
    }
    assert!(blocks <= limits.max_blocks_per_batch);
    assert!(tokens <= payload.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(payload in proptest::collection::vec(any::<u8>(), 0..512)) {
        let limits = DecodeLimits::default();
        if let Ok(batch) = decode_batch(&payload, &limits) {
            within_bounds(&batch, &limits, &payload);
        }
    }

    #[test]
    fn mutated_recordings_never_panic_and_stay_within_bounds(
        recording in prop_oneof![Just("a"), Just("b"), Just("dp1")],
        which in any::<prop::sample::Index>(),
        mutations in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
    ) {
        let mut payloads = recorded_payloads(recording);
        let mut payload = payloads.swap_remove(which.index(payloads.len()));
        for (place, byte) in mutations {
            let place = place.index(payload.len());
            payload[place] = byte;
        }
        let limits = DecodeLimits { max_events: 4, max_blocks_per_event: 8, max_blocks_per_batch: 12, ..DecodeLimits::default() };
        if let Ok(batch) = decode_batch(&payload, &limits) {
            within_bounds(&batch, &limits, &payload);
        }
    }
}
