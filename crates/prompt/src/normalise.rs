//! A chat request's messages, tools and arguments, in the shape in which vLLM
//! hands them to a template (`vllm/renderers/chat_utils.py` and the request
//! models of 0.32, observed on the real parser).
//!
//! What cannot be reproduced exactly is refused with a reason, never guessed:
//! a wrong prompt would be a wrong cache key.

use serde_json::{Map, Value};

use super::template::ContentFormat;

/// Why the router leaves a request's tokens to the engine. Static text without content of the
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedFeature(pub &'static str);

type Result<T> = std::result::Result<T, UnsupportedFeature>;

/// Fields of content parts that the engine interprets; other fields reach the template.
const KNOWN_PART_FIELDS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Why a prompt with media is left to the engine.
pub(super) const MEDIA: &str = "images, audio, video or files";

/// Fields that make a part a medium whatever its `type` is, with the kind of medium.
const MEDIA_FIELDS: [(&str, &str); 8] = [
    ("audio_embeds", "audio"),
    ("audio_url", "audio"),
    ("image_embeds", "image"),
    ("image_pil", "image"),
    ("image_url", "image"),
    ("input_audio", "audio"),
    ("video_embeds", "video"),
    ("video_url", "video"),
];

/// Fields that make a part something for which the router has no placeholder.
const OTHER_FIELDS: [&str; 5] =
    ["data", "file", "input_image", "prompt_cache_breakpoint", "prompt_embeds"];

/// The start of a line that one coding client puts before its system prompt, different for every
/// request; the engine drops the line.
const BILLING_LINE: &str = "x-anthropic-billing-header";

/// The conversation as a template gets it. Texts are moved and not copied, because they may be
/// long.
///
/// # Errors
/// [`UnsupportedFeature`] for media, unknown parts, and shapes that the engine's own validation may
/// refuse or reorder.
pub fn conversation(messages: Value, format: ContentFormat) -> Result<Vec<Value>> {
    conversation_with(messages, format, None)
}

/// Like [`conversation`], for messages with media. If the template wants parts, a medium is a part
/// in the engine's form (`{"type": "image"}`). If the template wants text, the engine puts
/// placeholders of its model before a message's text; here, `mark` stands in their place.
///
/// # Errors
/// As [`conversation`], except for media.
pub fn conversation_with(
    messages: Value,
    format: ContentFormat,
    mark: Option<&str>,
) -> Result<Vec<Value>> {
    let Value::Array(messages) = messages else {
        return Err(UnsupportedFeature("messages are not an array"));
    };
    messages.into_iter().map(|message| one_message(message, format, mark)).collect()
}

fn one_message(message: Value, format: ContentFormat, mark: Option<&str>) -> Result<Value> {
    let Value::Object(mut message) = message else {
        return Err(UnsupportedFeature("a message is not an object"));
    };
    let Some(Value::String(role)) = message.get_mut("role").map(Value::take) else {
        return Err(UnsupportedFeature("a message without a role"));
    };
    let (role, message) = (role.as_str(), &mut message);
    if message.contains_key("author") || present(message, "audio") {
        return Err(UnsupportedFeature("a message with an author or audio"));
    }
    let parts = parts(role, message)?;
    let has_media = parts.iter().any(|part| part.medium.is_some());
    let Some(mark) = mark.or((!has_media).then_some("")) else {
        return Err(UnsupportedFeature(MEDIA));
    };
    let mut out = Map::new();
    out.insert("role".to_owned(), Value::from(role));
    let content = match format {
        ContentFormat::OpenAi if role != "tool" || has_media => {
            Value::Array(parts.into_iter().map(Part::into_value).collect())
        }
        // Tool results are plain text in every template.
        ContentFormat::OpenAi => Value::from(joined(parts)),
        // In this format the engine drops empty parts before it joins the others.
        ContentFormat::String => {
            let mut parts = parts;
            parts.retain(|part| !part.text.is_empty());
            match has_media {
                true => Value::from(mark.to_owned() + &joined(parts)),
                false => Value::from(joined(parts)),
            }
        }
    };
    out.insert("content".to_owned(), content);
    match role {
        "assistant" => assistant_fields(message, &mut out)?,
        "tool" => match message.get("tool_call_id") {
            None => {}
            Some(Value::String(id)) => {
                out.insert("tool_call_id".to_owned(), Value::from(id.as_str()));
            }
            Some(_) => return Err(UnsupportedFeature("a tool_call_id that is not a string")),
        },
        _ => {}
    }
    for name in ["name", "task"] {
        match message.get(name) {
            Some(Value::String(text)) => {
                out.insert(name.to_owned(), Value::from(text.as_str()));
            }
            None | Some(Value::Null) => {}
            Some(_) => return Err(UnsupportedFeature("a name or task that is not a string")),
        }
    }
    if role == "developer" {
        if present(message, "tools") {
            return Err(UnsupportedFeature("tools inside a developer message"));
        }
        out.insert("tools".to_owned(), Value::Null);
    }
    Ok(Value::Object(out))
}

fn joined(mut parts: Vec<Part>) -> String {
    match &mut parts[..] {
        // Most messages are a single text.
        [part] => std::mem::take(&mut part.text),
        parts => parts.iter().map(|part| &*part.text).collect::<Vec<_>>().join("\n"),
    }
}

fn present(object: &Map<String, Value>, key: &str) -> bool {
    object.get(key).is_some_and(|value| !value.is_null())
}

/// A content part: its text unless it is a medium, and fields that the engine passes on unread.
struct Part {
    text: String,
    /// The kind of medium, in the word that templates use.
    medium: Option<&'static str>,
    extra: Map<String, Value>,
}

impl Part {
    fn into_value(self) -> Value {
        let mut out = Map::new();
        out.insert("type".to_owned(), Value::from(self.medium.unwrap_or("text")));
        if self.medium.is_none() {
            out.insert("text".to_owned(), Value::from(self.text));
        }
        out.extend(self.extra);
        Value::Object(out)
    }
}

fn parts(role: &str, message: &mut Map<String, Value>) -> Result<Vec<Part>> {
    let mut parts = match message.get_mut("content").map(Value::take) {
        None => Vec::new(),
        // Only for these two roles does the engine's request model accept null.
        Some(Value::Null)
            if matches!(role, "assistant" | "function")
                && message.get("tool_calls").is_none_or(|calls| !calls.is_null()) =>
        {
            Vec::new()
        }
        Some(Value::String(text)) => vec![Part { text, medium: None, extra: Map::new() }],
        Some(Value::Array(items)) => {
            items.into_iter().map(|item| part(role, item)).collect::<Result<_>>()?
        }
        Some(_) => return Err(UnsupportedFeature("content that is neither text nor parts")),
    };
    if role == "system" {
        parts.retain_mut(|part| {
            if part.medium.is_some() || !part.text.starts_with(BILLING_LINE) {
                return true;
            }
            part.text = part.text.split_once('\n').map_or("", |(_, rest)| rest).to_owned();
            !part.text.is_empty()
        });
    }
    Ok(parts)
}

fn part(role: &str, item: Value) -> Result<Part> {
    // The engine's request model accepts bare strings in some messages only.
    let Value::Object(mut part) = item else {
        return Err(UnsupportedFeature("a content part that is not an object"));
    };
    let medium = medium(&part);
    let has = |field: &str| part.contains_key(field);
    if OTHER_FIELDS.into_iter().any(has) || (medium.is_none() && has("uuid")) {
        return Err(UnsupportedFeature(MEDIA));
    }
    if medium.is_some() {
        part.retain(|name, _| !KNOWN_PART_FIELDS.contains(&name.as_str()));
        part.values().try_for_each(plain_numbers)?;
        return Ok(Part { text: String::new(), medium, extra: part });
    }
    let key = match part.get("type").and_then(Value::as_str) {
        Some("text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        _ => return Err(UnsupportedFeature("a content part of an unknown type")),
    };
    let Some(Value::String(text)) = part.get_mut(key).map(Value::take) else {
        return Err(UnsupportedFeature("a content part without its text"));
    };
    part.retain(|name, _| !KNOWN_PART_FIELDS.contains(&name.as_str()));
    let extra = part;
    if role == "system" && key != "text" {
        return Err(UnsupportedFeature("a system message with parts other than text"));
    }
    for value in extra.values() {
        plain_numbers(value)?;
    }
    Ok(Part { text, medium: None, extra })
}

/// Copies what the chat template is told beside the messages: how much to reason, and the client's own
/// values.
pub(super) fn copy_options(
    chat: &mut Map<String, Value>,
    effort: Option<&Value>,
    request: &Map<String, Value>,
) {
    let kwargs = request.get("chat_template_kwargs");
    for (name, value) in [("reasoning_effort", effort), ("chat_template_kwargs", kwargs)] {
        if let Some(value) = value {
            chat.insert(name.to_owned(), value.clone());
        }
    }
}

/// Whether a field of a part holds a medium's content.
pub(super) fn is_medium_field(name: &str) -> bool {
    MEDIA_FIELDS.iter().any(|(field, _)| *field == name)
}

/// The kind of medium that a part is, in the word that templates use; `None` for other parts.
pub(super) fn medium(part: &Map<String, Value>) -> Option<&'static str> {
    let found = MEDIA_FIELDS.iter().find(|(field, _)| part.contains_key(*field));
    found.map(|(_, medium)| *medium)
}

fn assistant_fields(message: &Map<String, Value>, out: &mut Map<String, Value>) -> Result<()> {
    match message.get("tool_calls") {
        None | Some(Value::Null) => {}
        // An empty list would make templates take their branch for tools.
        Some(Value::Array(calls)) if calls.is_empty() => {}
        Some(Value::Array(calls)) => {
            let calls = calls.iter().map(tool_call).collect::<Result<Vec<_>>>()?;
            out.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Some(_) => return Err(UnsupportedFeature("tool_calls that are not an array")),
    }
    // The older name is read if the newer one is missing or null.
    let reasoning = ["reasoning", "reasoning_content"]
        .into_iter()
        .filter_map(|name| message.get(name))
        .find(|value| !value.is_null());
    match reasoning {
        None => {}
        Some(Value::String(text)) => {
            out.insert("reasoning".to_owned(), Value::from(text.as_str()));
            out.insert("reasoning_content".to_owned(), Value::from(text.as_str()));
        }
        Some(_) => return Err(UnsupportedFeature("reasoning that is not a string")),
    }
    Ok(())
}

/// Writes the engine's own fields first, in the engine's order, then unknown fields: the order is
/// visible in templates that print a call as JSON.
fn tool_call(call: &Value) -> Result<Value> {
    let call = call.as_object().ok_or(UnsupportedFeature("a tool call that is not an object"))?;
    let function = call.get("function").and_then(Value::as_object);
    let (Some(Value::String(id)), Some(function), Some("function")) =
        (call.get("id"), function, call.get("type").and_then(Value::as_str))
    else {
        return Err(UnsupportedFeature("a tool call that is not a complete function call"));
    };
    let (Some(Value::String(arguments)), Some(Value::String(name))) =
        (function.get("arguments"), function.get("name"))
    else {
        return Err(UnsupportedFeature("a function call without name or arguments"));
    };
    let mut inner = Map::new();
    inner.insert("arguments".to_owned(), call_arguments(arguments)?);
    inner.insert("name".to_owned(), Value::from(name.as_str()));
    extend_unknown(&mut inner, function)?;
    let mut out = Map::new();
    out.insert("id".to_owned(), Value::from(id.as_str()));
    out.insert("function".to_owned(), Value::Object(inner));
    out.insert("type".to_owned(), Value::from("function"));
    extend_unknown(&mut out, call)?;
    Ok(Value::Object(out))
}

fn extend_unknown(out: &mut Map<String, Value>, from: &Map<String, Value>) -> Result<()> {
    for (name, value) in from {
        if !out.contains_key(name) {
            plain_numbers(value)?;
            out.insert(name.clone(), value.clone());
        }
    }
    Ok(())
}

/// Arguments are JSON in a string; templates get the object. As in the engine, anything other than
/// an object becomes an empty object.
fn call_arguments(text: &str) -> Result<Value> {
    let empty = || Value::Object(Map::new());
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.is_object() => {
            plain_numbers(&value)?;
            Ok(value)
        }
        Ok(_) => Ok(empty()),
        Err(error) => {
            // Python's JSON reader accepts some texts that `serde_json` refuses.
            let message = error.to_string();
            let python_may_read =
                ["recursion limit", "out of range", "surrogate", "unexpected end of hex"]
                    .iter()
                    .any(|known| message.contains(known))
                    || ["NaN", "Infinity", "\\u"].iter().any(|known| text.contains(known));
            if python_may_read {
                return Err(UnsupportedFeature(
                    "tool call arguments that only Python reads as JSON",
                ));
            }
            Ok(empty())
        }
    }
}

/// Refuses numbers that cannot be represented in 64 bits: Python keeps every digit of an integer,
/// and templates print it.
///
/// # Errors
/// [`UnsupportedFeature`] if there is such a number.
pub fn plain_numbers(value: &Value) -> Result<()> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(float)
                if number.is_f64()
                    && (float.abs() >= 9e18 || (float == 0.0 && float.is_sign_negative())) =>
            {
                Err(UnsupportedFeature("a number beyond 64 bits"))
            }
            _ => Ok(()),
        },
        Value::Array(items) => items.iter().try_for_each(plain_numbers),
        Value::Object(fields) => fields.values().try_for_each(plain_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

/// Tools as a template sees them: known fields only, in the engine's order,
/// absent descriptions and parameters as null.
///
/// # Errors
/// [`UnsupportedFeature`] for definitions that the engine may refuse.
pub fn tools(tools: &Value) -> Result<Value> {
    let tools = tools.as_array().ok_or(UnsupportedFeature("tools are not an array"))?;
    if tools.is_empty() {
        return Err(UnsupportedFeature("an empty list of tools"));
    }
    tools.iter().map(one_tool).collect::<Result<Vec<_>>>().map(Value::Array)
}

fn one_tool(tool: &Value) -> Result<Value> {
    let incomplete = UnsupportedFeature("a tool that is not a plain function definition");
    let tool = tool.as_object().ok_or(incomplete)?;
    let function = tool.get("function").and_then(Value::as_object).ok_or(incomplete)?;
    let is_function = match tool.get("type") {
        None => true,
        Some(kind) => kind == "function",
    };
    if !is_function || present(tool, "defer_loading") || present(function, "defer_loading") {
        return Err(incomplete);
    }
    let field = |name: &str, fits: fn(&Value) -> bool| match function.get(name) {
        None | Some(Value::Null) => Ok(Value::Null),
        Some(value) if fits(value) => Ok(value.clone()),
        Some(_) => Err(incomplete),
    };
    let name = field("name", Value::is_string)?;
    let parameters = field("parameters", Value::is_object)?;
    let strict = field("strict", Value::is_boolean)?;
    if name.is_null() {
        return Err(incomplete);
    }
    plain_numbers(&parameters)?;
    let mut inner = Map::new();
    inner.insert("name".to_owned(), name);
    inner.insert("description".to_owned(), field("description", Value::is_string)?);
    inner.insert("parameters".to_owned(), parameters);
    if !strict.is_null() {
        inner.insert("strict".to_owned(), strict);
    }
    let mut out = Map::new();
    out.insert("type".to_owned(), Value::from("function"));
    out.insert("function".to_owned(), Value::Object(inner));
    Ok(Value::Object(out))
}

/// Turns developer messages into system messages, for templates that do not know the role, and
/// merges all system messages into the first message if one of them would not be first.
#[must_use]
pub fn without_developer(conversation: Vec<Value>) -> Vec<Value> {
    let is = |message: &Value, role: &str| message["role"] == role;
    if !conversation.iter().any(|message| is(message, "developer")) {
        return conversation;
    }
    let mut converted = conversation;
    for message in converted.iter_mut().filter(|message| is(message, "developer")) {
        if let Some(fields) = message.as_object_mut() {
            fields.insert("role".to_owned(), Value::from("system"));
            fields.shift_remove("tools");
        }
    }
    if !converted.iter().skip(1).any(|message| is(message, "system")) {
        return converted;
    }
    let (system, others): (Vec<Value>, Vec<Value>) =
        converted.into_iter().partition(|message| is(message, "system"));
    let texts: Vec<String> =
        system.iter().map(content_text).filter(|text| !text.is_empty()).collect();
    let mut merged = Map::new();
    merged.insert("role".to_owned(), Value::from("system"));
    merged.insert("content".to_owned(), Value::from(texts.join("\n\n")));
    std::iter::once(Value::Object(merged)).chain(others).collect()
}

fn content_text(message: &Value) -> String {
    match &message["content"] {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        content => content.as_str().unwrap_or_default().to_owned(),
    }
}
