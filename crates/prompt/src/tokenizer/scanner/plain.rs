//! Splits text into the words of a tokenizer's regular expression, with a fast path for ASCII.
//!
//! The starts of most words are found sixty-four bytes at a time (`starts`). Non-ASCII text, a word
//! of sixty-four bytes or more, and the end of a text are left to the scanner of `fastokens` ("the
//! library"), which gets the text from the current word to the next place where a word certainly
//! ends.

use std::vec;

use super::Scanner;
use super::starts::starts;
use crate::tokenizer::pieces;

/// Minimum number of bytes given to the library in one call. Bytes that are not ASCII are often
/// close together, so one longer call is cheaper than several; the minimum also keeps the total
/// time linear.
const SCANNED_MIN_BYTES: usize = 64;

/// The ends of consecutive words: if bit `i` is set, a word ends before byte `from + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndBits {
    pub(crate) from: u32,
    pub(crate) bits: u64,
}

impl Iterator for EndBits {
    type Item = u32;

    #[inline(always)]
    fn next(&mut self) -> Option<u32> {
        let end = (self.bits != 0).then(|| self.from + self.bits.trailing_zeros())?;
        self.bits &= self.bits - 1;
        Some(end)
    }
}

/// Iterates over the ends of a text's words, several at a time. If the iteration stops before the
/// end of the text, its results must not be used.
pub(crate) struct WordEnds<'a> {
    scanner: Scanner,
    text: &'a str,
    /// Start of the next word, unless `scanned` still holds words.
    at: usize,
    /// `None` if the whole text is left to the library.
    rules: Option<Rules>,
    /// Words found by the library's scanner, relative to `scanned_from`.
    scanned: vec::IntoIter<(u32, u32)>,
    scanned_from: u32,
}

/// The differences between the expressions known here, for ASCII text:
///
/// - `cl100k`: `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|`
///   `?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`; Qwen's has single digits.
/// - DeepSeek has three expressions: `\p{N}{1,3}`, one for Chinese and Japanese, and for the rest
///   ``[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|``
///   `\s*[\r\n]+|\s+(?!\S)|\s+`. So spaces before a digit count as spaces at the end of a text.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// Maximum number of digits in a word.
    pub(super) digits_max: usize,
    /// Whether contractions such as `'s` are words.
    pub(super) contracts: bool,
    /// Whether digits are split off before the other rules apply, and characters that are neither
    /// letters, signs nor white space may match no rule (DeepSeek).
    pub(super) parts: bool,
}

const CL100K: Rules = Rules { digits_max: 3, contracts: true, parts: false };
const QWEN: Rules = Rules { digits_max: 1, ..CL100K };
const DEEP_SEEK: Rules = Rules { digits_max: 3, contracts: false, parts: true };

impl<'a> WordEnds<'a> {
    pub(super) fn new(scanner: Scanner, text: &'a str) -> Self {
        let rules = match scanner {
            Scanner::Cl100k => Some(CL100K),
            Scanner::Qwen => Some(QWEN),
            Scanner::DeepSeek => Some(DEEP_SEEK),
            Scanner::O200k | Scanner::Kimi => None,
        };
        let scanned = Vec::new().into_iter();
        Self { scanner, text, at: 0, rules, scanned, scanned_from: 0 }
    }

    /// Lets the library scan up to the next place where a word certainly ends.
    #[cold]
    #[inline(never)]
    fn scan(&mut self) -> Option<EndBits> {
        let rest = &self.text[self.at..];
        let cut = self.rules.and_then(|_| pieces::next_cut(rest.as_bytes(), SCANNED_MIN_BYTES));
        let end = cut.unwrap_or(rest.len());
        let words = self.scanner.scanned(&rest[..end]);
        if !are_whole(&words, end) {
            self.at = self.text.len();
            return None;
        }
        self.scanned = words.into_iter();
        self.scanned_from = self.at as u32;
        self.at += end;
        self.next()
    }
}

/// Whether the words cover a text of this length completely and without gaps.
fn are_whole(words: &[(u32, u32)], len: usize) -> bool {
    let ended = words.iter().try_fold(0, |ended, (from, to)| (*from == ended).then_some(*to));
    ended.is_some_and(|ended| ended as usize == len)
}

impl Iterator for WordEnds<'_> {
    type Item = EndBits;

    #[inline]
    fn next(&mut self) -> Option<EndBits> {
        if let Some((_, end)) = self.scanned.next() {
            return Some(EndBits { from: self.scanned_from + end, bits: 1 });
        }
        let rest = &self.text.as_bytes()[self.at..];
        if let (Some(rules), Some(bytes)) = (self.rules, rest.first_chunk()) {
            // Bit 0 is the start of the current word; the end of the previous word has been
            // returned already.
            let bits = starts(bytes, rules) & !1;
            if let Some(last) = bits.checked_ilog2() {
                let from = self.at as u32;
                self.at += last as usize;
                return Some(EndBits { from, bits });
            }
        }
        if rest.is_empty() { None } else { self.scan() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn same(text: &str) -> Result<(), TestCaseError> {
        for scanner in [Scanner::Cl100k, Scanner::Qwen, Scanner::DeepSeek] {
            let ends: Vec<u32> = scanner.words(text).flatten().collect();
            let wanted: Vec<u32> = scanner.scanned(text).into_iter().map(|(_, to)| to).collect();
            prop_assert_eq!(ends, wanted, "{:?} {:?}", scanner, text);
        }
        Ok(())
    }

    #[test]
    fn any_two_bytes_at_any_place_are_split_as_by_the_library() {
        for (first, second) in (0..128_u8).flat_map(|first| (0..128_u8).map(move |b| (first, b))) {
            let pair = format!("{}{}", char::from(first), char::from(second));
            for text in [pair.clone(), format!("ab{pair}"), format!(" {pair} {pair}ll x\n")] {
                assert!(same(&text).is_ok(), "{text:?}");
            }
        }
    }

    #[test]
    fn words_that_do_not_cover_the_text_are_refused() {
        assert!(are_whole(&[(0, 1), (1, 3)], 3));
        assert!(are_whole(&[], 0));
        for words in [&[(0, 1), (2, 3)][..], &[(0, 2)], &[(1, 3)], &[(0, 2), (1, 3)], &[]] {
            assert!(!are_whole(words, 3), "{words:?}");
        }
    }

    #[test]
    fn splitting_takes_linear_time() {
        // Each of these would take minutes if a word cost the length of the text after it.
        for part in ["1", " ", "\t", "\n", "!", "'", "a", "é", "é ", "1 ", " \n", "\u{1}", "'é"]
        {
            let text = part.repeat((1 << 20) / part.len());
            for scanner in [Scanner::Cl100k, Scanner::Qwen, Scanner::DeepSeek] {
                let ends = scanner.words(&text).flatten().last();
                assert_eq!(ends, Some(text.len() as u32), "{part:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_library(
            parts in prop::collection::vec(
                "[a-zA-Z]{1,20}|[a-z ]{1,90}| {1,4}|[0-9]{1,9}|[\\n\\r\\t \\x0b\\x0c]{1,5}|[!-/]{1,4}|[\\x00-\\x1f]{1,3}|'(?i:s|t|re|ve|m|ll|d|l|x)|[’é東\u{301}\u{a0}²\u{663}ſ]{1,2}|[ -~]{1,30}",
                0..40,
            ),
        ) {
            same(&parts.concat())?;
        }
    }
}
