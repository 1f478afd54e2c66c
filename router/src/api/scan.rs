//! One quick pass over a JSON object: is it harmless, and where are its members?
//!
//! What this accepts, [`super::strict`] accepts as well, and finds the same members in; a
//! property test says so. What it does not accept may still be fine: it gives up on whatever
//! is rare (escapes in keys, numbers with exponents, many keys), and leaves the answer, and
//! the message, to the thorough pass.

mod words;

use std::ops::Range;

pub(crate) use words::Specials;

/// Where a member's key (without quotes) and its value stand.
pub(crate) type Member = (Range<usize>, Range<usize>);

/// Containers inside one another; serde_json refuses more than 127.
const DEPTH_MAX: usize = 100;
/// Keys of one object, which are compared with one another.
const KEYS_MAX: usize = 64;
/// Digits of a number that surely fits.
const DIGITS_MAX: usize = 15;

/// The members of the object that is the whole of a text; `None` if that takes a closer look.
pub(crate) fn members(text: &str) -> Option<Vec<Member>> {
    let bytes = text.as_bytes();
    let mut scan = Scan { text: bytes, at: 0, specials: Specials::new(bytes) };
    scan.space();
    let mut found = Vec::with_capacity(12);
    scan.object(0, &mut found)?;
    scan.space();
    (scan.at == text.len()).then_some(found)
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    specials: Specials<'a>,
}

impl Scan<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        let is_next = self.peek()? == byte;
        self.at += usize::from(is_next);
        is_next.then_some(())
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    /// An object, whose members go into `found`.
    fn object(&mut self, depth: usize, found: &mut Vec<Member>) -> Option<()> {
        self.take(b'{')?;
        self.space();
        if self.take(b'}').is_some() {
            return Some(());
        }
        let first = found.len();
        loop {
            let from = self.at + 1;
            let plain = self.string()?;
            let key = from..self.at - 1;
            // An escape may spell what another key says plainly.
            if !plain || found.len() - first >= KEYS_MAX {
                return None;
            }
            let name = &self.text[key.clone()];
            if found[first..].iter().any(|(other, _)| self.text[other.clone()] == *name) {
                return None;
            }
            self.space();
            self.take(b':')?;
            self.space();
            let from = self.at;
            // What is found inside is not kept.
            found.push((key, from..from));
            let kept = found.len();
            self.value(depth, found)?;
            found.truncate(kept);
            found[kept - 1].1.end = self.at;
            self.space();
            if self.take(b',').is_none() {
                return self.take(b'}');
            }
            self.space();
        }
    }

    fn value(&mut self, depth: usize, found: &mut Vec<Member>) -> Option<()> {
        if depth >= DEPTH_MAX {
            return None;
        }
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => self.object(depth + 1, found),
            b'[' => self.list(depth + 1, found),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.number(),
        }
    }

    fn list(&mut self, depth: usize, found: &mut Vec<Member>) -> Option<()> {
        self.take(b'[')?;
        self.space();
        if self.take(b']').is_some() {
            return Some(());
        }
        loop {
            self.value(depth, found)?;
            self.space();
            if self.take(b',').is_none() {
                return self.take(b']');
            }
            self.space();
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        let is_next = self.text[self.at..].starts_with(word);
        self.at += if is_next { word.len() } else { 0 };
        is_next.then_some(())
    }

    fn number(&mut self) -> Option<()> {
        let _sign = self.take(b'-');
        let whole = self.digits();
        let starts_with_zero = self.text[self.at - whole..].first() == Some(&b'0');
        if whole == 0 || whole > DIGITS_MAX || (whole > 1 && starts_with_zero) {
            return None;
        }
        if self.take(b'.').is_some() && !(1..=DIGITS_MAX).contains(&self.digits()) {
            return None;
        }
        (!matches!(self.peek(), Some(b'e' | b'E'))).then_some(())
    }

    fn digits(&mut self) -> usize {
        let from = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - from
    }

    /// A string with its quotes; whether nothing in it is escaped.
    fn string(&mut self) -> Option<bool> {
        self.take(b'"')?;
        let mut plain = true;
        loop {
            self.at = self.specials.next(self.at)?;
            match self.text[self.at] {
                b'"' => {
                    self.at += 1;
                    return Some(plain);
                }
                b'\\' => {
                    plain = false;
                    self.escape()?;
                }
                _ => return None,
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        match self.text.get(self.at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
            b'u' => {
                let digits = self.text.get(self.at + 2..self.at + 6)?;
                let values = digits.iter().map(|digit| HEX[usize::from(*digit)]);
                // What is no digit makes the whole too large.
                let code = values.fold(0, |code, value| code << 4 | value);
                // Halves of pairs.
                if code > 0xffff || (0xd800..0xe000).contains(&code) {
                    return None;
                }
                self.at += 6;
            }
            _ => return None,
        }
        Some(())
    }
}

/// What a byte is worth as a hexadecimal digit; others are worth more than four digits can be.
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
    use proptest::prelude::*;

    use super::*;
    use crate::api::strict;

    fn found(text: &str) -> Option<Vec<(&str, &str)>> {
        let members = members(text)?;
        Some(members.into_iter().map(|(key, value)| (&text[key], &text[value])).collect())
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
    fn whatever_is_wrong_or_rare_takes_a_closer_look() {
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

    fn value() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            "-?[0-9]{1,4}(\\.[0-9]{1,3})?",
            "\"[ -~é本]{0,12}\"",
            "[ntf\"\\\\{\\[:,]{0,3}",
            Just("null".to_owned()),
            Just("\"\\u00e9\\n\"".to_owned()),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4)
                    .prop_map(|items| format!("[{}]", items.join(","))),
                prop::collection::vec(("[a-c]{1,2}", inner), 0..4).prop_map(|members| {
                    let members = members.iter().map(|(key, value)| format!("\"{key}\" :{value}"));
                    format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_accepted_by_the_thorough_pass_with_the_same_members(
            text in value(), cut in 0usize..200, byte in proptest::option::of(any::<char>()),
        ) {
            let mut text = text;
            if let Some(byte) = byte
                && text.is_char_boundary(cut.min(text.len()))
            {
                text.insert(cut.min(text.len()), byte);
            }
            let Some(members) = found(&text) else { return Ok(()) };
            prop_assert!(strict::check(text.as_bytes()).is_ok(), "{}", text);
            let thorough: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(members.len(), thorough.len());
            for ((key, raw), (name, value)) in members.iter().zip(&thorough) {
                prop_assert_eq!(key, &name.as_str());
                prop_assert_eq!(&serde_json::from_str::<serde_json::Value>(raw).unwrap(), value);
            }
        }
    }
}
