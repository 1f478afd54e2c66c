//! Arguments of chat templates that the engine uses itself and does not pass to the template.

/// Template arguments that are not variables of the template: they are parameters of the engine's
/// code that renders it. Taken from `apply_chat_template` of Hugging Face's `transformers`.
const CONTROL_KWARGS: [&str; 15] = [
    "chat_template",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "raise_exception",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "strftime_now",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// Whether an argument of this name steers the engine instead of reaching the template.
#[must_use]
pub fn is_control_kwarg(name: &str) -> bool {
    CONTROL_KWARGS.contains(&name)
}
