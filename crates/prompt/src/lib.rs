//! Turns a request's prompt into the token ids that vLLM will see.
//!
//! After loading, everything here is computation without I/O: callers run it off the reactor. What
//! cannot be reproduced exactly is refused as [`PromptError::Unsupported`]; the engine is then sent
//! the request without token ids.

pub mod compare;
mod engine_chat;
mod media;
mod memory;
pub mod messages;
pub mod normalise;
pub mod request;
pub mod responses;
mod spare;
pub mod stamp;
pub mod template;
pub mod tokenizer;
pub mod watch;

use std::path::Path;

use serde_json::{Map, Value};
use splitrail_engine::EngineKind;
use splitrail_kv::Chain;

pub use engine_chat::engine_chat;
pub use request::ChatRequestView;
pub use template::ContentFormat;
pub use tokenizer::{LoadError, TokenizeError, Tokenizer};

use normalise::UnsupportedFeature;
use template::{ChatInput, ChatTemplate, TemplateError};

/// Why there are no token ids for a request. No variant carries prompt text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The request is wrong and the engine would refuse it, too: status 400. The text may be a
    /// template's own message, at most 500 characters.
    #[error("{0}")]
    Client(String),
    /// The exact ids cannot be computed by the router; the request itself may be correct. The
    /// request is placed by an estimate.
    #[error("prompt left to the engine: {0}")]
    Unsupported(&'static str),
    /// A fault of the router. The request is placed by an estimate, and the fault is reported.
    #[error("{0}")]
    Internal(String),
}

impl From<UnsupportedFeature> for PromptError {
    fn from(reason: UnsupportedFeature) -> Self {
        Self::Unsupported(reason.0)
    }
}

impl From<TokenizeError> for PromptError {
    fn from(error: TokenizeError) -> Self {
        match error {
            TokenizeError::Unsupported(reason) => Self::Unsupported(reason),
            TokenizeError::Failed => Self::Internal(error.to_string()),
        }
    }
}

/// A tokenized prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTokens {
    /// The token ids, exactly as the engine hashes them into blocks.
    pub ids: Vec<u32>,
    /// Whether the template wrote the time into the prompt; see
    /// [`template::RenderedPrompt::uses_clock`].
    pub uses_clock: bool,
}

/// How much of a prompt is known as tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The whole prompt.
    Whole,
    /// The part before the first image, audio or video.
    BeforeMedia,
}

/// The engines of a model and the flags with which they were started, as far as they change prompts.
/// The default is vLLM without any of these flags.
#[derive(Clone, Debug, Default)]
pub struct PromptOptions {
    /// Which engines: each builds tokenizers by its own rules.
    pub engine: EngineKind,
    /// `--chat-template`: replaces the model's own templates.
    pub chat_template: Option<String>,
    /// `--chat-template-content-format`; `None` is `auto`.
    pub content_format: Option<ContentFormat>,
    /// `--default-chat-template-kwargs`.
    pub default_kwargs: Map<String, Value>,
    /// `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
}

/// Tokenizer and templates of one model.
#[derive(Debug)]
pub struct PromptModel {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    chat: Result<ChatTemplate, &'static str>,
    tool_chat: Option<Result<ChatTemplate, &'static str>>,
    options: PromptOptions,
    /// What an operator should know, for the log at start.
    pub notes: Vec<String>,
}

impl PromptModel {
    /// Loads a model folder. A missing or unsupported template is not an error, because text
    /// prompts still work; see [`Self::notes`].
    ///
    /// # Errors
    /// [`LoadError`] if there is no usable tokenizer.
    pub fn load(path: &Path, options: PromptOptions) -> Result<Self, LoadError> {
        Ok(Self::new(Tokenizer::load(path, options.engine)?, options))
    }

