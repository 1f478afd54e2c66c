//! A prefill engine's `kv_transfer_params`.

use serde_json::Value;
use serde_json::value::RawValue;
use splitrail_engine::connectors::nixl::HandOff;

pub(crate) fn check(data: &[u8]) {
    let Ok(raw) = RawValue::from_string(String::from_utf8_lossy(data).into_owned()) else {
        return;
    };
    let Ok(hand_off) = HandOff::from_reply(raw.get()) else {
        return;
    };
    // Parsed again by serde_json, which also rejects faults in members that the router ignores: a
    // number that no float can hold, or half of a surrogate pair.
    let Ok(value) = serde_json::from_str::<Value>(raw.get()) else {
        return;
    };
    assert_eq!(value["do_remote_prefill"], true);
    assert_ne!(value["do_remote_decode"], true);
    assert_eq!(value["remote_host"], hand_off.remote_host());
    let number = |key: &str| value[key].as_u64();
    assert_eq!(number("remote_num_tokens"), hand_off.remote_num_tokens().map(u64::from));
    let cached = hand_off.remote_prefill_cached_tokens();
    assert_eq!(number("remote_prefill_cached_tokens"), cached.map(u64::from));
    let items = value["remote_block_ids"].as_array().expect("a list of block ids");
    let ids = items.iter().map(|item| item.as_array().map_or(1, Vec::len)).sum::<usize>();
    assert_eq!(ids, hand_off.block_count());
    assert!(ids > 0, "a hand-off without blocks ends a decode engine");
    assert_eq!(*hand_off.into_json(), *raw.get(), "decode gets what prefill sent");
}
