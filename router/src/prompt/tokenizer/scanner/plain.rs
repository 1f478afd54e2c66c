//! Words of plain text, one after the other.
//!
//! Letters are found sixty-four bytes at a time; most words are a space and letters, and take a
//! shift and a count of zeros. What is not ASCII is left to the library's scanner, from the word
//! that it begins in up to the next place where words end whatever stands around.

use std::vec;

use wide::u8x16;

use super::Scanner;
use crate::prompt::tokenizer::pieces;

/// Bytes of a block: a bit each.
const BLOCK: usize = 64;

/// Where the words of a text begin and end.
pub(in crate::prompt::tokenizer) struct Words<'a> {
    scanner: Scanner,
    text: &'a str,
    /// Where the next word begins, unless there are some in `scanned`.
    at: usize,
    rules: Rules,
    letters: Letters<'a>,
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
struct Rules {
    /// How many digits a word may have.
    digits_max: usize,
    /// Whether `'s` and the like are words.
    contracts: bool,
    /// Whether digits are parted from all else before it is looked at, and what is neither
    /// letter nor sign nor space is left over.
    parts: bool,
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
        let (scanned, letters) = (scanned.into_iter(), Letters::new(text.as_bytes()));
        Self { scanner, text, at, rules, letters, scanned, scanned_from: 0 }
    }

    #[inline]
    fn byte(&self, at: usize) -> u8 {
        // Behind the end there is none that a word could go on with.
        self.text.as_bytes().get(at).copied().unwrap_or(b'\0')
    }

    /// The end of the word that begins at `at`, as far as that is known without the library: else
    /// the place of a byte that is not ASCII, or `at`.
    #[inline]
    fn end(&mut self) -> usize {
        let (at, first) = (self.at, self.byte(self.at));
        let next = self.byte(at + 1);
        let begins = match first {
            b'\'' if self.rules.contracts && next.is_ascii_alphabetic() => {
                if let Some(end) = self.contraction() {
                    return end;
                }
                true
            }
            _ if first.is_ascii_alphabetic() => true,
            b'\r' | b'\n' | b'0'..=b'9' | 0x80.. => false,
            _ => next.is_ascii_alphabetic(),
        };
        match begins {
            true => self.letters.end(at + 1),
            false => self.end_of_others(first),
        }
    }

    /// That of `'s` and the like.
    #[inline(never)]
    fn contraction(&self) -> Option<usize> {
        let letters = [self.byte(self.at + 1), self.byte(self.at + 2)];
        match letters.map(|letter| letter.to_ascii_lowercase()) {
            [b's' | b't' | b'm' | b'd', _] => Some(self.at + 2),
            [b'r' | b'v', b'e'] | [b'l', b'l'] => Some(self.at + 3),
            _ => None,
        }
    }

    /// That of digits, of signs and of spaces.
    #[inline(never)]
    fn end_of_others(&self, first: u8) -> usize {
        let at = self.at;
        let signs = at + usize::from(first == b' ');
        if first.is_ascii_digit() {
            let digits = self.run(at, |byte| byte.is_ascii_digit());
            return digits.min(at + self.rules.digits_max);
        }
        if self.rules.parts && first.is_ascii_control() && !is_space(first) {
            return at;
        }
        let is_sign = |byte: u8| is_sign(byte) && !(self.rules.parts && byte.is_ascii_control());
        if is_sign(self.byte(signs)) && signs < self.text.len() {
            let end = self.run(signs, is_sign);
            return self.run(end, |byte| matches!(byte, b'\r' | b'\n'));
        }
        let end = self.run(at, is_space);
        if !self.byte(end).is_ascii() {
            return end;
        }
        let spaces = &self.text.as_bytes()[at..end];
        match spaces.iter().rposition(|byte| matches!(byte, b'\r' | b'\n')) {
            Some(last) => at + last + 1,
            None if end == self.text.len() => end,
            None if self.rules.parts && self.byte(end).is_ascii_digit() => end,
            // The last one may be part of what comes then.
            None => (end - 1).max(at + 1),
        }
    }

    /// Where bytes of a kind end that begin there.
    #[inline]
    fn run(&self, at: usize, is: impl Fn(u8) -> bool) -> usize {
        let rest = self.text.as_bytes().get(at..).unwrap_or_default();
        at + rest.iter().take_while(|byte| is(**byte)).count()
    }

    /// The library takes over, up to where words end for sure behind that place.
    #[cold]
    #[inline(never)]
    fn scan(&mut self, behind: usize) -> Option<(u32, u32)> {
        let rest = &self.text[self.at..];
        let end = pieces::next_cut(rest.as_bytes(), behind - self.at).unwrap_or(rest.len());
        self.scanned = self.scanner.scanned(&rest[..end]).into_iter();
        self.scanned_from = self.at as u32;
        self.at += end;
        self.next_scanned()
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
        if let Some(word) = self.next_scanned() {
            return Some(word);
        }
        let at = self.at;
        if at >= self.text.len() {
            return None;
        }
        let end = self.end();
        // How the word goes on there is not known here.
        if end == at || !self.byte(end).is_ascii() {
            return self.scan(end);
        }
        self.at = end;
        Some((at as u32, end as u32))
    }
}

/// Neither space nor letter nor digit, and ASCII.
fn is_sign(byte: u8) -> bool {
    byte.is_ascii() && !byte.is_ascii_alphanumeric() && !is_space(byte)
}

/// As Unicode has it.
fn is_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | b' ')
}

/// Where letters stand.
struct Letters<'a> {
    text: &'a [u8],
    /// Where the block of `others` begins.
    block: usize,
    /// A bit for each byte that is no letter.
    others: u64,
}

impl<'a> Letters<'a> {
    fn new(text: &'a [u8]) -> Self {
        // No block begins there.
        Self { text, block: usize::MAX, others: 0 }
    }

    /// The first place from there on without a letter.
    #[inline]
    fn end(&mut self, at: usize) -> usize {
        let mut at = at;
        loop {
            if at & !(BLOCK - 1) != self.block {
                self.turn_to(at & !(BLOCK - 1));
            }
            let others = self.others >> (at % BLOCK);
            if others != 0 {
                return at + others.trailing_zeros() as usize;
            }
            at = self.block + BLOCK;
        }
    }

    #[inline]
    fn turn_to(&mut self, block: usize) {
        let rest = self.text.get(block..).unwrap_or_default();
        self.others = match rest.first_chunk() {
            Some(whole) => others(whole),
            None => others_of_last(rest),
        };
        self.block = block;
    }
}

#[cold]
#[inline(never)]
fn others_of_last(rest: &[u8]) -> u64 {
    let mut padded = [b' '; BLOCK];
    padded[..rest.len()].copy_from_slice(rest);
    others(&padded)
}

#[inline]
fn others(block: &[u8; BLOCK]) -> u64 {
    let (parts, _) = block.as_chunks();
    let letters = parts.iter().rev().fold(0, |mask, part| mask << 16 | u64::from(letters(*part)));
    !letters
}

#[inline]
fn letters(part: [u8; 16]) -> u32 {
    let place = (u8x16::new(part) | u8x16::splat(0x20)) - u8x16::splat(b'a');
    place.min(u8x16::splat(25)).simd_eq(place).to_bitmask()
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
            for text in [format!("{pair}"), format!("ab{pair}"), format!(" {pair} {pair}ll x\n")] {
                assert!(same(&text).is_ok(), "{text:?}");
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
