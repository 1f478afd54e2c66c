//! Finds places where a text can be cut so that the pieces have the same ids as the whole.
//!
//! Most models split text into words by a regular expression, from left to right, and each word is
//! encoded by itself. A place where a word always ends, whatever the surrounding text, is a place
//! where the text may be cut. For the expressions listed here, the place between an ASCII letter
//! and a space that is followed by a letter is such a place: no alternative matches a letter and
//! then a space; the next word begins with that space; and no alternative looks behind, or ahead
//! except at white space.

use serde_json::Value;
use tokenizers::AddedToken;

/// The alternatives of known expressions for which the statement above was checked.
const ALTERNATIVES: [&str; 30] = [
    // Letters, with an optional character before them.
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?\p{L}+",
    // Alternatives that do not match letters only.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?i:[sdmt]|ll|ve|re)",
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];
/// The first `OF_LETTERS` alternatives match every run of letters, each by itself; of
/// `OF_CAPITALS`, two together do.
const OF_LETTERS: usize = 4;
const OF_CAPITALS: [[usize; 2]; 2] = [[4, 5], [6, 7]];

/// Whether texts of a tokenizer may be cut at these places. `described` is its `tokenizer.json`.
pub(super) fn can_be_cut(described: &Value, added: &[AddedToken]) -> bool {
    // Added tokens that strip white space around them, or that extend over such a place.
    let crosses = |token: &AddedToken| {
        let across = |pair: &[u8]| pair[0].is_ascii_alphabetic() && pair[1] == b' ';
        token.lstrip || token.rstrip || token.content.as_bytes().windows(2).any(across)
    };
    keeps_words_apart(&described["normalizer"])
        && described["model"]["type"] == "BPE"
        && described["model"]["dropout"].is_null()
        && !added.iter().any(crosses)
        && cuts_into_words(&described["pre_tokenizer"])
}

/// Whether a normalizer leaves ASCII unchanged, and does not compose a space with the character
/// before it.
pub(super) fn keeps_words_apart(normalizer: &Value) -> bool {
    match normalizer["normalizers"].as_array() {
        Some(steps) if normalizer["type"] == "Sequence" => steps.iter().all(keeps_words_apart),
        _ => normalizer.is_null() || normalizer["type"] == "NFC",
    }
}

fn cuts_into_words(pre_tokenizer: &Value) -> bool {
    let alone = std::slice::from_ref(pre_tokenizer);
    let steps = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map_or(alone, Vec::as_slice),
        _ => alone,
    };
    let Some((bytes, splits)) = steps.split_last() else { return false };
    let mut has_letters = bytes["use_regex"] == true;
    let are_known = splits.iter().all(|split| {
        let alternatives = split["pattern"]["Regex"].as_str().and_then(known);
        has_letters |= alternatives.as_deref().is_some_and(match_letters);
        alternatives.is_some()
            && split["type"] == "Split"
            && split["behavior"] == "Isolated"
            && split["invert"] == false
    });
    are_known && has_letters && bytes["type"] == "ByteLevel" && bytes["add_prefix_space"] == false
}

fn match_letters(alternatives: &[usize]) -> bool {
    let both = |pair: &[usize; 2]| pair.iter().all(|at| alternatives.contains(at));
    alternatives.iter().any(|at| *at < OF_LETTERS) || OF_CAPITALS.iter().any(both)
}

/// The alternatives of an expression, by their positions in the list; `None` if one is not in the
/// list.
fn known(expression: &str) -> Option<Vec<usize>> {
    // Files write line ends with or without escapes.
    let expression = expression.replace('\r', "\\r").replace('\n', "\\n");
    let (mut depth, mut escaped, mut from) = (0_usize, false, 0);
    let mut found = Vec::new();
    let place = |alternative: &str| ALTERNATIVES.iter().position(|known| *known == alternative);
    for (at, byte) in expression.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            // Parentheses are balanced also inside brackets.
            b'[' | b'(' => depth += 1,
            b']' | b')' => depth = depth.checked_sub(1)?,
            b'|' if depth == 0 => {
                found.push(place(&expression[from..at])?);
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(place(&expression[from..])?);
    Some(found)
}

/// The pieces of a text, each of at least `min_bytes` except the last one.
pub(super) fn pieces(text: &str, min_bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = match next_cut(rest.as_bytes(), min_bytes) {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The first place from `from` on between a letter and a space that is followed by a letter.
pub(super) fn next_cut(text: &[u8], from: usize) -> Option<usize> {
    let from = from.max(1);
    let spaces = memchr::memchr_iter(b' ', text.get(from..)?).map(|at| from + at);
    let letter = |at: usize| text.get(at).is_some_and(u8::is_ascii_alphabetic);
    spaces.into_iter().find(|at| letter(at - 1) && letter(at + 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    const LLAMA: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn with(pattern: &str) -> Value {
        json!({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        ]}})
    }

    #[test]
    fn texts_are_cut_only_where_words_always_end() {
        let text = "One two  three.\nFour 5 six se-ven éa éb x";
        let all: Vec<&str> = pieces(text, 0).collect();
        assert_eq!(all, ["One", " two  three.\nFour 5 six", " se-ven éa éb", " x"]);
        assert_eq!(all.concat(), text);
        let few: Vec<&str> = pieces(text, 4).collect();
        assert_eq!(few, ["One two  three.\nFour 5 six", " se-ven éa éb", " x"]);
        assert_eq!(pieces("", 4).count(), 0);
    }

    #[test]
    fn only_texts_of_known_expressions_are_cut() {
        assert!(can_be_cut(&with(LLAMA), &[]));
        // Nothing that matches letters, something unknown, a word that goes across spaces.
        for pattern in [r"\p{N}{1,3}", &format!(r"{LLAMA}|\b"), r"\p{L}+ \p{L}+", ""] {
            assert!(!can_be_cut(&with(pattern), &[]), "{pattern}");
        }
        let changed = |path: &str, value: Value| {
            let mut described = with(LLAMA);
            *described.pointer_mut(path).unwrap() = value;
            can_be_cut(&described, &[])
        };
        assert!(!changed("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true)));
        assert!(!changed("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")));
        assert!(!changed("/model/type", json!("Unigram")));
        let (nfc, lower) = (json!({"type": "NFC"}), json!({"type": "Lowercase"}));
        for (normalizers, can) in [(json!([]), true), (json!([nfc]), true), (json!([lower]), false)]
        {
            let mut described = with(LLAMA);
            described["normalizer"] = json!({"type": "Sequence", "normalizers": normalizers});
            assert_eq!(can_be_cut(&described, &[]), can);
        }
        let token = |content: &str| AddedToken::from(content, true);
        for token in [token("<a b>"), token("<x>").lstrip(true), token("<x>").rstrip(true)] {
            assert!(!can_be_cut(&with(LLAMA), &[token]));
        }
        assert!(can_be_cut(&with(LLAMA), &[token("<|a|>"), token("  ")]));
    }
}
