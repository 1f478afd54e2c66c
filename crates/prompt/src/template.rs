//! Chat templates, rendered as Hugging Face renders them.
//!
//! Transformers compiles a template with `trim_blocks`, `lstrip_blocks`, loop
//! controls, its own `tojson`, `raise_exception`, `strftime_now` and a
//! `{% generation %}` tag; values print and behave as Python's. All of this is
//! reproduced on minijinja, which is close to Jinja2 but not the same.

mod clock;
mod content_format;
mod pyjson;
mod pystr;
mod shared;
mod split_concat;
mod watched;
mod written;

use std::collections::BTreeMap;
use std::error::Error as _;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde_json::{Map, Value as Json};

use super::{spare, watch};
use shared::StepwiseJson;

/// Maximum number of template steps of one render. A step takes some tens of nanoseconds, and a
/// prompt of 2,000 messages needs about half a million.
const MAX_STEPS: u64 = 10_000_000;

/// Maximum size of a rendered prompt in bytes, however long its conversation is.
const MAX_RENDERED_BYTES: usize = 64 << 20;

/// Maximum size of a rendered prompt in bytes per byte of its conversation. Definitions of tools
/// that are printed with an indentation of four become two to four times as long.
const RENDERED_PER_BYTE: usize = 8;

/// Maximum size in bytes of a rendered prompt in addition, for text of the template itself.
const TEMPLATE_TEXT_BYTES: usize = 256 << 10;

/// Texts are copied in steps of this many bytes. glibc (2.36) copies longer texts with `rep movsb`
/// on processors that report this as fast. If the target lies slightly further into its page than
/// the source, this took sixteen times as long for 48 KB as otherwise: 13.7 us on a Zen 4 (up to 15
/// bytes further), and 16 us on a Zen 3 (up to 31 bytes further).
const STEP_BYTES: usize = 2 << 10;

/// Maximum depth of nested macro calls and includes.
const MAX_RECURSION: usize = 120;

/// Maximum length in characters of a template's own message in [`TemplateError::Raised`].
const MAX_RAISED_CHARS: usize = 500;

const NAME: &str = "chat";

/// Named special tokens of a tokenizer, in the names that templates use
/// (`bos_token`, `eos_token`, `pad_token`, `unk_token`, ...).
pub type SpecialTokens = BTreeMap<String, String>;

/// The shape in which a template wants a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// One string; text parts are joined with a newline.
    String,
    /// A list of parts, `[{"type": "text", "text": ...}]`.
    OpenAi,
}

/// Why a template could not be compiled or rendered. No variant carries text
/// of the conversation, except what the template itself put into its message.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template rejected the conversation with `raise_exception`; the
    /// client's fault. At most 500 characters of the template's message.
    #[error("{0}")]
    Raised(String),
    /// The template is not valid, or uses a feature that is not supported.
    #[error("chat template, line {line}: {reason}")]
    Syntax {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// Rendering failed because the template cannot process a value.
    #[error("chat template, line {line}: {kind}")]
    Render {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// The kind of failure, without any value.
        kind: String,
    },
    /// Rendering exceeded a bound on steps, time, recursion or size.
    #[error("the chat template exceeds the bound on {0}")]
    TooMuch(&'static str),
}

/// One conversation, as a template gets it.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// The messages, already in the template's content format: an array.
    pub messages: &'a Json,
    /// Tools that the model may call: an array of definitions.
    pub tools: Option<&'a Json>,
    /// Documents for retrieval-augmented templates: an array.
    pub documents: Option<&'a Json>,
    /// Whether the template opens the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Further variables; they replace special tokens of the same name.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// The time that `strftime_now` uses, in seconds since the Unix epoch.
    pub now_unix_s: i64,
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The prompt's text, without the tokenizer's own special tokens.
    pub text: String,
    /// Whether the template read the time: an engine that renders at another moment, or in another
    /// time zone, may get another prompt.
    pub uses_clock: bool,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    /// The content format that the template's syntax tree implies.
    pub content_format: ContentFormat,
    /// Whether the template mentions the role `developer`; for templates that do not, vLLM turns
    /// such messages into system messages.
    pub knows_developer: bool,
}

