//! Settings of tokenizer and chat template.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use splitrail_settings::size;

use crate::scalar;

/// How prompts become tokens.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TokenizerConfig {
    /// A `tokenizer.json` with its chat template.
    Huggingface(HuggingfaceTokenizer),
    /// The engines' own `/tokenize`: no files, and a round trip for each prompt.
    Engine(EngineTokenizer),
    /// No tokens. Policies that need them cannot be used.
    None {},
}

impl TokenizerConfig {
    /// Whether tokens of prompts are to be had, from files or from engines.
    pub fn makes_tokens(&self) -> bool {
        !matches!(self, Self::None {})
    }
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
    /// The engines' `--chat-template`. Default: the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
    /// The value of the engines' `--chat-template-content-format`.
    #[serde(default)]
    pub chat_template_content_format: ContentFormatConfig,
    /// The engines' `--default-chat-template-kwargs`.
    #[serde(default)]
    pub default_chat_template_kwargs: Map<String, Value>,
    /// Whether the engines are started with `--exclude-tools-when-tool-choice-none`.
    #[serde(default)]
    pub exclude_tools_when_tool_choice_none: bool,
}

/// How engines are asked for the tokens of prompts. A prompt whose tokens do not come in time is
/// placed by load alone.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTokenizer {
    /// Maximum wait for the tokens of a prompt.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub timeout: Duration,
    /// Maximum prompts that engines are asked about at a time. Further ones are placed by load.
    #[schemars(range(min = 1, max = 65_536))]
    pub in_flight_max: u32,
    /// Memory for block hashes of recent prompts, kept for five minutes.
    #[serde(rename = "cache_size")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(max = 1_099_511_627_776_u64))]
    pub cache_bytes: usize,
}

impl Default for EngineTokenizer {
    fn default() -> Self {
        Self { timeout: Duration::from_millis(500), in_flight_max: 64, cache_bytes: 16 << 20 }
    }
}

/// The shape in which a chat template gets the content of messages.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ContentFormatConfig {
    /// The format of text that the template expects.
    #[default]
    Auto,
    /// One text.
    String,
    /// A list of parts.
    Openai,
}
