//! Tells the KV cache groups of a hybrid model apart: the spine, those that are followed beside it,
//! and those that are not.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::BitOr;

use splitrail_kv::{CacheGroup, GroupRule};

/// Maximum number of cache groups in a stream's events. Groups with a higher number are not followed.
const MAX_GROUPS: u32 = 256;

/// What the stored events of a stream have said of its cache groups. Removals give only the number
/// of a group, and the hashes of different groups are equal.
#[derive(Clone, Debug, Default)]
pub struct KnownGroups {
    groups: BTreeMap<u32, KnownGroup>,
    /// Whether blocks were stored without a group.
    is_ungrouped: bool,
    /// The groups of which an earlier batch has stored blocks, as long as the spine is not known.
    before_spine: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KnownGroup {
    usage: GroupUse,
    /// The block size of the group's whole blocks: the largest that was named.
    block_size: u32,
}

/// What is done with the events of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupUse {
    /// Its blocks are those of the index: full attention, of which there is one group or the first.
    Spine,
    /// It is followed beside the spine.
    Beside(GroupRule),
    /// It is not followed.
    Unfollowed,
}

/// A stored event, as far as it says to which group it belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct SaidOfGroup<'a> {
    pub(super) number: Option<u32>,
    pub(super) kind: Option<&'a str>,
    /// The sliding window in tokens.
    pub(super) window: Option<u32>,
    /// The chunk of chunked local attention in tokens.
    pub(super) chunk: u32,
    pub(super) block_size: u32,
}

/// What is done with a stored event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredUse {
    Spine,
    Beside(CacheGroup),
    Unfollowed,
    /// It names the beginning of a block, which no prompt of whole blocks uses.
    Part,
}

impl KnownGroups {
    /// Records a stored event's group, and returns what is done with the event.
    ///
    /// Full attention and its variants (latent attention, attention sinks) keep every token of a
    /// prompt. If no event has given the kind of a group, the first group is the spine: the engine
    /// has only one, or does not say which of them is full attention.
    pub(super) fn learn(&mut self, said: SaidOfGroup<'_>) -> StoredUse {
        let rule = said.kind.map(|kind| rule_of(kind, &said));
        let Some(number) = said.number else {
            let is_spine = matches!(rule, None | Some(Some(GroupRule::Prefix)));
            self.is_ungrouped |= is_spine;
            return if is_spine { StoredUse::Spine } else { StoredUse::Unfollowed };
        };
        if number >= MAX_GROUPS {
            return StoredUse::Unfollowed;
        }
        let known = self.groups.get(&number).copied();
        let is_spine = |known: &KnownGroup| known.usage == GroupUse::Spine;
        let usage = match (rule, known) {
            (None, Some(known)) => known.usage,
            (None, None) if number == 0 => GroupUse::Spine,
            (None | Some(None), _) => GroupUse::Unfollowed,
            (Some(Some(GroupRule::Prefix)), Some(known)) if is_spine(&known) => GroupUse::Spine,
            (Some(Some(GroupRule::Prefix)), _) if !self.groups.values().any(is_spine) => {
                GroupUse::Spine
            }
            (Some(Some(rule)), _) => GroupUse::Beside(rule),
        };
        let block_size = known.map_or(0, |known| known.block_size).max(said.block_size);
        self.groups.insert(number, KnownGroup { usage, block_size });
        match usage {
            GroupUse::Unfollowed => StoredUse::Unfollowed,
            // An event without a block size cannot be used, which its reader says.
            GroupUse::Spine if said.block_size == 0 => StoredUse::Spine,
            _ if said.block_size < block_size => StoredUse::Part,
            GroupUse::Spine => StoredUse::Spine,
            GroupUse::Beside(rule) => StoredUse::Beside(CacheGroup { number, rule, block_size }),
        }
    }

    /// What is done with what a group has removed.
    pub(super) fn removal(&self, group: Option<u32>) -> GroupUse {
        let Some(group) = group else { return GroupUse::Spine };
        let unknown = if self.is_ungrouped { GroupUse::Spine } else { GroupUse::Unfollowed };
        self.groups.get(&group).map_or(unknown, |known| known.usage)
    }

    /// Whether there is no full attention: two batches have stored blocks of one of the groups, which are
    /// those of this batch, and none has stored blocks of full attention. An engine may send the events of
    /// each group in a batch of its own.
    pub(super) fn lacks_spine(&mut self, groups: BTreeSet<u32>) -> bool {
        let is_spine = |known: &KnownGroup| known.usage == GroupUse::Spine;
        if self.is_ungrouped || self.groups.values().any(is_spine) {
            self.before_spine.clear();
            return false;
        }
        let is_again = !groups.is_disjoint(&self.before_spine);
        self.before_spine.extend(groups);
        is_again
    }

    /// Whether blocks of groups beside the spine are followed.
    pub(super) fn are_several(&self) -> bool {
        self.groups.values().any(|known| matches!(known.usage, GroupUse::Beside(_)))
    }
}

/// The rule of a kind of group; `None` if the group cannot be followed.
fn rule_of(kind: &str, said: &SaidOfGroup<'_>) -> Option<GroupRule> {
    match kind {
        "full_attention" | "mla_attention" | "sink_full_attention" => Some(GroupRule::Prefix),
        "sliding_window" | "sliding_window_mla" => {
            said.window.map(|tokens| GroupRule::Window { tokens })
        }
        "chunked_local_attention" => Some(GroupRule::Chunk { tokens: said.chunk }),
        "mamba" => Some(GroupRule::State),
        _ => None,
    }
}

/// Kinds of cache groups beside the spine. The last stands for all that are not listed.
const KINDS: [&str; 8] = [
    "full_attention",
    "sliding_window",
    "sliding_window_mla",
    "chunked_local_attention",
    "mamba",
    // States at the beginnings of blocks (`prefix_match_unit`).
    "mamba_in_parts",
    // All groups, if none of them is full attention.
    "no_full_attention",
    "other",
];

/// Cache groups of an engine beside the spine: by kind, and by number if the engine gives no kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherGroups(u64);

impl OtherGroups {
    /// The groups as one bit each, so that they can be shared by an atomic number.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The groups with these [`bits`](Self::bits).
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The group with one of the [`names`](Self::names), from another program.
    pub fn named(name: &str) -> Self {
        match name.parse() {
            Ok(group) => Self::of(Some(group), None),
            Err(_) => Self::of(None, Some(name)),
        }
    }

    /// The group of a stored event.
    pub(super) fn of(group: Option<u32>, spec_kind: Option<&str>) -> Self {
        let number = group.map(|group| KINDS.len() + group as usize).filter(|bit| *bit < 64);
        let kind = spec_kind.and_then(|kind| KINDS.iter().position(|known| *known == kind));
        let bit = if spec_kind.is_some() { kind } else { number };
        Self(1 << bit.unwrap_or(KINDS.len() - 1))
    }

    /// Whether all of `others` are among these.
    pub fn includes(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The kinds, then the numbers.
    pub fn names(self) -> impl Iterator<Item = String> {
        let bits = (0..64).filter(move |bit| self.0 >> bit & 1 == 1);
        bits.map(|bit| match KINDS.get(bit) {
            Some(kind) => (*kind).to_owned(),
            None => (bit - KINDS.len()).to_string(),
        })
    }
}

impl BitOr for OtherGroups {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for OtherGroups {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.names().collect::<Vec<_>>().join(", "))
    }
}
