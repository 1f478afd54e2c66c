//! An engine's whole reply: its usage is told anew, and replies of a batch are
//! made into one.

use serde_json::Value;
use serde_json::value::RawValue;
use splitrail::api::JsonObject;
use splitrail::reply::{merge, usage};

const BATCH: usize = 3;
const N: u32 = 2;

pub(crate) fn check(data: &[u8]) {
    let Ok(reply) = JsonObject::parse(bytes::Bytes::copy_from_slice(data)) else {
        return;
    };
    if let Some(raw) = reply.raw("usage") {
        told(raw);
    }
    let merged =
        merge::replies(vec![reply.clone(); BATCH], merge::Places { n: N, samples_apart: 1 });
    let choices = reply.raw("choices").map(serde_json::from_str::<Vec<&RawValue>>);
    match (merged, choices) {
        (Ok(merged), Some(Ok(choices))) => {
            let merged = JsonObject::parse(merged.to_bytes()).expect("a merged reply is an object");
            let raw = merged.raw("choices").expect("a merged reply has choices");
            let together: Vec<&RawValue> = serde_json::from_str(raw).expect("choices are a list");
            assert_eq!(together.len(), BATCH * choices.len());
            for (place, choice) in together.iter().enumerate() {
                // What is no object, or has a key twice, stays as it is.
                let Ok(choice) = JsonObject::parse_str(choice.get()) else {
                    continue;
                };
                let base = (place / choices.len()) as u64 * u64::from(N);
                let index = choice.get::<u64>("index", "a number").ok().flatten();
                assert!(index.is_some_and(|index| index >= base), "{choice} at place {place}");
            }
        }
        (Err(_), Some(Ok(_))) => panic!("replies with choices were refused"),
        _ => {}
    }
}

/// The client reads what it is told, and all else of the usage as it was.
fn told(raw: &str) {
    for figure in [None, Some(0), Some(u32::MAX)] {
        let Some(written) = usage::rewrite(raw, figure) else {
            continue;
        };
        let (Ok(before), Ok(after)) =
            (serde_json::from_str::<Value>(raw), serde_json::from_str::<Value>(&written))
        else {
            continue;
        };
        let details = &after["prompt_tokens_details"];
        assert_eq!(details["cached_tokens"].as_u64(), figure.map(u64::from), "{written}");
        let same = |(key, value): (&String, &Value)| {
            key == "prompt_tokens_details" || after.get(key) == Some(value)
        };
        assert!(before.as_object().is_some_and(|members| members.iter().all(same)), "{written}");
    }
}
