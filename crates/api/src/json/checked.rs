//! Validates a client's body as JSON and UTF-8 in one pass.
//!
//! The only file of this crate with `unsafe`: the validation of the body shows that the bytes are
//! UTF-8, and the standard library would read all of them once more to check this.

#![allow(unsafe_code)]

use bytes::Bytes;
use bytestring::ByteString;
use splitrail_engine::json::Members;

use crate::error::Error;

/// The body as text, with the members of its object; see [`Members::of_body`].
pub(super) fn members(
    bytes: Bytes,
    members_max: usize,
    charge: impl FnOnce(usize) -> Result<(), Error>,
) -> Result<(ByteString, Members), Error> {
    let members = Members::of_body(&bytes, members_max, charge)?;
    debug_assert!(std::str::from_utf8(&bytes).is_ok(), "bytes were passed over");
    // SAFETY: `of_body` accepts only valid UTF-8.
    Ok((unsafe { ByteString::from_bytes_unchecked(bytes) }, members))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_utf8_becomes_text() {
        for text in [r#"{"a":"plain"}"#, r#"{"a":"é本😀"}"#, r#"{"\u0061":1e5}"#, r#"{"é":1e5}"#]
        {
            let (found, members) = members_of(text.into()).unwrap();
            assert_eq!((&*found, members.list.len()), (text, 1));
            for at in 0..text.len() {
                let mut bytes = text.as_bytes().to_vec();
                bytes[at] = 0xff;
                assert!(members_of(bytes).is_err(), "{text} at {at}");
            }
        }
    }

    fn members_of(bytes: Vec<u8>) -> Result<(ByteString, Members), Error> {
        members(bytes.into(), 64, |_| Ok(()))
    }
}
