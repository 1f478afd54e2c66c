//! Splits text into words, for the expressions that most models have: with the scanners of
//! `fastokens`, and for plain text and the most common expressions with this crate's own scanner
//! (`plain`), which returns each word as soon as its end is known.
//!
//! The library's public interface uses its whole tokenizer, with some 60 MB for a model of 128,000
//! tokens and 16 MB for each thread. The functions that are called here are not part of its public
//! interface, so the version is pinned in the workspace's `Cargo.toml`; loading a tokenizer checks
//! that they return the right words.

mod plain;
mod starts;

use fastokens::tiktoken;
use serde_json::Value;

pub(super) use plain::{EndBits, WordEnds};

/// The expressions for which there is a scanner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scanner {
    /// DeepSeek's three expressions, applied one after the other.
    DeepSeek,
    /// Llama 3, GLM 4 and others.
    Cl100k,
    /// Like `Cl100k`, but with single digits.
    Qwen,
    /// gpt-oss and others.
    O200k,
    Kimi,
}

impl Scanner {
    /// The scanner that does the work of a `pre_tokenizer`, except mapping bytes to characters.
    pub(super) fn of(pre_tokenizer: &Value) -> Option<Self> {
        let steps = pre_tokenizer["pretokenizers"].as_array()?;
        let (bytes, splits) = steps.split_last()?;
        let only_spells = bytes["type"] == "ByteLevel"
            && bytes["use_regex"] == false
            && bytes["add_prefix_space"] == false;
        if pre_tokenizer["type"] != "Sequence" || !only_spells {
            return None;
        }
        let pattern = |split: &Value| {
            let is_plain = split["type"] == "Split"
                && split["behavior"] == "Isolated"
                && split["invert"] == false;
            split["pattern"]["Regex"].as_str().filter(|_| is_plain).map(str::to_owned)
        };
        let patterns: Vec<String> = splits.iter().map(pattern).collect::<Option<_>>()?;
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        const DEEP_SEEK: [&str; 3] = [
            tiktoken::DEEPSEEK_SPLIT1_PATTERN,
            tiktoken::DEEPSEEK_SPLIT2_PATTERN,
            tiktoken::DEEPSEEK_SPLIT3_PATTERN,
        ];
        Some(match patterns[..] {
            [first, second, third] if [first, second, third] == DEEP_SEEK => Self::DeepSeek,
            [tiktoken::CL100K_BASE_PATTERN] => Self::Cl100k,
            [tiktoken::QWEN2_PATTERN] => Self::Qwen,
            [tiktoken::O200K_BASE_PATTERN] => Self::O200k,
            [tiktoken::KIMI_PATTERN] => Self::Kimi,
            _ => return None,
        })
    }

    /// The ends of a text's words.
    pub(super) fn words(self, text: &str) -> WordEnds<'_> {
        WordEnds::new(self, text)
    }

    /// The same by the library's scanners.
    fn scanned(self, text: &str) -> Vec<(u32, u32)> {
        let name = match self {
            Self::DeepSeek => "deepseek",
            Self::Cl100k | Self::Qwen => "cl100k",
            Self::O200k => "o200k",
            Self::Kimi => "kimi",
        };
        let words = fastokens::__bench_scan_spans(text, name);
        match self {
            Self::Qwen => apart(text, words),
            _ => words,
        }
    }
}

/// Splits words of digits into single digits. Only words of digits begin with a digit.
fn apart(text: &str, words: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    let mut all = Vec::with_capacity(words.len() + words.len() / 4);
    for (from, to) in words {
        let word = &text[from as usize..to as usize];
        if word.len() < 2 || !word.starts_with(is_digit) {
            all.push((from, to));
            continue;
        }
        let digits = word.char_indices().map(|(at, digit)| (at, at + digit.len_utf8()));
        all.extend(digits.map(|(begins, ends)| (from + begins as u32, from + ends as u32)));
    }
    all
}

/// Whether the library's scanner treats a character as a digit: it splits four of them into two
/// words.
fn is_digit(character: char) -> bool {
    let four = || character.to_string().repeat(4);
    character.is_ascii_digit()
        || (character.is_numeric() && fastokens::__bench_scan_spans(&four(), "cl100k").len() == 2)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    fn steps(mut steps: Vec<Value>) -> Value {
        steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}));
        json!({"type": "Sequence", "pretokenizers": steps})
    }

    #[test]
    fn an_expression_is_recognised_by_its_complete_text() {
        let qwen = steps(vec![split(tiktoken::QWEN2_PATTERN)]);
        assert_eq!(Scanner::of(&qwen), Some(Scanner::Qwen));
        let deep_seek = [
            split(tiktoken::DEEPSEEK_SPLIT1_PATTERN),
            split(tiktoken::DEEPSEEK_SPLIT2_PATTERN),
            split(tiktoken::DEEPSEEK_SPLIT3_PATTERN),
        ];
        assert_eq!(Scanner::of(&steps(deep_seek.to_vec())), Some(Scanner::DeepSeek));
        assert_eq!(Scanner::of(&steps(deep_seek[..2].to_vec())), None);
        assert_eq!(Scanner::of(&steps(vec![split(r"\p{L}+")])), None);
        assert_eq!(Scanner::of(&steps(vec![])), None);
        assert_eq!(Scanner::of(&Value::Null), None);
        for (field, value) in [("invert", json!(true)), ("behavior", json!("Removed"))] {
            let mut other = qwen.clone();
            other["pretokenizers"][0][field] = value;
            assert_eq!(Scanner::of(&other), None, "{field}");
        }
        for (field, value) in [("use_regex", json!(true)), ("add_prefix_space", json!(true))] {
            let mut other = qwen.clone();
            other["pretokenizers"][1][field] = value;
            assert_eq!(Scanner::of(&other), None, "{field}");
        }
    }

    #[test]
    fn words_cover_the_whole_text() {
        let text = "Don't stop 12345 times, 東京都！ x\u{301}y  \n\n ½\u{663}\u{664}4 \u{10d40}";
        for scanner in
            [Scanner::DeepSeek, Scanner::Cl100k, Scanner::Qwen, Scanner::O200k, Scanner::Kimi]
        {
            let ends: Vec<u32> = scanner.words(text).flatten().collect();
            assert!(ends.is_sorted_by(|one, next| one < next), "{scanner:?}");
            assert_eq!(ends.last(), Some(&(text.len() as u32)), "{scanner:?}");
            assert_eq!(scanner.words("").count(), 0);
        }
    }

    #[test]
    fn qwen_splits_numbers_into_single_digits() {
        let words = |text: &str| -> Vec<String> {
            let mut from = 0;
            let ends = Scanner::Qwen.words(text).flatten().map(|end| end as usize);
            ends.map(|end| text[std::mem::replace(&mut from, end)..end].to_owned()).collect()
        };
        assert_eq!(words("ab 1234x"), ["ab", " ", "1", "2", "3", "4", "x"]);
        assert_eq!(words("²½\u{663}"), ["²", "½", "\u{663}"]);
        assert_eq!(words(" ab"), [" ab"]);
    }
}