/// Maximum size in bytes of the prompt that a conversation of `bytes` bytes may become.
#[must_use]
pub fn rendered_max_bytes(bytes: usize) -> usize {
    let max = bytes.saturating_mul(RENDERED_PER_BYTE).saturating_add(TEMPLATE_TEXT_BYTES);
    max.min(MAX_RENDERED_BYTES)
}

impl ChatTemplate {
    /// Compiles `source`. The tokens in `special` are variables of every render.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] if the template uses an unknown feature.
    pub fn compile(source: &str, special: SpecialTokens) -> Result<Self, TemplateError> {
        let syntax = syntax().map_err(|error| syntax_error(&error))?;
        // Jinja2 reads every kind of line end as a newline.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let knows_developer = source.contains("\"developer\"") || source.contains("'developer'");
        let source = without_generation_tags(&source);
        let tree = minijinja::machinery::parse(&source, NAME, syntax.clone())
            .map_err(|error| syntax_error(&error))?;
        let content_format = content_format::detect(&tree);
        drop(tree);
        let source = split_concat::split_concatenations(&source, syntax.clone());
        let mut environment = environment(syntax);
        environment
            .add_template_owned(NAME.to_owned(), source)
            .map_err(|error| syntax_error(&error))?;
        Ok(Self { environment, special, content_format, knows_developer })
    }

    /// Renders one conversation.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] if the template rejects the conversation; see the other variants.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<RenderedPrompt, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| syntax_error(&error))?;
        let context = self.context(input);
        // The capacity covers all messages and some text around them.
        let capacity = text_bytes(input.messages) * 17 / 16 + 1024;
        let bytes = spare::TEXT.with(|spare| spare.take(capacity));
        let mut out = BoundedOutput { bytes };
        let max_bytes = rendered_max_bytes(input.bytes());
        let ((result, uses_clock), exceeded) = watch::rendering(max_bytes, || {
            clock::with_now(input.now_unix_s, || {
                template.render_captured_to(context, &mut out).map(drop)
            })
        });
        if let Some(bound) = exceeded {
            return Err(TemplateError::TooMuch(bound));
        }
        result.map_err(|error| render_error(&error))?;
        let text = String::from_utf8(out.bytes)
            .map_err(|_| TemplateError::Render { line: 0, kind: "not UTF-8".to_owned() })?;
        Ok(RenderedPrompt { text, uses_clock })
    }

    fn context(&self, input: &ChatInput<'_>) -> Value {
        let none = || Value::from(());
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, token) in &self.special {
            context.insert(name, Value::from(token.as_str()));
        }
        for (name, value) in input.kwargs.into_iter().flatten() {
            context.insert(name, from_json(value));
        }
        context.insert("messages", from_json(input.messages));
        context.insert("tools", input.tools.map_or_else(none, from_json));
        context.insert("documents", input.documents.map_or_else(none, from_json));
        context.insert("add_generation_prompt", Value::from(input.add_generation_prompt));
        Value::from_pairs(context)
    }
}

impl ChatInput<'_> {
    /// The length in bytes of the shortest JSON of all values, without escapes.
    fn bytes(&self) -> usize {
        let values = [Some(self.messages), self.tools, self.documents];
        let kwargs = self.kwargs.map_or(0, members_bytes);
        kwargs + values.into_iter().flatten().map(json_bytes).sum::<usize>()
    }
}

impl RenderedPrompt {
    /// Keeps the text's buffer for the thread's next prompt. To be called when the text is no
    /// longer needed.
    pub fn give_back(self) {
        spare::TEXT.with(|spare| spare.give_back(self.text.into_bytes()));
    }
}

