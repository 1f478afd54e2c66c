//! Chats that are resumed as completions: the conditions under which that is exact, and the conversion of
//! completion chunks to chat chunks.
//!
//! An engine returns the token ids of a chat's prompt and reply when it is asked for them. The
//! rest of the reply is a completion of exactly these tokens: no template is rendered again and
//! no text is tokenised again. Parsers of reasoning and of tool calls have a state that cannot be
//! transferred: a reply with such parts is not resumed.

use std::borrow::Cow;
use std::fmt::Write;

use serde::Deserialize;
use serde_json::value::RawValue;

use splitrail_api::JsonObject;

/// Members that a chat may have besides those of a completion. They determine its prompt, whose
/// token ids the engine reports, and its limit.
pub(super) const MEMBERS: [&str; 4] =
    ["messages", "max_completion_tokens", "chat_template_kwargs", "add_generation_prompt"];

/// What one chunk of a chat adds to the reply.
pub(super) struct ChunkAddition {
    /// Whether the chunk has text for the client.
    pub(super) has_text: bool,
    /// Whether the chunk has a part that is not plain text: reasoning or tool calls.
    pub(super) is_parsed: bool,
}

/// Reads the delta of a chunk's choice; `None` if there is none.
pub(super) fn read_delta(choice: &JsonObject) -> Option<ChunkAddition> {
    let delta = JsonObject::parse_str(choice.raw("delta")?).ok()?;
    let is_said = |raw: &str| !matches!(raw, "null" | "\"\"" | "[]");
    let is_plain = |key: &str| matches!(key, "role" | "content");
    Some(ChunkAddition {
        has_text: delta.raw("content").is_some_and(is_said),
        is_parsed: delta.members().any(|(key, raw)| !is_plain(key) && is_said(raw)),
    })
}

/// Converts the choice of a completion chunk to that of a chat chunk; `None` if it has no text.
pub(super) fn from_completion(choice: &JsonObject) -> Option<String> {
    let text = Some(choice.raw("text")?).filter(|raw| *raw != "null").unwrap_or("\"\"");
    let finish_reason = choice.raw("finish_reason").unwrap_or("null");
    let mut out = format!(
        r#"{{"index":0,"delta":{{"content":{text}}},"logprobs":null,"finish_reason":{finish_reason}"#
    );
    if finish_reason != "null" {
        let stop_reason = choice.raw("stop_reason").unwrap_or("null");
        // Writing to a string does not fail.
        let _written = write!(out, r#","stop_reason":{stop_reason}"#);
    }
    let token_ids = choice.raw("token_ids").unwrap_or("null");
    let _written = write!(out, r#","token_ids":{token_ids}}}"#);
    Some(out)
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
}

/// Whether messages consist of text only. An image cannot be restored from the token ids that stand
/// for it.
pub(super) fn are_text(messages: &str) -> bool {
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(messages) else { return false };
    messages.iter().all(|message| {
        let Some(content) = message.content.map(RawValue::get) else { return true };
        if content == "null" || content.starts_with('"') {
            return true;
        }
        let parts = serde_json::from_str::<Vec<Part<'_>>>(content);
        parts.is_ok_and(|parts| parts.iter().all(|part| part.kind == "text"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_text_goes_on() {
        for messages in [
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[]}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#,
            r#"[{"role":"user"}]"#,
        ] {
            assert!(are_text(messages), "{messages}");
        }
        for messages in [
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]"#,
            r#"[{"role":"user","content":["a"]}]"#,
            r#"[{"role":"user","content":{"type":"text"}}]"#,
            r#"[{"role":"user","content":[{"text":"a"}]}]"#,
            r#""a""#,
        ] {
            assert!(!are_text(messages), "{messages}");
        }
    }

    #[test]
    fn a_completion_s_choice_becomes_a_chat_s() {
        let choice = |text: &str| from_completion(&JsonObject::parse_str(text).unwrap());
        let going = r#"{"index":0,"text":"a\n","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1],"token_ids":[2]}"#;
        assert_eq!(
            choice(going).unwrap(),
            r#"{"index":0,"delta":{"content":"a\n"},"logprobs":null,"finish_reason":null,"token_ids":[2]}"#
        );
        let last =
            r#"{"index":0,"text":"","finish_reason":"stop","stop_reason":7,"token_ids":null}"#;
        assert_eq!(
            choice(last).unwrap(),
            r#"{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":7,"token_ids":null}"#
        );
        assert!(choice(r#"{"index":0,"delta":{}}"#).is_none());
    }

    #[test]
    fn text_that_a_parser_of_the_engine_has_made_is_recognised() {
        let read = |delta: &str| {
            let choice = JsonObject::parse_str(&format!(r#"{{"delta":{delta}}}"#)).unwrap();
            let added = read_delta(&choice).unwrap();
            (added.has_text, added.is_parsed)
        };
        assert_eq!(read(r#"{"role":"assistant","content":""}"#), (false, false));
        assert_eq!(read(r#"{"content":"a","reasoning":null,"tool_calls":[]}"#), (true, false));
        assert_eq!(read(r#"{"reasoning":"a"}"#), (false, true));
        assert_eq!(read(r#"{"tool_calls":[{"index":0}]}"#), (false, true));
    }
}
