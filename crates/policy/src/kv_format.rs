//! How an engine stores KV, as far as the engine reports it, and its transfer group, as far as an
//! operator says it. KV can move only between engines of one group that store it alike.

/// The data type and the layout of an engine's KV, each as a tag of its name, and its block size in
/// tokens; 0 if it is not known. Two names with one tag (of 2^32) count as equal: engines compare the
/// names themselves as well. They do not compare transfer groups, whose tags are of 2^64; engines
/// without one are a group of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvFormat {
    dtype: u32,
    layout: u32,
    block_size: u32,
    group: u64,
}

impl KvFormat {
    /// The format with these names, of an unknown block size, without a transfer group.
    pub fn of(dtype: Option<&str>, layout: Option<&str>) -> Self {
        Self { dtype: dtype.map_or(0, tag), layout: layout.map_or(0, tag), ..Self::default() }
    }

    /// The same format in the transfer group of this [tag](group_tag).
    pub fn in_group(self, group: u64) -> Self {
        Self { group, ..self }
    }

    /// Whether KV may move between engines of both by their transfer groups.
    pub fn is_of_group_of(self, other: Self) -> bool {
        self.group == other.group
    }

    /// The same format with this block size in tokens; `None` if it is not known.
    pub fn with_block_size(self, block_size: Option<u32>) -> Self {
        Self { block_size: block_size.unwrap_or(0), ..self }
    }

    /// Whether KV can move between engines of both formats: they are of one transfer group and do not
    /// differ in what is known of both.
    pub fn fits(self, other: Self) -> bool {
        self.fits_but_for_blocks(other) && fit(self.block_size, other.block_size)
    }

    /// The same, whatever their block sizes.
    pub fn fits_but_for_blocks(self, other: Self) -> bool {
        self.is_of_group_of(other) && fit(self.dtype, other.dtype) && fit(self.layout, other.layout)
    }

    /// Whether the block size is a whole multiple of the other's, as far as both are known.
    pub fn has_multiple_of_blocks_of(self, other: Self) -> bool {
        let (own, others) = (self.block_size, other.block_size);
        own == 0 || others == 0 || own.is_multiple_of(others)
    }

    /// The tags of both names in one number, without the block size and the group.
    pub fn to_bits(self) -> u64 {
        u64::from(self.dtype) << 32 | u64::from(self.layout)
    }

    /// The format of [`to_bits`](Self::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        Self { dtype: (bits >> 32) as u32, layout: bits as u32, ..Self::default() }
    }
}

/// Whether two tags or sizes do not differ, as far as both are known.
fn fit(one: u32, other: u32) -> bool {
    one == other || one == 0 || other == 0
}

/// The tag of a transfer group: FNV-1a with 64 bits, never 0.
pub fn group_tag(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

/// FNV-1a with 32 bits, never 0.
fn tag(name: &str) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, step).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_known_difference_keeps_kv_from_moving() {
        let of = KvFormat::of;
        let auto = of(Some("auto"), None);
        assert!(auto.fits(of(None, None)) && auto.fits(of(Some("auto"), Some("HND"))));
        assert!(!auto.fits(of(Some("fp8"), None)) && !of(Some("fp8"), None).fits(auto));
        assert!(!of(None, Some("HND")).fits(of(Some("auto"), Some("NHD"))));
        let both = of(Some("fp8"), Some("NHD"));
        assert_eq!(KvFormat::from_bits(both.to_bits()), both);
        let blocks = |tokens| auto.with_block_size(Some(tokens));
        assert!(blocks(16).fits(blocks(16)) && blocks(16).fits(auto) && auto.fits(blocks(16)));
        assert!(!blocks(16).fits(blocks(32)) && !blocks(32).fits(blocks(16)));
        assert!(blocks(16).fits_but_for_blocks(blocks(32)));
        assert!(blocks(32).has_multiple_of_blocks_of(blocks(16)));
        assert!(!blocks(16).has_multiple_of_blocks_of(blocks(32)));
    }
}
