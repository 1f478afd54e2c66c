//! Counts block ids without storing them.

use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::json::ShapeError;

/// Number of bytes of a list that are examined together.
const COUNTED: usize = u8::MAX as usize;

/// Number of ids in the JSON value of `remote_block_ids`: a list per cache group, or one list in
/// older versions.
///
/// # Errors
/// If the value is another one.
pub(super) fn count(list: &str) -> Result<usize, ShapeError> {
    quick_count(list).map_or_else(|| thorough_count(list), Ok)
}

/// The number of ids in a valid JSON list of plain ids; `None` if the list must be parsed.
fn quick_count(list: &str) -> Option<usize> {
    let bytes = list.as_bytes();
    // The loops have no early exit, so that they process many bytes per instruction.
    let is_plain = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b',' | b' ' | b'[' | b']');
    if bytes.first() != Some(&b'[') || !bytes.iter().fold(true, |all, byte| all & is_plain(byte)) {
        return None;
    }
    let mut depth = 0_u32;
    for at in memchr::memchr2_iter(b'[', b']', bytes) {
        depth = if bytes[at] == b'[' { depth + 1 } else { depth.saturating_sub(1) };
        if depth > 2 {
            return None;
        }
    }
    let begins = |(before, byte): (&u8, &u8)| !before.is_ascii_digit() & byte.is_ascii_digit();
    // In chunks so small that the counts fit into a byte.
    let pairs = bytes.chunks(COUNTED).zip(bytes[1..].chunks(COUNTED));
    let ids = pairs.map(|(before, bytes)| {
        let begins = before.iter().zip(bytes).map(|pair| u8::from(begins(pair)));
        usize::from(begins.fold(0, u8::wrapping_add))
    });
    Some(ids.sum())
}

/// The number of ids in a JSON list. What is in a group counts, whatever it is.
fn thorough_count(list: &str) -> Result<usize, ShapeError> {
    let items: Vec<&RawValue> = serde_json::from_str(list)?;
    let count = |item: &RawValue| match item.get().starts_with('[') {
        true => Ok(serde_json::from_str::<Vec<IgnoredAny>>(item.get())?.len()),
        false => serde_json::from_str::<u64>(item.get()).map(|_id| 1),
    };
    Ok(items.into_iter().map(count).sum::<Result<_, serde_json::Error>>()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn plain_ids_are_counted_as_a_thorough_reader_counts_them() {
        for (list, is_quick) in [
            ("[]", true),
            ("[[]]", true),
            ("[1]", true),
            ("[1, 22,333]", true),
            ("[[1,2],[],[ 3 ]]", true),
            ("[[1,2],3]", true),
            ("[[[1,2]],3]", false),
            ("[[-1,null],[\"a\"]]", false),
        ] {
            let thorough = thorough_count(list).unwrap();
            assert_eq!(quick_count(list), is_quick.then_some(thorough), "{list}");
            assert_eq!(count(list), Ok(thorough), "{list}");
        }
        assert!(count("7").is_err() && count("{}").is_err());
        let long: Vec<u32> = (0..1000).collect();
        let long = serde_json::to_string(&[long]).unwrap();
        assert_eq!(quick_count(&long), Some(1000));
    }
}
