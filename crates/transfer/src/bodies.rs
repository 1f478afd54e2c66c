//! The bodies that are sent to the engine of each leg: the client's body with a few members replaced.

use crate::params::{DecodeParams, PrefillParams};
use splitrail_api::error::Error;
use splitrail_api::request::Options;
use splitrail_api::sampling::edit_sampling;
use splitrail_api::{Endpoint, JsonObject, Parts};

/// Members that could end a one-token leg for another reason than its length, or make it run more
/// than one sample.
const NOT_IN_ONE_TOKEN: [&str; 7] =
    ["min_tokens", "stop", "stop_sequences", "stop_token_ids", "n", "best_of", "use_beam_search"];

/// Members that limit the number of output tokens, on any endpoint.
const OUTPUT_TOKENS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];

/// The body of the leg that generates the reply, with the parameters of its prefill leg. The engine
/// is always asked for usage, because only the engine knows how many tokens were cached.
///
/// # Errors
/// An error with status 400 if `stream_options` is not an object.
pub fn generate(
    body: JsonObject,
    endpoint: Endpoint,
    asked: Options,
    carried: DecodeParams<'_>,
) -> Result<Parts, Error> {
    // Streams with named events contain usage without being asked for it.
    let mut body = match endpoint.dialect().names_events() {
        true => body,
        false => with_usage(body, asked)?,
    };
    carried.put(&mut body);
    Ok(body.to_parts())
}

/// The fields of a form whose text is streamed. vLLM is always asked for usage; SGLang, which reports
/// none, ignores that.
pub fn transcription(mut fields: JsonObject, asked: Options) -> JsonObject {
    fields.set("stream_include_usage", "true");
    if !asked.include_usage {
        fields.remove("stream_continuous_usage_stats");
    }
    fields
}

/// The body of a prefill leg: one token, not streamed (a streamed prefill returns
/// no hand-off and pins its blocks until the lease ends).
///
/// # Errors
/// An error with status 400 if `sampling_params` must be an object and is not.
pub fn prefill(
    body: &JsonObject,
    endpoint: Endpoint,
    params: PrefillParams<'_>,
) -> Result<Parts, Error> {
    // An engine that samples the first token of the reply stops by itself after this token.
    let mut body = if params.samples() { unstreamed(body) } else { one_token(body, endpoint)? };
    params.put(&mut body);
    Ok(body.to_parts())
}

/// The body of a decode leg that only takes a hand-off. It is sent before several samples, which
/// then find the prompt in the worker's own cache (one hand-off cannot serve several samples), or
/// to free the blocks of an unused hand-off.
///
/// # Errors
/// An error with status 400 if `sampling_params` must be an object and is not.
pub fn take_hand_off(
    body: &JsonObject,
    endpoint: Endpoint,
    carried: DecodeParams<'_>,
) -> Result<Parts, Error> {
    let mut body = one_token(body, endpoint)?;
    carried.put(&mut body);
    Ok(body.to_parts())
}

/// A body that computes its prompt and one token of any value.
///
/// vLLM hands blocks over only if the request ended by its length limit, so all members that could
/// end it earlier are removed. The one token is thrown away; the decode engine samples it again
/// from the full prompt.
fn one_token(body: &JsonObject, endpoint: Endpoint) -> Result<JsonObject, Error> {
    let mut body = unstreamed(body);
    edit_sampling(&mut body, endpoint, |sampling| cut_to_one_token(sampling, endpoint))?;
    Ok(body)
}

fn cut_to_one_token(sampling: &mut JsonObject, endpoint: Endpoint) {
    for key in NOT_IN_ONE_TOKEN {
        sampling.remove(key);
    }
    let own = match endpoint {
        Endpoint::Responses => "max_output_tokens",
        _ => "max_tokens",
    };
    sampling.set(own, "1");
    for key in OUTPUT_TOKENS {
        if sampling.raw(key).is_some() {
            sampling.set(key, "1");
        }
    }
    if endpoint == Endpoint::Chat {
        sampling.set("max_completion_tokens", "1");
    }
    // The Messages API has no such member, so its reply may end with the first token.
    if endpoint != Endpoint::Messages {
        sampling.set("ignore_eos", "true");
    }
}