    /// Combines a loaded tokenizer with an engine's options.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, options: PromptOptions) -> Self {
        let mut notes = tokenizer.notes.to_vec();
        let mut compile = |source: &str| {
            ChatTemplate::compile(source, tokenizer.special.clone()).map_err(|error| {
                notes.push(error.to_string());
                "the model's chat template is not supported"
            })
        };
        let (chat, tool_chat) = if let Some(source) = &options.chat_template {
            (compile(source), None)
        } else if let Some(reason) = tokenizer.native_chat {
            (Err(reason), None)
        } else {
            let default = tokenizer.chat_template("default").map(&mut compile);
            let tool_use = tokenizer.chat_template("tool_use").map(&mut compile);
            (default.unwrap_or(Err("the model has no chat template")), tool_use)
        };
        if let Err(reason) = &chat {
            notes.push(format!("chats cannot be tokenized exactly: {reason}"));
        }
        Self { tokenizer, chat, tool_chat, options, notes }
    }

    /// Token ids of a completion's text prompt. The request's
    /// `add_special_tokens` is true unless the client says otherwise.
    ///
    /// # Errors
    /// [`PromptError::Unsupported`] if the engine's tokenizer could not be
    /// rebuilt, [`PromptError::Internal`] if the tokenizer fails.
    pub fn tokenize_text(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<PromptTokens, PromptError> {
        let ids = self.tokenizer.encode(text, add_special_tokens)?;
        Ok(PromptTokens { ids, uses_clock: false })
    }

    /// Appends the ids of [`Self::tokenize_text`] to a chain; see [`Tokenizer::chain`].
    ///
    /// # Errors
    /// As [`Self::tokenize_text`].
    pub fn chain_text(
        &self,
        text: &str,
        add_special_tokens: bool,
        chain: &mut Chain,
    ) -> Result<(), PromptError> {
        Ok(self.tokenizer.chain(text, add_special_tokens, chain)?)
    }

    /// Token ids of a chat request, rendered at `now_unix_s` (seconds since
    /// the Unix epoch; matters only to templates that print the date).
    ///
    /// # Errors
    /// See [`PromptError`].
    pub fn tokenize_chat(
        &self,
        chat: ChatRequestView<'_>,
        now_unix_s: i64,
    ) -> Result<PromptTokens, PromptError> {
        let special = chat.add_special_tokens;
        let rendered = self.render_supported(chat, now_unix_s)?;
        let prompt = self.tokenize_text(&rendered.text, special)?;
        Ok(PromptTokens { uses_clock: rendered.uses_clock, ..prompt })
    }

    /// Token ids of a chat's text before its first medium, as far as they do not depend on the
    /// medium.
    ///
    /// # Errors
    /// See [`PromptError`].
    pub fn tokenize_before_media(
        &self,
        chat: ChatRequestView<'_>,
        now_unix_s: i64,
    ) -> Result<Vec<u32>, PromptError> {
        media::tokens_before(self, chat, now_unix_s)
    }

    /// Appends the ids of [`Self::tokenize_chat`] to a chain; see [`Tokenizer::chain`]. For a chat
    /// with media, those of [`Self::tokenize_before_media`].
    ///
    /// # Errors
    /// See [`PromptError`].
    pub fn chain_chat(
        &self,
        chat: ChatRequestView<'_>,
        now_unix_s: i64,
        chain: &mut Chain,
    ) -> Result<Extent, PromptError> {
        if media::has_media(&chat.messages) {
            chain.append(&self.tokenize_before_media(chat, now_unix_s)?);
            return Ok(Extent::BeforeMedia);
        }
        let special = chat.add_special_tokens;
        let rendered = self.render_supported(chat, now_unix_s)?;
        self.chain_text(&rendered.text, special, chain)?;
        rendered.give_back();
        Ok(Extent::Whole)
    }

    /// Renders a chat to text, if its tokens can be computed exactly.
    fn render_supported(
        &self,
        chat: ChatRequestView<'_>,
        now_unix_s: i64,
    ) -> Result<template::RenderedPrompt, PromptError> {
        match self.tokenizer.unsupported {
            Some(reason) => Err(PromptError::Unsupported(reason)),
            None => self.render_chat(chat, now_unix_s),
        }
    }

    /// The text that [`Self::tokenize_chat`] tokenizes.
    ///
    /// # Errors
    /// See [`PromptError`].
    pub fn render_chat(
        &self,
        mut chat: ChatRequestView<'_>,
        now_unix_s: i64,
    ) -> Result<template::RenderedPrompt, PromptError> {
        let input = RenderInput::new(self, &chat, now_unix_s)?;
        let messages = std::mem::take(&mut chat.messages).into_owned();
        input.render(normalise::conversation(messages, input.format)?)
    }

    fn tools(&self, chat: &ChatRequestView<'_>) -> Result<Option<Value>, PromptError> {
        let excluded = self.options.exclude_tools_when_tool_choice_none
            && chat.tool_choice.is_some_and(|choice| choice == "none");
        match chat.tools {
            Some(tools) => {
                let tools = normalise::tools(tools)?;
                Ok(Some(tools).filter(|_| !excluded))
            }
            None => Ok(None),
        }
    }
}

/// The inputs of a template except the messages.
struct RenderInput<'a> {
    template: &'a ChatTemplate,
    /// The shape in which the template gets the messages' content.
    format: ContentFormat,
    tools: Option<Value>,
    documents: Option<&'a Value>,
    add_generation_prompt: bool,
    kwargs: Map<String, Value>,
    now_unix_s: i64,
}

impl<'a> RenderInput<'a> {
    fn new(
        model: &'a PromptModel,
        chat: &ChatRequestView<'a>,
        now_unix_s: i64,
    ) -> Result<Self, PromptError> {
        let tools = model.tools(chat)?;
        let template = match (&tools, &model.tool_chat) {
            (Some(_), Some(template)) => template,
            _ => &model.chat,
        };
        let template = template.as_ref().map_err(|reason| PromptError::Unsupported(reason))?;
        Ok(Self {
            template,
            format: model.options.content_format.unwrap_or(template.content_format),
            tools,
            documents: chat.documents,
            add_generation_prompt: chat.add_generation_prompt,
            kwargs: request::template_kwargs(chat, &model.options.default_kwargs)?,
            now_unix_s,
        })
    }

    fn render(&self, mut messages: Vec<Value>) -> Result<template::RenderedPrompt, PromptError> {
        if messages.is_empty() {
            return Err(PromptError::Client("`messages` must not be empty".to_owned()));
        }
        if !self.template.knows_developer {
            messages = normalise::without_developer(messages);
        }
        let input = ChatInput {
            messages: &Value::Array(messages),
            tools: self.tools.as_ref(),
            documents: self.documents,
            add_generation_prompt: self.add_generation_prompt,
            kwargs: Some(&self.kwargs),
            now_unix_s: self.now_unix_s,
        };
        self.template.render(&input).map_err(|error| match error {
            TemplateError::Raised(message) => PromptError::Client(message),
            // In this case the result depends on the engine's own template language.
            TemplateError::Render { .. } => {
                PromptError::Unsupported("the chat template cannot work with this request")
            }
            TemplateError::TooMuch(_) => {
                PromptError::Unsupported("rendering the chat takes too much time or memory")
            }
            TemplateError::Syntax { .. } => PromptError::Internal(error.to_string()),
        })
    }
}
