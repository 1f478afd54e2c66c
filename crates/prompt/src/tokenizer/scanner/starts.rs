//! Finds the starts of words in sixty-four bytes of plain text in parallel: one bit for each byte.
//!
//! The processor cannot predict a branch on the kind of each word: with such a branch, splitting a
//! prompt took longer than with the library. Most text needs no such branch here.

use wide::u8x16;

use super::plain::Rules;

/// Number of bytes that are examined together.
pub(super) const BYTES: usize = 64;

/// The positions at which words start, if a word starts at the first byte: one bit for each byte,
/// as far as the bytes after the sixty-four cannot change the result.
#[inline]
pub(super) fn starts(bytes: &[u8; BYTES], rules: Rules) -> u64 {
    let kinds = Kinds::of(bytes);
    let Kinds { letters, digits, spaces, newlines, plain_blanks, .. } = kinds;
    let strange = kinds.others | if rules.parts { controls(bytes) & !spaces } else { 0 };
    let signs = !(letters | digits | spaces | strange);
    let blanks = spaces & !newlines;
    let behind = |mask: u64| mask << 1;
    let before = |mask: u64| mask >> 1;
    // A blank belongs to the letters after it, and so does a single sign.
    let alone = signs & !behind(signs | plain_blanks) & !before(signs);
    let words = letters & !behind(letters | blanks | alone);
    // A plain blank belongs to the signs after it, and line ends belong to the signs before them.
    let runs_of_signs = signs & !behind(signs | plain_blanks);
    let eaten = newlines & !newlines.wrapping_add(newlines & behind(signs));
    let left = spaces & !eaten;
    // The last of several spaces may belong to what follows; if digits are split off first, nothing
    // follows.
    let first_spaces = left & !behind(left);
    let parted = if rules.parts { before(digits) } else { 0 };
    let last_blanks = blanks & !before(spaces) & !parted;
    let all = 1
        | words
        | runs_of_signs
        | first_spaces
        | last_blanks
        | of_digits(digits, rules.digits_max)
        | behind_line_ends(blanks, newlines & !eaten)
        | if rules.contracts { behind_contractions(bytes, alone, letters) } else { 0 };
    all & known(spaces, strange)
}

/// The starts of numbers of at most `digits_max` digits.
#[inline]
fn of_digits(digits: u64, digits_max: usize) -> u64 {
    if digits_max == 1 {
        return digits;
    }
    let mut begun = digits & !(digits << 1);
    let mut all = begun;
    // Positions of three digits that a fourth one follows.
    let fourth = digits & digits << 1 & digits << 2;
    while begun != 0 {
        begun = begun << 3 & fourth;
        all |= begun;
    }
    all
}

/// The start of blanks after the last line end of a run of spaces; runs with a further line end are
/// excluded.
#[inline]
fn behind_line_ends(blanks: u64, newlines: u64) -> u64 {
    let mut begun = blanks & newlines << 1;
    let mut all = 0;
    while begun != 0 {
        let run = blanks >> begun.trailing_zeros();
        let end = begun.trailing_zeros() + run.trailing_ones();
        let is_last = newlines.checked_shr(end).unwrap_or_default() & 1 == 0;
        all |= if is_last { begun & begun.wrapping_neg() } else { 0 };
        begun &= begun - 1;
    }
    all
}

/// Letters that continue after a contraction such as `'s`.
#[inline]
fn behind_contractions(bytes: &[u8; BYTES], alone: u64, letters: u64) -> u64 {
    let mut candidates = alone & letters >> 1;
    let mut all = 0;
    while candidates != 0 {
        let at = candidates.trailing_zeros() as usize;
        let rest = &bytes[at..];
        if rest[0] == b'\''
            && let Some(end) = contraction(rest)
            && at + end < BYTES
        {
            all |= 1 << (at + end) & letters;
        }
        candidates &= candidates - 1;
    }
    all
}

/// The length in bytes of the contraction at the start of a text that begins with an apostrophe:
/// one of `'s`, `'t`, `'m`, `'d`, `'re`, `'ve` and `'ll`.
fn contraction(text: &[u8]) -> Option<usize> {
    let letter = |at: usize| text.get(at).map_or(0, u8::to_ascii_lowercase);
    match [letter(1), letter(2)] {
        [b's' | b't' | b'm' | b'd', _] => Some(2),
        [b'r' | b'v', b'e'] | [b'l', b'l'] => Some(3),
        _ => None,
    }
}

/// The bytes whose starts cannot depend on later bytes: those before the first other byte, or the
/// end, and before the spaces in front of it.
#[inline]
fn known(spaces: u64, strange: u64) -> u64 {
    let ends = strange.trailing_zeros();
    let here = u64::MAX.checked_shr(u64::BITS - ends).unwrap_or_default();
    let others = here & !spaces;
    u64::MAX.checked_shr(others.leading_zeros()).unwrap_or_default() | 1
}

/// One bit per byte for each kind of byte.
#[derive(Default)]
struct Kinds {
    letters: u64,
    digits: u64,
    /// White space, including line ends.
    spaces: u64,
    newlines: u64,
    /// U+0020.
    plain_blanks: u64,
    /// Bytes that are not ASCII.
    others: u64,
}

impl Kinds {
    #[inline]
    fn of(bytes: &[u8; BYTES]) -> Self {
        let mut all = Self::default();
        let (parts, _) = bytes.as_chunks();
        for part in parts.iter().rev() {
            let part = u8x16::new(*part);
            let is = |byte: u8| part.simd_eq(u8x16::splat(byte));
            let plain = is(b' ');
            for (mask, bits) in [
                (&mut all.letters, among(b'a', 26, part | u8x16::splat(0x20))),
                (&mut all.digits, among(b'0', 10, part)),
                // The five characters from the tabulator on; the line ends among them are also
                // newlines.
                (&mut all.spaces, among(b'\t', 5, part) | plain),
                (&mut all.newlines, is(b'\n') | is(b'\r')),
                (&mut all.plain_blanks, plain),
                // The highest bit of these bytes is set.
                (&mut all.others, part),
            ] {
                *mask = *mask << 16 | u64::from(bits.to_bitmask());
            }
        }
        all
    }
}

/// Control characters, some of which are spaces.
fn controls(bytes: &[u8; BYTES]) -> u64 {
    let (parts, _) = bytes.as_chunks();
    parts.iter().rev().fold(0, |mask, part| {
        let part = u8x16::new(*part);
        let bits = among(0, 32, part) | part.simd_eq(u8x16::splat(0x7f));
        mask << 16 | u64::from(bits.to_bitmask())
    })
}

/// All bits set for the bytes in the range of `count` values from `first` on.
#[inline]
fn among(first: u8, count: u8, part: u8x16) -> u8x16 {
    let place = part - u8x16::splat(first);
    place.min(u8x16::splat(count - 1)).simd_eq(place)
}
