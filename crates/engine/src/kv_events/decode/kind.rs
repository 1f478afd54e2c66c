//! The kinds of events, by their tags.

/// What an event does, as its tag says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    /// Blocks were stored.
    Stored,
    /// Blocks were removed.
    Removed,
    /// All blocks of one tier were removed.
    TierCleared,
    /// All blocks were removed.
    Cleared,
    /// Unknown, but its name says that it only adds.
    Added,
    /// Unknown, or without a tag: it may have removed blocks.
    Unknown,
}

impl EventKind {
    pub(super) fn of(tag: &str) -> Self {
        match tag {
            "BlockStored" => Self::Stored,
            "BlockRemoved" => Self::Removed,
            "TierBlocksCleared" => Self::TierCleared,
            "AllBlocksCleared" => Self::Cleared,
            unknown => {
                let tag = unknown.to_ascii_lowercase();
                let contains = |words: &[&str]| words.iter().any(|word| tag.contains(word));
                let removes = contains(&["remov", "evict", "clear", "delet", "drop", "free"]);
                match contains(&["stored", "added"]) && !removes {
                    true => Self::Added,
                    false => Self::Unknown,
                }
            }
        }
    }

    pub(super) fn is_unknown(self) -> bool {
        matches!(self, Self::Added | Self::Unknown)
    }

    /// Whether blocks may be gone after an event of this kind.
    pub(super) fn may_remove(self) -> bool {
        !matches!(self, Self::Stored | Self::Added)
    }
}
