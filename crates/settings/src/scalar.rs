//! Scalars with special formats: durations, sizes and addresses.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// The schema `format` of [`DurationText`]. It is not JSON Schema's `duration`, which is ISO 8601.
pub const DURATION_FORMAT: &str = "duration-with-units";
/// The members of a duration's schema with its least and its greatest value, as texts: `minimum` and
/// `maximum` of JSON Schema are for numbers.
pub(crate) const DURATION_BOUNDS: [&str; 2] = ["x-minimum", "x-maximum"];
/// The schema `format` of [`Address`].
pub const ADDRESS_FORMAT: &str = "ip-port";

/// Maximum duration; deadlines within it never overflow a clock.
const DURATION_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// The units in microseconds, largest first: a duration has each at most once, in this order.
const UNITS: [(&str, u64); 5] =
    [("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000), ("us", 1)];

/// The schema type of an `IP:PORT`.
#[derive(Debug)]
pub struct Address;

impl JsonSchema for Address {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Address".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": ADDRESS_FORMAT })
    }
}

/// The schema type of a duration with units.
#[derive(Debug)]
pub struct DurationText;

impl JsonSchema for DurationText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "format": DURATION_FORMAT,
            "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?([0-9]+us)?$",
            "minLength": 2
        })
    }
}

/// Why a text is not a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadDuration {
    /// The text does not consist of numbers with units.
    #[error("is not a duration")]
    Form,
    /// A number has no unit.
    #[error("has a number without a unit")]
    Unit,
    /// A unit occurs twice, or a larger unit follows a smaller one.
    #[error("has its units in the wrong order")]
    Order,
    /// The duration exceeds [`DURATION_MAX`].
    #[error("is longer than 168h")]
    TooLong,
}

/// Parses numbers with units, largest first: `250ms`, `30s`, `1m30s`, `2h`.
///
/// # Errors
/// The text has another form, or is a duration of more than `DURATION_MAX`.
pub fn parse_duration(text: &str) -> Result<Duration, BadDuration> {
    let mut rest = text;
    let mut units = UNITS.iter();
    let mut total_us = 0_u64;
    if rest.is_empty() {
        return Err(BadDuration::Form);
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, after) = rest.split_at(digits);
        let letters = after.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(after.len());
        let (unit, next) = after.split_at(letters);
        if number.is_empty() {
            return Err(BadDuration::Form);
        }
        if after.is_empty() {
            return Err(BadDuration::Unit);
        }
        if !UNITS.iter().any(|(name, _)| *name == unit) {
            return Err(BadDuration::Form);
        }
        let unit_us = units.find(|(name, _)| *name == unit).ok_or(BadDuration::Order)?.1;
        total_us = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit_us))
            .and_then(|us| us.checked_add(total_us))
            .ok_or(BadDuration::TooLong)?;
        rest = next;
    }
    let total = Duration::from_micros(total_us);
    if total > DURATION_MAX { Err(BadDuration::TooLong) } else { Ok(total) }
}

/// The least and the greatest duration that `schema` allows.
pub(crate) fn duration_bounds(schema: &Value) -> (Duration, Duration) {
    let [least, most] = DURATION_BOUNDS.map(|key| {
        let text = schema.get(key).and_then(Value::as_str);
        text.and_then(|text| parse_duration(text).ok())
    });
    (least.unwrap_or_default(), most.unwrap_or(DURATION_MAX))
}

/// The inverse of [`parse_duration`]: `1m30s`; fractions of a microsecond are dropped.
pub fn format_duration(duration: Duration) -> String {
    let mut rest_us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, unit_us) in UNITS {
        if rest_us >= unit_us {
            text.push_str(&format!("{}{unit}", rest_us / unit_us));
            rest_us %= unit_us;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Deserializes a duration by [`parse_duration`].
///
/// # Errors
/// The value is not a text, or [`parse_duration`] refuses it.
pub fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).map_err(|why| de::Error::custom(format!("`{text}` {why}")))
}

/// Serializes a duration by [`format_duration`].
///
/// # Errors
/// Those of the serializer.
pub fn duration_text<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_duration(*duration))
}

/// Deserializes a duration by [`parse_duration`], or null.
///
/// # Errors
/// The value is neither null nor a text that [`parse_duration`] accepts.
pub fn optional_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let read = |text: String| {
        parse_duration(&text).map_err(|why| de::Error::custom(format!("`{text}` {why}")))
    };
    text.map(read).transpose()
}

/// Serializes a duration by [`format_duration`], or null.
///
/// # Errors
/// Those of the serializer.
pub fn optional_duration_text<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    duration.map(format_duration).serialize(serializer)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_need_units_largest_first() {
        let ms = |text| parse_duration(text).map(|duration| duration.as_millis());
        assert_eq!(ms("250ms"), Ok(250));
        assert_eq!(ms("1m30s"), Ok(90_000));
        assert_eq!(ms("1h1m1s1ms"), Ok(3_661_001));
        assert_eq!(parse_duration("2ms500us"), Ok(Duration::from_micros(2500)));
        assert_eq!(ms("0s"), Ok(0));
        assert_eq!(ms("168h"), Ok(604_800_000));
        assert_eq!(ms("30"), Err(BadDuration::Unit));
        assert_eq!(ms("1m30"), Err(BadDuration::Unit));
        assert_eq!(ms("30s1m"), Err(BadDuration::Order));
        assert_eq!(ms("1s1s"), Err(BadDuration::Order));
        assert_eq!(ms("168h1ms"), Err(BadDuration::TooLong));
        assert_eq!(ms("99999999999999999999h"), Err(BadDuration::TooLong));
        for text in ["", "s", "1.5s", "-1s", "1 s", "30sec", "1d", "1S", "ms1"] {
            assert_eq!(ms(text), Err(BadDuration::Form), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_formatted_duration_parses_to_the_same_duration(us in 0_u64..=604_800_000_000) {
            let duration = Duration::from_micros(us);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }
    }
}
