//! Converts a request of `/v1/messages` to the chat that vLLM makes of it
//! (`entrypoints/anthropic/serving.py`, 0.32), as far as that does not depend on how the engine was
//! started.

use serde_json::{Map, Value, json};

use super::normalise::{UnsupportedFeature, copy_options};

/// The members of a request of `/v1/messages` that [`chat_of`] reads.
pub const MEMBERS: [&str; 7] = [
    "system",
    "messages",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
];

type Result<T> = std::result::Result<T, UnsupportedFeature>;
type Fields = Map<String, Value>;

/// A block of a system prompt that begins with this text is dropped as a whole.
const BILLING_LINE: &str = "x-anthropic-billing-header";

/// Converts the fields of a request of `/v1/messages` to those of a chat.
///
/// # Errors
/// [`UnsupportedFeature`] for images, for what depends on the engine's test of its chat template,
/// and for what the engine refuses.
pub fn chat_of(fields: &Fields) -> Result<Fields> {
    let mut messages = Vec::new();
    let system = system_text(fields.get("system"))?;
    if !system.is_empty() {
        messages.push(json!({"role": "system", "content": system}));
    }
    let said = fields.get("messages").and_then(Value::as_array);
    for message in said.ok_or(UnsupportedFeature("messages are not an array"))? {
        convert(message, &mut messages)?;
    }
    let mut chat = Fields::new();
    chat.insert("messages".to_owned(), Value::Array(messages));
    if let Some(tools) = present(fields, "tools") {
        chat.insert("tools".to_owned(), tools_of(tools)?);
    }
    if let Some(choice) = present(fields, "tool_choice") {
        // Other values do not change the prompt.
        if choice["type"] == "none" {
            chat.insert("tool_choice".to_owned(), "none".into());
        }
    }
    match present(fields, "thinking").map(|thinking| thinking["type"].as_str()) {
        None | Some(Some("enabled" | "adaptive")) => {}
        // Becomes "none" or "low" effort, depending on the engine's test of its template.
        Some(_) => return Err(UnsupportedFeature("thinking that is switched off")),
    }
    let effort = present(fields, "output_config").and_then(|config| config.get("effort"));
    copy_options(&mut chat, effort, fields);
    Ok(chat)
}

fn present<'a>(fields: &'a Fields, key: &str) -> Option<&'a Value> {
    fields.get(key).filter(|value| !value.is_null())
}

fn system_text(system: Option<&Value>) -> Result<String> {
    match system {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let texts = blocks.iter().map(|block| match block["type"].as_str() {
                Some("text") => text_of(block, "text"),
                _ => Err(UnsupportedFeature("a system prompt with blocks other than text")),
            });
            let texts = texts.collect::<Result<Vec<_>>>()?;
            Ok(texts.into_iter().filter(|text| !text.starts_with(BILLING_LINE)).collect())
        }
        Some(_) => Err(UnsupportedFeature("a system prompt that is neither text nor blocks")),
    }
}

/// A text, or an empty one if the member is missing.
fn text_of<'a>(block: &'a Value, key: &str) -> Result<&'a str> {
    match &block[key] {
        Value::Null => Ok(""),
        Value::String(text) => Ok(text),
        _ => Err(UnsupportedFeature("a block whose text is not a string")),
    }
}

fn convert(message: &Value, out: &mut Vec<Value>) -> Result<()> {
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant")) => role,
        // The engine keeps these in place or moves them to the front, depending on its test of the
        // template.
        Some("system") => {
            return Err(UnsupportedFeature("a system message within the conversation"));
        }
        _ => return Err(UnsupportedFeature("a message of an unknown role")),
    };
    let blocks = match &message["content"] {
        Value::String(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err(UnsupportedFeature("content that is neither text nor blocks")),
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match (block["type"].as_str(), role) {
            (Some("text"), _) => texts.push(text_of(block, "text")?),
            (Some("thinking"), "assistant") => thoughts.push(text_of(block, "thinking")?),
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => calls.push(call(block)?),
            // Tool results come before the message's other content.
            (Some("tool_result"), "user") => out.push(result(block)?),
            _ => return Err(UnsupportedFeature("a block of another type")),
        }
    }
    texts.retain(|text| !text.is_empty());
    let mut made = Fields::new();
    made.insert("role".to_owned(), role.into());
    match texts[..] {
        [] => {}
        [text] => {
            made.insert("content".to_owned(), text.into());
        }
        _ => {
            let parts = texts.iter().map(|text| json!({"type": "text", "text": text})).collect();
            made.insert("content".to_owned(), parts);
        }
    }
    if !thoughts.is_empty() {
        made.insert("reasoning".to_owned(), thoughts.concat().into());
    }
    if !calls.is_empty() {
        made.insert("tool_calls".to_owned(), calls.into());
    }
    match (made.len(), role) {
        (1, "user") => {}
        (1, _) => return Err(UnsupportedFeature("an empty message of the assistant")),
        _ => out.push(made.into()),
    }
    Ok(())
}

