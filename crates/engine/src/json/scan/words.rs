//! Finds the bytes of JSON strings that need attention, 64 bytes at a time.
//!
//! For each block of the text, one mask is made with a bit for every quote, backslash and control
//! byte. Finding the next of them is then a matter of counting zeros, however close together they
//! are. Prompts contain line ends, so this happens thousands of times in a body.

use wide::u8x16;

/// Number of bytes per block: one for each bit of the mask.
pub(super) const BLOCK: usize = 64;

/// Finds the special bytes of a text, from front to back.
pub struct Specials<'a> {
    text: &'a [u8],
    /// The position at which the block of `mask` begins.
    block: usize,
    mask: u64,
    /// All bytes of the blocks that were read, combined by OR.
    bits: u8x16,
}

impl<'a> Specials<'a> {
    /// Starts with a whole text.
    #[must_use]
    pub fn new(text: &'a [u8]) -> Self {
        // No block begins at `usize::MAX`.
        Self { text, block: usize::MAX, mask: 0, bits: u8x16::splat(0) }
    }

    /// Whether all blocks that were read are ASCII. These include all bytes from each position that
    /// was asked for to the one that was found.
    pub(super) fn saw_ascii(&self) -> bool {
        self.bits.to_bitmask() == 0
    }

    /// The first position from `at` on with a quote, backslash or control byte.
    #[inline]
    pub fn next(&mut self, at: usize) -> Option<usize> {
        if at & !(BLOCK - 1) == self.block {
            let left = self.mask >> (at % BLOCK);
            if left != 0 {
                return Some(at + left.trailing_zeros() as usize);
            }
            return self.next_block(self.block + BLOCK, 0);
        }
        self.next_block(at & !(BLOCK - 1), at % BLOCK)
    }

    /// Like `next`, from a position within a block.
    fn next_block(&mut self, mut block: usize, mut place: usize) -> Option<usize> {
        loop {
            let mask = self.mask_at(block)?;
            let left = mask >> place;
            if left != 0 {
                (self.block, self.mask) = (block, mask);
                return Some(block + place + left.trailing_zeros() as usize);
            }
            (block, place) = (block + BLOCK, 0);
        }
    }

    /// The mask of the block that begins at `block`; `None` beyond the end of the text.
    #[inline]
    fn mask_at(&mut self, block: usize) -> Option<u64> {
        let rest = self.text.get(block..)?;
        match rest.first_chunk() {
            Some(whole) => Some(mask(whole, &mut self.bits)),
            None => mask_of_last(rest, &mut self.bits),
        }
    }
}

/// The mask of the rest of a text, which is shorter than a block.
#[cold]
#[inline(never)]
fn mask_of_last(rest: &[u8], seen: &mut u8x16) -> Option<u64> {
    let mut padded = [b' '; BLOCK];
    padded[..rest.len()].copy_from_slice(rest);
    (!rest.is_empty()).then(|| mask(&padded, seen))
}

/// A mask with a bit for each special byte; the first byte has the lowest bit. Most blocks of a
/// prompt have none.
#[inline]
fn mask(block: &[u8; BLOCK], seen: &mut u8x16) -> u64 {
    let (parts, _) = block.as_chunks();
    let parts = [0, 1, 2, 3].map(|at| u8x16::new(parts[at]));
    let [a, b, c, d] = parts;
    *seen |= (a | b) | (c | d);
    if special(parts).to_bitmask() == 0 {
        return 0;
    }
    let bits = |part: &u8x16| u64::from(special([*part]).to_bitmask());
    parts.iter().rev().fold(0, |mask, part| mask << 16 | bits(part))
}

/// Sets all bits of each byte position at which any part has a special byte.
#[inline]
fn special<const COUNT: usize>(parts: [u8x16; COUNT]) -> u8x16 {
    // The minimum over the parts tells whether any of them has a special byte.
    let least = |parts: [u8x16; COUNT]| parts.into_iter().fold(u8x16::splat(0xff), u8x16::min);
    // The first XOR moves quotes next to the control bytes, to 0x20; the second makes backslashes
    // 0.
    let turned = least(parts.map(|part| part ^ u8x16::splat(b'"' ^ b' ')));
    let slashed = least(parts.map(|part| part ^ u8x16::splat(b'\\')));
    turned.saturating_sub(u8x16::splat(b' ')).min(slashed).simd_eq(u8x16::splat(0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(text: &[u8], from: usize) -> Option<usize> {
        let special = |byte: &u8| *byte == b'"' || *byte == b'\\' || *byte < b' ';
        text.get(from..)?.iter().position(special).map(|found| from + found)
    }

    #[test]
    fn each_byte_is_found_at_each_place_of_a_block() {
        for byte in 0..=u8::MAX {
            for place in 0..BLOCK {
                for others in [b' ', 0x7f, 0x80, 0xff, b'!', b'#', b'[', b']'] {
                    let mut block = [others; BLOCK];
                    block[place] = byte;
                    let wanted = u64::from(naive(&[byte], 0).is_some()) << place;
                    let mut seen = u8x16::splat(0);
                    let found = mask(&block, &mut seen);
                    assert_eq!(found, wanted, "{byte:#x} at {place} among {others:#x}");
                    assert_eq!(seen.to_bitmask() == 0, block.is_ascii());
                }
            }
        }
    }

    proptest! {
        #[test]
        fn specials_are_where_a_look_at_each_byte_finds_them(
            mut text in prop::collection::vec(any::<u8>(), 0..400),
            dense in 0usize..40,
            (begin, steps) in (0usize..70, prop::collection::vec(0usize..90, 1..40)),
        ) {
            // From no special bytes to only special bytes, at regular distances.
            for (at, byte) in text.iter_mut().enumerate() {
                if dense == 0 || at % dense != 0 {
                    *byte = (*byte).clamp(b'#', b'[');
                }
            }
            let text = text.get(begin.min(text.len())..).unwrap();
            let mut specials = Specials::new(text);
            let mut at = 0;
            for step in steps {
                let found = specials.next(at);
                prop_assert_eq!(found, naive(text, at));
                let Some(found) = found else { break };
                at = found + 1 + step;
            }
            // From any position, also backwards.
            for at in (0..text.len() + 70).rev() {
                prop_assert_eq!(specials.next(at), naive(text, at), "from {}", at);
            }
        }
    }
}
