//! The text of a chat before its first image, audio or video.
//!
//! How many tokens an engine puts in the place of a medium, and with which ids, depends on the
//! model and is not known to the router. The text before a medium is text as in any other prompt,
//! and its full blocks are those of a prompt without media: vLLM adds a medium's hash only to the
//! blocks that contain tokens of the medium.

use serde_json::Value;

use super::normalise::{self, MEDIA};
use super::template::ContentFormat;
use super::tokenizer::Tokenizer;
use super::{ChatRequestView, PromptError, PromptModel, RenderInput};

/// Marks the position of a medium. If a client's text contains the mark as well, the only effect is
/// that the known part is shorter.
const MARK: &str = "\u{e000}medium\u{e001}";

/// Number of bytes at the end of a text that are examined to find how many of its last tokens
/// depend on the following text.
const TAIL_BYTES: usize = 512;

/// Examples of text that may follow: models write placeholders as tags, words or numbers, with or
/// without line breaks before them.
const FOLLOWERS: [&str; 9] = ["a", "A", "0", " ", "\n", "\n\n", "<", "[", "("];

/// Words in the tags that models use for media.
const TAG_WORDS: [&str; 8] = ["image", "img", "im_", "audio", "video", "vision", "media", "pad"];

/// Maximum length of a tag that is recognised, in bytes.
const TAG_BYTES: usize = 48;

/// Whether any message has a medium.
pub(super) fn has_media(messages: &Value) -> bool {
    messages.as_array().is_some_and(|messages| messages.iter().any(message_has_media))
}

fn message_has_media(message: &Value) -> bool {
    let parts = message.get("content").and_then(Value::as_array);
    parts.is_some_and(|parts| {
        parts.iter().filter_map(Value::as_object).any(|part| normalise::medium(part).is_some())
    })
}

/// The tokens before the first medium that are certainly the same in the engine.
///
/// # Errors
/// [`PromptError::Unsupported`] if they cannot be determined, and the errors of rendering and
/// tokenizing. The list may be empty.
pub(super) fn tokens_before(
    model: &PromptModel,
    chat: ChatRequestView<'_>,
    now_unix_s: i64,
) -> Result<Vec<u32>, PromptError> {
    if chat.add_special_tokens {
        // The tokenizer may add special tokens at the end, but this text does not end where the
        // prompt ends.
        return Err(PromptError::Unsupported(MEDIA));
    }
    let text = text_before(model, chat, now_unix_s)?;
    let mut ids = model.tokenizer.encode(&text, false)?;
    let unsure = unsure_tokens(&model.tokenizer, &text, &ids)?;
    ids.truncate(ids.len() - unsure);
    Ok(ids)
}

/// The text before the first medium's placeholder.
fn text_before(
    model: &PromptModel,
    mut chat: ChatRequestView<'_>,
    now_unix_s: i64,
) -> Result<String, PromptError> {
    let unknown = PromptError::Unsupported(MEDIA);
    let messages = std::mem::take(&mut chat.messages).into_owned();
    let listed = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    let first = listed.iter().position(message_has_media).ok_or_else(|| unknown.clone())?;
    // If a text contains what looks like a placeholder, the engine inserts the medium at the first
    // such text, wherever it is.
    let looks_like_one =
        listed[..=first].iter().chain(chat.tools).chain(chat.documents).any(mentions_placeholder);
    if looks_like_one || listed[first]["role"] != "user" {
        return Err(unknown);
    }
    let input = RenderInput::new(model, &chat, now_unix_s)?;
    let format = input.format;
    if format == ContentFormat::String && model.options.chat_template.is_some() {
        // Some models have no placeholders: their engine puts all images at the start of the
        // prompt. These models bring no chat template, so this may be one of them if a template is
        // configured.
        return Err(unknown);
    }
    let conversation = normalise::conversation_with(messages, format, Some(MARK))?;
    let as_sent = match format {
        ContentFormat::OpenAi => Some(conversation.clone()),
        ContentFormat::String => None,
    };
    let marked = match format {
        ContentFormat::OpenAi => conversation.into_iter().map(marked).collect(),
        ContentFormat::String => conversation,
    };
    let render = |messages| input.render(messages).map_err(|_| unknown.clone());
    let mut marked = render(marked)?.text;
    let mut known = marked.find(MARK).ok_or_else(|| unknown.clone())?;
    if let Some(as_sent) = as_sent {
        let as_sent = render(as_sent)?.text;
        if marked.replace(MARK, "") == as_sent {
            // The template prints nothing for media, so the engine inserts them at a place that is
            // not known here.
            return Err(unknown);
        }
        // A template may print media before the text of their message, or mention them earlier.
        known = common_prefix(&marked[..known], &as_sent);
    }
    marked.truncate(known);
    Ok(marked)
}

