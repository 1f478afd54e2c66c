//! Recognises texts without added tokens.
//!
//! The library copies a text and searches it for up to a thousand added tokens. The tokens that an
//! ASCII text may contain mostly begin alike, with a bracket and a bar, and few texts contain these
//! characters.

use serde_json::Value;

use super::pieces;

/// Maximum number of distinct first bytes. The text is searched once for each; with more, the
/// library is as fast.
const FIRST_BYTES: usize = 3;

/// The first two bytes of all added tokens that an ASCII text may contain.
pub(super) struct Openings {
    /// The distinct first bytes.
    first: Vec<u8>,
    /// The distinct first two bytes.
    pairs: Vec<[u8; 2]>,
}

impl Openings {
    /// The openings of a tokenizer; `described` is its `tokenizer.json` with its added tokens.
    /// `None` if a text needs other work as well, or there are too many distinct first bytes.
    pub(super) fn of(described: &Value) -> Option<Self> {
        let normalizer = &described["normalizer"];
        // These normalizers do not change ASCII.
        if !pieces::keeps_words_apart(normalizer) {
            return None;
        }
        let (mut first, mut pairs) = (Vec::new(), Vec::new());
        for token in described["added_tokens"].as_array()? {
            let content = token["content"].as_str()?;
            match *content.as_bytes() {
                [one, other, ..] if content.is_ascii() => {
                    first.push(one);
                    pairs.push([one, other]);
                }
                // After composition some characters are ASCII: the kelvin sign becomes `K`.
                _ if content.is_ascii()
                    || (token["normalized"] != false && composes(normalizer)) =>
                {
                    return None;
                }
                _ => {}
            }
        }
        first.sort_unstable();
        first.dedup();
        pairs.sort_unstable();
        pairs.dedup();
        (first.len() <= FIRST_BYTES).then_some(Self { first, pairs })
    }

    /// Whether a text contains no added token and is not changed by the normalizer.
    pub(super) fn lacks_added_tokens(&self, text: &str) -> bool {
        let text = text.as_bytes();
        let opens = |at: usize| self.pairs.iter().any(|pair| text[at..].starts_with(pair));
        let lacks = |byte: &u8| !memchr::memchr_iter(*byte, text).any(opens);
        text.is_ascii() && self.first.iter().all(lacks)
    }
}

/// Whether a normalizer composes characters (NFC).
fn composes(normalizer: &Value) -> bool {
    let mut steps = normalizer["normalizers"].as_array().into_iter().flatten();
    normalizer["type"] == "NFC" || steps.any(composes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(normalizer: &Value, tokens: &[(&str, bool)]) -> Option<Openings> {
        let token = |(content, normalized): &(&str, bool)| json!({"content": content, "normalized": normalized});
        let tokens: Vec<Value> = tokens.iter().map(token).collect();
        Openings::of(&json!({"normalizer": normalizer, "added_tokens": tokens}))
    }

    #[test]
    fn texts_without_an_opening_have_no_added_tokens() {
        let tokens =
            [("<|end|>", true), ("<think>", false), ("[INST]", false), ("<｜end｜>", true)];
        let openings = of(&Value::Null, &tokens).unwrap();
        for text in ["", "a < b <= c, x[0] | |> <", "<", "[", "tI<"] {
            assert!(openings.lacks_added_tokens(text), "{text}");
        }
        for text in ["a<|end|>", "<t", "x[I", "é", "<｜", "a < b <|"] {
            assert!(!openings.lacks_added_tokens(text), "{text}");
        }
    }

    #[test]
    fn openings_that_any_text_may_contain_are_left_to_the_library() {
        let nfc = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]});
        let none = json!({"type": "Sequence", "normalizers": []});
        assert!(of(&none, &[("<\u{212a}>", true)]).is_some());
        assert!(of(&nfc, &[("<a>", true), ("<｜a｜>", false)]).is_some());
        assert!(of(&nfc, &[("<\u{212a}>", true)]).is_none(), "composed, it is ASCII");
        assert!(of(&Value::Null, &[("\n", false)]).is_none(), "of one byte");
        assert!(of(&Value::Null, &[("", false)]).is_none());
        assert!(of(&json!({"type": "Lowercase"}), &[]).is_none());
        let many = [("<a", false), ("[a", false), ("(a", false), ("{a", false)];
        assert!(of(&Value::Null, &many).is_none());
        assert!(of(&Value::Null, &many[..3]).is_some());
    }
}