fn call(block: &Value) -> Result<Value> {
    let incomplete = UnsupportedFeature("a tool use without id, name or input");
    let id = block["id"].as_str().filter(|id| !id.is_empty()).ok_or(incomplete)?;
    let name = block["name"].as_str().ok_or(incomplete)?;
    let arguments = match &block["input"] {
        input @ Value::Object(_) => input.to_string(),
        _ => return Err(incomplete),
    };
    Ok(json!({
        "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
    }))
}

fn result(block: &Value) -> Result<Value> {
    let text = match &block["content"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let texts = items.iter().map(|item| match item["type"].as_str() {
                Some("text") => text_of(item, "text"),
                _ => Err(UnsupportedFeature("a tool result with items other than text")),
            });
            texts.collect::<Result<Vec<_>>>()?.join("\n")
        }
        _ => return Err(UnsupportedFeature("a tool result that is neither text nor items")),
    };
    let id = text_of(block, "tool_use_id")?;
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

fn tools_of(tools: &Value) -> Result<Value> {
    let incomplete = UnsupportedFeature("a tool without name or schema");
    let tools = tools.as_array().ok_or(incomplete)?;
    let convert = |tool: &Value| {
        let mut parameters = tool["input_schema"].as_object().ok_or(incomplete)?.clone();
        parameters.entry("type").or_insert_with(|| "object".into());
        if !tool["defer_loading"].is_null() {
            return Err(UnsupportedFeature("a tool that is loaded later"));
        }
        Ok(json!({"type": "function", "function": {
            "name": tool["name"], "description": tool["description"],
            "parameters": parameters, "strict": tool["strict"],
        }}))
    };
    tools.iter().map(convert).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(body: &Value) -> Result<Value> {
        chat_of(body.as_object().unwrap()).map(Value::Object)
    }

    #[test]
    fn blocks_become_the_messages_of_a_chat() {
        let body = json!({
            "model": "m", "max_tokens": 5, "stop_sequences": ["x"],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ],
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "two"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": [2.5]}},
                ]},
                {"role": "user", "content": [
                    {"type": "text", "text": "three"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [
                        {"type": "text", "text": "r1"}, {"type": "text", "text": "r2"},
                    ]},
                    {"type": "text", "text": ""},
                    {"type": "text", "text": "four"},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"properties": {}}, "cache_control": {}}],
            "tool_choice": {"type": "none"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
        });
        assert_eq!(
            of(&body).unwrap(),
            json!({
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "two", "reasoning": "hm", "tool_calls": [
                        {"id": "t1", "type": "function",
                         "function": {"name": "f", "arguments": "{\"b\":1,\"a\":[2.5]}"}},
                    ]},
                    {"role": "tool", "tool_call_id": "t1", "content": "r1\nr2"},
                    {"role": "user", "content": [
                        {"type": "text", "text": "three"}, {"type": "text", "text": "four"},
                    ]},
                    {"role": "tool", "tool_call_id": "t2", "content": ""},
                ],
                "tools": [{"type": "function", "function": {
                    "name": "f", "description": null,
                    "parameters": {"properties": {}, "type": "object"}, "strict": null,
                }}],
                "tool_choice": "none",
                "reasoning_effort": "low",
            })
        );
    }

    #[test]
    fn requests_that_depend_on_the_engines_start_are_left_to_the_engine() {
        let user = json!([{"role": "user", "content": "a"}]);
        for body in [
            json!({"messages": [{"role": "system", "content": "a"}]}),
            json!({"messages": user, "thinking": {"type": "disabled"}}),
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            json!({"messages": [{"role": "assistant", "content": []}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
            json!({"messages": [{"role": "user", "content": [
                {"type": "tool_result", "content": [{"type": "image", "source": {}}]},
            ]}]}),
            json!({"messages": user, "system": [{"type": "image"}]}),
            json!({"messages": user, "tools": [{"name": "f", "type": "web_search_20250305"}]}),
            json!({"messages": user, "tools": [
                {"name": "f", "input_schema": {}, "defer_loading": true},
            ]}),
            json!({"messages": {}}),
        ] {
            assert!(of(&body).is_err(), "{body}");
        }
    }
}
