//! Settings of tokenizer and chat template.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// How prompts become tokens.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TokenizerConfig {
    /// A Hugging Face `tokenizer.json` with its chat template.
    Huggingface(HuggingfaceTokenizer),
    /// None: the router knows no tokens, and no policy that needs them can be used.
    None {},
}

/// A tokenizer of the Hugging Face library. What its engines were started with must be said here
/// as well: the router writes chats as they do.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct HuggingfaceTokenizer {
    /// The model's folder, or the `tokenizer.json` itself.
    pub path: PathBuf,
    /// A file with the chat template, where the engines have `--chat-template`; the model's own if
    /// left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// The engines' `--chat-template-content-format`.
    #[serde(default)]
    pub chat_template_content_format: ContentFormatConfig,
    /// The engines' `--default-chat-template-kwargs`: variables of the chat template that a request
    /// may override.
    #[serde(default)]
    pub default_chat_template_kwargs: Map<String, Value>,
    /// Whether the engines have `--exclude-tools-when-tool-choice-none`.
    #[serde(default)]
    pub exclude_tools_when_tool_choice_none: bool,
}

/// The shape in which a chat template gets the content of messages.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormatConfig {
    /// As the template's own text asks for.
    #[default]
    Auto,
    /// One text.
    String,
    /// A list of parts.
    Openai,
}