/// Total size in bytes of the strings in a value.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.values().map(text_bytes).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

/// The length in bytes of a value's JSON and a comma, without white space and escapes and with
/// numbers of one digit.
fn json_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len() + 3,
        Json::Array(items) => 3 + items.iter().map(json_bytes).sum::<usize>(),
        Json::Object(fields) => 3 + members_bytes(fields),
        Json::Null | Json::Bool(true) => 5,
        Json::Bool(false) => 6,
        Json::Number(_) => 2,
    }
}

fn members_bytes(fields: &Map<String, Json>) -> usize {
    fields.iter().map(|(name, value)| name.len() + 3 + json_bytes(value)).sum()
}

fn from_json(value: &Json) -> Value {
    Value::from(Serde(StepwiseJson(value)))
}

fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// A failure raised by `raise_exception`, as the source of an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn environment(syntax: SyntaxConfig) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax);
    env.set_debug(false);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(pystr::unknown_method);
    env.set_formatter(|out, state, value| match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            let text = f64::try_from(value.clone()).map(pyjson::float)?;
            out.write_str(&text).map_err(Error::from)
        }
        ValueKind::Seq | ValueKind::Map if !pystr::prints_alike(&value.to_string()) => {
            Err(Error::new(ErrorKind::InvalidOperation, "a list or mapping printed as Python"))
        }
        _ => minijinja::escape_formatter(out, state, value),
    });
    // Minijinja defines this name, Jinja2 does not.
    env.remove_global("debug");
    // It prints other text than Python's.
    env.remove_filter("pprint");
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message: String = message.to_string().chars().take(MAX_RAISED_CHARS).collect();
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception")
            .with_source(RaisedException(message)))
    });
    env.add_function("strftime_now", clock::strftime_now);
    env.add_filter(split_concat::TEXT, split_concat::text);
    env.add_filter("tojson", pyjson::tojson);
    env.add_filter("indent", pystr::indent);
    env.add_filter("trim", |value: Value, chars: Option<&str>| match value.as_str() {
        Some(text) => pystr::stripped(&value, text, chars, true, true),
        None => Value::from(pystr::strip(&value.to_string(), chars, true, true)),
    });
    // As in Jinja2, which asks Python: a string has a length and items, and so does a mapping.
    env.add_test("iterable", |value: &Value| {
        value.kind() == ValueKind::String || value.try_iter().is_ok()
    });
    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
        )
    });
    env
}

fn syntax_error(error: &Error) -> TemplateError {
    // The detail of a syntax error contains text of the template, not of a request.
    let reason = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    TemplateError::Syntax { line: error.line().unwrap_or(0), reason }
}

fn render_error(error: &Error) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = error.source();
    while let Some(inner) = source {
        if let Some(RaisedException(message)) = inner.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        source = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::TooMuch("steps"),
        kind => TemplateError::Render { line: error.line().unwrap_or(0), kind: kind.to_string() },
    }
}

/// Collects output up to the bound of the render on this thread.
struct BoundedOutput {
    bytes: Vec<u8>,
}

impl std::io::Write for BoundedOutput {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        if !watch::render_has_room(self.bytes.len() + data.len()) {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        for step in data.chunks(STEP_BYTES) {
            self.bytes.extend_from_slice(step);
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}` marks the assistant's text, for training; it renders its body. It is replaced
/// by `with`, which has the same scope, so that white-space control around the tag keeps its
/// meaning.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let name_at = tag.len() - tag.trim_start_matches(['-', '+']).trim_start().len();
        let (head, name) = tag.split_at(name_at);
        for (word, replacement) in [("generation", "with"), ("endgeneration", "endwith")] {
            if let Some(tail) = name.strip_prefix(word)
                && tail.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
            {
                out.push_str(head);
                out.push_str(replacement);
                rest = tail;
                break;
            }
        }
    }
    out.push_str(rest);
    out
}
