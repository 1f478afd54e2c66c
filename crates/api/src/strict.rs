//! One pass over a body that checks it before anything is built from it.
//!
//! Bounds the nesting depth (serde_json's limit of 128) and the members of each object, refuses duplicate keys
//! (two parsers on the way could pick different ones), numbers that do not fit,
//! and bytes that are not UTF-8.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};

use crate::error::{Error, Kind};

/// Checks a whole JSON text, of which no object may have more than `members_max` members. Gives
/// the number of members of the object that it is; 0 if it is none.
///
/// # Errors
/// A 400 with line and column, never with content.
pub fn check(text: &[u8], members_max: usize) -> Result<usize, Error> {
    let text = std::str::from_utf8(text)
        .map_err(|_| Error::new(Kind::InvalidRequest, "the body is not valid UTF-8"))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let checked = Check { members_max }.deserialize(&mut deserializer);
    let checked = checked.and_then(|members| deserializer.end().map(|()| members));
    checked.map_err(|error| locate(&error))
}

/// A parse error as a 400 that says where, without repeating what was there.
pub fn locate(error: &serde_json::Error) -> Error {
    let said = error.to_string();
    let too_many = said.strip_prefix(TOO_MANY).and_then(|rest| rest.split_whitespace().next());
    let what = if let Some(max) = too_many {
        &format!("has an object with more than {max} members (limits.object_members_max)")
    } else if said.starts_with(DUPLICATE) {
        "has a key twice in one object"
    } else if said.starts_with("recursion limit") {
        "is nested too deeply"
    } else if said.starts_with("number out of range") {
        "has a number out of range"
    } else if error.is_eof() {
        "ends too early"
    } else {
        "is not valid JSON"
    };
    Error::new(
        Kind::InvalidRequest,
        format!("the body {what} (line {}, column {})", error.line(), error.column()),
    )
    .with_code("invalid_json")
}

const DUPLICATE: &str = "duplicate key";

/// What an error begins with that says how many members an object may have.
const TOO_MANY: &str = "more members than ";

/// Reads a value, and gives the number of its members if it is an object, else 0.
#[derive(Clone, Copy)]
struct Check {
    members_max: usize,
}

impl<'de> DeserializeSeed<'de> for Check {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Check {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_i64<E>(self, _: i64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_u64<E>(self, _: u64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_f64<E>(self, _: f64) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_str<E>(self, _: &str) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_unit<E>(self) -> Result<usize, E> {
        Ok(0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<usize, A::Error> {
        while items.next_element_seed(self)?.is_some() {}
        Ok(0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<usize, A::Error> {
        let mut seen = HashSet::new();
        while let Some(Key(key)) = members.next_key::<Key<'de>>()? {
            if seen.len() >= self.members_max {
                return Err(A::Error::custom(format_args!("{TOO_MANY}{}", self.members_max)));
            }
            if !seen.insert(key) {
                return Err(A::Error::custom(DUPLICATE));
            }
            members.next_value_seed(self)?;
        }
        Ok(seen.len())
    }
}

/// A key that borrows unless it is escaped.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Key<'a>(pub(crate) Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(key)))
            }

            fn visit_str<E>(self, key: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(key.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use splitrail_engine::json::scan;

    use super::*;

    #[test]
    fn depth_duplicates_numbers_and_utf8_are_refused_with_a_place() {
        let deep = |n: usize| format!("{}1{}", "[".repeat(n), "]".repeat(n));
        assert!(check(deep(100).as_bytes(), 100).is_ok());
        for (text, part) in [
            (deep(200), "nested too deeply"),
            (deep(1_000_000), "nested too deeply"),
            ("[".repeat(1_000_000), "nested too deeply"),
            (r#"{"a":1,"b":{"c":1,"c":2}}"#.into(), "key twice"),
            ("{\"a\":1,\"\\u0061\":2}".into(), "key twice"),
            (r#"{"a":1e999}"#.into(), "number out of range"),
            (r#"{"a":"#.into(), "ends too early"),
            (r#"{"a" 1}"#.into(), "not valid JSON"),
            (r#"{"a":1} x"#.into(), "not valid JSON"),
        ] {
            let error = check(text.as_bytes(), 100).unwrap_err();
            assert_eq!(error.status(), 400);
            assert!(error.message().contains(part), "{} lacks {part}", error.message());
        }
        assert!(check(b"{\"a\":\"\xff\"}", 100).unwrap_err().message().contains("UTF-8"));
    }

    fn quick(text: &str) -> Option<Vec<(&str, &str)>> {
        let members = scan::members(text)?;
        Some(members.into_iter().map(|(key, value)| (&text[key], &text[value])).collect())
    }

    fn value() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            "-?[0-9]{1,4}(\\.[0-9]{1,25})?",
            "\"[ -~é本]{0,12}\"",
            "[ntf\"\\\\{\\[:,]{0,3}",
            Just("null".to_owned()),
            Just("\"\\u00e9\\n\"".to_owned()),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                (prop::collection::vec(inner.clone(), 0..4), ",|, | ,|,  ")
                    .prop_map(|(items, between)| format!("[{}]", items.join(&between))),
                prop::collection::vec(("[a-c]{1,2}", inner), 0..4).prop_map(|members| {
                    let members = members.iter().map(|(key, value)| format!("\"{key}\" :{value}"));
                    format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_a_quick_pass_accepts_is_accepted_with_the_same_members(
            text in value(), cut in 0usize..200, byte in proptest::option::of(any::<char>()),
        ) {
            let mut text = text;
            if let Some(byte) = byte
                && text.is_char_boundary(cut.min(text.len()))
            {
                text.insert(cut.min(text.len()), byte);
            }
            let Some(members) = quick(&text) else { return Ok(()) };
            prop_assert!(check(text.as_bytes(), 100).is_ok(), "{}", text);
            let thorough: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(members.len(), thorough.len());
            for ((key, raw), (name, value)) in members.iter().zip(&thorough) {
                prop_assert_eq!(key, &name.as_str());
                prop_assert_eq!(&serde_json::from_str::<serde_json::Value>(raw).unwrap(), value);
            }
        }
    }
}
