//! The simulated model's tokenizer: bytes, three special tokens, one chat template.
//!
//! The same rules are shipped as Hugging Face files ([`TOKENIZER_JSON`],
//! [`TOKENIZER_CONFIG_JSON`]), so a router that tokenises by itself must get the ids that this
//! engine uses.

use std::io;
use std::path::Path;

use serde_json::Value;

/// The tokenizer as a Hugging Face `tokenizer.json`.
pub const TOKENIZER_JSON: &str = include_str!("../model/tokenizer.json");
/// The tokenizer's `tokenizer_config.json`, with the chat template.
pub const TOKENIZER_CONFIG_JSON: &str = include_str!("../model/tokenizer_config.json");

/// Special tokens; a token's id is its index in this list.
pub const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// Ends a reply unless `ignore_eos` is set.
pub const EOS_TOKEN: u32 = 2;
/// Id of byte 0; byte `b` has id `FIRST_BYTE_TOKEN + b`.
pub const FIRST_BYTE_TOKEN: u32 = 3;

/// The text that the chat template prints for an image; the engine replaces it by the image's
/// tokens.
pub const IMAGE: &str = "<|image|>";
/// The token for each part of an image.
pub const IMAGE_TOKEN: u32 = 0;

/// Writes the simulated model's tokenizer as Hugging Face files into an existing folder.
///
/// # Errors
/// A file cannot be written.
pub fn write_tokenizer(folder: &Path) -> io::Result<()> {
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER_JSON)?;
    std::fs::write(folder.join("config.json"), r#"{"model_type": "splitrail-sim"}"#)?;
    std::fs::write(folder.join("tokenizer_config.json"), TOKENIZER_CONFIG_JSON)
}

/// The tokens of a text. Special tokens that are written out in the text become single tokens, like
/// Hugging Face's added tokens.
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let next = SPECIAL_TOKENS
            .iter()
            .zip(0u32..)
            .filter_map(|(token, id)| rest.find(token).map(|at| (at, id, token.len())))
            .min();
        let (plain_len, special) = match next {
            Some((at, id, len)) => (at, Some((id, len))),
            None => (rest.len(), None),
        };
        ids.extend(rest.as_bytes()[..plain_len].iter().map(|b| byte_token(*b)));
        rest = &rest[plain_len..];
        if let Some((id, len)) = special {
            ids.push(id);
            rest = &rest[len..];
        }
    }
    ids
}

/// The token of one byte.
#[must_use]
pub fn byte_token(byte: u8) -> u32 {
    FIRST_BYTE_TOKEN + u32::from(byte)
}

/// The text of a token for display, as in `/tokenize`.
#[must_use]
pub fn token_text(id: u32) -> String {
    decode(&[id], false)
}

/// The text of tokens. Ids outside the vocabulary and bytes that are not UTF-8 become U+FFFD.
#[must_use]
pub fn decode(ids: &[u32], skip_special: bool) -> String {
    let mut bytes = Vec::with_capacity(ids.len());
    for id in ids {
        match SPECIAL_TOKENS.get(*id as usize) {
            Some(_) if skip_special => {}
            Some(token) => bytes.extend_from_slice(token.as_bytes()),
            None => match u8::try_from(id - FIRST_BYTE_TOKEN) {
                Ok(byte) => bytes.push(byte),
                Err(_) => bytes.extend_from_slice("\u{fffd}".as_bytes()),
            },
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The prompt of a chat: one block per message, then the beginning of the reply.
///
/// # Errors
/// What is wrong, if `messages` is not a list of messages with a role and content that is a string,
/// null or a list of text and image parts.
pub fn render_chat(messages: &Value) -> Result<String, String> {
    let messages = messages.as_array().ok_or("messages must be a list")?;
    let mut text = String::new();
    for message in messages {
        let role = message["role"].as_str().ok_or("every message needs a role")?;
        text.push_str(SPECIAL_TOKENS[1]);
        text.push_str(role);
        text.push('\n');
        push_content(&mut text, &message["content"])?;
        text.push_str(SPECIAL_TOKENS[2]);
        text.push('\n');
    }
    text.push_str(SPECIAL_TOKENS[1]);
    text.push_str("assistant\n");
    Ok(text)
}

/// The addresses of a chat's images, in the order in which the template prints them.
#[must_use]
pub fn images(messages: &Value) -> Vec<&str> {
    let messages = messages.as_array().into_iter().flatten();
    let parts = messages.filter_map(|message| message["content"].as_array()).flatten();
    parts.filter_map(|part| part["image_url"]["url"].as_str()).collect()
}

fn push_content(text: &mut String, content: &Value) -> Result<(), String> {
    match content {
        Value::Null => Ok(()),
        Value::String(content) => {
            text.push_str(content);
            Ok(())
        }
        Value::Array(parts) => {
            for (index, part) in parts.iter().enumerate() {
                if index > 0 {
                    text.push('\n');
                }
                text.push_str(match part.get("image_url") {
                    Some(_) => IMAGE,
                    None => part["text"].as_str().ok_or("only text and images are supported")?,
                });
            }
            Ok(())
        }
        _ => Err("content must be a string or a list of parts".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn special_tokens_in_text_are_cut_out() {
        assert_eq!(encode("a<|im_end|>b"), [3 + 97, 2, 3 + 98]);
        assert_eq!(encode("<|im_start"), "<|im_start".bytes().map(byte_token).collect::<Vec<_>>());
    }

    #[test]
    fn chat_joins_text_parts_with_newlines() {
        let prompt = render_chat(&json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null},
        ]));
        assert_eq!(
            prompt.unwrap(),
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn shipped_vocabulary_has_the_same_ids() {
        let file: Value = serde_json::from_str(TOKENIZER_JSON).unwrap();
        let vocabulary = file["model"]["vocab"].as_object().unwrap();
        assert_eq!(vocabulary.len(), 3 + 256);
        for ascii in b'!'..=b'~' {
            let symbol = char::from(ascii).to_string();
            assert_eq!(vocabulary[&symbol], byte_token(ascii));
        }
        for (id, token) in SPECIAL_TOKENS.iter().enumerate() {
            assert_eq!(file["added_tokens"][id]["content"], *token);
            assert_eq!(file["added_tokens"][id]["id"], id);
        }
        assert!(file["model"]["merges"].as_array().unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn encoded_text_decodes_to_the_same_text(text in "(?s).{0,60}|(<\\|im_end\\|>|a|é){0,9}") {
            prop_assert_eq!(decode(&encode(&text), false), text);
        }
    }
}
