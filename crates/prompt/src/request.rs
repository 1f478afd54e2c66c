//! The fields of a chat request that decide its prompt.

use std::borrow::Cow;

use serde_json::{Map, Value};
use splitrail_engine::template_kwargs::is_control_kwarg;

use super::PromptError;
use super::normalise::plain_numbers;

/// The values of `reasoning_effort` that the engine accepts.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Names that Jinja2 defines itself: template arguments with these names are dropped.
const JINJA_GLOBALS: [&str; 6] = ["cycler", "dict", "joiner", "lipsum", "namespace", "range"];

/// Members by which the engine may change the prompt in ways that the router does not reproduce, each
/// with a name for logs. Only their presence matters.
pub const ENGINE_ONLY: [(&str, &str); 4] = [
    ("chat_template", "a chat template sent by the client"),
    ("truncate_prompt_tokens", "truncate_prompt_tokens"),
    ("mm_processor_kwargs", "mm_processor_kwargs"),
    ("media_io_kwargs", "media_io_kwargs"),
];

/// Members of a chat request that [`ChatRequestView::from_body`] reads.
pub const MEMBERS: [&str; 9] = [
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
];

/// The fields of a chat request that determine its prompt. Other fields (`response_format`,
/// sampling, `parallel_tool_calls`, ...) never reach the template in vLLM 0.32.
#[derive(Clone, Debug)]
pub struct ChatRequestView<'a> {
    /// `messages`.
    pub messages: Cow<'a, Value>,
    /// `tools`, if not null.
    pub tools: Option<&'a Value>,
    /// `tool_choice`, if not null; matters to engines that hide tools on `none`.
    pub tool_choice: Option<&'a Value>,
    /// `documents`, if not null.
    pub documents: Option<&'a Value>,
    /// `add_generation_prompt`; true unless the client says otherwise.
    pub add_generation_prompt: bool,
    /// `add_special_tokens`; false unless the client says otherwise.
    pub add_special_tokens: bool,
    /// `chat_template_kwargs`, if not null.
    pub chat_template_kwargs: Option<&'a Map<String, Value>>,
    /// `reasoning_effort`, if not null.
    pub reasoning_effort: Option<&'a str>,
}

impl<'a> ChatRequestView<'a> {
    /// Picks the fields out of a request's body.
    ///
    /// # Errors
    /// [`PromptError::Client`] without `messages`; [`PromptError::Unsupported`]
    /// for fields that are the engine's to interpret or to refuse.
    pub fn from_body(body: &'a Map<String, Value>) -> Result<Self, PromptError> {
        Self::of(body, body.get("messages").map(Cow::Borrowed))
    }

    /// Like [`Self::from_body`], but takes the messages out of the body, so that their texts are
    /// not copied.
    ///
    /// # Errors
    /// As [`Self::from_body`].
    pub fn taken_from(body: &'a mut Map<String, Value>) -> Result<Self, PromptError> {
        let messages = body.get_mut("messages").map(Value::take);
        Self::of(body, messages.map(Cow::Owned))
    }

    fn of(
        body: &'a Map<String, Value>,
        messages: Option<Cow<'a, Value>>,
    ) -> Result<Self, PromptError> {
        let field = |name: &str| body.get(name).filter(|value| !value.is_null());
        let flag = |name: &str, default: bool| match body.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(PromptError::Unsupported("a flag that is not a boolean")),
        };
        for (name, reason) in ENGINE_ONLY {
            if field(name).is_some() {
                return Err(PromptError::Unsupported(reason));
            }
        }
        if flag("continue_final_message", false)? {
            return Err(PromptError::Unsupported("continue_final_message"));
        }
        let messages = messages
            .filter(|messages| !messages.is_null())
            .ok_or_else(|| PromptError::Client("`messages` is required".to_owned()))?;
        let chat_template_kwargs = match field("chat_template_kwargs") {
            None => None,
            Some(Value::Object(kwargs)) => Some(kwargs),
            Some(_) => {
                return Err(PromptError::Unsupported("chat_template_kwargs of another type"));
            }
        };
        let reasoning_effort = match field("reasoning_effort") {
            None => None,
            Some(Value::String(effort)) if EFFORTS.contains(&effort.as_str()) => {
                Some(effort.as_str())
            }
            Some(_) => return Err(PromptError::Unsupported("an unknown reasoning_effort")),
        };
        Ok(Self {
            messages,
            tools: field("tools"),
            tool_choice: field("tool_choice"),
            documents: field("documents").map(checked_documents).transpose()?,
            add_generation_prompt: flag("add_generation_prompt", true)?,
            add_special_tokens: flag("add_special_tokens", false)?,
            chat_template_kwargs,
            reasoning_effort,
        })
    }
}

fn checked_documents(documents: &Value) -> Result<&Value, PromptError> {
    let plain = documents.as_array().is_some_and(|list| {
        list.iter().all(|document| {
            document.as_object().is_some_and(|fields| fields.values().all(Value::is_string))
        })
    });
    if plain { Ok(documents) } else { Err(PromptError::Unsupported("documents of other types")) }
}

/// Variables for the template beside messages and tools: the engine's defaults, then the client's,
/// then the values of the request's own fields. A client's null and `"auto"` count as absent, as in
/// the engine.
pub(super) fn template_kwargs(
    chat: &ChatRequestView<'_>,
    defaults: &Map<String, Value>,
) -> Result<Map<String, Value>, PromptError> {
    let mut kwargs = defaults.clone();
    let client = chat.chat_template_kwargs;
    for (name, value) in client.into_iter().flatten() {
        if is_control_kwarg(name) {
            return Err(PromptError::Unsupported("chat_template_kwargs that steer the engine"));
        }
        if !value.is_null() && value != "auto" {
            plain_numbers(value)?;
            kwargs.insert(name.clone(), value.clone());
        }
    }
    if let Some(effort) = chat.reasoning_effort {
        kwargs.insert("reasoning_effort".to_owned(), Value::from(effort));
        if client.is_none_or(|client| !client.contains_key("enable_thinking")) {
            kwargs.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
        }
    }
    for name in JINJA_GLOBALS.iter().chain(&["add_generation_prompt", "continue_final_message"]) {
        kwargs.shift_remove(*name);
    }
    Ok(kwargs)
}
