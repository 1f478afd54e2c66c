//! A quick pass over a JSON object, which validates it and finds its members.
//!
//! Any text that this pass accepts is also accepted by the thorough reader, with the same members.
//! A text that it does not accept may still be valid: it gives up on rare constructs (escapes in
//! keys, numbers with exponents, many keys) and leaves the result, or the error, to the thorough
//! reader.

mod build;
mod ids;
mod weigh;
mod words;

use std::ops::Range;

pub(super) use build::value;
pub use weigh::{Weight, weigh};
pub use words::Specials;

use super::members::{Member, Members, mark};

/// Maximum depth of nested objects and lists; serde_json refuses more than 127.
const DEPTH_MAX: usize = 100;
/// Maximum number of keys of one object, which are compared with each other. No configured limit on
/// members is lower.
const KEYS_MAX: usize = 64;
/// Maximum number of digits before the decimal point, so that a number certainly fits into a float.
const DIGITS_MAX: usize = 15;

/// The members of the object that is the whole text, and whether the text is all ASCII; `None` if
/// the thorough reader is needed. The bytes need not be UTF-8.
pub(super) fn members(text: &[u8]) -> Option<(Members, bool)> {
    let mut scan = Scan::new(text);
    let at = scan.space(0);
    let mut found = Vec::with_capacity(12);
    if scan.byte(at) != b'{' {
        return None;
    }
    let end = scan.object(at, 0, &mut found)?;
    // Outside strings, this pass accepts only ASCII bytes.
    let is_ascii = scan.specials.saw_ascii();
    let members = Members { list: found, marks: scan.marks };
    (scan.space(end) == text.len()).then_some((members, is_ascii))
}

/// The string of a JSON text that contains the position `at`, without its quotes; `None` if there
/// is none, or the text is not JSON.
#[must_use]
pub fn string_around(text: &[u8], at: usize) -> Option<Range<usize>> {
    let mut scan = Scan::new(text);
    let mut from = 0;
    loop {
        let quote = scan.specials.next(from).filter(|quote| *quote < at)?;
        // Line ends between strings are special bytes as well.
        if scan.byte(quote) != b'"' {
            from = quote + 1;
            continue;
        }
        let end = scan.string(quote)?;
        if at < end {
            return Some(quote + 1..end - 1);
        }
        from = end;
    }
}

/// The state of the pass. Its functions take the start of a part of the text and return its end.
struct Scan<'a> {
    text: &'a [u8],
    specials: Specials<'a>,
    /// The marks of the keys of the object that ended last.
    marks: u64,
}

impl<'a> Scan<'a> {
    fn new(text: &'a [u8]) -> Self {
        Self { text, specials: Specials::new(text), marks: 0 }
    }

    /// The byte at a position; 0 beyond the end, which no part of a text begins with.
    #[inline]
    fn byte(&self, at: usize) -> u8 {
        self.text.get(at).copied().unwrap_or(0)
    }

    /// Skips white space. Fast path: most texts have none between their parts.
    #[inline]
    fn space(&self, at: usize) -> usize {
        if self.byte(at) > b' ' { at } else { self.some_space(at) }
    }

    #[inline(never)]
    fn some_space(&self, mut at: usize) -> usize {
        while matches!(self.byte(at), b' ' | b'\n' | b'\r' | b'\t') {
            at += 1;
        }
        at
    }

