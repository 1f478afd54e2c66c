//! A JSON object whose members can be replaced without touching the others.
//!
//! The object keeps the client's text and the place of each member in it. An edit
//! replaces one member's value; every other value reaches the engine byte for
//! byte, known to the router or not.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use bytestring::ByteString;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use splitrail_engine::json::scan;

mod build;
mod scanned;

pub use build::{Builder, write_text};

use super::parts::Parts;
use super::strict::{self, Key, locate};
use crate::error::{Error, Kind};

/// A client's value from this length on is not copied into what an engine is sent.
const APART_BYTES: usize = 4 << 10;

/// A JSON object as text, with its members' places.
#[derive(Clone)]
pub struct JsonObject {
    text: ByteString,
    members: Vec<(Text, Text)>,
    /// The [`mark`]s of all keys, and perhaps of some that are gone: most keys that are asked
    /// for are not there.
    marks: u64,
}

/// One of 64 marks that a key has.
fn mark(key: &str) -> u64 {
    let first = key.bytes().next().unwrap_or_default();
    1 << (first.wrapping_mul(5).wrapping_add(key.len() as u8) & 63)
}

/// A key, or a value as raw JSON.
#[derive(Clone, Debug)]
enum Text {
    /// A part of the client's text; of a key, what stands between its quotes.
    Original(Range<usize>),
    /// Something else. Of a key, what it says.
    Edited(Box<str>),
}

impl JsonObject {
    /// Finds the members of an object.
    ///
    /// # Errors
    /// A 400 if the text is no JSON object, or has a key twice.
    pub fn parse(text: Bytes) -> Result<Self, Error> {
        Self::from_text(utf8(text)?)
    }

    /// The same of a client's body, which is proved harmless through and through; see
    /// [`strict::check`].
    ///
    /// # Errors
    /// A 400 with the place of what is wrong.
    pub fn parse_strictly(text: Bytes) -> Result<Self, Error> {
        match scanned::members(text) {
            Ok((text, members)) => Ok(Self::scanned(text, members)),
            Err(text) => {
                let text = utf8(text)?;
                strict::check(text.as_bytes())?;
                Self::from_text(text)
            }
        }
    }

    fn scanned(text: ByteString, members: Vec<scan::Member>) -> Self {
        let marks = members.iter().fold(0, |marks, (key, _)| marks | mark(&text[key.clone()]));
        let place = |(key, value)| (Text::Original(key), Text::Original(value));
        Self { text, members: members.into_iter().map(place).collect(), marks }
    }

    /// An object from text; see [`JsonObject::parse`].
    ///
    /// # Errors
    /// A 400 if the text is no JSON object, or has a key twice.
    pub fn parse_str(text: &str) -> Result<Self, Error> {
        Self::from_text(text.into())
    }

    fn from_text(text: ByteString) -> Result<Self, Error> {
        if let Some(members) = scan::members(&text) {
            return Ok(Self::scanned(text, members));
        }
        let source: &str = &text;
        let base = source.as_ptr() as usize;
        let mut deserializer = serde_json::Deserializer::from_str(source);
        let found = (&mut deserializer).deserialize_map(Members).map_err(|error| match error {
            error if error.is_data() => {
                Error::new(Kind::InvalidRequest, "a JSON object was expected")
                    .with_code("invalid_json")
            }
            error => locate(&error),
        })?;
        deserializer.end().map_err(|error| locate(&error))?;
        // Two parsers on the way could pick different ones of two equal keys.
        let distinct: HashSet<&str> = found.iter().map(|(key, _)| key.as_ref()).collect();
        if distinct.len() != found.len() {
            let message = "the body has a key twice in one object";
            return Err(Error::new(Kind::InvalidRequest, message).with_code("invalid_json"));
        }
        let place = |raw: &RawValue| {
            let start = raw.get().as_ptr() as usize - base;
            Text::Original(start..start + raw.get().len())
        };
        let marks = found.iter().fold(0, |marks, (key, _)| marks | mark(key));
        let key = |key: Cow<'_, str>| Text::Edited(key.into());
        let members = found.into_iter().map(|(name, raw)| (key(name), place(raw))).collect();
        Ok(Self { text, members, marks })
    }

