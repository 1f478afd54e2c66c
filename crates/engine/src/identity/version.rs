//! Versions of engines, as far as they can be compared.

use std::fmt;

/// The numbers of a version: `0.32.0` and its builds (`0.32.0+cpu`) are equal, and so are candidates
/// of a release (`0.32.0rc1`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineVersion {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
    /// The third number; 0 if there is none.
    pub patch: u32,
}

impl EngineVersion {
    /// The numbers at the start of a version in the engine's notation, with or without a `v`.
    /// `None` if there are fewer than two.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        let mut numbers = text.splitn(3, '.').map(|part| {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            part[..digits].parse().ok()
        });
        let (major, minor) = (numbers.next()??, numbers.next()??);
        let patch = numbers.next().flatten().unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

impl fmt::Display for EngineVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leading_numbers_of_a_version_are_compared() {
        let version = |major, minor, patch| Some(EngineVersion { major, minor, patch });
        for (text, expected) in [
            ("0.32.0", version(0, 32, 0)),
            ("v0.22.1", version(0, 22, 1)),
            ("0.32.0+cpu", version(0, 32, 0)),
            ("0.11.0rc2.dev17+g1234", version(0, 11, 0)),
            ("1.0", version(1, 0, 0)),
            ("0.9rc1", version(0, 9, 0)),
            ("dev", None),
            ("7", None),
            ("", None),
            ("0.99999999999", None),
        ] {
            assert_eq!(EngineVersion::parse(text), expected, "{text}");
        }
        assert!(version(0, 9, 2) < version(0, 32, 0));
    }
}
