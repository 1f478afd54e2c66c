//! A JSON object whose members can be replaced without touching the others.
//!
//! The object keeps the client's text and the position of each member in it. An edit replaces one
//! member's value; every other value reaches the engine byte for byte, whether the router knows it
//! or not.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use serde::de::DeserializeOwned;
use splitrail_engine::json::{Fault, Member, Members, ShapeError, mark, place_of};

mod build;
mod checked;

pub use build::{Builder, write_text};

use super::parts::Parts;
use crate::error::{Error, ErrorKind};

/// Minimum length of a part of the client's text that is sent without being copied.
const APART_BYTES: usize = 4 << 10;

/// A JSON object as text, with the positions of its members. Copies share the text and the
/// positions; only their own edits take memory.
#[derive(Clone)]
pub struct JsonObject {
    text: ByteString,
    members: Arc<Vec<(Text, Text)>>,
    /// The [`mark`]s of all keys, and possibly of removed ones, to answer quickly for keys that are
    /// absent, which most are.
    marks: u64,
    /// New values of members by their position, in order; `None` for removed members. Empty while
    /// no copy shares the members, because they are then edited directly.
    changed: Vec<(usize, Option<Text>)>,
    /// Members that were added.
    added: Vec<(Text, Text)>,
    /// The bytes of all members that were set so far.
    set_bytes: usize,
}

/// Bytes that a member takes in the table of an object, including those needed to build it.
const MEMBER_BYTES: usize = 128;

/// What a member takes in the text beside its key and its value: quotes, colon and comma, and a few
/// bytes for escapes in the key.
const PUNCTUATION_BYTES: usize = 8;

/// A key, or a value as raw JSON.
#[derive(Clone, Debug)]
enum Text {
    /// A range of the client's text; for a key, the text between its quotes.
    Original(Range<usize>),
    /// Text that is not part of the client's text; for a key, its unescaped name.
    Edited(Box<str>),
}

/// A value that can be set in an object and its copies; see [`JsonObject::piece`].
#[derive(Clone, Debug)]
pub struct Piece(Text);

impl JsonObject {
    /// Parses the text of an object.
    ///
    /// # Errors
    /// A 400 if the text is not a JSON object, has a key twice, or has more than 4,096 members.
    pub fn parse(text: Bytes) -> Result<Self, Error> {
        Self::from_text(ByteString::try_from(text).map_err(ShapeError::from)?)
    }

    /// Like `parse`, for a client's body, which is validated completely; see [`Members::of_body`].
    /// `charge` is called with the size of the table of members before a table of more than a few
    /// is allocated.
    ///
    /// # Errors
    /// A 400 with the position of the mistake, or the error of `charge`.
    pub fn parse_strictly(
        text: Bytes,
        members_max: usize,
        charge: impl FnOnce(usize) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let charge = |members| charge(members * MEMBER_BYTES);
        let (text, members) = checked::members(text, members_max, charge)?;
        Ok(Self::of(text, members))
    }

    /// An object from text; see [`JsonObject::parse`].
    ///
    /// # Errors
    /// A 400 if the text is not a JSON object, has a key twice, or has more than 4,096 members.
    pub fn parse_str(text: &str) -> Result<Self, Error> {
        Self::from_text(text.into())
    }

    fn from_text(text: ByteString) -> Result<Self, Error> {
        let members = Members::of(&text)?;
        Ok(Self::of(text, members))
    }

    fn of(text: ByteString, members: Members) -> Self {
        let member = |member: Member| {
            let key = match member.name(&text) {
                Cow::Borrowed(_) => Text::Original(member.key),
                Cow::Owned(name) => Text::Edited(name.into()),
            };
            (key, Text::Original(member.value))
        };
        let list = members.list.into_iter().map(member).collect();
        Self::new(text, list, members.marks)
    }

    fn new(text: ByteString, members: Vec<(Text, Text)>, marks: u64) -> Self {
        let members = Arc::new(members);
        Self { text, members, marks, changed: Vec::new(), added: Vec::new(), set_bytes: 0 }
    }