    /// Reads an object from its opening brace, and adds its members to `found`.
    fn object(&mut self, at: usize, depth: usize, found: &mut Vec<Member>) -> Option<usize> {
        let mut at = self.space(at + 1);
        let first = found.len();
        let mut marks = 0;
        if self.byte(at) == b'}' {
            self.marks = marks;
            return Some(at + 1);
        }
        loop {
            if self.byte(at) != b'"' {
                return None;
            }
            let end = self.specials.next(at + 1)?;
            let key = at + 1..end;
            // A key with escapes may be equal to one without.
            if self.byte(end) != b'"' || found.len() - first >= KEYS_MAX {
                return None;
            }
            let name = self.text.get(key.clone())?;
            let mark = mark(name);
            // Keys with different marks differ.
            if marks & mark != 0 && self.is_among(name, &found[first..]) {
                return None;
            }
            marks |= mark;
            at = self.space(end + 1);
            if self.byte(at) != b':' {
                return None;
            }
            at = self.space(at + 1);
            let kept = found.len();
            found.push(Member { key, value: at..at });
            let end = self.value(at, depth, found)?;
            // Members of nested objects are not kept.
            found.truncate(kept + 1);
            found[kept].value.end = end;
            at = self.space(end);
            match self.byte(at) {
                b',' => at = self.space(at + 1),
                b'}' => {
                    self.marks = marks;
                    return Some(at + 1);
                }
                _ => return None,
            }
        }
    }

    #[cold]
    fn is_among(&self, name: &[u8], found: &[Member]) -> bool {
        found.iter().any(|other| self.text[other.key.clone()] == *name)
    }

    fn value(&mut self, at: usize, depth: usize, found: &mut Vec<Member>) -> Option<usize> {
        match self.byte(at) {
            b'"' => self.string(at),
            b't' => self.word(at, b"true"),
            b'f' => self.word(at, b"false"),
            b'n' => self.word(at, b"null"),
            b'{' if depth < DEPTH_MAX => self.object(at, depth + 1, found),
            b'[' if depth < DEPTH_MAX => self.list(at, depth + 1, found),
            _ => self.number(at),
        }
    }

    /// Reads a list from its opening bracket.
    fn list(&mut self, at: usize, depth: usize, found: &mut Vec<Member>) -> Option<usize> {
        let mut at = self.space(at + 1);
        if self.byte(at) == b']' {
            return Some(at + 1);
        }
        loop {
            at = self.space(ids::end(self.text, at));
            at = self.value(at, depth, found)?;
            at = self.space(at);
            match self.byte(at) {
                b',' => at = self.space(at + 1),
                b']' => return Some(at + 1),
                _ => return None,
            }
        }
    }

    #[inline]
    fn word(&self, at: usize, word: &[u8]) -> Option<usize> {
        let end = at + word.len();
        (self.text.get(at..end)? == word).then_some(end)
    }

    fn number(&self, at: usize) -> Option<usize> {
        let from = at + usize::from(self.byte(at) == b'-');
        let mut end = self.digits(from);
        let whole = end - from;
        if whole == 0 || whole > DIGITS_MAX || (whole > 1 && self.byte(from) == b'0') {
            return None;
        }
        if self.byte(end) == b'.' {
            let point = end;
            end = self.digits(point + 1);
            if end == point + 1 {
                return None;
            }
        }
        (!matches!(self.byte(end), b'e' | b'E')).then_some(end)
    }

    fn digits(&self, from: usize) -> usize {
        let rest = self.text.get(from..).unwrap_or_default();
        from + rest.iter().take_while(|byte| byte.is_ascii_digit()).count()
    }

    /// Reads a string from its opening quote. Returns the position after its closing quote.
    #[inline]
    fn string(&mut self, at: usize) -> Option<usize> {
        let end = self.specials.next(at + 1)?;
        match self.byte(end) {
            b'"' => Some(end + 1),
            _ => self.escaped_string(end),
        }
    }

    /// Reads the rest of a string, from its first special byte.
    #[inline(never)]
    fn escaped_string(&mut self, mut at: usize) -> Option<usize> {
        loop {
            match self.byte(at) {
                b'"' => return Some(at + 1),
                b'\\' => at = self.escape(at)?,
                _ => return None,
            }
            at = self.specials.next(at)?;
        }
    }

    #[inline]
    fn escape(&self, at: usize) -> Option<usize> {
        match self.byte(at + 1) {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(at + 2),
            b'u' => {
                let digits = self.text.get(at + 2..at + 6)?;
                let values = digits.iter().map(|digit| HEX[usize::from(*digit)]);
                // A byte that is not a digit makes the value too large.
                let code = values.fold(0, |code, value| code << 4 | value);
                // Surrogates are left to the thorough reader.
                (code <= 0xffff && !(0xd800..0xe000).contains(&code)).then_some(at + 6)
            }
            _ => None,
        }
    }
}

