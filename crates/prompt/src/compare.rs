//! Compares the router's tokens of a known prompt with those of an engine. Pure functions.

/// Prose, code, numbers, white space and several scripts, so that any difference between tokenizers
/// shows. It is no client's text: its tokens may be shown.
pub const SAMPLE: &str = "Splitrail counts blocks: 1, 2, 3 ... 1024; 3.5e-7 of them, don't ask.\n\
    \tif (a[i] != b[j]) { return \"no\"; }  // two  spaces\r\n\
    Ein schöner Gruß, 日本語の文、한국어, и немного русского. 🚄🧮\n\n";

/// Maximum number of special tokens: a BOS and an EOS.
pub const SPECIAL_MAX: usize = 2;

/// How two token sequences differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// They are equal.
    None,
    /// By one or two tokens at the ends only.
    Ends,
    /// In any other way.
    Other,
}

/// How the router's tokens differ from the engine's.
#[must_use]
pub fn difference(ours: &[u32], engines: &[u32]) -> Difference {
    if ours == engines {
        return Difference::None;
    }
    let (short, long) = if ours.len() < engines.len() { (ours, engines) } else { (engines, ours) };
    let surplus = long.len() - short.len();
    let within = (0..=surplus).any(|at| long[at..at + short.len()] == *short);
    match within && (1..=SPECIAL_MAX).contains(&surplus) && !short.is_empty() {
        true => Difference::Ends,
        false => Difference::Other,
    }
}

/// The index of the first token that differs, with both tokens; `None` stands for the end of a
/// sequence. `None` as a whole if the sequences are equal.
#[must_use]
pub fn first_difference(
    ours: &[u32],
    engines: &[u32],
) -> Option<(usize, Option<u32>, Option<u32>)> {
    let at = ours.iter().zip(engines).take_while(|(ours, engines)| ours == engines).count();
    let (ours, engines) = (ours.get(at).copied(), engines.get(at).copied());
    (ours != engines).then_some((at, ours, engines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_that_differs_is_found() {
        for (ours, engines, expected) in [
            (&[1, 2][..], &[1, 2][..], None),
            (&[1, 2], &[1, 3], Some((1, Some(2), Some(3)))),
            (&[1], &[1, 3], Some((1, None, Some(3)))),
            (&[0, 1], &[1], Some((0, Some(0), Some(1)))),
            (&[], &[], None),
        ] {
            assert_eq!(first_difference(ours, engines), expected);
        }
    }
}