    /// The raw JSON of a member.
    pub fn raw(&self, key: &str) -> Option<&str> {
        if self.marks & mark(key) == 0 {
            return None;
        }
        let value = match self.place(key) {
            Some(at) => self.value_at(at),
            None => self.added_place(key).map(|at| &self.added[at].1),
        };
        value.map(|value| self.text_of(value))
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

    /// Sets a member to raw JSON. A new member is added at the end.
    pub fn set(&mut self, key: &str, raw: impl Into<Box<str>>) {
        self.put(key, Text::Edited(raw.into()));
    }

    /// A value to be set later in this object or in copies of it. A part of the object's own text
    /// is referenced, not copied.
    pub fn piece(&self, raw: &str) -> Piece {
        Piece(part(&self.text, raw))
    }

    /// Sets a member to a [piece](Self::piece) of this object or of the object that it was copied
    /// from.
    pub fn set_piece(&mut self, key: &str, piece: Piece) {
        self.put(key, piece.0);
    }

    fn put(&mut self, key: &str, value: Text) {
        self.set_bytes += key.len() + self.text_of(&value).len() + PUNCTUATION_BYTES;
        let known = self.marks & mark(key) != 0;
        if let Some(at) = known.then(|| self.place(key)).flatten() {
            match self.own() {
                Some(members) => members[at].1 = value,
                None => self.change(at, Some(value)),
            }
        } else if let Some(at) = known.then(|| self.added_place(key)).flatten() {
            self.added[at].1 = value;
        } else {
            self.marks |= mark(key);
            let member = (Text::Edited(key.into()), value);
            match self.own() {
                Some(members) => members.push(member),
                None => self.added.push(member),
            }
        }
    }

    /// The members, if no copy shares them and there are no pending edits, so that they can be
    /// edited directly.
    fn own(&mut self) -> Option<&mut Vec<(Text, Text)>> {
        let is_plain = self.changed.is_empty() && self.added.is_empty();
        is_plain.then(|| Arc::get_mut(&mut self.members)).flatten()
    }

    fn change(&mut self, at: usize, value: Option<Text>) {
        match self.changed.binary_search_by_key(&at, |(place, _)| *place) {
            Ok(found) => self.changed[found].1 = value,
            Err(behind) => self.changed.insert(behind, (at, value)),
        }
    }

    /// The position of a member of the original text, even if it has been removed.
    fn place(&self, key: &str) -> Option<usize> {
        self.members.iter().position(|(name, _)| name.is(key, &self.text))
    }

    fn added_place(&self, key: &str) -> Option<usize> {
        self.added.iter().position(|(name, _)| name.is(key, &self.text))
    }

    fn value_at(&self, at: usize) -> Option<&Text> {
        match self.changed.binary_search_by_key(&at, |(place, _)| *place) {
            Ok(found) => self.changed[found].1.as_ref(),
            Err(_) => Some(&self.members[at].1),
        }
    }

    /// Removes a member. Returns whether it was present.
    pub fn remove(&mut self, key: &str) -> bool {
        if self.marks & mark(key) == 0 {
            return false;
        }
        let Some(at) = self.place(key) else {
            return self.added_place(key).map(|at| self.added.remove(at)).is_some();
        };
        let was_there = self.value_at(at).is_some();
        match self.own() {
            Some(members) => drop(members.remove(at)),
            None => self.change(at, None),
        }
        was_there
    }

    /// Removes every member whose key fails the test. Returns how many.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) -> usize {
        self.settle();
        let text = &self.text;
        let members = Arc::make_mut(&mut self.members);
        let before = members.len();
        members.retain(|(name, _)| keep(name.of(text)));
        before - members.len()
    }

    /// Applies all pending edits to the members.
    fn settle(&mut self) {
        if self.changed.is_empty() && self.added.is_empty() {
            return;
        }
        let members = Arc::make_mut(&mut self.members);
        let mut changed = std::mem::take(&mut self.changed).into_iter().peekable();
        let mut at = 0;
        members.retain_mut(|(_, value)| {
            let change = changed.next_if(|(place, _)| *place == at);
            at += 1;
            match change {
                None => true,
                Some((_, None)) => false,
                Some((_, Some(new))) => {
                    *value = new;
                    true
                }
            }
        });
        members.append(&mut self.added);
    }

    fn entries(&self) -> impl Iterator<Item = (&Text, &Text)> {
        let mut changed = self.changed.iter().peekable();
        let found = self.members.iter().enumerate().filter_map(move |(at, (key, value))| {
            match changed.next_if(|(place, _)| *place == at) {
                None => Some((key, value)),
                Some((_, new)) => new.as_ref().map(|new| (key, new)),
            }
        });
        found.chain(self.added.iter().map(|(key, value)| (key, value)))
    }

    /// The members in order, as key and raw JSON.
    pub fn members(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries().map(|(key, value)| (self.text_of(key), self.text_of(value)))
    }

    /// The length of the object's text in bytes, overestimated by members that were removed or
    /// replaced.
    pub fn bytes(&self) -> usize {
        self.text.len() + self.set_bytes
    }

    /// The object as JSON text.
    pub fn to_bytes(&self) -> Bytes {
        let mut out = String::with_capacity(self.bytes());
        self.write_to(&mut out);
        Bytes::from(out)
    }

