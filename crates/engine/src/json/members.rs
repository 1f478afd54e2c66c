//! The members of an object, by their places in its text.

use std::borrow::Cow;
use std::ops::Range;

use super::thorough::Key;

/// Where a member stands in the text of its object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The key: what stands between its quotes, or, if anything in it is escaped, all of it with
    /// its quotes.
    pub key: Range<usize>,
    /// The value.
    pub value: Range<usize>,
}

impl Member {
    /// What the key says; borrowed unless anything in it is escaped. `text` is that of the object.
    #[inline]
    pub fn name<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let key = &text[self.key.clone()];
        match key.starts_with('"') {
            false => Cow::Borrowed(key),
            // It was read before, with success.
            true => string(key).unwrap_or_default(),
        }
    }

    /// The raw JSON of the value. `text` is that of the object.
    #[inline]
    pub fn raw<'a>(&self, text: &'a str) -> &'a str {
        &text[self.value.clone()]
    }
}

/// The members of an object.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// The members in the order of the text. No name is there twice.
    pub list: Vec<Member>,
    /// The [`mark`]s of all names.
    pub marks: u64,
}

/// One of 64 marks that a name has: most names that an object does not have are known to be absent
/// without a search.
#[inline]
pub fn mark(name: impl AsRef<[u8]>) -> u64 {
    let name = name.as_ref();
    let (first, last) = (name.first(), name.last());
    let ends = first.map_or(0, |byte| byte.wrapping_mul(5)) ^ last.map_or(0, |byte| byte << 2);
    1 << (ends.wrapping_add(name.len() as u8) & 63)
}

/// The place of a part of a text in the text; `None` for what is elsewhere in memory.
pub fn place_of(text: &str, part: &str) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    let place = start..start.checked_add(part.len())?;
    let found = text.get(place.clone())?;
    std::ptr::eq(found.as_bytes(), part.as_bytes()).then_some(place)
}

/// The content of a string, given as a JSON value; `None` if the value is another one.
pub fn string(raw: &str) -> Option<Cow<'_, str>> {
    let content = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match content.filter(|content| memchr::memchr2(b'\\', b'"', content.as_bytes()).is_none()) {
        Some(content) => Some(content.into()),
        None => serde_json::from_str(raw).ok().map(|Key(content)| content),
    }
}
