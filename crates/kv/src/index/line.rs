//! Sixteen slots of a table of names in one cache line. All sixteen are compared in parallel, so
//! that the processor need not predict a branch for each slot.
//!
//! One of two files of this crate with `unsafe`: vector instructions depend on the target, and
//! calling them on slots that are read as vectors is `unsafe`, also where the target is known to
//! have them.
#![allow(unsafe_code)]

/// Number of slots in a line.
pub(super) const LINE_SLOTS: usize = 16;

/// Marks a slot as empty.
pub(super) const EMPTY: u32 = u32::MAX;

/// A line of slots; their order has no meaning.
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

    /// Distributes its slots to two empty lines by one bit.
    #[inline]
    pub(super) fn split(&self, bit: u32, halves: &mut [Self; 2]) {
        let (occupied, upper) = (!self.empty(), self.having(bit));
        for (half, slots) in halves.iter_mut().zip([occupied & !upper, occupied & upper]) {
            let (mut left, mut filled) = (slots, 0);
            while left != 0 {
                half.0[filled % LINE_SLOTS] = self.0[left.trailing_zeros() as usize % LINE_SLOTS];
                filled += 1;
                left &= left - 1;
            }
        }
    }

    /// One bit for each slot whose value, shifted right by `shift`, is `value`.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(super) fn equal(&self, value: u32, shift: u32) -> u16 {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { sse2::equal(&self.0, value, shift) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    pub(super) fn equal(&self, value: u32, shift: u32) -> u16 {
        let bits = self.0.iter().enumerate();
        bits.fold(0, |bits, (at, slot)| bits | u16::from(slot >> shift == value) << at)
    }

    /// One bit for each slot in which this bit is set.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn having(&self, bit: u32) -> u16 {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { sse2::having(&self.0, bit) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    fn having(&self, bit: u32) -> u16 {
        let bits = self.0.iter().enumerate();
        bits.fold(0, |bits, (at, slot)| bits | ((slot >> bit & 1) as u16) << at)
    }
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi32, _mm_cvtsi32_si128, _mm_movemask_epi8, _mm_packs_epi16,
        _mm_packs_epi32, _mm_set1_epi32, _mm_sll_epi32, _mm_srl_epi32,
    };

    use crate::index::line::LINE_SLOTS;

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn equal(slots: &[u32; LINE_SLOTS], value: u32, shift: u32) -> u16 {
        let (value, shift) = (_mm_set1_epi32(value as i32), _mm_cvtsi32_si128(shift as i32));
        signs(fours(slots).map(|four| _mm_cmpeq_epi32(_mm_srl_epi32(four, shift), value)))
    }

    #[target_feature(enable = "sse2")]
    #[inline]
    pub(super) fn having(slots: &[u32; LINE_SLOTS], bit: u32) -> u16 {
        let shift = _mm_cvtsi32_si128((u32::BITS - 1 - bit) as i32);
        signs(fours(slots).map(|four| _mm_sll_epi32(four, shift)))
    }

    #[inline(always)]
    fn fours(slots: &[u32; LINE_SLOTS]) -> [__m128i; 4] {
        // SAFETY: both types have 64 bytes, and any content is valid.
        unsafe { std::mem::transmute(*slots) }
    }

    /// One bit for each negative number: narrowing keeps signs.
    #[target_feature(enable = "sse2")]
    #[inline]
    fn signs(fours: [__m128i; 4]) -> u16 {
        let low = _mm_packs_epi32(fours[0], fours[1]);
        let high = _mm_packs_epi32(fours[2], fours[3]);
        _mm_movemask_epi8(_mm_packs_epi16(low, high)) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_compared_by_its_upper_bits() {
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

    #[test]
    fn a_line_is_split_by_any_bit() {
        for bit in [0, 7, 31] {
            let mut line = Line::EMPTY;
            for place in (0..LINE_SLOTS).filter(|place| place % 5 != 2) {
                line.0[place] = (place as u32) << 8 | u32::from(place % 3 == 0) << bit;
            }
            let mut halves = [Line::EMPTY, Line::EMPTY];
            line.split(bit, &mut halves);
            for (upper, half) in halves.iter().enumerate() {
                let belongs = |slot: &&u32| **slot != EMPTY && **slot >> bit & 1 == upper as u32;
                let mut expected: Vec<u32> = line.0.iter().filter(belongs).copied().collect();
                expected.resize(LINE_SLOTS, EMPTY);
                assert_eq!(half.0.to_vec(), expected);
            }
        }
    }
}
