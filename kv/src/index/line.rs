//! Sixteen slots of a table of names, which one trip to memory brings: looked at
//! all at once, so that no branch has to be guessed, slot by slot.
//!
//! One of two files of this crate with `unsafe`: vector instructions are a matter of
//! the target, and to call them where it is known to have them needs saying so.
#![allow(unsafe_code)]

/// Slots of a line.
pub(super) const LINE_SLOTS: usize = 16;

/// Marks a slot as empty.
pub(super) const EMPTY: u32 = u32::MAX;

/// A line of slots; the order among them means nothing.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Line(pub(super) [u32; LINE_SLOTS]);

impl Line {
    pub(super) const EMPTY: Self = Self([EMPTY; LINE_SLOTS]);

    /// One bit for each empty slot.
    #[inline]
    pub(super) fn empty(&self) -> u16 {
        self.equal(EMPTY, 0)
    }

    /// Puts its slots into two empty lines, by one bit.
    #[inline]
    pub(super) fn split(&self, bit: u32, halves: &mut [Self; 2]) {
        let [low, high] = halves;
        let (mut lows, mut highs) = (0_usize, 0_usize);
        for slot in self.0 {
            // No branch to be guessed: what does not belong to a half is written there as
            // an empty slot, and written over.
            let is_high = (slot >> bit & 1).wrapping_neg();
            let (to_low, to_high) = (slot | is_high, slot | !is_high);
            low.0[lows % LINE_SLOTS] = to_low;
            lows += usize::from(to_low != EMPTY);
            high.0[highs % LINE_SLOTS] = to_high;
            highs += usize::from(to_high != EMPTY);
        }
    }

    /// One bit for each slot that, shifted right by `shift`, is `value`.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn equal(&self, value: u32, shift: u32) -> u16 {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { equal_sse2(&self.0, value, shift) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    pub(super) fn equal(&self, value: u32, shift: u32) -> u16 {
        let bits = self.0.iter().enumerate();
        bits.fold(0, |bits, (at, slot)| bits | u16::from(slot >> shift == value) << at)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn equal_sse2(slots: &[u32; LINE_SLOTS], value: u32, shift: u32) -> u16 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi32, _mm_cvtsi32_si128, _mm_movemask_epi8, _mm_packs_epi16,
        _mm_packs_epi32, _mm_set1_epi32, _mm_srl_epi32,
    };
    // SAFETY: both are 64 bytes of which any content is a value.
    let fours: [__m128i; 4] = unsafe { std::mem::transmute(*slots) };
    let (value, shift) = (_mm_set1_epi32(value as i32), _mm_cvtsi32_si128(shift as i32));
    let equal = fours.map(|four| _mm_cmpeq_epi32(_mm_srl_epi32(four, shift), value));
    let low = _mm_packs_epi32(equal[0], equal[1]);
    let high = _mm_packs_epi32(equal[2], equal[3]);
    _mm_movemask_epi8(_mm_packs_epi16(low, high)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_looked_at_and_compared_by_its_upper_bits() {
        let mut line = Line::EMPTY;
        assert_eq!(line.empty(), u16::MAX);
        for place in 0..LINE_SLOTS {
            line.0[place] = 0xabc0_0000 | place as u32;
            assert_eq!(line.empty(), u16::MAX << place << 1);
            assert_eq!(line.equal(0xabc, 20), !(u16::MAX << place << 1));
            assert_eq!(line.equal(0xabd, 20), 0);
            assert_eq!(line.equal(0xabc0_0000 | place as u32, 0), 1 << place);
        }
    }
}
