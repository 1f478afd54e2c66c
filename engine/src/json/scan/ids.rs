//! Lists of plain numbers: of block ids and tokens there are thousands.

use super::DIGITS_MAX;

/// Bytes that are looked at together.
const BYTES: usize = size_of::<u64>();

/// Where plain numbers that begin there end, each with a comma behind it and perhaps a space.
/// What follows is for others to look at; so is any number that is not as plain as that.
pub(super) fn end(text: &[u8], mut at: usize) -> usize {
    while let Some(digits) = digits(text, at) {
        let has_zero_before = digits > 1 && text[at] == b'0';
        let behind = at + digits;
        if digits == 0 || has_zero_before || text.get(behind) != Some(&b',') {
            return at;
        }
        at = behind + 1 + usize::from(text.get(behind + 1) == Some(&b' '));
    }
    at
}

/// How many digits stand there; `None` if that takes a closer look.
#[inline]
fn digits(text: &[u8], at: usize) -> Option<usize> {
    let Some(bytes) = text.get(at..).and_then(<[u8]>::first_chunk::<BYTES>) else {
        let rest = text.get(at..)?;
        return Some(rest.iter().take_while(|byte| byte.is_ascii_digit()).count());
    };
    // Of each byte its difference to a zero, which of a digit is below ten: the highest bit of
    // what is not is set by the sum, or was before it.
    let values = u64::from_le_bytes(*bytes) ^ 0x3030_3030_3030_3030;
    let others = (values.wrapping_add(0x7676_7676_7676_7676) | values) & 0x8080_8080_8080_8080;
    let digits = others.trailing_zeros() as usize / 8;
    const { assert!(BYTES <= DIGITS_MAX) };
    (digits < BYTES).then_some(digits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_with_a_comma_behind_them_are_passed_over() {
        for (text, rest) in [
            ("1,22, 333,4]", "4]"),
            ("0,1234567,12345678,9]", "12345678,9]"),
            ("1,01,2]", "01,2]"),
            ("1,  2,3]", " 2,3]"),
            ("1 ,2]", "1 ,2]"),
            ("7,", ""),
            ("-1,2]", "-1,2]"),
            ("", ""),
        ] {
            assert_eq!(&text[end(text.as_bytes(), 0)..], rest, "{text}");
        }
    }

    proptest! {
        #[test]
        fn digits_are_counted_as_one_by_one(text in prop::collection::vec(any::<u8>(), 0..20)) {
            let count = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
            prop_assert_eq!(digits(&text, 0), (count < BYTES || text.len() < BYTES).then_some(count));
        }
    }
}
