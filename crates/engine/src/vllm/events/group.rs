//! Selects the KV cache groups of a hybrid model that count.

/// Maximum number of cache groups in a stream's events.
const MAX_GROUPS: usize = 256;

/// The cache groups that are known not to be full attention. Stored events say what a group is;
/// removals give only its number, and the hashes of different groups are equal, so a removal of
/// another group must not reach the index.
#[derive(Clone, Debug, Default)]
pub struct GroupFilter {
    others: [u64; MAX_GROUPS / 64],
}

impl GroupFilter {
    /// Records a stored event's group, and returns whether it counts.
    ///
    /// Full attention and its variants (latent attention, attention sinks) keep every token of a
    /// prompt. If the event gives no kind, the engine has only one group.
    pub(super) fn learn(&mut self, group: Option<u8>, spec_kind: Option<&str>) -> bool {
        let Some(spec_kind) = spec_kind else {
            return self.counts(group);
        };
        let counts =
            matches!(spec_kind, "full_attention" | "mla_attention" | "sink_full_attention");
        if let Some(group) = group {
            let (word, bit) = Self::place(group);
            if counts {
                self.others[word] &= !bit;
            } else {
                self.others[word] |= bit;
            }
        }
        counts
    }

    /// Whether events of the group count. An unknown group counts: its removals then name hashes
    /// that the index does not hold.
    pub(super) fn counts(&self, group: Option<u8>) -> bool {
        group.is_none_or(|group| {
            let (word, bit) = Self::place(group);
            self.others[word] & bit == 0
        })
    }

    fn place(group: u8) -> (usize, u64) {
        (usize::from(group) / 64, 1 << (group % 64))
    }
}
