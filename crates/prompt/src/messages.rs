//! The chat that vLLM makes of a request of `/v1/messages`
//! (`entrypoints/anthropic/serving.py`, 0.32), as far as that does not depend on how the
//! engine was started.

use serde_json::{Map, Value, json};

use super::normalise::Unsupported;

/// Members of a message's request that [`chat_of`] reads.
pub const MEMBERS: [&str; 7] = [
    "system",
    "messages",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "chat_template_kwargs",
];

type Result<T> = std::result::Result<T, Unsupported>;
type Fields = Map<String, Value>;

/// A block of a system prompt that begins so is dropped as a whole.
const BILLING_LINE: &str = "x-anthropic-billing-header";

/// A chat's fields from those of a message's request.
///
/// # Errors
/// [`Unsupported`] for images, for what an engine finds out by trying its chat template, and
/// for what it refuses.
pub fn chat_of(fields: &Fields) -> Result<Fields> {
    let mut messages = Vec::new();
    let system = system_text(fields.get("system"))?;
    if !system.is_empty() {
        messages.push(json!({"role": "system", "content": system}));
    }
    let said = fields.get("messages").and_then(Value::as_array);
    for message in said.ok_or(Unsupported("messages are not an array"))? {
        convert(message, &mut messages)?;
    }
    let mut chat = Fields::new();
    chat.insert("messages".to_owned(), Value::Array(messages));
    if let Some(tools) = present(fields, "tools") {
        chat.insert("tools".to_owned(), tools_of(tools)?);
    }
    if let Some(choice) = present(fields, "tool_choice") {
        // Others are no concern of a prompt's.
        if choice["type"] == "none" {
            chat.insert("tool_choice".to_owned(), "none".into());
        }
    }
    match present(fields, "thinking").map(|thinking| thinking["type"].as_str()) {
        None | Some(Some("enabled" | "adaptive")) => {}
        // As "none" or as "low" effort, as the template was found to take it.
        Some(_) => return Err(Unsupported("thinking that is switched off")),
    }
    let effort = present(fields, "output_config").and_then(|config| config.get("effort"));
    for (name, value) in
        [("reasoning_effort", effort), ("chat_template_kwargs", fields.get("chat_template_kwargs"))]
    {
        if let Some(value) = value {
            chat.insert(name.to_owned(), value.clone());
        }
    }
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
                _ => Err(Unsupported("a system prompt of other blocks than text")),
            });
            let texts = texts.collect::<Result<Vec<_>>>()?;
            Ok(texts.into_iter().filter(|text| !text.starts_with(BILLING_LINE)).collect())
        }
        Some(_) => Err(Unsupported("a system prompt that is neither text nor blocks")),
    }
}

/// A text that may be missing.
fn text_of<'a>(block: &'a Value, key: &str) -> Result<&'a str> {
    match &block[key] {
        Value::Null => Ok(""),
        Value::String(text) => Ok(text),
        _ => Err(Unsupported("a block whose text is none")),
    }
}

fn convert(message: &Value, out: &mut Vec<Value>) -> Result<()> {
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant")) => role,
        // They stay where they are or go to the front, as the template was found to take them.
        Some("system") => return Err(Unsupported("a system message within the conversation")),
        _ => return Err(Unsupported("a message of an unknown role")),
    };
    let blocks = match &message["content"] {
        Value::String(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err(Unsupported("content that is neither text nor blocks")),
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match (block["type"].as_str(), role) {
            (Some("text"), _) => texts.push(text_of(block, "text")?),
            (Some("thinking"), "assistant") => thoughts.push(text_of(block, "thinking")?),
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => calls.push(call(block)?),
            // Results go before what else the message says.
            (Some("tool_result"), "user") => out.push(result(block)?),
            _ => return Err(Unsupported("a block of another type")),
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
        (1, _) => return Err(Unsupported("an empty message of the assistant's")),
        _ => out.push(made.into()),
    }
    Ok(())
}

fn call(block: &Value) -> Result<Value> {
    let incomplete = Unsupported("a tool use without id, name or input");
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
                _ => Err(Unsupported("a tool result of other items than text")),
            });
            texts.collect::<Result<Vec<_>>>()?.join("\n")
        }
        _ => return Err(Unsupported("a tool result that is neither text nor items")),
    };
    let id = text_of(block, "tool_use_id")?;
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

fn tools_of(tools: &Value) -> Result<Value> {
    let incomplete = Unsupported("a tool without name or schema");
    let tools = tools.as_array().ok_or(incomplete)?;
    let convert = |tool: &Value| {
        let mut parameters = tool["input_schema"].as_object().ok_or(incomplete)?.clone();
        parameters.entry("type").or_insert_with(|| "object".into());
        if !tool["defer_loading"].is_null() {
            return Err(Unsupported("a tool that is loaded later"));
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
    fn blocks_become_what_a_chat_has_for_them() {
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
    fn what_depends_on_the_engine_is_left_to_it() {
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
