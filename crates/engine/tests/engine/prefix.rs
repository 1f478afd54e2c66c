//! Hand-offs of prefixes, cut for the prefill leg that takes them.

use proptest::prelude::*;
use serde_json::{Value, json};
use splitrail_engine::connectors::nixl::HandOff;

/// The value in the reply of vLLM 0.32 to a prompt of ten whole blocks of 32 and one more token.
const RECORDED: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[224,223,222,221,220,219,218,217,216,215,213]],"remote_engine_id":"p0","remote_request_id":"cmpl-aba96f11-4db4-4403-a956-f8c8db43b87b-0-827855fb","remote_host":"127.0.0.1","remote_port":24410,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":321,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":320}"#;

fn cut(raw: &str, blocks: u32, block_size: u32) -> Option<Value> {
    let hand_off = HandOff::from_reply(raw).ok()?;
    let json = hand_off.prefix_params(blocks, block_size)?;
    Some(serde_json::from_str(&json).unwrap())
}

#[test]
fn a_recorded_hand_off_is_cut_to_the_whole_blocks_that_a_prefill_leg_takes() {
    let mut expected: Value = serde_json::from_str(RECORDED).unwrap();
    expected["do_remote_decode"] = true.into();
    expected["do_remote_prefill"] = false.into();
    expected["remote_num_tokens"] = 320.into();
    expected["remote_block_ids"] = json!([[224, 223, 222, 221, 220, 219, 218, 217, 216, 215]]);
    expected.as_object_mut().unwrap().remove("remote_prefill_cached_tokens");
    assert_eq!(cut(RECORDED, 10, 32).unwrap(), expected);
    // Older versions have one list.
    let plain = RECORDED.replace("[[", "[").replace("]]", "]");
    assert_eq!(cut(&plain, 2, 32).unwrap()["remote_block_ids"], json!([224, 223]));
}

#[test]
fn a_hand_off_that_cannot_be_cut_exactly_is_not_cut() {
    assert_eq!(cut(RECORDED, 11, 32), None, "the last block is not full");
    assert_eq!(cut(RECORDED, 0, 32), None);
    assert_eq!(cut(RECORDED, 10, 16), None, "blocks of another size");
    assert_eq!(cut(RECORDED, 1, 0), None);
    assert_eq!(cut(RECORDED, u32::MAX, 32), None);
    for (from, to) in [
        ("215,213]]", "215]]"),
        ("215,213]]", "215,213,212]]"),
        ("[[224,", "[[1],[224,"),
        (r#""remote_num_tokens":321"#, r#""remote_num_tokens":null"#),
    ] {
        let other = RECORDED.replace(from, to);
        assert_ne!(other, RECORDED);
        assert_eq!(cut(&other, 10, 32), None, "{to}");
    }
}

proptest! {
    #[test]
    fn ids_and_tokens_always_fit_each_other(
        staged in 1u32..2000, blocks in 0u32..80, block_size in 1u32..65,
    ) {
        let ids: Vec<u32> = (7..7 + staged.div_ceil(block_size)).collect();
        let mut raw: Value = serde_json::from_str(RECORDED).unwrap();
        (raw["remote_block_ids"], raw["remote_num_tokens"]) = (json!([ids]), staged.into());
        match cut(&raw.to_string(), blocks, block_size) {
            Some(params) => {
                let left = params["remote_block_ids"][0].as_array().unwrap();
                prop_assert_eq!(left.len() as u32, blocks);
                prop_assert_eq!(&params["remote_num_tokens"], blocks * block_size);
                prop_assert!(left.iter().zip(&ids).all(|(left, id)| left == id));
            }
            None => prop_assert!(blocks == 0 || blocks * block_size > staged),
        }
    }
}
