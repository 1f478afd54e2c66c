//! Vectors of an engine that pools: `/v1/embeddings` and `/pooling`.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
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
    Ok(list(&format!("embd-{id}"), body, data, tokens))
}

/// The reply to `/pooling`.
pub(super) fn pool(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let (entries, tokens) = vectors(body, config)?;
    let data: Vec<Value> = (0..)
        .zip(entries)
        .map(|(index, data): (usize, _)| json!({"index": index, "object": "pooling", "data": data}))
        .collect();
    Ok(list(&format!("pooling-{id}"), body, data, tokens))
}

/// A reply without generated tokens.
pub(super) fn list(id: &str, body: &Value, data: Vec<Value>, tokens: usize) -> Value {
    json!({
        "id": id,
        "object": "list",
        "model": body["model"],
        "data": data,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": null,
        },
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
            true => BASE64_STANDARD
                .encode(embedding.flat_map(f32::to_le_bytes).collect::<Vec<_>>())
                .into(),
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
