//! The request with which an engine is asked for the tokens of a chat, for models whose tokenizer the
//! router does not have.
//!
//! `/tokenize` of vLLM renders chats as chat completions do, with the options that the engine was
//! started with, but has fewer fields (`entrypoints/serve/tokenize/protocol.py`, 0.32). A chat that
//! needs one of the others is left to the engine.

use serde_json::{Map, Value};

use super::media::has_media;
use super::normalise::MEDIA;
use super::request::template_kwargs;
use super::{ChatRequestView, PromptError};

/// The request for the tokens of a chat to `model`, the engine's name for the model or adapter.
///
/// # Errors
/// [`PromptError::Unsupported`] for fields that `/tokenize` lacks, and for media, whose blocks have
/// hashes that tokens do not show.
pub fn engine_chat(mut chat: ChatRequestView<'_>, model: &str) -> Result<Value, PromptError> {
    if has_media(&chat.messages) {
        return Err(PromptError::Unsupported(MEDIA));
    }
    if chat.documents.is_some() {
        return Err(PromptError::Unsupported("documents"));
    }
    // Templates of some models write the choice into the prompt, and some engines are started so that
    // they hide the tools of a request that may not use them.
    if chat.tools.is_some() && chat.tool_choice.is_some_and(|choice| choice != "auto") {
        return Err(PromptError::Unsupported("tool_choice"));
    }
    let kwargs = template_kwargs(&chat, &Map::new())?;
    let mut request = Map::new();
    let mut set = |name: &str, value: Value| request.insert(name.to_owned(), value);
    set("model", model.into());
    set("messages", std::mem::take(&mut chat.messages).into_owned());
    set("add_generation_prompt", chat.add_generation_prompt.into());
    set("add_special_tokens", chat.add_special_tokens.into());
    if let Some(tools) = chat.tools {
        set("tools", tools.clone());
    }
    if !kwargs.is_empty() {
        set("chat_template_kwargs", kwargs.into());
    }
    Ok(request.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: Value) -> Result<Value, PromptError> {
        let body = body.as_object().unwrap().clone();
        engine_chat(ChatRequestView::from_body(&body)?, "m")
    }

    #[test]
    fn an_engine_is_sent_what_decides_the_prompt_and_nothing_else() {
        let messages = json!([{"role": "user", "content": "a"}]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let body = json!({
            "messages": messages, "tools": tools, "tool_choice": "auto", "temperature": 0.5,
            "reasoning_effort": "low", "chat_template_kwargs": {"a": 1, "b": null},
            "cache_salt": "s", "stream": true,
        });
        let expected = json!({
            "model": "m", "messages": messages, "tools": tools,
            "add_generation_prompt": true, "add_special_tokens": false,
            "chat_template_kwargs": {"a": 1, "reasoning_effort": "low", "enable_thinking": true},
        });
        assert_eq!(of(body).unwrap(), expected);
        let plain = of(json!({"messages": messages, "add_generation_prompt": false})).unwrap();
        let expected = json!({
            "model": "m", "messages": messages,
            "add_generation_prompt": false, "add_special_tokens": false,
        });
        assert_eq!(plain, expected);
    }

    #[test]
    fn chats_that_need_fields_that_the_endpoint_lacks_are_left_to_the_engine() {
        let messages = json!([{"role": "user", "content": "a"}]);
        let image = json!([{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
        ]}]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for body in [
            json!({"messages": image}),
            json!({"messages": messages, "documents": [{"text": "a"}]}),
            json!({"messages": messages, "tools": tools, "tool_choice": "none"}),
            json!({"messages": messages, "chat_template": "{{ 1 }}"}),
            json!({"messages": messages, "chat_template_kwargs": {"tokenize": false}}),
            json!({"messages": messages, "continue_final_message": true}),
            json!({"messages": messages, "mm_processor_kwargs": {}}),
        ] {
            assert!(matches!(of(body.clone()), Err(PromptError::Unsupported(_))), "{body}");
        }
        assert!(matches!(of(json!({})), Err(PromptError::Client(_))));
    }
}