    /// The object as JSON text in parts. Long stretches of the original text are shared rather than
    /// copied, whether they are one value or many members.
    pub fn to_parts(&self) -> Parts {
        if self.text.len() < APART_BYTES {
            return self.to_bytes().into();
        }
        let mut parts = Parts::default();
        let mut out = String::with_capacity(APART_BYTES / 4);
        out.push('{');
        let mut stretch = 0..0;
        for (i, (key, value)) in self.entries().enumerate() {
            match value {
                Text::Original(place) if self.follows(stretch.end, key, place) => {
                    stretch.end = place.end;
                    continue;
                }
                _ => {}
            }
            self.put_stretch(std::mem::take(&mut stretch), &mut out, &mut parts);
            if i > 0 {
                out.push(',');
            }
            self.write_key(key, &mut out);
            match value {
                Text::Original(place) => stretch = place.clone(),
                Text::Edited(value) => out.push_str(value),
            }
        }
        self.put_stretch(stretch, &mut out, &mut parts);
        out.push('}');
        parts.push(Bytes::from(out));
        parts
    }

    /// Writes a stretch of the original text to `out`, or adds it as a part if it is long.
    fn put_stretch(&self, stretch: Range<usize>, out: &mut String, parts: &mut Parts) {
        if stretch.len() < APART_BYTES {
            out.push_str(&self.text[stretch]);
            return;
        }
        parts.push(Bytes::from(std::mem::take(out)));
        parts.push(self.text.as_bytes().slice(stretch));
    }

    /// Whether the member with this key and value directly follows, in the original text, the value
    /// that ends at `end`.
    fn follows(&self, end: usize, key: &Text, value: &Range<usize>) -> bool {
        let Some(gap) = self.text.get(end..value.start).filter(|_| end > 0) else { return false };
        match key {
            Text::Original(key) => {
                let before = self.text.get(end..key.start.saturating_sub(1));
                let behind = self.text.get(key.end + 1..value.start);
                before.is_some_and(|gap| is_mark(gap, ','))
                    && behind.is_some_and(|gap| is_mark(gap, ':'))
            }
            Text::Edited(key) => {
                // The key was escaped in the original text, so it is parsed again.
                let (Some(from), Some(to)) = (gap.find('"'), gap.rfind('"')) else { return false };
                let said = serde_json::from_str::<String>(&gap[from..=to]);
                is_mark(&gap[..from], ',')
                    && is_mark(&gap[to + 1..], ':')
                    && said.is_ok_and(|said| *said == **key)
            }
        }
    }

    fn write_to(&self, out: &mut String) {
        out.push('{');
        for (i, (key, value)) in self.entries().enumerate() {
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
            // Keys that are kept as ranges contain no escapes.
            Text::Original(place) => {
                out.push('"');
                out.push_str(&self.text[place.clone()]);
                out.push('"');
            }
            Text::Edited(key) => write_text(out, key),
        }
        out.push(':');
    }

    fn text_of<'a>(&'a self, text: &'a Text) -> &'a str {
        text.of(&self.text)
    }
}

/// Whether a text consists of this mark and white space around it.
fn is_mark(text: &str, mark: char) -> bool {
    text.trim_matches([' ', '\n', '\r', '\t']) == mark.encode_utf8(&mut [0; 4])
}

/// A range of `text` if `raw` is part of it, otherwise a copy.
fn part(text: &str, raw: &str) -> Text {
    place_of(text, raw).map_or_else(|| Text::Edited(raw.into()), Text::Original)
}

impl Text {
    /// Whether the text equals `key`. Lengths are compared first, since most differ.
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

/// A client error: names the mistake and its position, but no content.
impl From<ShapeError> for Error {
    fn from(error: ShapeError) -> Self {
        let what = match error.fault {
            Fault::NotUtf8 => {
                return Self::new(ErrorKind::InvalidRequest, "the body is not valid UTF-8");
            }
            Fault::Kind => {
                let message = "a JSON object was expected";
                return Self::new(ErrorKind::InvalidRequest, message).with_code("invalid_json");
            }
            Fault::TooManyMembers { max } => {
                &format!("has an object with more than {max} members (limits.object_members_max)")
            }
            Fault::DuplicateKey => "has a key twice in one object",
            Fault::TooDeep => "is nested too deeply",
            Fault::NumberOutOfRange => "has a number out of range",
            Fault::EndsEarly => "ends too early",
            Fault::Syntax => "is not valid JSON",
        };
        let message = format!("the body {what} (line {}, column {})", error.line, error.column);
        Self::new(ErrorKind::InvalidRequest, message).with_code("invalid_json")
    }
}

/// Shows keys only, since values may contain a prompt.
impl fmt::Debug for JsonObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.members().map(|(key, _)| key)).finish()
    }
}

/// A string as a JSON string.
pub fn quote(text: &str) -> String {
    let mut out = String::new();
    write_text(&mut out, text);
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
