//! A client's body as text, from one pass over its bytes.
//!
//! One of three files of this crate with `unsafe`: the pass that finds an object's members also shows that the bytes
//! are ASCII, and the standard library would read all of them once more.

#![allow(unsafe_code)]

use bytes::Bytes;
use bytestring::ByteString;
use splitrail_engine::json::scan::{self, Member};

/// The text with the members of the object that it is; the bytes again if they take a closer look.
pub(super) fn members(bytes: Bytes) -> Result<(ByteString, Vec<Member>), Bytes> {
    match scan::members_of_bytes(&bytes) {
        Some((members, true)) => {
            debug_assert!(bytes.is_ascii(), "bytes were passed over");
            // SAFETY: the scan saw each byte of an object that it accepts, and that it is ASCII:
            // those of strings as they were searched for the strings' ends, all others as one of
            // the few that stand between. ASCII is UTF-8.
            Ok((unsafe { ByteString::from_bytes_unchecked(bytes) }, members))
        }
        Some((members, false)) => match ByteString::try_from(bytes.clone()) {
            Ok(text) => Ok((text, members)),
            Err(_) => Err(bytes),
        },
        None => Err(bytes),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// With every kind of byte that an object may have, inside of strings and outside.
    fn text(prompt: &str) -> String {
        format!(
            r#" {{"a":[1,22, 333, 4 ,5,-1.5,true,null], "b" :"{prompt}\u00e9\n \"x\\", "z":{{"":[]}} }} "#
        )
    }

    #[test]
    fn what_is_not_utf8_is_no_text_wherever_it_stands() {
        for len in [0, 50, 200] {
            let text = text(&"x".repeat(len));
            let (found, _) = members(text.clone().into()).unwrap();
            assert_eq!(*found, *text);
            for at in 0..text.len() {
                for wrong in [0x80, 0xc3, 0xff] {
                    let mut bytes = text.clone().into_bytes();
                    bytes[at] = wrong;
                    assert!(members(bytes.into()).is_err(), "{wrong:#x} at {at}");
                }
            }
        }
    }

    #[test]
    fn what_is_utf8_is_text_wherever_it_stands() {
        for (before, after) in (0..130).map(|before| (before, 130 - before)) {
            let text = text(&["x".repeat(before), "é本😀".into(), "x".repeat(after)].concat());
            let (found, members) = members(text.clone().into()).unwrap();
            assert_eq!((&*found, members.len()), (&*text, 3));
        }
    }
}
