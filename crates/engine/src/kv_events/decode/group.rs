//! Selects the KV cache groups of a hybrid model that count, and names the others.

use std::fmt;
use std::ops::BitOr;

/// Maximum number of cache groups in a stream's events. Groups with a higher number never count.
const MAX_GROUPS: usize = 256;

/// What the stored events of a stream have said of its cache groups. Removals give only the number
/// of a group, and the hashes of different groups are equal, so a removal of another group must not
/// reach the index.
#[derive(Clone, Debug, Default)]
pub struct GroupFilter {
    /// Groups that count.
    counted: GroupSet,
    /// Groups that do not.
    others: GroupSet,
    /// Whether blocks were stored without a group.
    is_ungrouped: bool,
}

/// A set of numbers of groups.
#[derive(Clone, Debug, Default)]
struct GroupSet([u64; MAX_GROUPS / 64]);

impl GroupFilter {
    /// Records a stored event's group, and returns whether it counts.
    ///
    /// Full attention and its variants (latent attention, attention sinks) keep every token of a
    /// prompt. If no event has given the kind of a group, the first group counts: the engine has
    /// only one, or does not say which of them is full attention.
    pub(super) fn learn(&mut self, group: Option<u32>, spec_kind: Option<&str>) -> bool {
        let is_full = spec_kind
            .map(|kind| matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention"));
        let Some(group) = group else {
            self.is_ungrouped |= is_full != Some(false);
            return is_full != Some(false);
        };
        let is_known = self.counted.contains(group) || self.others.contains(group);
        if is_full.is_some() || !is_known {
            let counts = is_full.unwrap_or(group == 0);
            self.counted.set(group, counts);
            self.others.set(group, !counts);
        }
        self.counted.contains(group)
    }

    /// Whether what a group has removed may be in the index.
    pub(super) fn has_removed(&self, group: Option<u32>) -> bool {
        group.is_none_or(|group| {
            self.counted.contains(group) || (self.is_ungrouped && !self.others.contains(group))
        })
    }
}

impl GroupSet {
    fn contains(&self, group: u32) -> bool {
        self.0.get(group as usize / 64).is_some_and(|word| word >> (group % 64) & 1 == 1)
    }

    fn set(&mut self, group: u32, contained: bool) {
        if let Some(word) = self.0.get_mut(group as usize / 64) {
            *word = *word & !(1 << (group % 64)) | u64::from(contained) << (group % 64);
        }
    }
}

/// Kinds of cache groups that do not count. The last stands for all that are not listed.
const KINDS: [&str; 5] =
    ["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "other"];

/// The cache groups of an engine that are not followed: by kind, and by number if the engine gives no
/// kinds. An engine uses a block only if all its groups hold it, so the overlap in the index of an
/// engine with such groups is an upper bound.
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

    /// Whether all groups are followed.
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
