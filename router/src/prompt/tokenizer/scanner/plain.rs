//! Words of plain text, one after the other.
//!
//! Where most of them begin is found sixty-four bytes at a time (`starts`). What is not ASCII, a
//! word that is as long, and the end of a text are left to the library's scanner, from the word that
//! is begun up to the next place where words end whatever stands around.

use std::vec;

use super::Scanner;
use super::starts::starts;
use crate::prompt::tokenizer::pieces;

/// Where one byte is not ASCII others are near, and each call of the library costs something: it
/// is given at least so much, if there is, and so no byte is looked at again and again.
const SCANNED_MIN_BYTES: usize = 64;

/// Where the words of a text begin and end.
pub(in crate::prompt::tokenizer) struct Words<'a> {
    scanner: Scanner,
    text: &'a str,
    /// Where the next word begins, unless there are some in `scanned`.
    at: usize,
    rules: Rules,
    /// Where the words behind that begin, as far as that is known: a bit for each byte from
    /// `known_from` on.
    known: u64,
    known_from: usize,
    /// What the library's scanner has found, from that place on.
    scanned: vec::IntoIter<(u32, u32)>,
    scanned_from: u32,
}

/// What the expressions that are known here do not have in common, as far as ASCII goes:
///
/// - `cl100k`: `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|`
///   `?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`; Qwen's has single digits.
/// - DeepSeek's is three: `\p{N}{1,3}`, one for Chinese and Japanese, and of what these leave
///   ``[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|``
///   `\s*[\r\n]+|\s+(?!\S)|\s+`. So spaces before a digit are at the end of a text.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// How many digits a word may have.
    pub(super) digits_max: usize,
    /// Whether `'s` and the like are words.
    pub(super) contracts: bool,
    /// Whether digits are parted from all else before it is looked at, and what is neither
    /// letter nor sign nor space is left over.
    pub(super) parts: bool,
}

const CL100K: Rules = Rules { digits_max: 3, contracts: true, parts: false };
const QWEN: Rules = Rules { digits_max: 1, ..CL100K };
const DEEP_SEEK: Rules = Rules { digits_max: 3, contracts: false, parts: true };

impl<'a> Words<'a> {
    pub(super) fn new(scanner: Scanner, text: &'a str) -> Self {
        let (at, rules, scanned) = match scanner {
            Scanner::Cl100k => (0, CL100K, Vec::new()),
            Scanner::Qwen => (0, QWEN, Vec::new()),
            Scanner::DeepSeek => (0, DEEP_SEEK, Vec::new()),
            Scanner::O200k | Scanner::Kimi => (text.len(), CL100K, scanner.scanned(text)),
        };
        let (known, known_from, scanned_from) = (0, 0, 0);
        let scanned = scanned.into_iter();
        Self { scanner, text, at, rules, known, known_from, scanned, scanned_from }
    }

    /// The library takes over, up to where words end for sure.
    #[cold]
    #[inline(never)]
    fn scan(&mut self) -> Option<(u32, u32)> {
        let rest = &self.text[self.at..];
        let end = pieces::next_cut(rest.as_bytes(), SCANNED_MIN_BYTES).unwrap_or(rest.len());
        self.scanned = self.scanner.scanned(&rest[..end]).into_iter();
        self.scanned_from = self.at as u32;
        self.at += end;
        self.next_scanned()
    }

    /// The next word where its end has to be found first.
    #[inline(never)]
    fn next_unknown(&mut self) -> Option<(u32, u32)> {
        if let Some(word) = self.next_scanned() {
            return Some(word);
        }
        let at = self.at;
        if let Some(bytes) = self.text.as_bytes().get(at..).and_then(|rest| rest.first_chunk()) {
            // Of the first it is known already that it begins there.
            (self.known, self.known_from) = (starts(bytes, self.rules) & !1, at);
            if self.known != 0 {
                return self.next();
            }
        }
        if at < self.text.len() { self.scan() } else { None }
    }

    #[inline]
    fn next_scanned(&mut self) -> Option<(u32, u32)> {
        let (from, to) = self.scanned.next()?;
        Some((self.scanned_from + from, self.scanned_from + to))
    }
}

impl Iterator for Words<'_> {
    type Item = (u32, u32);

    #[inline]
    fn next(&mut self) -> Option<(u32, u32)> {
        if self.known == 0 {
            return self.next_unknown();
        }
        let (at, end) = (self.at, self.known_from + self.known.trailing_zeros() as usize);
        self.known &= self.known - 1;
        self.at = end;
        Some((at as u32, end as u32))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn same(text: &str) -> Result<(), TestCaseError> {
        for scanner in [Scanner::Cl100k, Scanner::Qwen, Scanner::DeepSeek] {
            let words: Vec<_> = scanner.words(text).collect();
            prop_assert_eq!(words, scanner.scanned(text), "{:?} {:?}", scanner, text);
        }
        Ok(())
    }

    #[test]
    fn each_two_bytes_make_the_words_of_the_library_wherever_they_stand() {
        for (first, second) in (0..128_u8).flat_map(|first| (0..128_u8).map(move |b| (first, b))) {
            let pair = format!("{}{}", char::from(first), char::from(second));
            for text in [pair.clone(), format!("ab{pair}"), format!(" {pair} {pair}ll x\n")] {
                assert!(same(&text).is_ok(), "{text:?}");
            }
        }
    }

    #[test]
    fn no_text_is_looked_at_again_and_again() {
        // Each of these takes minutes if a word costs the length of what follows it.
        for part in ["1", " ", "\t", "\n", "!", "'", "a", "é", "é ", "1 ", " \n", "\u{1}", "'é"]
        {
            let text = part.repeat((1 << 20) / part.len());
            for scanner in [Scanner::Cl100k, Scanner::Qwen, Scanner::DeepSeek] {
                let ends = scanner.words(&text).last().map(|(_, to)| to as usize);
                assert_eq!(ends, Some(text.len()), "{part:?}");
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
