//! Vectors of an engine that pools: `/v1/embeddings` and `/pooling`.

use serde_json::{Value, json};

use super::request_body::completion_prompts;
use crate::config::SimConfig;
use crate::error::ApiError;

/// Number of dimensions of an embedding.
const DIMENSIONS: usize = 16;

/// The reply to `/v1/embeddings`.
pub(super) fn embed(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let (entries, tokens) = vectors(body, config)?;
    let data: Vec<Value> = (0..)
        .zip(entries)
        .map(|(index, vector): (usize, _)| {
            json!({"index": index, "object": "embedding", "embedding": vector})
        })
        .collect();
    Ok(json!({
        "id": format!("embd-{id}"),
        "object": "list",
        "model": body["model"],
        "data": data,
        "usage": usage(tokens),
    }))
}

/// The reply to `/pooling`.
pub(super) fn pool(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let (entries, tokens) = vectors(body, config)?;
    let data: Vec<Value> = (0..)
        .zip(entries)
        .map(|(index, data): (usize, _)| json!({"index": index, "object": "pooling", "data": data}))
        .collect();
    Ok(json!({
        "id": format!("pooling-{id}"),
        "object": "list",
        "model": body["model"],
        "data": data,
        "usage": usage(tokens),
    }))
}

/// The usage of a reply without generated tokens.
pub(super) fn usage(tokens: usize) -> Value {
    json!({
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": null,
    })
}

/// The vectors that the input asks for, and its tokens.
fn vectors(body: &Value, config: &SimConfig) -> Result<(Vec<Value>, usize), ApiError> {
    let is_base64 = match body["encoding_format"].as_str() {
        None if body["encoding_format"].is_null() => false,
        Some("float") => false,
        Some("base64") => true,
        _ => return Err(ApiError::bad_request("encoding_format", "float or base64.")),
    };
    let dimensions = match &body["dimensions"] {
        Value::Null => DIMENSIONS,
        given => given
            .as_u64()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..=DIMENSIONS).contains(count))
            .ok_or_else(|| {
                let message = format!("This model has {DIMENSIONS} dimensions at most.");
                ApiError::bad_request("dimensions", message)
            })?,
    };
    let prompts = inputs(&body["input"], "input", config)?;
    let tokens = prompts.iter().map(Vec::len).sum();
    let vectors = prompts.iter().map(|prompt| {
        let embedding = embedding(prompt, dimensions);
        match is_base64 {
            true => json!(base64(&embedding.map(f32::to_le_bytes).collect::<Vec<_>>().concat())),
            false => json!(embedding.collect::<Vec<f32>>()),
        }
    });
    Ok((vectors.collect(), tokens))
}

/// The tokens of each text of a member.
pub(super) fn inputs(
    given: &Value,
    member: &'static str,
    config: &SimConfig,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let prompts = completion_prompts(given, config.dialect)
        .map_err(|error| ApiError { param: Some(member), ..error })?;
    let limit = config.sequence_limit_tokens();
    match prompts.iter().find(|prompt| prompt.len() > limit) {
        None => Ok(prompts),
        Some(long) => {
            let message =
                format!("This model takes {limit} tokens at most; the input has {}.", long.len());
            Err(ApiError::bad_request("input_tokens", message))
        }
    }
}

/// The same numbers for the same tokens, from -1 to 1 in steps of an eighth: exact in every format.
pub(super) fn embedding(prompt: &[u32], dimensions: usize) -> impl Iterator<Item = f32> {
    let bytes: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
    (0..dimensions).map(move |i| {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, i as u64);
        (hash % 17) as f32 / 8.0 - 1.0
    })
}

/// Standard base64 with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let byte = |at: usize| u32::from(part.get(at).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            out.push(if place <= part.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded() {
        for (plain, encoded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v")] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