    /// The raw JSON of a member.
    pub fn raw(&self, key: &str) -> Option<&str> {
        self.place(key).map(|at| self.text_of(&self.members[at].1))
    }

    /// A member as a value; `None` if absent or `null`.
    ///
    /// # Errors
    /// A 400 that names the member and what was expected.
    pub fn get<T: DeserializeOwned>(
        &self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, Error> {
        match self.raw(key) {
            None => Ok(None),
            Some(raw) => serde_json::from_str::<Option<T>>(raw)
                .map_err(|_| Error::invalid(key, format!("`{key}` must be {expected}"))),
        }
    }

    /// Sets a member to a raw JSON value, in its place or at the end.
    pub fn set(&mut self, key: &str, raw: impl Into<Box<str>>) {
        let value = Text::Edited(raw.into());
        match self.place(key) {
            Some(at) => self.members[at].1 = value,
            None => {
                self.marks |= mark(key);
                self.members.push((Text::Edited(key.into()), value));
            }
        }
    }

    fn place(&self, key: &str) -> Option<usize> {
        if self.marks & mark(key) == 0 {
            return None;
        }
        self.members.iter().position(|(name, _)| name.is(key, &self.text))
    }

    /// Removes a member; says whether it was there.
    pub fn remove(&mut self, key: &str) -> bool {
        self.place(key).map(|at| self.members.remove(at)).is_some()
    }

    /// Removes every member whose key fails the test; says how many.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) -> usize {
        let before = self.members.len();
        let text = &self.text;
        self.members.retain(|(name, _)| keep(name.of(text)));
        before - self.members.len()
    }

    /// Members in order: key and raw JSON.
    pub fn members(&self) -> impl Iterator<Item = (&str, &str)> {
        self.members.iter().map(|(key, value)| (self.text_of(key), self.text_of(value)))
    }

    /// The object as JSON text.
    pub fn to_bytes(&self) -> Bytes {
        let bytes: usize = self.members().map(|(key, value)| key.len() + value.len() + 8).sum();
        let mut out = String::with_capacity(bytes + 2);
        self.write_to(&mut out);
        Bytes::from(out)
    }

    /// The same in parts; long values of the original text are parts of it.
    pub fn to_parts(&self) -> Parts {
        let is_apart =
            |value: &Text| matches!(value, Text::Original(place) if place.len() >= APART_BYTES);
        if !self.members.iter().any(|(_, value)| is_apart(value)) {
            return self.to_bytes().into();
        }
        let original = self.text.as_bytes();
        let mut parts = Parts::default();
        let mut out = String::with_capacity(APART_BYTES / 4);
        for (i, (key, value)) in self.members.iter().enumerate() {
            out.push(if i == 0 { '{' } else { ',' });
            self.write_key(key, &mut out);
            match value {
                Text::Original(place) if is_apart(value) => {
                    parts.push(Bytes::from(std::mem::take(&mut out)));
                    parts.push(original.slice(place.clone()));
                }
                value => out.push_str(self.text_of(value)),
            }
        }
        out.push('}');
        parts.push(Bytes::from(out));
        parts
    }

    fn write_to(&self, out: &mut String) {
        out.push('{');
        for (i, (key, value)) in self.members.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            self.write_key(key, out);
            out.push_str(self.text_of(value));
        }
        out.push('}');
    }

    fn write_key(&self, key: &Text, out: &mut String) {
        match key {
            // Nothing in it is escaped.
            Text::Original(place) => {
                out.push('"');
                out.push_str(&self.text[place.clone()]);
                out.push('"');
            }
            Text::Edited(key) => out.push_str(&quote(key)),
        }
        out.push(':');
    }

    fn text_of<'a>(&'a self, text: &'a Text) -> &'a str {
        text.of(&self.text)
    }
}

impl Text {
    /// Whether it says this. Most lengths differ.
    fn is(&self, key: &str, original: &str) -> bool {
        match self {
            Self::Edited(text) => **text == *key,
            Self::Original(place) => {
                place.len() == key.len() && original.as_bytes()[place.clone()] == *key.as_bytes()
            }
        }
    }

