//! `/v1/embeddings` of an engine that only serves embeddings.

use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::connection::ConnectionControl;
use super::request_body::{completion_prompts, random_hex, read_model};
use super::{Shared, parse, unix_seconds};
use crate::config::SimConfig;
use crate::error::{ApiError, json_response};
use crate::faults::RequestFaults;

/// The path.
pub(super) const PATH: &str = "/v1/embeddings";

/// Number of dimensions of an embedding.
const DIMENSIONS: usize = 16;

pub(super) async fn embed(
    State(app): Shared,
    ConnectInfo(connection): ConnectInfo<ConnectionControl>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    app.log.push(PATH, &headers, &body);
    let config = &app.engine.config;
    if !config.embeds {
        return ApiError::new(StatusCode::NOT_FOUND, "Not Found").into_response();
    }
    let faults = app.faults.of_request(false, false);
    if let Some(refused) = apply_faults(&faults, &connection).await {
        return refused;
    }
    let given_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let id = given_id.map_or_else(|| random_hex(16), str::to_owned);
    let reply = parse(&body).and_then(|body| answer(&body, config, &id));
    match reply {
        Ok(reply) => json_response(StatusCode::OK, &reply),
        Err(error) => error.into_response(),
    }
}

/// Applies the faults that occur before a reply.
async fn apply_faults(faults: &RequestFaults, connection: &ConnectionControl) -> Option<Response> {
    if let Some(delay) = faults.delay {
        tokio::time::sleep(delay).await;
    }
    if faults.hang {
        std::future::pending::<()>().await;
    }
    if faults.reset {
        connection.cut_in_head();
    }
    let status = faults.reset.then_some(500).or(faults.status)?;
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Some(ApiError::new(status, "A fault was injected.").into_response())
}

fn answer(body: &Value, config: &SimConfig, id: &str) -> Result<Value, ApiError> {
    let (model, _) = read_model(body, config)?;
    for member in ["kv_transfer_params", "request_id"] {
        if !body[member].is_null() {
            let message = "only the router may say this.";
            return Err(ApiError::bad_request(member, message));
        }
    }
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
    let prompts = completion_prompts(&body["input"], config.dialect)
        .map_err(|error| ApiError { param: Some("input"), ..error })?;
    let limit = config.sequence_limit_tokens();
    if let Some(long) = prompts.iter().find(|prompt| prompt.len() > limit) {
        let message =
            format!("This model takes {limit} tokens at most; the input has {}.", long.len());
        return Err(ApiError::bad_request("input_tokens", message));
    }
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let data: Vec<Value> = (0..)
        .zip(&prompts)
        .map(|(index, prompt): (usize, _)| {
            let embedding = embedding(prompt, dimensions);
            let embedding = match is_base64 {
                true => {
                    json!(base64(&embedding.map(f32::to_le_bytes).collect::<Vec<_>>().concat()))
                }
                false => json!(embedding.collect::<Vec<f32>>()),
            };
            json!({"index": index, "object": "embedding", "embedding": embedding})
        })
        .collect();
    Ok(json!({
        "id": format!("embd-{id}"),
        "object": "list",
        "created": unix_seconds(),
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": null,
        },
    }))
}

/// The same numbers for the same tokens, from -1 to 1 in steps of an eighth: exact in every format.
fn embedding(prompt: &[u32], dimensions: usize) -> impl Iterator<Item = f32> {
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
