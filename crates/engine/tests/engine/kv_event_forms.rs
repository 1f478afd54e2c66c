//! The forms in which generations of engines write the same events: batches and events as arrays (vLLM up
//! to 0.23), events as maps in arrays (0.32), and maps throughout.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::kv_events::{Pack, decode};

/// An event as any engine may write it: fields in the order of the array form, of which engines leave out
/// those at the end that they do not know.
#[derive(Clone, Debug)]
enum Event {
    Stored {
        hashes: Vec<i64>,
        parent: Option<i64>,
        adapter: Option<&'static str>,
        salt: Option<&'static str>,
        medium: Option<&'static str>,
        group: Option<(i64, &'static str, Option<i64>)>,
    },
    Removed {
        hashes: Vec<i64>,
        medium: Option<&'static str>,
        group: Option<i64>,
    },
    TierCleared(&'static str),
    Cleared,
}

fn event() -> impl Strategy<Value = Event> {
    // SGLang writes hashes as signed numbers, vLLM as unsigned ones.
    let hashes = || vec(prop_oneof![Just(-1), Just(i64::MIN), 1..9_i64], 0..4);
    let medium = || option::of(proptest::sample::select(vec!["GPU", "CPU", "CPU_TIER1", "DISK"]));
    let group = proptest::sample::select(vec![
        (0, "full_attention", None),
        (1, "sliding_window", Some(5)),
        (2, "mamba", None),
        (3, "chunked_local_attention", None),
        (4, "of tomorrow", None),
    ]);
    let named = (option::of(Just("lora")), option::of(Just("salt")));
    let stored = (hashes(), option::of(-2..9_i64), named, medium(), option::of(group));
    let stored = stored.prop_map(|(hashes, parent, (adapter, salt), medium, group)| {
        Event::Stored { hashes, parent, adapter, salt, medium, group }
    });
    let removed = (hashes(), medium(), option::of(0..5_i64))
        .prop_map(|(hashes, medium, group)| Event::Removed { hashes, medium, group });
    prop_oneof![
        6 => stored,
        3 => removed,
        1 => proptest::sample::select(vec!["GPU", "CPU"]).prop_map(Event::TierCleared),
        1 => Just(Event::Cleared),
    ]
}

fn or_nil<T>(pack: Pack, value: Option<T>, write: impl Fn(Pack, T) -> Pack) -> Pack {
    match value {
        Some(value) => write(pack, value),
        None => pack.nil(),
    }
}

/// Writes fields by name, or without names.
struct Fields {
    pack: Pack,
    is_map: bool,
}

impl Fields {
    fn new(pack: Pack, is_map: bool, count: u32) -> Self {
        Self { pack: if is_map { pack.map(count) } else { pack.array(count) }, is_map }
    }

    fn field(self, name: &str, write: impl FnOnce(Pack) -> Pack) -> Self {
        let Self { pack, is_map } = self;
        Self { pack: write(if is_map { pack.str(name) } else { pack }), is_map }
    }

    fn text(self, name: &str, value: Option<&str>) -> Self {
        self.field(name, |pack| or_nil(pack, value, Pack::str))
    }

    fn number(self, name: &str, value: Option<i64>) -> Self {
        self.field(name, |pack| or_nil(pack, value, Pack::int))
    }
}

impl Event {
    fn write(&self, pack: Pack, is_map: bool) -> Pack {
        match self {
            Self::Stored { hashes, parent, adapter, salt, medium, group } => {
                let tokens: Vec<i64> = (0..hashes.len() as i64 * 2).collect();
                let keys: Vec<&str> = [adapter, salt].into_iter().flatten().copied().collect();
                let blocks = hashes.len() as u32;
                let of_block = |pack: Pack, block: u32| match block {
                    _ if keys.is_empty() => pack.nil(),
                    0 => keys.iter().fold(pack.array(keys.len() as u32), |pack, key| pack.str(key)),
                    _ => or_nil(pack, *adapter, |pack, adapter| pack.array(1).str(adapter)),
                };
                let extra = |pack: Pack| (0..blocks).fold(pack.array(blocks), of_block);
                let fields = Fields::new(pack, is_map, 12)
                    .text("type", Some("BlockStored"))
                    .field("block_hashes", |pack| pack.ints(hashes))
                    .number("parent_block_hash", *parent)
                    .field("token_ids", |pack| pack.ints(&tokens))
                    .number("block_size", Some(2))
                    .number("lora_id", adapter.map(|_| 1))
                    .text("medium", *medium)
                    .text("lora_name", *adapter)
                    .field("extra_keys", extra);
                let fields = fields.number("group_idx", group.map(|(number, ..)| number));
                let fields = fields.text("kv_cache_spec_kind", group.map(|(_, kind, _)| kind));
                let window = group.and_then(|(.., window)| window);
                fields.number("kv_cache_spec_sliding_window", window).pack
            }
            Self::Removed { hashes, medium, group } => {
                Fields::new(pack, is_map, 4)
                    .text("type", Some("BlockRemoved"))
                    .field("block_hashes", |pack| pack.ints(hashes))
                    .text("medium", *medium)
                    .number("group_idx", *group)
                    .pack
            }
            Self::TierCleared(medium) => {
                let fields = Fields::new(pack, is_map, 2).text("type", Some("TierBlocksCleared"));
                fields.text("medium", Some(medium)).pack
            }
            Self::Cleared => {
                Fields::new(pack, is_map, 1).text("type", Some("AllBlocksCleared")).pack
            }
        }
    }
}

fn payload(events: &[Event], batch_is_map: bool, events_are_maps: bool) -> Vec<u8> {
    let all = |pack: Pack| {
        let pack = pack.array(events.len() as u32);
        events.iter().fold(pack, |pack, event| event.write(pack, events_are_maps))
    };
    let batch = Fields::new(Pack::default(), batch_is_map, 3).field("ts", |pack| pack.float(1.5));
    batch.field("events", all).number("data_parallel_rank", Some(1)).pack.0
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_mean_the_same_in_every_form(events in vec(event(), 0..8)) {
        let expected = decode(&payload(&events, false, true));
        for (batch_is_map, events_are_maps) in [(false, false), (true, false), (true, true)] {
            let other = decode(&payload(&events, batch_is_map, events_are_maps));
            prop_assert_eq!(&other, &expected);
        }
        prop_assert_eq!(expected.rank, Some(1));
        prop_assert_eq!(expected.skipped.unusable_events + expected.skipped.unknown_events, 0);
    }
}
