//! KV that decode engines keep pinned: read from replies, and cut for prefill legs.

use proptest::prelude::*;
use serde_json::Value;
use splitrail_engine::connectors::nixl::{HandOffError, InexactPin, PinnedKv};

/// The value in the reply of a decode leg of vLLM 0.32: 200 tokens of prompt and 100 of reply, in
/// blocks of 32.
const RECORDED: &str = r#"{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[132,133,134,135,136,137,138,139,140,141]],"remote_engine_id":"p1b","remote_request_id":"cmpl-8a925ee2-0785-43a8-af1b-515779f8b14b-0-921eed80","remote_host":"127.0.0.1","remote_port":24420,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":299,"remote_blocks_expiry_time":4352.528075292,"transfer_mode":"pull"}"#;

fn pinned(raw: &str) -> PinnedKv {
    PinnedKv::from_reply(raw).unwrap().unwrap()
}

#[test]
fn a_recorded_reply_is_cut_to_whole_blocks_and_otherwise_kept_byte_for_byte() {
    let pinned = pinned(RECORDED);
    assert_eq!((pinned.tokens, pinned.blocks(), &*pinned.host), (299, 10, "127.0.0.1"));
    assert_eq!(pinned.check(32), Ok(()));
    let expected = RECORDED
        .replace("136,137,138,139,140,141]]", "136,137,138]]")
        .replace("\"remote_num_tokens\":299", "\"remote_num_tokens\":224");
    assert_eq!(pinned.read_json(7, 32).unwrap(), expected);
    assert!(pinned.read_json(9, 32).is_some());
    assert_eq!(pinned.read_json(10, 32), None, "the tenth block is not full");
    assert_eq!(pinned.read_json(0, 32), None);
    let expected = RECORDED.replace("\"remote_num_tokens\":299", "\"remote_num_tokens\":1");
    assert_eq!(pinned.release_json().unwrap(), expected);
}

#[test]
fn a_pin_that_cannot_be_read_exactly_can_only_be_released() {
    let other = pinned(RECORDED);
    let count = InexactPin::Count { ids: 10, tokens: 299, block_size: 16 };
    assert_eq!(other.check(16), Err(count), "blocks of another size");
    assert_eq!(other.read_json(7, 16), None);
    let groups = RECORDED.replace("[[132,", "[[1],[132,");
    let groups = pinned(&groups);
    assert_eq!((groups.check(32), groups.blocks()), (Err(InexactPin::Groups(2)), 11));
    assert_eq!(groups.read_json(1, 32), None);
    assert!(groups.release_json().unwrap().contains("[[1],[132,"));
}

#[test]
fn values_without_pinned_kv_are_distinguished_from_broken_ones() {
    let hand_off = RECORDED.replace("\"do_remote_decode\":true", "\"do_remote_decode\":false");
    for raw in ["null", "{}", &*hand_off, r#"{"do_remote_prefill":true}"#] {
        assert!(PinnedKv::from_reply(raw).unwrap().is_none(), "{raw}");
    }
    for (raw, error) in [
        (RECORDED.replace("pull", "push"), HandOffError::NotPull),
        (RECORDED.replace("remote_request_id", "x"), HandOffError::NoBlocks),
        (RECORDED.replace("remote_host", "x"), HandOffError::NoBlocks),
        (r#"{"do_remote_decode":true}"#.to_owned(), HandOffError::NoBlocks),
    ] {
        assert_eq!(PinnedKv::from_reply(&raw).unwrap_err(), error, "{raw}");
    }
    assert!(matches!(PinnedKv::from_reply("[1]").unwrap_err(), HandOffError::Shape(_)));
}

#[test]
fn debug_output_has_no_block_ids() {
    let debug = format!("{:?}", pinned(RECORDED));
    assert!(debug.contains("blocks: 10") && !debug.contains("136"), "{debug}");
}

proptest! {
    #[test]
    fn a_cut_names_as_many_ids_as_whole_blocks_and_exactly_their_tokens(
        tokens in 1u32..2000, block_size in 1u32..64, blocks in 0usize..200, is_plain: bool,
    ) {
        let ids: Vec<u32> = (0..tokens.div_ceil(block_size)).map(|id| id * 7 + 1).collect();
        let list = serde_json::to_string(&ids).unwrap();
        let list = if is_plain { list } else { format!("[{list}]") };
        let raw = format!(
            r#"{{"remote_num_tokens": {tokens} ,"remote_block_ids":{list},"do_remote_decode":true,"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1}}"#
        );
        let pinned = pinned(&raw);
        prop_assert_eq!(pinned.check(block_size), Ok(()));
        let cut = pinned.read_json(blocks, block_size);
        let full = (tokens / block_size) as usize;
        prop_assert_eq!(cut.is_some(), blocks > 0 && blocks <= full);
        let Some(cut) = cut else { return Ok(()) };
        let cut: Value = serde_json::from_str(&cut).unwrap();
        let group = if is_plain { &cut["remote_block_ids"] } else { &cut["remote_block_ids"][0] };
        let left: Vec<u32> = serde_json::from_value(group.clone()).unwrap();
        prop_assert_eq!(&left[..], &ids[..blocks]);
        prop_assert_eq!(cut["remote_num_tokens"].as_u64(), Some(blocks as u64 * u64::from(block_size)));
        prop_assert_eq!(&cut["remote_engine_id"], "e");
    }
}
