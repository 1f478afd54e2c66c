//! Hand-offs of recorded and constructed prefill replies.

use crate::support::fixture_text;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use splitrail_engine::connectors::nixl::{
    HandOff, HandOffError, MAX_HAND_OFF_BYTES, PREFILL_PARAMS_JSON,
};
use splitrail_engine::connectors::nixl_push::{PushError, PushReply};

#[derive(Deserialize)]
struct Reply {
    kv_transfer_params: Box<RawValue>,
}

/// The `kv_transfer_params` of a recorded reply.
fn recorded(name: &str) -> Box<RawValue> {
    let exchange: Value =
        serde_json::from_str(&fixture_text(&format!("nixl/{name}.json"))).unwrap();
    let reply: Reply = serde_json::from_str(exchange["response"].as_str().unwrap()).unwrap();
    reply.kv_transfer_params
}

fn hand_off(text: &str) -> Result<HandOff, HandOffError> {
    HandOff::from_reply(text)
}

#[test]
fn a_recorded_hand_off_is_read_and_kept_verbatim() {
    let raw = recorded("nixl_warm_both_prefill");
    let hand_off = HandOff::from_reply(raw.get()).unwrap();
    assert_eq!(hand_off.remote_host(), "127.0.0.1");
    assert_eq!(hand_off.remote_num_tokens(), Some(200));
    assert_eq!(hand_off.remote_prefill_cached_tokens(), Some(192));
    assert_eq!(hand_off.remote_blocks_expiry_s(), None);
    assert_eq!(hand_off.block_count(), 7);
    assert_eq!(*hand_off.into_json(), *raw.get());
}

#[test]
fn every_recorded_pull_hand_off_is_usable() {
    let cold = HandOff::from_reply(recorded("nixl_cold_prefill").get()).unwrap();
    assert_eq!(cold.remote_prefill_cached_tokens(), Some(0));
    HandOff::from_reply(recorded("nixl_chat_prefill").get()).unwrap();
    // An engine may omit the number of cached tokens.
    let without = HandOff::from_reply(recorded("prefill_min_params_maxtok3").get()).unwrap();
    assert_eq!(without.remote_prefill_cached_tokens(), None);
    assert_eq!(without.remote_num_tokens(), Some(122));
}

#[test]
fn values_that_are_not_a_hand_off_are_refused() {
    assert_eq!(
        HandOff::from_reply(recorded("nixl_cold_decode").get()).unwrap_err(),
        HandOffError::Absent
    );
    assert_eq!(
        HandOff::from_reply(recorded("push1_prefill").get()).unwrap_err(),
        HandOffError::Push
    );
    let where_from = r#""remote_engine_id":"e","remote_host":"h","remote_port":1"#;
    for (text, error) in [
        ("{}".to_owned(), HandOffError::NotForDecode),
        (PREFILL_PARAMS_JSON.to_owned(), HandOffError::NotForDecode),
        (
            format!(
                r#"{{"do_remote_prefill":true,"do_remote_decode":true,{where_from},"remote_block_ids":[1]}}"#
            ),
            HandOffError::NotForDecode,
        ),
        (format!(r#"{{"do_remote_prefill":true,{where_from}}}"#), HandOffError::NoBlocks),
    ] {
        assert_eq!(hand_off(&text).unwrap_err(), error, "{text}");
    }
    for ids in ["null", "[]", "[[]]", "[[],[]]"] {
        let text = format!(r#"{{"do_remote_prefill":true,{where_from},"remote_block_ids":{ids}}}"#);
        assert_eq!(hand_off(&text).unwrap_err(), HandOffError::NoBlocks, "{ids}");
    }
    for text in [
        "[true,false]",
        "3",
        r#"{"do_remote_prefill":true}"#,
        r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":70000,"remote_block_ids":[1]}"#,
        r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_block_ids":["x"]}"#,
        r#"{"do_remote_prefill":true,"do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_block_ids":[1]}"#,
    ] {
        assert!(matches!(hand_off(text).unwrap_err(), HandOffError::Shape(_)), "{text}");
    }
    let huge = format!(r#"{{"x":"{}"}}"#, "x".repeat(MAX_HAND_OFF_BYTES));
    assert!(matches!(hand_off(&huge).unwrap_err(), HandOffError::TooLarge { .. }));
}

#[test]
fn a_flat_list_of_block_ids_counts() {
    let text = r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_block_ids":[4,5,6]}"#;
    assert_eq!(hand_off(text).unwrap().block_count(), 3);
}

#[test]
fn debug_output_counts_block_ids_instead_of_printing_them() {
    let text = r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_block_ids":[[987654321]]}"#;
    let debug = format!("{:?}", hand_off(text).unwrap());
    assert!(debug.contains("block_count: 1"), "{debug}");
    assert!(!debug.contains("987654321"), "{debug}");
}

#[test]
fn the_prefill_leg_asks_for_a_remote_decode() {
    let params: Value = serde_json::from_str(PREFILL_PARAMS_JSON).unwrap();
    assert_eq!(params["do_remote_decode"], true);
    assert_eq!(params["do_remote_prefill"], false);
}

#[test]
fn a_recorded_reply_of_an_engine_that_pushes_says_where_decode_registers() {
    let raw = recorded("push1_prefill");
    let said: Value = serde_json::from_str(raw.get()).unwrap();
    let reply = PushReply::parse(raw.get()).unwrap();
    assert_eq!(reply.engine.host(), said["remote_host"].as_str().unwrap());
    let cached = said["remote_prefill_cached_tokens"].as_u64().map(|count| count as u32);
    assert_eq!(reply.cached_tokens, cached);
    let params: Value = serde_json::from_str(&reply.engine.decode_params_json("id")).unwrap();
    let expected = serde_json::json!({
        "do_remote_decode": false,
        "do_remote_prefill": true,
        "remote_engine_id": said["remote_engine_id"],
        "remote_host": said["remote_host"],
        "remote_port": said["remote_port"],
        "remote_request_id": "id",
        "tp_size": said["tp_size"],
        "pp_size": said["pp_size"],
    });
    assert_eq!(params, expected);
}

#[test]
fn replies_that_name_no_engine_that_pushes_are_refused() {
    let pulled = recorded("nixl_warm_both_prefill");
    assert_eq!(PushReply::parse(pulled.get()), Err(PushError::Pull));
    assert_eq!(PushReply::parse("null"), Err(PushError::Absent));
    assert_eq!(PushReply::from_body(br#"{"id":"x"}"#), Err(PushError::Absent));
    let named = |id: &str, host: &str, more: &str| {
        format!(
            r#"{{"do_remote_prefill":true,"remote_engine_id":"{id}","remote_host":"{host}","remote_port":1,"transfer_mode":"push"{more}}}"#
        )
    };
    assert!(PushReply::parse(&named("e", "h", "")).is_ok());
    let long = "x".repeat(257);
    for text in [
        named("", "h", ""),
        named("e", "", ""),
        named(&long, "h", ""),
        named("e", &long, ""),
        named("e", "h", r#","tp_size":0"#),
        named("e", "h", &" ".repeat(MAX_HAND_OFF_BYTES)),
    ] {
        assert_eq!(PushReply::parse(&text), Err(PushError::OutOfBounds));
    }
    let of_decode = named("e", "h", "").replace("prefill\":true", "prefill\":false");
    assert_eq!(PushReply::parse(&of_decode), Err(PushError::NotForDecode));
    for text in ["", "[]", "{}", r#"{"transfer_mode":"push"}"#, "1"] {
        assert!(matches!(PushReply::parse(text), Err(PushError::Shape(_))), "{text}");
    }
}
