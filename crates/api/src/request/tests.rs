//! Tests of what is read from each endpoint's requests, and of what is refused.

use std::sync::Arc;

use super::*;
use crate::memory_budget::{self, MemoryBudget};
use splitrail_config::Limits;

fn parse(endpoint: Endpoint, text: &str) -> Result<Inbound, Error> {
    let text = bytes::Bytes::copy_from_slice(text.as_bytes());
    let limits = Limits::default();
    let body = JsonObject::parse_strictly(text, limits.object_members_max, |_| Ok(()))?;
    let charge = Arc::new(MemoryBudget::default()).charge();
    let mut work = Meter::new(charge, usize::MAX, &memory_budget::full);
    let allowance = Allowance { limits: &limits, work: &mut work };
    Inbound::read(endpoint, body, None, allowance, |_| &[])
}

#[test]
fn prompts_of_every_form_are_recognised() {
    let shapes = [
        (r#""text""#, 1, false),
        ("[1,2,3]", 1, false),
        (r#"["a","b"]"#, 2, true),
        ("[[1,2],[3]]", 2, true),
        (r#"["a"]"#, 1, true),
    ];
    for (prompt, count, split) in shapes {
        let text = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        let inbound = parse(Endpoint::Completions, &text).unwrap();
        assert_eq!(inbound.prompts.len(), count, "{prompt}");
        assert_eq!(inbound.prompts[0].1.is_some(), split, "{prompt}");
    }
    for prompt in ["[]", "[1,\"a\"]", "[[1],2]", "{}", "1", "null", "[-1]", "[1.5]", "[[\"a\"]]"] {
        let text = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        let error = parse(Endpoint::Completions, &text).err().unwrap();
        assert_eq!(error.status(), 400, "{prompt}");
    }
}

#[test]
fn a_threshold_is_checked_and_taken_out_of_the_body() {
    let body = |t: &str| format!(r#"{{"model":"m","prompt":"x","cache_hit_threshold":{t}}}"#);
    let inbound = parse(Endpoint::Completions, &body("0.33")).unwrap();
    assert_eq!(inbound.body.raw("cache_hit_threshold"), None);
    assert_eq!(inbound.threshold, Some(0.33));
    assert_eq!(parse(Endpoint::Completions, &body("null")).unwrap().threshold, None);
    for bad in ["1.01", "-0.1", "\"0.5\"", "true", "[0.5]"] {
        assert_eq!(parse(Endpoint::Completions, &body(bad)).err().unwrap().status(), 400, "{bad}");
    }
    assert!(check_threshold(f64::NAN).is_err());
}

#[test]
fn members_that_only_the_decode_leg_carries_are_checked_before_a_prefill() {
    let refusable = |endpoint, members: &str| {
        let text = format!(r#"{{"model":"m","prompt":"x","messages":[],{members}}}"#);
        parse(endpoint, &text).unwrap().options.refusable
    };
    for members in [
        r#""max_tokens":0"#,
        r#""min_tokens":17"#,
        r#""min_tokens":5,"max_tokens":4"#,
        r#""stop":["a",""]"#,
        r#""stop":"""#,
    ] {
        assert!(refusable(Endpoint::Completions, members), "{members}");
    }
    for members in [
        r#""min_tokens":4,"max_tokens":4"#,
        r#""stop":["a"]"#,
        r#""stop":null,"detokenize":false"#,
        r#""min_tokens":16"#,
    ] {
        assert!(!refusable(Endpoint::Completions, members), "{members}");
    }
    for members in [r#""max_tokens":0"#, r#""stop":"x""#, r#""max_tokens":4,"stop_sequences":[""]"#]
    {
        assert!(refusable(Endpoint::Messages, members), "{members}: they must say how much");
    }
    assert!(!refusable(Endpoint::Messages, r#""max_tokens":4,"stop_sequences":["x"]"#));
    let response =
        |members: &str| refusable(Endpoint::Responses, &format!(r#""input":"x",{members}"#));
    assert!(response(r#""max_output_tokens":0"#));
    assert!(!response(r#""max_tokens":0"#), "it is not a response's");
    assert!(!refusable(Endpoint::Chat, r#""min_tokens":17"#));
    assert!(refusable(Endpoint::Chat, r#""min_tokens":5,"max_completion_tokens":4"#));
}

#[test]
fn token_ids_come_with_sampling_parameters_of_their_own() {
    let body = |ids: &str, sampling: &str| {
        format!(r#"{{"model":"m","token_ids":{ids},"sampling_params":{sampling},"n":9}}"#)
    };
    let read = |ids, sampling| parse(Endpoint::Generate, &body(ids, sampling));
    let sampling = r#"{"n":2,"max_tokens":7,"skip_reading_prefix_cache":true}"#;
    let inbound = read("[1,2]", sampling).unwrap();
    assert!(matches!(&inbound.prompts[..], [(Prompt::Tokens(ids), None)] if ids == &[1, 2]));
    let options = inbound.options;
    assert_eq!((options.n, options.samples, options.output.max_tokens), (2, 2, Some(7)));
    assert_eq!(options.bypasses_cache, Some("skip_reading_prefix_cache"));
    for sampling in [r#"{"min_tokens":17}"#, r#"{"stop":"a","detokenize":false}"#] {
        assert!(read("[1]", sampling).unwrap().options.refusable, "{sampling}");
    }
    let truncated = read("[1]", r#"{"truncate_prompt_tokens":1}"#).unwrap();
    assert!(matches!(truncated.prompts[0].0, Prompt::Opaque("truncate_prompt_tokens")));
    for (ids, sampling, param) in [
        ("[]", "{}", "token_ids"),
        ("null", "{}", "token_ids"),
        ("[-1]", "{}", "token_ids"),
        ("[1.5]", "{}", "token_ids"),
        ("\"x\"", "{}", "token_ids"),
        ("[[1]]", "{}", "token_ids"),
        ("[1]", "null", "sampling_params"),
        ("[1]", "[1]", "sampling_params"),
        ("[1]", r#"{"n":"two"}"#, "n"),
    ] {
        let error = read(ids, sampling).err().unwrap();
        assert_eq!(error.status(), 400);
        assert!(error.to_openai().contains(&format!("\"param\":\"{param}\"")), "{ids}");
    }
}

#[test]
fn wrong_types_are_named() {
    for (text, param) in [
        (r#"{"prompt":"x"}"#, "model"),
        (r#"{"model":3,"prompt":"x"}"#, "model"),
        (r#"{"model":"m","prompt":"x","stream":"maybe"}"#, "stream"),
        (r#"{"model":"m","prompt":"x","stream":true,"stream_options":[true]}"#, "stream_options"),
        (r#"{"model":"m","prompt":"x","stream_options":{}}"#, "stream_options"),
        (r#"{"model":"m","prompt":"x","cache_salt":5}"#, "cache_salt"),
        (r#"{"model":"m","prompt":"x","use_beam_search":[]}"#, "use_beam_search"),
        (r#"{"model":"m","prompt":"x","prompt_embeds":[]}"#, "prompt_embeds"),
    ] {
        let error = parse(Endpoint::Completions, text).err().unwrap();
        assert!(error.to_openai().contains(&format!("\"param\":\"{param}\"")), "{text}");
    }
    assert!(parse(Endpoint::Chat, r#"{"model":"m","messages":"hi"}"#).is_err());
}

#[test]
fn the_most_tokens_are_those_of_any_reading_of_the_options() {
    let most = |endpoint, members: &str| {
        let body = JsonObject::parse_str(&format!("{{{members}}}")).unwrap();
        Sampling::of(&body, endpoint).unwrap().output_limit().unwrap().upper_bound_tokens
    };
    let chat = |members| most(Endpoint::Chat, members);
    assert_eq!(chat(r#""max_tokens":9,"max_completion_tokens":1"#), Some(9));
    assert_eq!(chat(r#""max_tokens":9"#), Some(9));
    assert_eq!(chat(r#""max_tokens":0,"max_completion_tokens":1"#), None, "0 may mean no limit");
    assert_eq!(chat(""), None);
    assert_eq!(most(Endpoint::Responses, r#""max_output_tokens":3,"max_tokens":9"#), Some(3));
    assert_eq!(most(Endpoint::Completions, r#""max_tokens":3"#), Some(3));
}
