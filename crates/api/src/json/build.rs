//! Builds an object that the router writes itself; its members need not be parsed.

use std::fmt::Write;

use serde::Serialize;
use splitrail_engine::json::{Specials, mark};

use super::{JsonObject, Text};

/// Writes an object, member after member.
#[derive(Debug)]
pub struct Builder {
    text: String,
    members: Vec<(Text, Text)>,
    marks: u64,
}

impl Builder {
    /// An empty object with room for about this many bytes.
    pub fn with_capacity(bytes: usize) -> Self {
        let mut text = String::with_capacity(bytes);
        text.push('{');
        Self { text, members: Vec::with_capacity(12), marks: 0 }
    }

    /// Adds a member with a serialisable value, such as a number or a list. Keys must be unique.
    pub fn put(&mut self, key: &str, value: impl Serialize) {
        // Serialising such values into memory does not fail.
        let json = serde_json::to_string(&value).unwrap_or_default();
        self.put_with(key, |text| text.push_str(&json));
    }

    /// Adds a member whose value is a string.
    pub fn put_text(&mut self, key: &str, value: &str) {
        self.put_with(key, |text| write_text(text, value));
    }

    /// Adds a member whose value `write` appends as JSON.
    pub fn put_with(&mut self, key: &str, write: impl FnOnce(&mut String)) {
        if self.text.len() > 1 {
            self.text.push(',');
        }
        // Fast path: most keys are the router's own and need no escapes.
        if key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            self.text.extend(["\"", key, "\""]);
        } else {
            write_text(&mut self.text, key);
        }
        self.text.push(':');
        let start = self.text.len();
        write(&mut self.text);
        self.marks |= mark(key);
        self.members.push((Text::Edited(key.into()), Text::Original(start..self.text.len())));
    }

    /// The finished object.
    pub fn build(mut self) -> JsonObject {
        self.text.push('}');
        JsonObject::new(self.text.into(), self.members, self.marks)
    }
}

/// Appends a text as a JSON string. Stretches without special characters are copied at once.
pub fn write_text(out: &mut String, text: &str) {
    out.reserve(text.len() + 2);
    out.push('"');
    let mut specials = Specials::new(text.as_bytes());
    let mut from = 0;
    while let Some(at) = specials.next(from) {
        out.push_str(&text[from..at]);
        match text.as_bytes()[at] {
            b'"' => out.push_str(r#"\""#),
            b'\\' => out.push_str(r"\\"),
            b'\x08' => out.push_str(r"\b"),
            b'\x0c' => out.push_str(r"\f"),
            b'\n' => out.push_str(r"\n"),
            b'\r' => out.push_str(r"\r"),
            b'\t' => out.push_str(r"\t"),
            control => {
                // Writing to a `String` cannot fail.
                let _infallible = write!(out, "\\u{control:04x}");
            }
        }
        from = at + 1;
    }
    out.push_str(&text[from..]);
    out.push('"');
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_text_is_written_as_json_is(text in "[a-z\"\\\\é😀\\x00-\\x1f\\x7f]{0,200}") {
            let mut written = String::new();
            write_text(&mut written, &text);
            prop_assert_eq!(written, serde_json::to_string(&text).unwrap());
        }

        #[test]
        fn a_built_object_equals_its_parsed_text(
            members in proptest::collection::btree_map(".{0,8}", ".{0,20}", 0..6),
            ids in proptest::collection::vec(0u32.., 0..5),
        ) {
            let mut builder = Builder::with_capacity(16);
            for (key, value) in &members {
                builder.put_text(key, value);
            }
            builder.put("the ids", &ids);
            let built = builder.build();
            let read = JsonObject::parse_str(&built.to_string()).unwrap();
            prop_assert_eq!(built.members().count(), members.len() + 1);
            prop_assert!(built.members().eq(read.members()));
            prop_assert_eq!(&*built.text, built.to_string());
        }
    }
}
