//! What each leg's engine is sent: the client's body with a few members replaced.

use bytes::Bytes;
use serde_json::value::RawValue;
use splitrail_engine::nixl::{HandOff, PREFILL_PARAMS_JSON};

use crate::api::request::Options;
use crate::api::{Endpoint, JsonObject};
use crate::error::Error;

/// The body of a leg that does the whole request. The engine is always asked for
/// usage: without it nobody could say what was cached.
///
/// # Errors
/// A 400 if `stream_options` is no object.
pub fn aggregated(body: &JsonObject, asked: Options) -> Result<Bytes, Error> {
    Ok(with_usage(body.clone(), asked)?.to_bytes())
}

/// The body of a decode leg, with its hand-off as JSON.
///
/// # Errors
/// A 400 if `stream_options` is no object.
pub fn decode(body: &JsonObject, asked: Options, hand_off: &RawValue) -> Result<Bytes, Error> {
    let mut body = with_usage(body.clone(), asked)?;
    body.set("kv_transfer_params", hand_off.get());
    Ok(body.to_bytes())
}

/// The body of a decode leg that only fetches a hand-off, so that its blocks are freed.
pub fn release(body: &JsonObject, endpoint: Endpoint, hand_off: HandOff) -> Bytes {
    let mut body = one_token(body, endpoint);
    body.set("kv_transfer_params", hand_off.into_json().get());
    body.to_bytes()
}

/// The body of a prefill leg: one token, not streamed (a streamed prefill returns
/// no hand-off and pins its blocks until the lease ends).
///
/// vLLM hands blocks over only where the request ended by length, so whatever
/// could end it earlier is taken away; the one token is thrown away, and decode
/// samples it again from the full prompt.
pub fn prefill(body: &JsonObject, endpoint: Endpoint) -> Bytes {
    let mut body = one_token(body, endpoint);
    body.set("kv_transfer_params", PREFILL_PARAMS_JSON);
    body.to_bytes()
}

fn one_token(body: &JsonObject, endpoint: Endpoint) -> JsonObject {
    let mut body = body.clone();
    for key in ["stream_options", "min_tokens", "stop", "stop_token_ids"] {
        body.remove(key);
    }
    body.set("stream", "false");
    body.set("max_tokens", "1");
    if endpoint == Endpoint::Chat {
        body.set("max_completion_tokens", "1");
    }
    body.set("ignore_eos", "true");
    body
}

fn with_usage(mut body: JsonObject, asked: Options) -> Result<JsonObject, Error> {
    if asked.stream {
        let mut options = match body.raw("stream_options") {
            Some(raw) if raw != "null" => JsonObject::parse_str(raw)?,
            _ => JsonObject::parse_str("{}")?,
        };
        options.set("include_usage", "true");
        if !asked.include_usage {
            // Running totals come only with the usage that this client did not want.
            options.remove("continuous_usage_stats");
        }
        let options = options.to_string();
        body.set("stream_options", options);
    }
    Ok(body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_leg_asks_for_one_token_and_keeps_the_rest() {
        let text = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"min_tokens":4,"stop":["x"],"temperature":0.25}"#;
        let body = prefill(&JsonObject::parse_str(text).unwrap(), Endpoint::Chat);
        let sent: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            sent,
            serde_json::json!({
                "model": "m", "messages": [], "stream": false, "max_tokens": 1,
                "max_completion_tokens": 1, "temperature": 0.25, "ignore_eos": true,
                "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
            })
        );
    }

    #[test]
    fn a_stream_is_always_asked_for_usage_and_for_totals_only_if_the_client_wants_usage() {
        let text = r#"{"stream":true,"stream_options":{"continuous_usage_stats":true,"x":1}}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let options = |include_usage| {
            let asked = Options {
                stream: true,
                include_usage,
                samples: 1,
                n: 1,
                bypasses_cache: None,
                embeds: false,
                refusable: false,
                max_tokens: None,
            };
            let sent = aggregated(&body, asked).unwrap();
            serde_json::from_slice::<serde_json::Value>(&sent).unwrap()["stream_options"].clone()
        };
        assert_eq!(options(false), serde_json::json!({"include_usage": true, "x": 1}));
        assert_eq!(
            options(true),
            serde_json::json!({"include_usage": true, "continuous_usage_stats": true, "x": 1})
        );
    }
}