    fn of<'a>(&'a self, original: &'a str) -> &'a str {
        match self {
            Self::Edited(text) => text,
            Self::Original(place) => &original[place.clone()],
        }
    }
}

impl fmt::Display for JsonObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.write_to(&mut out);
        f.write_str(&out)
    }
}

/// The text that bytes are.
fn utf8(bytes: Bytes) -> Result<ByteString, Error> {
    ByteString::try_from(bytes)
        .map_err(|_| Error::new(Kind::InvalidRequest, "the body is not valid UTF-8"))
}

/// Keys only: values may be a prompt.
impl fmt::Debug for JsonObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.members().map(|(key, _)| key)).finish()
    }
}

/// A string as JSON.
pub fn quote(text: &str) -> String {
    if text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') {
        return ["\"", text, "\""].concat();
    }
    serde_json::Value::from(text).to_string()
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            members.push((key, map.next_value::<&'de RawValue>()?));
        }
        Ok(members)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edits_leave_other_values_byte_for_byte() {
        let text = r#"{ "a" : 1.50e+3, "pro\u006dpt": "x\u00e9\/", "z": [ 1 , {"k":  null} ] }"#;
        let mut object = JsonObject::parse_str(text).unwrap();
        assert_eq!(object.raw("prompt"), Some(r#""x\u00e9\/""#));
        object.set("stream", "true");
        object.set("a", "2");
        assert_eq!(
            object.to_string(),
            r#"{"a":2,"prompt":"x\u00e9\/","z":[ 1 , {"k":  null} ],"stream":true}"#
        );
        assert!(object.remove("z"));
        assert!(!object.remove("z"));
        assert_eq!(object.raw("z"), None);
    }

    #[test]
    fn what_is_no_object_is_a_400() {
        for text in ["[]", "1", "\"x\"", "null", "{\"a\":1,\"a\":2}", "{} {}", ""] {
            assert_eq!(JsonObject::parse_str(text).unwrap_err().status(), 400, "{text}");
        }
    }

    #[test]
    fn a_body_that_is_not_utf8_is_told_so_wherever_that_is() {
        for text in
            [&b"{\"a\":\"\xff\"}"[..], b"{\"\xc3\":1}", b"{\"a\":1}\x80", b"\xff", b"{\"a\":\xe9}"]
        {
            let error = JsonObject::parse_strictly(Bytes::from_static(text)).unwrap_err();
            assert_eq!(error.status(), 400);
            assert_eq!(error.message(), "the body is not valid UTF-8");
        }
    }

    #[test]
    fn a_long_value_is_sent_from_where_it_came_in() {
        let long = format!("[\"{}\"]", "x".repeat(APART_BYTES));
        let text = format!(r#"{{"a":1,"messages":{long} , "b" : 2,"more":{long}}}"#);
        let mut object = JsonObject::parse(text.into()).unwrap();
        object.set("a", "3");
        object.set("c", "4");
        let mut parts = object.to_parts();
        assert_eq!(parts.clone().into_bytes(), object.to_bytes());
        bytes::Buf::advance(&mut parts, r#"{"a":3,"messages":"#.len());
        let original = object.raw("messages").unwrap();
        assert_eq!(bytes::Buf::chunk(&parts), original.as_bytes());
        assert_eq!(bytes::Buf::chunk(&parts).as_ptr(), original.as_ptr(), "not a copy");
    }

    proptest! {
        #[test]
        fn members_survive_a_round_trip(
            keys in proptest::collection::btree_set(".{0,8}", 0..8), value in ".{0,20}"
        ) {
            let mut object = JsonObject::parse_str("{}").unwrap();
            for key in &keys {
                object.set(key, quote(&value));
            }
            let again = JsonObject::parse(object.to_bytes()).unwrap();
            prop_assert_eq!(again.members().count(), keys.len());
            let quoted = quote(&value);
            for key in &keys {
                prop_assert_eq!(again.raw(key), Some(quoted.as_str()));
            }
        }
    }
}
