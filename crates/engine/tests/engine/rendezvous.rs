//! Hand-offs in which both legs are sent at once: those of Mooncake and SGLang.

use std::collections::HashSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use splitrail_engine::connectors::mooncake::{
    EngineIds, MAX_QUERY_BYTES, QueryError, RankEngine, TransferId,
};
use splitrail_engine::connectors::sglang_room::Room;

fn value(json: &str) -> Value {
    serde_json::from_str(json).unwrap()
}

#[test]
fn mooncake_legs_carry_one_transfer_id() {
    let id = TransferId::from_random(0xab);
    let name = id.as_str().to_owned();
    assert_eq!(name.len(), 32);
    assert_eq!(
        value(&id.prefill_params_json()),
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": name})
    );
    assert_eq!(
        value(&id.into_decode_params_json("http://10.0.0.1:8998", "e\"1")),
        json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": name,
            "remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "e\"1",
        })
    );
}

#[test]
fn a_bootstrap_server_names_its_ranks() {
    let one = r#"{"0":{"engine_id":"a","worker_addr":{"0":{"0":"tcp://h:1"}}}}"#;
    let only = RankEngine { rank: 0, id: "a", is_only: true };
    assert_eq!(EngineIds::parse(one).unwrap().of_rank(None), Some(only));
    let two = r#"{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}"#;
    let two = EngineIds::parse(two).unwrap();
    assert_eq!(two.of_rank(None), Some(RankEngine { is_only: false, ..only }));
    assert_eq!(two.of_rank(Some(1)), Some(RankEngine { rank: 1, id: "b", is_only: false }));
    assert_eq!(two.of_rank(Some(2)), None);
}

#[test]
fn answers_that_no_bootstrap_server_sends_are_refused() {
    assert_eq!(EngineIds::parse("{}"), Err(QueryError::NoEngine));
    let long = format!(r#"{{"0":{{"engine_id":"{}"}}}}"#, "x".repeat(257));
    assert_eq!(EngineIds::parse(&long), Err(QueryError::OutOfBounds));
    assert_eq!(EngineIds::parse(r#"{"0":{"engine_id":""}}"#), Err(QueryError::OutOfBounds));
    let huge = " ".repeat(MAX_QUERY_BYTES + 1);
    assert_eq!(EngineIds::parse(&huge), Err(QueryError::OutOfBounds));
    for text in ["", "[]", "null", "1", r#"{"x":{"engine_id":"a"}}"#, r#"{"0":{}}"#, r#"{"0":"a"}"#]
    {
        assert!(matches!(EngineIds::parse(text), Err(QueryError::Shape(_))), "{text}");
    }
}

proptest! {
    #[test]
    fn any_answer_of_a_bootstrap_server_is_read_or_refused(text in ".{0,64}") {
        // Must not panic, and never returns an empty list.
        if let Ok(ids) = EngineIds::parse(&text) {
            prop_assert!(ids.of_rank(None).is_some());
        }
    }

    #[test]
    fn rooms_are_signed_64_bit_integers_in_both_legs(bits: u64) {
        let room = Room::from_random(bits);
        let number = room.number();
        prop_assert!(i64::try_from(number).is_ok());
        let members = room.into_members("10.0.0.1", 8998);
        let keys: HashSet<_> = members.iter().map(|(key, _)| *key).collect();
        prop_assert_eq!(keys.len(), 3);
        prop_assert_eq!(value(&members[0].1), json!("10.0.0.1"));
        prop_assert_eq!(value(&members[1].1), json!(8998));
        prop_assert_eq!(value(&members[2].1), json!(number));
    }
}
