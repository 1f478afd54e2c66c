//! Reads, with serde_json, texts that the quick pass gives up on.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::de::Read;
use serde_json::value::RawValue;

use super::error::{DUPLICATE, Fault, ShapeError, TOO_MANY};
use super::members::{Member, Members, TABLE_MEMBERS_MAX, mark, place_of};

/// The members of an object; see [`Members::of`]. `count` is their number, if it is known.
///
/// # Errors
/// As there. The number of members is not checked if it is known.
pub(super) fn members(text: &str, count: Option<usize>) -> Result<Members, ShapeError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let found = deserializer.deserialize_map(Table { text, count })?;
    deserializer.end()?;
    Ok(found)
}

/// The members with these names; see [`super::pick`].
pub(super) fn pick<'de, R: Read<'de>, const COUNT: usize>(
    mut deserializer: serde_json::Deserializer<R>,
    names: [&str; COUNT],
) -> Result<[Option<&'de str>; COUNT], ShapeError> {
    let picked = deserializer.deserialize_map(MemberPicker { names })?;
    deserializer.end()?;
    Ok(picked)
}

/// Checks a whole text as described at [`Members::of_body`]. Returns the number of members of its
/// object.
pub(super) fn check(text: &str, members_max: usize) -> Result<usize, ShapeError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let members = Check { members_max }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    members.ok_or(ShapeError { fault: Fault::Kind, line: 1, column: 1 })
}

fn too_many<E: Error>(members_max: usize) -> E {
    E::custom(format_args!("{TOO_MANY}{members_max}"))
}

/// Builds the table of an object's members.
struct Table<'a> {
    text: &'a str,
    count: Option<usize>,
}

impl<'de> Visitor<'de> for Table<'de> {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let capacity = self.count.unwrap_or_default();
        let mut members = Members { list: Vec::with_capacity(capacity), marks: 0 };
        let mut end = 0;
        while let Some(Key(name)) = map.next_key::<Key<'de>>()? {
            if self.count.is_none() && members.list.len() >= TABLE_MEMBERS_MAX {
                return Err(too_many(TABLE_MEMBERS_MAX));
            }
            members.marks |= mark(&*name);
            let raw = map.next_value::<&'de RawValue>()?.get();
            let places = place_of(self.text, raw).and_then(|value| {
                // Between two values are a comma, the key, a colon and white space.
                let gap = self.text.get(end..value.start)?;
                let (open, close) = (end + gap.find('"')?, end + gap.rfind('"')?);
                let is_escaped = matches!(name, Cow::Owned(_));
                Some((if is_escaped { open..close + 1 } else { open + 1..close }, value))
            });
            let (key, value) = places.ok_or_else(|| A::Error::custom("a member elsewhere"))?;
            end = value.end;
            members.list.push(Member { key, value });
        }
        let names = members.list.iter().map(|member| member.name(self.text));
        if names.collect::<HashSet<_>>().len() < members.list.len() {
            return Err(A::Error::custom(DUPLICATE));
        }
        Ok(members)
    }
}

/// Finds the members with given names.
struct MemberPicker<'n, const COUNT: usize> {
    names: [&'n str; COUNT],
}

impl<'de, const COUNT: usize> Visitor<'de> for MemberPicker<'_, COUNT> {
    type Value = [Option<&'de str>; COUNT];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut picked, mut seen) = ([None; COUNT], [false; COUNT]);
        while let Some(Key(key)) = map.next_key::<Key<'de>>()? {
            let Some(at) = self.names.iter().position(|name| *name == key) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            if std::mem::replace(&mut seen[at], true) {
                return Err(A::Error::custom(DUPLICATE));
            }
            picked[at] = map.next_value::<Option<&'de RawValue>>()?.map(RawValue::get);
        }
        Ok(picked)
    }
}

/// Checks a value, and returns the number of its members if it is an object.
#[derive(Clone, Copy)]
struct Check {
    members_max: usize,
}

impl<'de> DeserializeSeed<'de> for Check {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Check {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while items.next_element_seed(self)?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut seen = HashSet::new();
        while let Some(Key(key)) = members.next_key::<Key<'de>>()? {
            if seen.len() >= self.members_max {
                return Err(too_many(self.members_max));
            }
            if !seen.insert(key) {
                return Err(A::Error::custom(DUPLICATE));
            }
            members.next_value_seed(self)?;
        }
        Ok(Some(seen.len()))
    }
}

/// A key, borrowed from the text unless it contains escapes.
#[derive(PartialEq, Eq, Hash)]
pub struct Key<'a>(pub Cow<'a, str>);

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
