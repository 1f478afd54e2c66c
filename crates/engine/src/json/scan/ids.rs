//! Skips lists of plain numbers, 64 bytes at a time, because block ids and token ids come in
//! thousands.

use wide::u8x16;

use super::DIGITS_MAX;
use super::words::BLOCK;

/// Skips plain numbers from `at`, each followed by a comma and at most one space, and returns the
/// position after them. Anything else is left to the caller.
pub(super) fn end(text: &[u8], mut at: usize) -> usize {
    while let Some(rest) = text.get(at..) {
        let numbers = match rest.first_chunk() {
            Some(block) => numbers(block),
            None => numbers_of_last(rest),
        };
        if numbers == 0 {
            return at;
        }
        at += numbers;
        at += usize::from(text.get(at) == Some(&b' '));
    }
    at
}

/// Like `numbers`, for the rest of the text, which is shorter than a block.
#[cold]
#[inline(never)]
fn numbers_of_last(rest: &[u8]) -> usize {
    let mut padded = [b']'; BLOCK];
    padded[..rest.len()].copy_from_slice(rest);
    numbers(&padded)
}

/// Number of bytes of a block up to and including the last comma that has only numbers before it; 0
/// if there is none. The block must begin with a number.
#[inline]
fn numbers(block: &[u8; BLOCK]) -> usize {
    let is = |byte: u8| move |part: u8x16| part.simd_eq(u8x16::splat(byte));
    let commas = mask(block, is(b','));
    let spaces = mask(block, is(b' '));
    let zeros = mask(block, is(b'0'));
    let digits = mask(block, |part| {
        let value = part - u8x16::splat(b'0');
        value.min(u8x16::splat(9)).simd_eq(value)
    });
    let behind = |mask: u64| mask << 1;
    let leading_zeros = zeros & !behind(digits);
    let wrong = !(digits | commas | spaces)
        | commas & !behind(digits)
        | spaces & !behind(commas)
        | behind(spaces) & !digits
        | behind(leading_zeros) & digits
        | too_long(digits);
    let right = wrong.trailing_zeros();
    let commas = commas & 1_u64.checked_shl(right).map_or(u64::MAX, |bit| bit - 1);
    (u64::BITS - commas.leading_zeros()) as usize
}

/// The positions that end a run of more than `DIGITS_MAX` digits.
#[inline]
fn too_long(digits: u64) -> u64 {
    const { assert!(DIGITS_MAX == 15) };
    [1, 2, 4, 8].iter().fold(digits, |runs, step| runs & runs << step)
}

/// A mask with a bit for each byte of the block for which `holds`; the first byte has the lowest
/// bit.
#[inline]
fn mask(block: &[u8; BLOCK], holds: impl Fn(u8x16) -> u8x16) -> u64 {
    let (parts, _) = block.as_chunks();
    let bits = |part: &[u8; 16]| u64::from(holds(u8x16::new(*part)).to_bitmask());
    parts.iter().rev().fold(0, |mask, part| mask << 16 | bits(part))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One byte after the other.
    fn naive(text: &[u8], mut at: usize) -> usize {
        loop {
            let rest = &text[at.min(text.len())..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let plain = (1..=DIGITS_MAX).contains(&digits) && (digits == 1 || rest[0] != b'0');
            if !plain || rest.get(digits) != Some(&b',') {
                return at;
            }
            at += digits + 1 + usize::from(rest.get(digits + 1) == Some(&b' '));
        }
    }

    #[test]
    fn numbers_with_a_comma_behind_them_are_passed_over() {
        for (text, rest) in [
            ("1,22, 333,4]", "4]"),
            ("0,1234567,12345678,9]", "9]"),
            ("123456789012345,1234567890123456,9]", "1234567890123456,9]"),
            ("1,01,2]", "01,2]"),
            ("1,  2,3]", " 2,3]"),
            ("1 ,2]", "1 ,2]"),
            ("1,,2]", ",2]"),
            ("7,", ""),
            ("7, ", ""),
            ("-1,2]", "-1,2]"),
            (" 1,2]", " 1,2]"),
            ("", ""),
        ] {
            assert_eq!(&text[end(text.as_bytes(), 0)..], rest, "{text}");
            let long = format!("{}{text}", "12345, ".repeat(40));
            assert_eq!(end(long.as_bytes(), 0), naive(long.as_bytes(), 0), "{long}");
        }
        assert_eq!(end(b"1,2", 9), 9, "behind the end there is nothing");
    }

    proptest! {
        #[test]
        fn numbers_end_where_a_look_at_each_byte_finds_their_end(
            numbers in prop::collection::vec((0_u64..1 << 60, 0..64_u32, any::<bool>()), 0..90),
            (place, byte) in (any::<prop::sample::Index>(), prop::sample::select(&b",, 019-]x."[..])),
            spoilt in any::<bool>(),
        ) {
            let text = |(number, bits, space): &(u64, u32, bool)| {
                format!("{},{}", number >> bits, if *space { " " } else { "" })
            };
            let mut text: Vec<u8> = numbers.iter().map(text).collect::<String>().into();
            if spoilt && !text.is_empty() {
                let at = place.index(text.len());
                text[at] = byte;
            }
            text.extend(b"7]");
            prop_assert_eq!(end(&text, 0), naive(&text, 0));
        }
    }
}