fn unstreamed(body: &JsonObject) -> JsonObject {
    let mut body = body.clone();
    body.remove("stream_options");
    body.set("stream", "false");
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
            // Running totals are part of the usage, which this client did not ask for.
            options.remove("continuous_usage_stats");
        }
        body.set("stream_options", options.to_string());
    }
    Ok(body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::params::Matched;

    #[test]
    fn a_prefill_leg_asks_for_one_token_and_keeps_the_rest() {
        let text = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":50,"min_tokens":4,"stop":["x"],"temperature":0.25}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let body = prefill(&body, Endpoint::Chat, PrefillParams::Pulled).unwrap();
        let sent: serde_json::Value = serde_json::from_slice(&body.into_bytes()).unwrap();
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
    fn a_prefill_leg_keeps_sampling_parameters_that_stand_apart_byte_for_byte() {
        let text = r#"{"model":"m","token_ids":[1 ,2],"sampling_params":{"temperature":0.10,"max_tokens":9,"n":3,"stop":["x"],"x":{"y" : 1}},"stream":true,"max_tokens":7}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let body = prefill(&body, Endpoint::Generate, PrefillParams::Pulled).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&body.into_bytes()),
            r#"{"model":"m","token_ids":[1 ,2],"sampling_params":{"temperature":0.10,"max_tokens":1,"x":{"y" : 1},"ignore_eos":true},"stream":false,"max_tokens":7,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#
        );
    }

    #[test]
    fn a_prefill_leg_asks_for_one_token_in_its_endpoint_s_words_and_no_others() {
        let params = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}"#;
        for (endpoint, body, expected) in [
            (
                Endpoint::Responses,
                r#"{"input":"a","max_output_tokens":9,"stop":["x"],"stream":true,"x":1.50}"#,
                r#"{"input":"a","max_output_tokens":1,"stream":false,"x":1.50,"ignore_eos":true,"#,
            ),
            (
                Endpoint::Responses,
                r#"{"input":"a"}"#,
                r#"{"input":"a","stream":false,"max_output_tokens":1,"ignore_eos":true,"#,
            ),
            (
                Endpoint::Messages,
                r#"{"messages":[],"max_tokens":9,"stop_sequences":["x"],"system":"s"}"#,
                r#"{"messages":[],"max_tokens":1,"system":"s","stream":false,"#,
            ),
        ] {
            let body = JsonObject::parse_str(body).unwrap();
            let sent = prefill(&body, endpoint, PrefillParams::Pulled).unwrap().into_bytes();
            assert_eq!(String::from_utf8_lossy(&sent), format!("{expected}{params}}}"));
        }
    }

    #[test]
    fn a_prefill_leg_asks_for_one_token_under_every_name() {
        let text = r#"{"max_tokens":5,"max_completion_tokens":6,"max_output_tokens":7,"n":2,"best_of":4,"use_beam_search":true}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let sent = prefill(&body, Endpoint::Completions, PrefillParams::Stored).unwrap();
        let sent: serde_json::Value = serde_json::from_slice(&sent.into_bytes()).unwrap();
        for key in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            assert_eq!(sent[key], 1, "{key}");
        }
        for key in ["n", "best_of", "use_beam_search"] {
            assert_eq!(sent[key], serde_json::Value::Null, "{key}");
        }
    }

    #[test]
    fn each_connector_adds_its_own_members_and_nothing_else() {
        let text = r#"{"model":"m","prompt":"x","stream":true,"max_tokens":9,"x":1.50}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let asked = |stream| Options { stream, ..Options::PLAIN };
        let text = |parts: Parts| String::from_utf8_lossy(&parts.into_bytes()).into_owned();
        let room = splitrail_engine::connectors::sglang_room::Room::from_random(7);
        let members = room.into_members("10.0.0.1", 8998);
        let cut =
            r#"{"model":"m","prompt":"x","stream":false,"max_tokens":1,"x":1.50,"ignore_eos":true"#;
        let whole = r#"{"model":"m","prompt":"x","stream":true,"max_tokens":9,"x":1.50"#;
        let room_members =
            r#","bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#;
        let prefill_leg = |params| text(prefill(&body, Endpoint::Completions, params).unwrap());
        assert_eq!(prefill_leg(PrefillParams::Stored), format!("{cut}}}"));
        let params = r#"{"transfer_id":"t"}"#;
        assert_eq!(
            prefill_leg(PrefillParams::Pushed(params)),
            format!(r#"{cut},"kv_transfer_params":{params}}}"#)
        );
        // SGLang's prefill engine samples the first token with the client's parameters; its reply
        // is not streamed.
        let sampling = whole.replace("\"stream\":true", "\"stream\":false");
        assert_eq!(prefill_leg(PrefillParams::Room(&members)), format!("{sampling}{room_members}"));

        let completions = Endpoint::Completions;
        let given =
            |carried| text(generate(body.clone(), completions, asked(false), carried).unwrap());
        assert_eq!(given(DecodeParams::Nothing), format!("{whole}}}"));
        let request_id = Some("\"resp_1\"");
        let matched = Matched { params: r#"{"a":2}"#, request_id };
        let named = r#","kv_transfer_params":{"a":2},"request_id":"resp_1"}"#;
        assert_eq!(prefill_leg(PrefillParams::Matched(matched)), format!("{cut}{named}"));
        assert_eq!(given(DecodeParams::Matched(matched)), format!("{whole}{named}"));
        let plain = Matched { request_id: None, ..matched };
        let plain = given(DecodeParams::Matched(plain));
        assert_eq!(plain, format!(r#"{whole},"kv_transfer_params":{{"a":2}}}}"#));
        let pushed = DecodeParams::Params(r#"{"a":1}"#);
        assert_eq!(given(pushed), format!(r#"{whole},"kv_transfer_params":{{"a":1}}}}"#));
        assert_eq!(given(DecodeParams::Room(&members)), format!("{whole}{room_members}"));
        let taken =
            take_hand_off(&body, Endpoint::Completions, DecodeParams::Params("{}")).unwrap();
        assert_eq!(text(taken), format!(r#"{cut},"kv_transfer_params":{{}}}}"#));
    }

    #[test]
    fn a_stream_is_always_asked_for_usage_and_for_totals_only_if_the_client_wants_usage() {
        let text = r#"{"stream":true,"stream_options":{"continuous_usage_stats":true,"x":1}}"#;
        let body = JsonObject::parse_str(text).unwrap();
        let options = |include_usage| {
            let asked = Options { stream: true, include_usage, ..Options::PLAIN };
            let sent =
                generate(body.clone(), Endpoint::Chat, asked, DecodeParams::Nothing).unwrap();
            let sent = sent.into_bytes();
            serde_json::from_slice::<serde_json::Value>(&sent).unwrap()["stream_options"].clone()
        };
        assert_eq!(options(false), serde_json::json!({"include_usage": true, "x": 1}));
        assert_eq!(
            options(true),
            serde_json::json!({"include_usage": true, "continuous_usage_stats": true, "x": 1})
        );
    }
}
