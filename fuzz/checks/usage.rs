//! The `usage` of an engine's reply.

use serde_json::{Value, json};
use splitrail_engine::dialect::Dialect;
use splitrail_engine::usage::EngineUsage;

pub(crate) fn check(data: &[u8]) {
    let raw = String::from_utf8_lossy(data);
    for dialect in [Dialect::Chunks, Dialect::Responses, Dialect::Messages] {
        let (Some(usage), _) = EngineUsage::read(dialect, &raw) else { continue };
        assert!(usage.cached_tokens.is_none_or(|cached| cached <= usage.prompt_tokens));
    }
    let Ok(usage) = EngineUsage::parse(Dialect::Chunks, &raw) else {
        return;
    };
    // Read a second time, by other code, which is stricter where nobody looks: a
    // number beyond a float or half a character, in a field that means nothing.
    let Ok(value) = serde_json::from_str::<Value>(&raw) else {
        return;
    };
    let EngineUsage { prompt_tokens, completion_tokens, cached_tokens } = usage;
    assert_eq!(value["prompt_tokens"], prompt_tokens);
    assert_eq!(value["completion_tokens"].as_u64(), completion_tokens.map(u64::from));
    let details = &value["prompt_tokens_details"];
    assert_eq!(details["cached_tokens"].as_u64(), cached_tokens.map(u64::from), "0 is a figure");
    assert!(cached_tokens.is_none_or(|cached| cached <= prompt_tokens));

    let said_again = json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": { "cached_tokens": cached_tokens },
    });
    assert_eq!(EngineUsage::parse(Dialect::Chunks, &said_again.to_string()), Ok(usage));
}
