//! Counts block ids without storing them.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// Number of ids in `remote_block_ids`: a list per cache group, or one list in
/// older versions.
pub(super) struct BlockCount(pub(super) usize);

/// Number of bytes of a list that are examined together.
const COUNTED: usize = u8::MAX as usize;

impl BlockCount {
    /// The number of ids in a valid JSON list; `None` if the list must be parsed.
    pub(super) fn of_text(list: &str) -> Option<Self> {
        let bytes = list.as_bytes();
        // The loops have no early exit, so that they process many bytes per instruction.
        let is_plain =
            |byte: &u8| byte.is_ascii_digit() || matches!(byte, b',' | b' ' | b'[' | b']');
        if bytes.first() != Some(&b'[')
            || !bytes.iter().fold(true, |all, byte| all & is_plain(byte))
        {
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
        Some(Self(ids.sum()))
    }
}

/// Number of ids in one item of the list: 1 for an id, more for a group.
struct Item(usize);

impl<'de> Deserialize<'de> for BlockCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor).map(BlockCount)
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor).map(Item)
    }
}

struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of block ids, or of such lists")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<usize, A::Error> {
        let mut count = 0;
        while let Some(Item(ids)) = items.next_element()? {
            count += ids;
        }
        Ok(count)
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a block id, or a list of them")
    }

    fn visit_u64<E>(self, _id: u64) -> Result<usize, E> {
        Ok(1)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut ids: A) -> Result<usize, A::Error> {
        let mut count = 0;
        while ids.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_counted_in_text_as_serde_counts_them() {
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
            let serde: BlockCount = serde_json::from_str(list).unwrap();
            let quick = BlockCount::of_text(list).map(|count| count.0);
            assert_eq!(quick, is_quick.then_some(serde.0), "{list}");
        }
        assert!(BlockCount::of_text("null").is_none());
        let long: Vec<u32> = (0..1000).collect();
        let long = serde_json::to_string(&[long]).unwrap();
        assert_eq!(BlockCount::of_text(&long).unwrap().0, 1000);
    }
}
