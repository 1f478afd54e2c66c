//! The readers of JSON texts. Each tries the quick pass first.

use serde::Deserialize;
use serde_json::Value;

use super::error::{Fault, ShapeError};
use super::members::Members;
use super::{scan, thorough};

/// The white space of JSON.
const SPACE: [char; 4] = [' ', '\n', '\r', '\t'];

/// Reads a struct from an object; serde alone would accept an array as well.
pub(crate) fn object<'a, T: Deserialize<'a>>(raw: &'a str) -> Result<T, ShapeError> {
    if !raw.trim_start_matches(SPACE).starts_with('{') {
        return Err(ShapeError { fault: Fault::Kind, line: 1, column: 1 });
    }
    Ok(serde_json::from_str(raw)?)
}

/// The raw values of the members with these names, in the order of the names; `None` for a member
/// that is absent or `null`. Only the syntax of other members is checked.
///
/// # Errors
/// If the text is not an object, or has one of the names twice.
#[inline]
pub fn pick<'a, const COUNT: usize>(
    text: &'a str,
    names: [&str; COUNT],
) -> Result<[Option<&'a str>; COUNT], ShapeError> {
    let Some((members, _)) = scan::members(text.as_bytes()) else {
        return thorough::pick(serde_json::Deserializer::from_str(text), names);
    };
    Ok(members.pick(text, names))
}

/// Like [`pick`], for bytes. Values of other members may contain strings that are not UTF-8.
///
/// # Errors
/// See [`pick`].
#[inline]
pub fn pick_from_slice<'a, const COUNT: usize>(
    text: &'a [u8],
    names: [&str; COUNT],
) -> Result<[Option<&'a str>; COUNT], ShapeError> {
    match std::str::from_utf8(text) {
        Ok(text) => pick(text, names),
        Err(_) => thorough::pick(serde_json::Deserializer::from_slice(text), names),
    }
}

/// Parses a whole text as one value.
///
/// # Errors
/// If the text is not JSON, is nested too deeply, or has a number out of range.
pub fn value(text: &str) -> Result<Value, ShapeError> {
    scan::value(text).map_or_else(|| Ok(serde_json::from_str(text)?), Ok)
}

impl Members {
    /// Finds the members of an object that is the whole text. Values are checked for syntax only.
    ///
    /// # Errors
    /// If the text is not an object, has a key twice, or has more than 4,096 members.
    pub fn of(text: &str) -> Result<Self, ShapeError> {
        match scan::members(text.as_bytes()) {
            Some((members, _)) => Ok(members),
            None => thorough::members(text, None),
        }
    }

    /// Finds the members of an untrusted client's object, and validates it completely: it is UTF-8,
    /// no object in it has a key twice or more than `members_max` members (at least 64 are always
    /// allowed), no number is out of range, and nothing is nested more than 127 levels deep.
    /// `charge` is called with the number of members before a table of more than a few is
    /// allocated.
    ///
    /// # Errors
    /// The mistake in the text with its position, or the error of `charge`.
    pub fn of_body<E: From<ShapeError>>(
        text: &[u8],
        members_max: usize,
        charge: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let scanned = scan::members(text);
        if let Some((members, true)) = scanned {
            return Ok(members);
        }
        let text = std::str::from_utf8(text).map_err(ShapeError::from)?;
        if let Some((members, _)) = scanned {
            return Ok(members);
        }
        let count = thorough::check(text, members_max)?;
        charge(count)?;
        Ok(thorough::members(text, Some(count))?)
    }
}
