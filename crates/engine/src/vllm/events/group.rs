//! Selects the KV cache groups of a hybrid model that count.

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