/// The message with the mark as text in the place of each medium.
fn marked(mut message: Value) -> Value {
    let parts = message.get_mut("content").and_then(Value::as_array_mut);
    for part in parts.into_iter().flatten().filter(|part| part["type"] != "text") {
        *part = serde_json::json!({"type": "text", "text": MARK});
    }
    message
}

/// The length of the longest common prefix, in bytes.
fn common_prefix(one: &str, other: &str) -> usize {
    let alike = one.char_indices().zip(other.chars()).take_while(|((_, a), b)| a == b);
    alike.last().map_or(0, |((at, last), _)| at + last.len_utf8())
}

/// Whether a text in a value may be taken for a placeholder of a medium.
fn mentions_placeholder(value: &Value) -> bool {
    match value {
        Value::String(text) => has_tag(text),
        Value::Array(items) => items.iter().any(mentions_placeholder),
        Value::Object(fields) => fields.iter().any(|(name, value)| {
            // A medium may be megabytes long.
            let is_medium = normalise::is_medium_field(name);
            !is_medium && (has_tag(name) || mentions_placeholder(value))
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

fn has_tag(text: &str) -> bool {
    text.match_indices(['<', '[']).any(|(at, open)| {
        let inner = &text.as_bytes()[at + 1..text.len().min(at + TAG_BYTES)];
        let close = if open == "<" { b'>' } else { b']' };
        let Some(end) = inner.iter().position(|byte| *byte == close) else { return false };
        let inner = inner[..end].to_ascii_lowercase();
        inner.starts_with(b"|")
            || TAG_WORDS
                .iter()
                .any(|word| inner.windows(word.len()).any(|window| window == word.as_bytes()))
    })
}

/// How many of a text's last tokens may change when more text follows.
fn unsure_tokens(tokenizer: &Tokenizer, text: &str, ids: &[u32]) -> Result<usize, PromptError> {
    let tail = &text[text.floor_char_boundary(text.len().saturating_sub(TAIL_BYTES))..];
    let alone = tokenizer.encode(tail, false)?;
    let mut sure = alone.len();
    for follower in FOLLOWERS {
        let followed = tokenizer.encode(&[tail, follower].concat(), false)?;
        let alike = alone.iter().zip(&followed).take_while(|(a, b)| a == b).count();
        sure = sure.min(alike);
    }
    let unsure = alone.len() - sure;
    // The first tokens of the tail may differ from those of the text; the last ones must be equal.
    let compared = alone.len().min(unsure + 1);
    match unsure == ids.len() || ids.ends_with(&alone[alone.len() - compared..]) {
        true => Ok(unsure.min(ids.len())),
        false => Err(PromptError::Unsupported(MEDIA)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_an_engine_may_take_for_a_medium_are_found() {
        for text in [
            "see <image>",
            "<|image_1|>",
            "(<image>./</image>)",
            "[IMG]",
            "<|vision_start|>",
            "<start_of_image>",
            "<ImageHere>",
            "<|reserved_special_token_0|>",
            "<im_patch>",
            "<|im_end|>",
            "<img src=\"a.png\">",
        ] {
            assert!(has_tag(text), "{text}");
        }
        for text in ["", "a < b > c", "an image", "<time>", "[1]", "<div>image</div>", "x[0]<y"] {
            assert!(!has_tag(text), "{text}");
        }
    }

    #[test]
    fn a_common_prefix_ends_between_characters() {
        for (one, other, len) in [("", "a", 0), ("aé", "aè", 1), ("aé", "aéb", 3), ("ab", "ab", 2)]
        {
            assert_eq!(common_prefix(one, other), len, "{one} {other}");
        }
    }
}
