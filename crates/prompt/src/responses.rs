//! Converts a request of `/v1/responses` with text only to the chat that vLLM makes of it
//! (`entrypoints/openai/responses/utils.py`, 0.32).

use serde_json::{Map, Value, json};

use super::normalise::{UnsupportedFeature, copy_options};

/// The members of a request of `/v1/responses` that [`chat_of`] reads.
pub const MEMBERS: [&str; 5] =
    ["truncation", "instructions", "input", "reasoning", "chat_template_kwargs"];

type Result<T> = std::result::Result<T, UnsupportedFeature>;
type Fields = Map<String, Value>;

/// Members by which the engine may change the prompt in ways that the router does not reproduce, each
/// with a name for logs. Only whether they have any content matters.
pub const ENGINE_ONLY: [(&str, &str); 5] = [
    ("tools", "tools of a response"),
    ("prompt", "a prompt that is stored elsewhere"),
    ("previous_input_messages", "previous_input_messages"),
    ("mm_processor_kwargs", "mm_processor_kwargs"),
    ("media_io_kwargs", "media_io_kwargs"),
];

/// Converts the fields of a request of `/v1/responses` to those of a chat.
///
/// # Errors
/// [`UnsupportedFeature`] for items other than text messages, for tools, and for what the engine
/// refuses.
pub fn chat_of(fields: &Fields) -> Result<Fields> {
    for (name, reason) in ENGINE_ONLY {
        let value = fields.get(name).filter(|value| !value.is_null());
        if value.is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty())) {
            return Err(UnsupportedFeature(reason));
        }
    }
    if !matches!(fields.get("truncation"), None | Some(Value::Null))
        && fields["truncation"] != "disabled"
    {
        return Err(UnsupportedFeature("truncation"));
    }
    let mut messages = Vec::new();
    match fields.get("instructions") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => messages.push(json!({"role": "system", "content": text})),
        Some(_) => return Err(UnsupportedFeature("instructions that are not text")),
    }
    match fields.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for item in items {
                messages.push(message(item)?);
            }
        }
        _ => return Err(UnsupportedFeature("input that is neither text nor items")),
    }
    if messages.is_empty() {
        return Err(UnsupportedFeature("an empty input"));
    }
    let mut chat = Fields::new();
    chat.insert("messages".to_owned(), Value::Array(messages));
    // Unlike a chat, this text is tokenised with the tokenizer's own special tokens.
    chat.insert("add_special_tokens".to_owned(), true.into());
    let effort = fields.get("reasoning").and_then(|reasoning| reasoning.get("effort"));
    copy_options(&mut chat, effort, fields);
    Ok(chat)
}

fn message(item: &Value) -> Result<Value> {
    let typed = match item.get("type") {
        None => false,
        Some(kind) if kind == "message" => true,
        Some(_) => return Err(UnsupportedFeature("an item that is not a message")),
    };
    if !matches!(item["status"].as_str(), None | Some("completed")) {
        return Err(UnsupportedFeature("a message that is not completed"));
    }
    let role = match item["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
        _ => return Err(UnsupportedFeature("an item of an unknown role")),
    };
    let content = match (&item["content"], role) {
        (Value::String(text), _) => Value::from(text.as_str()),
        // If there are several parts, the engine uses the first.
        (Value::Array(parts), "assistant") => match &parts[..] {
            [part] if typed => text(part, "output_text")?.into(),
            _ => return Err(UnsupportedFeature("a reply of several parts")),
        },
        (Value::Array(parts), _) => {
            let part =
                |part: &Value| Ok(json!({"type": "text", "text": text(part, "input_text")?}));
            parts.iter().map(part).collect::<Result<_>>()?
        }
        _ => return Err(UnsupportedFeature("content that is neither text nor parts")),
    };
    Ok(json!({"role": role, "content": content}))
}

/// The text of a part, if the part has this type.
fn text<'a>(part: &'a Value, kind: &str) -> Result<&'a str> {
    const KNOWN: [&str; 4] = ["type", "text", "annotations", "logprobs"];
    let members = part.as_object().filter(|members| {
        members.keys().all(|key| KNOWN.contains(&key.as_str())) && part["type"] == kind
    });
    let text = members.and_then(|members| members.get("text")).and_then(Value::as_str);
    text.ok_or(UnsupportedFeature("a part that is not plain text"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(body: &Value) -> Result<Value> {
        chat_of(body.as_object().unwrap()).map(Value::Object)
    }

    #[test]
    fn text_items_become_a_chat() {
        let body = json!({
            "model": "m", "instructions": "Be brief.", "max_output_tokens": 3, "tools": [],
            "input": [
                {"role": "developer", "content": "zero"},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"},
                ]},
                {"role": "assistant", "content": "three"},
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                 "content": [{"type": "output_text", "text": "four", "annotations": []}]},
            ],
            "reasoning": {"effort": "low", "summary": null},
        });
        assert_eq!(
            of(&body).unwrap(),
            json!({
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "developer", "content": "zero"},
                    {"role": "user", "content": [
                        {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
                    ]},
                    {"role": "assistant", "content": "three"},
                    {"role": "assistant", "content": "four"},
                ],
                "add_special_tokens": true,
                "reasoning_effort": "low",
            })
        );
        let messages = json!([{"role": "user", "content": "a"}]);
        let plain = of(&json!({"input": "a", "instructions": "", "truncation": "disabled"}));
        assert_eq!(plain.unwrap()["messages"], messages);
    }

    #[test]
    fn responses_with_more_than_text_are_left_to_the_engine() {
        for body in [
            json!({"input": []}),
            json!({"input": "a", "tools": [{"type": "function", "name": "f"}]}),
            json!({"input": "a", "truncation": "auto"}),
            json!({"input": "a", "instructions": ["a"]}),
            json!({"input": [{"type": "function_call", "name": "f"}]}),
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            json!({"input": [{"role": "user", "content": [
                {"type": "input_text", "text": "a", "prompt_cache_breakpoint": true},
            ]}]}),
            json!({"input": [{"role": "assistant", "content": [
                {"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"},
            ]}]}),
            json!({"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]}),
            json!({"input": [{"role": "tool", "content": "a"}]}),
        ] {
            assert!(of(&body).is_err(), "{body}");
        }
    }
}
