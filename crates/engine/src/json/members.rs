//! The members of an object, as ranges of its text.

use std::borrow::Cow;
use std::ops::Range;

use super::thorough::Key;

/// The position of a member in the text of its object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The key: the text between its quotes, or, if it contains escapes, the whole string with its
    /// quotes.
    pub key: Range<usize>,
    /// The value.
    pub value: Range<usize>,
}

impl Member {
    /// The unescaped key, borrowed unless it contains escapes. `text` is the text of the object.
    #[inline]
    pub fn name<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let key = &text[self.key.clone()];
        match key.starts_with('"') {
            false => Cow::Borrowed(key),
            // The key was parsed before, so this cannot fail.
            true => string(key).unwrap_or_default(),
        }
    }

    /// The raw JSON of the value. `text` is the text of the object.
    #[inline]
    pub fn raw<'a>(&self, text: &'a str) -> &'a str {
        &text[self.value.clone()]
    }
}

/// Maximum number of members of an object of which a table is made and whose members were not
/// counted before: replies of engines, and objects inside bodies. A table takes some 200 bytes per
/// member.
pub(super) const TABLE_MEMBERS_MAX: usize = 4096;

/// The members of an object.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// The members in the order of the text. Names are unique.
    pub list: Vec<Member>,
    /// The [`mark`]s of all names.
    pub marks: u64,
}

impl Members {
    /// The raw values of the members with these names, in the order of the names; `None` for a member
    /// that is absent or `null`. `text` is the text of the object.
    #[inline]
    pub fn pick<'a, const COUNT: usize>(
        &self,
        text: &'a str,
        names: [&str; COUNT],
    ) -> [Option<&'a str>; COUNT] {
        let mut picked = [None; COUNT];
        for member in &self.list {
            let name = member.name(text);
            if let Some(at) = names.iter().position(|known| *known == name) {
                picked[at] = Some(member.raw(text)).filter(|raw| *raw != "null");
            }
        }
        picked
    }
}

/// Maps a name to one of 64 bits. A name whose bit is not among those of an object is known to be
/// absent without a search.
#[inline]
pub fn mark(name: impl AsRef<[u8]>) -> u64 {
    let name = name.as_ref();
    let (first, last) = (name.first(), name.last());
    let ends = first.map_or(0, |byte| byte.wrapping_mul(5)) ^ last.map_or(0, |byte| byte << 2);
    1 << (ends.wrapping_add(name.len() as u8) & 63)
}

/// The range of a part within its text; `None` if `part` does not point into `text`.
pub fn place_of(text: &str, part: &str) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    let place = start..start.checked_add(part.len())?;
    let found = text.get(place.clone())?;
    std::ptr::eq(found.as_bytes(), part.as_bytes()).then_some(place)
}

/// The content of a string that is given as raw JSON; `None` if the value is not a string.
pub fn string(raw: &str) -> Option<Cow<'_, str>> {
    let content = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match content.filter(|content| memchr::memchr2(b'\\', b'"', content.as_bytes()).is_none()) {
        Some(content) => Some(content.into()),
        None => serde_json::from_str(raw).ok().map(|Key(content)| content),
    }
}
