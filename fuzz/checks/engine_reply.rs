//! An engine's whole reply: its usage is rewritten, and the replies of a batch are merged unless one
//! has more choices than were asked for, or one with the index of another prompt.

use serde_json::Value;
use serde_json::value::RawValue;
use splitrail_api::{JsonObject, usage};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;
use splitrail_reply::merge;

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
            assert!(choices.len() <= N as usize, "{} choices", choices.len());
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
                let own = base..base + u64::from(N);
                assert!(index.is_some_and(|index| own.contains(&index)), "{choice} at {place}");
            }
        }
        (Err(_), Some(Ok(choices))) => {
            let is_foreign = |choice: &&RawValue| {
                let choice = JsonObject::parse_str(choice.get()).ok();
                let index = choice.and_then(|choice| choice.raw("index")?.parse::<u64>().ok());
                index.is_some_and(|index| index >= u64::from(N))
            };
            let is_wrong = choices.len() > N as usize || choices.iter().any(is_foreign);
            assert!(is_wrong, "replies with choices were refused");
        }
        _ => {}
    }
}

/// The counts of both dialects beside those of details.
const COUNTS: [&str; 5] =
    ["prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"];

fn is_count(value: &Value) -> bool {
    value.is_null() || value.as_u64().is_some_and(|count| u32::try_from(count).is_ok())
}

/// The client reads what it is told, and all else of the usage as it was, without counts that cannot be
/// read.
fn told(raw: &str) {
    for dialect in [Dialect::Chunks, Dialect::Responses, Dialect::Messages] {
        let is_read = EngineUsage::read(dialect, raw).0.is_some();
        assert!(!is_read || usage::rewrite(dialect, raw, None).is_some(), "{raw} is billed");
    }
    let dialects =
        [(Dialect::Chunks, "prompt_tokens_details"), (Dialect::Responses, "input_tokens_details")];
    for (dialect, key) in dialects {
        for figure in [None, Some(0), Some(u32::MAX)] {
            let Some((before, after)) = rewritten(dialect, raw, figure) else {
                continue;
            };
            assert_eq!(after[key]["cached_tokens"].as_u64(), figure.map(u64::from), "{after}");
            let same = |(name, value): (&String, &Value)| {
                // A dialect has its own names of counts; others stay.
                let may_go = COUNTS.contains(&name.as_str()) && !is_count(value);
                let now = after.get(name);
                name == key || now == Some(value) || (may_go && now.is_none())
            };
            assert!(before.as_object().is_some_and(|members| members.iter().all(same)), "{after}");
        }
    }
    for figure in [None, Some(0), Some(7), Some(u32::MAX)] {
        let Some((before, after)) = rewritten(Dialect::Messages, raw, figure) else {
            continue;
        };
        const PARTS: [&str; 3] =
            ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"];
        let sum = |usage: &Value| {
            PARTS.iter().fold(0u64, |sum, key| sum.saturating_add(usage[key].as_u64().unwrap_or(0)))
        };
        assert_eq!(sum(&before), sum(&after), "each token counts once: {before} {after}");
        let read = after["cache_read_input_tokens"].as_u64();
        // Without the rest of the prompt, the sum is not known.
        let is_known =
            before["input_tokens"].as_u64().is_some_and(|rest| u32::try_from(rest).is_ok());
        let told = figure.map(|figure| u64::from(figure).min(sum(&before)));
        assert_eq!(read, told.filter(|_| is_known), "{after}");
    }
}

fn rewritten(dialect: Dialect, raw: &str, figure: Option<u32>) -> Option<(Value, Value)> {
    let written = usage::rewrite(dialect, raw, figure)?;
    let before = serde_json::from_str(raw).ok()?;
    Some((before, serde_json::from_str(&written).ok()?))
}
