//! Configuration values with their own syntax.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use splitrail_settings::reference::DERIVED;
pub(super) use splitrail_settings::scalar::{
    Address, DurationText, duration, duration_text, format_duration, optional_duration,
    optional_duration_text, parse_duration,
};

/// Leaves the default out of a key's schema, because the configuration that is shown never has the
/// key.
pub(super) fn without_default(schema: &mut Schema) {
    schema.remove("default");
}

/// Marks the schema of a key whose default follows from other keys or from the engines.
pub(super) fn derived(schema: &mut Schema) {
    without_default(schema);
    schema.insert(DERIVED.to_owned(), true.into());
}

/// The text in place of a duration.
const NONE: &str = "none";

/// The schema type of a duration or `none`.
pub(super) struct DurationOrNone;

impl JsonSchema for DurationOrNone {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DurationOrNone".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let duration = DurationText::json_schema(generator);
        json_schema!({ "anyOf": [{ "type": "string", "const": NONE }, duration] })
    }
}

/// Deserializes a duration or `none`.
pub(super) fn duration_or_none<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.as_str() {
        NONE => Ok(None),
        text => parse_duration(text)
            .map(Some)
            .map_err(|why| de::Error::custom(format!("`{text}` {why}"))),
    }
}

/// Serializes a duration or `none`.
pub(super) fn duration_or_none_text<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        None => serializer.serialize_str(NONE),
        Some(duration) => duration_text(duration, serializer),
    }
}

/// Maximum number of tokens per KV block.
const BLOCK_SIZE_MAX: u64 = 65_536;

/// Tokens per KV block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockSize {
    /// The block size is taken from the first engine that reports it.
    #[default]
    Auto,
    /// This many tokens, 1 to 65536.
    Tokens(u32),
}

impl Serialize for BlockSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Tokens(tokens) => serializer.serialize_u32(*tokens),
        }
    }
}

impl<'de> Deserialize<'de> for BlockSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BlockSizeVisitor)
    }
}

struct BlockSizeVisitor;

impl Visitor<'_> for BlockSizeVisitor {
    type Value = BlockSize;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a whole number from 1 to {BLOCK_SIZE_MAX}, or auto")
    }

    fn visit_u64<E: de::Error>(self, tokens: u64) -> Result<BlockSize, E> {
        u32::try_from(tokens)
            .ok()
            .filter(|_| (1..=BLOCK_SIZE_MAX).contains(&tokens))
            .map(BlockSize::Tokens)
            .ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(tokens), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<BlockSize, E> {
        match text {
            "auto" => Ok(BlockSize::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

impl JsonSchema for BlockSize {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "BlockSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": BLOCK_SIZE_MAX },
                { "type": "string", "const": "auto" }
            ]
        })
    }
}

/// The cache hit threshold: the share of a prompt's tokens that must be cached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HitThreshold {
    /// The router learns the share above which a local prefill is faster than a remote one.
    Auto,
    /// A fixed share, from 0 to 1.
    Ratio(f64),
}

impl Serialize for HitThreshold {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Ratio(ratio) => serializer.serialize_f64(*ratio),
        }
    }
}

impl<'de> Deserialize<'de> for HitThreshold {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HitThresholdVisitor)
    }
}

struct HitThresholdVisitor;

impl Visitor<'_> for HitThresholdVisitor {
    type Value = HitThreshold;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a number from 0 to 1, or auto")
    }

    fn visit_f64<E: de::Error>(self, ratio: f64) -> Result<HitThreshold, E> {
        match (0.0..=1.0).contains(&ratio) {
            true => Ok(HitThreshold::Ratio(ratio)),
            false => Err(E::invalid_value(de::Unexpected::Float(ratio), &self)),
        }
    }

    fn visit_u64<E: de::Error>(self, ratio: u64) -> Result<HitThreshold, E> {
        self.visit_f64(ratio as f64)
    }

    fn visit_i64<E: de::Error>(self, ratio: i64) -> Result<HitThreshold, E> {
        self.visit_f64(ratio as f64)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<HitThreshold, E> {
        match text {
            "auto" => Ok(HitThreshold::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

impl JsonSchema for HitThreshold {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "HitThreshold".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "number", "minimum": 0.0, "maximum": 1.0 },
                { "type": "string", "const": "auto" }
            ]
        })
    }
}
