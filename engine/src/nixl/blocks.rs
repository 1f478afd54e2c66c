//! Counting block ids without keeping them.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// Number of ids in `remote_block_ids`: a list per cache group, or one list in
/// older versions.
pub(super) struct BlockCount(pub(super) usize);

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