/// The value of each byte as a hexadecimal digit; larger than any four digits for other bytes.
const HEX: [u32; 256] = {
    let mut values = [0x1_0000; 256];
    let mut value = 0;
    while value < 16 {
        values[b"0123456789abcdef"[value] as usize] = value as u32;
        values[b"0123456789ABCDEF"[value] as usize] = value as u32;
        value += 1;
    }
    values
};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<Vec<(&str, &str)>> {
        let (members, _) = members(text.as_bytes())?;
        Some(
            members
                .list
                .iter()
                .map(|member| (&text[member.key.clone()], member.raw(text)))
                .collect(),
        )
    }

    #[test]
    fn members_are_found_with_their_bytes() {
        let long = "x".repeat(100) + "\\n" + &"é".repeat(40);
        let text = format!(
            r#" {{"a" : -1.50 ,"messages":[{{"content":"{long}"}}, {{}}],"t":true, "z":null}} "#
        );
        let messages = format!(r#"[{{"content":"{long}"}}, {{}}]"#);
        let wanted =
            [("a", "-1.50"), ("messages", messages.as_str()), ("t", "true"), ("z", "null")];
        assert_eq!(found(&text).unwrap(), wanted);
        assert_eq!(found("{}").unwrap(), []);
    }

    #[test]
    fn lists_of_numbers_are_passed_over_however_they_are_spaced() {
        for list in ["[]", "[1]", "[1,22, 333,  4 , 5]", "[[1,2],[ 3 ,4 ]]", "[0,1.5,-2,{},7]"] {
            let text = format!(r#"{{"ids":{list},"z":1}}"#);
            assert_eq!(found(&text).unwrap(), [("ids", list), ("z", "1")]);
        }
    }

    #[test]
    fn a_place_is_in_the_string_that_is_around_it() {
        let text = r#"{"a" : "b\"c", "d":[ "" ,1]}"#.replace(" :", "\n:");
        let around = |at| string_around(text.as_bytes(), at).map(|range| &text[range]);
        let expected = |at: usize| match at {
            2..=3 => Some("a"),
            8..=12 => Some("b\\\"c"),
            16..=17 => Some("d"),
            22 => Some(""),
            _ => None,
        };
        for at in 0..text.len() + 2 {
            assert_eq!(around(at), expected(at), "{at}");
        }
        assert_eq!(string_around(b"\"a", 1), None);
    }

    #[test]
    fn wrong_or_rare_json_goes_to_the_slow_reader() {
        for text in [
            "",
            "{",
            "[]",
            "1",
            "{}x",
            "{,}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":1,}"#,
            r#"{"a":[1,]}"#,
            r#"{"a":[1, ]}"#,
            r#"{"a":[1,,2]}"#,
            r#"{"a":[01,2]}"#,
            r#"{"a":[1,2"#,
            r#"{"a":[1234567890123456,2]}"#,
            r#"{"a":01}"#,
            r#"{"a":-}"#,
            r#"{"a":1.}"#,
            r#"{"a":1e5}"#,
            r#"{"a":tru}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"x":{"a":1,"a":2}}"#,
            r#"{"\u0061":1}"#,
            r#"{"a":"\ud800"}"#,
            r#"{"a":"\x"}"#,
            r#"{"a":"\u00g0"}"#,
            "{\"a\":\"\n\"}",
            r#"{"a":"x}"#,
            r#"{"a":12345678901234567890}"#,
        ] {
            assert_eq!(found(text), None, "{text}");
        }
        let deep = |n: usize| format!("{{\"a\":{}1{}}}", "[".repeat(n), "]".repeat(n));
        assert!(found(&deep(90)).is_some());
        assert_eq!(found(&deep(200)), None);
        assert_eq!(found(&"[".repeat(1_000_000)), None);
    }
}
