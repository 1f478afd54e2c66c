//! Sizes in bytes, and sizes per second, with units: `64MiB`, `1GB`, `4KiB/s`.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserializer, Serializer};

/// The schema `format` of [`SizeText`].
pub const SIZE_FORMAT: &str = "size-with-units";
/// The schema `format` of [`RateText`].
pub const RATE_FORMAT: &str = "size-per-second";

/// The units in bytes. A size is written in the largest unit of which it is a multiple, where the
/// binary units come first.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
];

/// Other spellings of units: the decimal thousand is often written with a capital letter.
const SPELLINGS: [(&str, &str); 1] = [("KB", "kB")];

/// What follows a size in a rate.
const PER_SECOND: &str = "/s";

/// The schema type of a size: a number of bytes, or a text with a unit.
#[derive(Debug)]
pub struct SizeText;

impl JsonSchema for SizeText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "format": SIZE_FORMAT,
            "pattern": "^[0-9]+([KMGT]i?B|kB|B)?$"
        })
    }
}

/// The schema type of a rate: a number of bytes per second, or a text with a unit.
#[derive(Debug)]
pub struct RateText;

impl JsonSchema for RateText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Rate".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "format": RATE_FORMAT,
            "pattern": "^[0-9]+([KMGT]i?B|kB|B)?(/s)?$"
        })
    }
}

/// Why a text is not a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSize {
    /// The text does not consist of a whole number and a unit.
    #[error("is not a size")]
    Form,
    /// The unit is not known.
    #[error("has an unknown unit")]
    Unit,
    /// The size does not fit into 64 bits.
    #[error("is larger than any size")]
    TooLarge,
}

/// Parses a number of bytes with or without a unit: `64MiB`, `1GB`, `4096`.
///
/// # Errors
/// The text is not a size.
pub fn parse_size(text: &str) -> Result<u64, BadSize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() || unit.starts_with(|c: char| !c.is_ascii_alphabetic()) {
        return Err(BadSize::Form);
    }
    let unit = SPELLINGS.iter().find(|(other, _)| *other == unit).map_or(unit, |(_, unit)| unit);
    let unit_bytes = match unit {
        "" => 1,
        _ => UNITS.iter().find(|(name, _)| *name == unit).ok_or(BadSize::Unit)?.1,
    };
    let number: u64 = number.parse().map_err(|_| BadSize::TooLarge)?;
    number.checked_mul(unit_bytes).ok_or(BadSize::TooLarge)
}

/// Parses a number of bytes per second: a size that `/s` may follow.
///
/// # Errors
/// The text is not a rate.
pub fn parse_rate(text: &str) -> Result<u64, BadSize> {
    parse_size(text.strip_suffix(PER_SECOND).unwrap_or(text))
}

/// The inverse of [`parse_size`].
pub fn format_size(bytes: u64) -> String {
    let fits = |(_, unit_bytes): &&(&str, u64)| bytes > 0 && bytes.is_multiple_of(*unit_bytes);
    match UNITS.iter().find(fits) {
        Some((unit, unit_bytes)) => format!("{}{unit}", bytes / unit_bytes),
        None => "0B".to_owned(),
    }
}

/// The inverse of [`parse_rate`].
pub fn format_rate(bytes_per_s: u64) -> String {
    format_size(bytes_per_s) + PER_SECOND
}

/// Deserializes a size: a number of bytes, or a text by [`parse_size`].
///
/// # Errors
/// The value is neither, or does not fit into `T`.
pub fn size<'de, T: TryFrom<u64>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    fitting(deserializer.deserialize_any(BytesVisitor(parse_size))?)
}

/// Serializes a size by [`format_size`].
///
/// # Errors
/// Those of the serializer.
pub fn size_text<T: TryInto<u64> + Copy, S: Serializer>(
    bytes: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_size((*bytes).try_into().unwrap_or(u64::MAX)))
}

/// Deserializes a rate: a number of bytes per second, or a text by [`parse_rate`].
///
/// # Errors
/// The value is neither, or does not fit into `T`.
pub fn rate<'de, T: TryFrom<u64>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    fitting(deserializer.deserialize_any(BytesVisitor(parse_rate))?)
}

/// Serializes a rate by [`format_rate`].
///
/// # Errors
/// Those of the serializer.
pub fn rate_text<T: TryInto<u64> + Copy, S: Serializer>(
    bytes_per_s: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_rate((*bytes_per_s).try_into().unwrap_or(u64::MAX)))
}

fn fitting<T: TryFrom<u64>, E: de::Error>(bytes: u64) -> Result<T, E> {
    T::try_from(bytes).map_err(|_| E::custom(format!("{bytes} {}", BadSize::TooLarge)))
}

struct BytesVisitor(fn(&str) -> Result<u64, BadSize>);

impl Visitor<'_> for BytesVisitor {
    type Value = u64;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a size such as 64MiB, or a number of bytes")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<u64, E> {
        Ok(bytes)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
        (self.0)(text).map_err(|why| E::custom(format!("`{text}` {why}")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_are_whole_numbers_with_or_without_a_unit() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        assert_eq!(parse_size("1GB"), Ok(1_000_000_000));
        assert_eq!(parse_size("3kB"), parse_size("3KB"));
        assert_eq!(parse_size("2KiB"), Ok(2048));
        assert_eq!(parse_rate("4KiB/s"), Ok(4096));
        assert_eq!(parse_rate("4KiB"), Ok(4096));
        for text in ["", "MiB", "-1", "1.5GB", "1 GB", "1_000"] {
            assert_eq!(parse_size(text), Err(BadSize::Form), "{text}");
        }
        for text in ["1Mi", "1mb", "1Mb", "1M", "1EiB"] {
            assert_eq!(parse_size(text), Err(BadSize::Unit), "{text}");
        }
        assert_eq!(parse_size("4KiB/s"), Err(BadSize::Unit));
        assert_eq!(parse_size("99999999TiB"), Err(BadSize::TooLarge));
        assert_eq!(parse_size("99999999999999999999"), Err(BadSize::TooLarge));
    }

    #[test]
    fn a_size_is_written_in_its_largest_unit() {
        for (bytes, text) in [
            (0, "0B"),
            (1, "1B"),
            (1000, "1kB"),
            (1024, "1KiB"),
            (33_554_432, "32MiB"),
            (2_050_000, "2050kB"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn a_formatted_size_parses_to_the_same_size(number in 0_u64..10_000, shift in 0_u32..50) {
            for bytes in [number << shift, number * 1000, number] {
                prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
                prop_assert_eq!(parse_rate(&format_rate(bytes)), Ok(bytes));
            }
        }

        #[test]
        fn no_text_makes_the_reader_of_sizes_panic(text in "\\PC*") {
            let _any = (parse_size(&text), parse_rate(&text));
        }
    }
}
