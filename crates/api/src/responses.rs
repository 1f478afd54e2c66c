//! Checks requests of OpenAI's Responses API.
//!
//! The router stores no responses and makes engines store none. vLLM has a store only with
//! `VLLM_ENABLE_RESPONSES_API_STORE`, in the memory of one API server, and never frees it. After a
//! hand-off, neither leg's worker has what the next request would need. A request that needs stored
//! responses is refused, with the name of the field.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::JsonObject;
use super::request::{Prompt, check_length};
use crate::error::Error;
use splitrail_config::model::Limits;

/// Types of tools that the client runs. Engines run others by themselves, in further turns.
const CLIENT_TOOLS: [&str; 3] = ["function", "custom", "namespace"];

/// Checks the members that only this API has, and sets `store: false`.
///
/// # Errors
/// A 400 for members that need a stored response, and for a missing `input`.
pub(super) fn read(body: &mut JsonObject, limits: &Limits) -> Result<Prompt, Error> {
    const ALL: &str = "responses are not kept here: send the whole conversation as `input`";
    if body.get::<bool>("background", "true or false")? == Some(true) {
        let message = "`background` is not supported: responses are not kept here, and nobody \
             could ask for one later";
        return Err(Error::invalid("background", message));
    }
    for key in ["previous_response_id", "conversation"] {
        if !matches!(body.raw(key), None | Some("null")) {
            return Err(Error::invalid(key, format!("`{key}` is not supported: {ALL}")));
        }
    }
    // Nothing is kept, whatever the client asks for: vLLM does the same without a store.
    let _asked = body.get::<bool>("store", "true or false")?;
    body.set("store", "false");
    check_length(body, "input", limits)?;
    match body.raw("input") {
        Some(raw) if raw.starts_with(['"', '[']) => Ok(Prompt::Responses),
        Some(_) => Err(Error::invalid("input", "`input` must be a string or a list of items")),
        None => Err(Error::invalid("input", "`input` is missing")),
    }
}

/// Whether the engine may call tools and continue by itself, running several prompts for one
/// request.
pub(super) fn engine_takes_turns(body: &JsonObject) -> bool {
    #[derive(Deserialize)]
    struct Tool {
        #[serde(rename = "type")]
        kind: String,
    }
    let Some(raw) = body.raw("tools").filter(|raw| *raw != "null") else { return false };
    let tools: Option<Vec<&RawValue>> = serde_json::from_str(raw).ok();
    let of_client = |tool: &&RawValue| {
        let tool = serde_json::from_str::<Tool>(tool.get());
        tool.is_ok_and(|tool| CLIENT_TOOLS.contains(&tool.kind.as_str()))
    };
    // The engine refuses `tools` that is not a list of tools.
    !tools.is_some_and(|tools| tools.iter().all(of_client))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn object(members: &str) -> JsonObject {
        JsonObject::parse_str(&format!("{{{members}}}")).unwrap()
    }

    #[test]
    fn nothing_is_kept_and_what_needs_it_is_refused_by_name() {
        for (members, param) in [
            (r#""input":"a","background":true"#, "background"),
            (r#""input":"a","previous_response_id":"resp_1""#, "previous_response_id"),
            (r#""input":"a","conversation":{"id":"c"}"#, "conversation"),
            (r#""input":"a","store":"yes""#, "store"),
            (r#""input":{}"#, "input"),
            (r#""store":false"#, "input"),
        ] {
            let error = read(&mut object(members), &Limits::default()).err().unwrap();
            assert_eq!(error.status(), 400);
            assert!(error.to_openai().contains(&format!("\"param\":\"{param}\"")), "{members}");
        }
        for said in [
            "",
            r#","store":null"#,
            r#","store":false"#,
            r#","store":true"#,
            r#","background":false"#,
        ] {
            let mut body = object(&format!(r#""input":[]{said},"previous_response_id":null"#));
            assert!(matches!(read(&mut body, &Limits::default()), Ok(Prompt::Responses)), "{said}");
            assert_eq!(body.raw("store"), Some("false"), "{said}");
        }
    }

    #[test]
    fn tools_of_the_engine_are_distinguished_from_those_of_the_client() {
        for (tools, takes) in [
            ("null", false),
            ("[]", false),
            (r#"[{"type":"function","name":"f"},{"type":"custom"}]"#, false),
            (r#"[{"type":"function"},{"type":"web_search_preview"}]"#, true),
            (r#"[{"type":"mcp","server_label":"x"}]"#, true),
            ("[7]", true),
            ("{}", true),
        ] {
            assert_eq!(
                engine_takes_turns(&object(&format!("\"tools\":{tools}"))),
                takes,
                "{tools}"
            );
        }
        assert!(!engine_takes_turns(&object("")));
    }
}
