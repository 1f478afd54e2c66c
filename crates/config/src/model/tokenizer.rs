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
    /// The router computes no tokens. Policies that need tokens cannot be used.
    None {},
}

/// The tokenizer of a model that has none. Without a value, the tokenizer is looked up before the
/// file is read.
pub(super) fn none() -> TokenizerConfig {
    TokenizerConfig::None {}
}

/// How a tokenizer may be written. Only the schema is of this type: a text becomes a mapping before
/// the file is read.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the schema has this type, and no value does")]
pub(super) enum TokenizerEntry {
    /// The model's folder, or its id.
    Text(String),
    /// The tokenizer with its keys.
    Tokenizer(TokenizerConfig),
}

/// A tokenizer of the Hugging Face library. Options with which the engines are started must be
/// repeated here, because the router renders chats as the engines do.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct HuggingfaceTokenizer {
    /// The model's folder, or the file `tokenizer.json`.
    pub path: PathBuf,
    /// A file with the chat template. Set it if the engines are started with `--chat-template`.
    /// Defaults to the model's own template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// The value of the engines' `--chat-template-content-format`.
    #[serde(default)]
    pub chat_template_content_format: ContentFormatConfig,
    /// The value of the engines' `--default-chat-template-kwargs`: variables of the chat template
    /// that a request may override.
    #[serde(default)]
    pub default_chat_template_kwargs: Map<String, Value>,
    /// Whether the engines are started with `--exclude-tools-when-tool-choice-none`.
    #[serde(default)]
    pub exclude_tools_when_tool_choice_none: bool,
}

/// The shape in which a chat template gets the content of messages.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormatConfig {
    /// The format that the text of the template expects.
    #[default]
    Auto,
    /// One text.
    String,
    /// A list of parts.
    Openai,
}
