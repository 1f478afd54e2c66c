//! Configuration values with their own syntax.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use splitrail_settings::reference::DERIVED;
pub(super) use splitrail_settings::scalar::{
    Address, DurationText, duration, duration_text, optional_duration, optional_duration_text,
    parse_duration,
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

/// The schema type of a duration of at least 10 ms, or `none`.
pub(super) struct DurationOrNone;

impl JsonSchema for DurationOrNone {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DurationOrNone".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut duration = DurationText::json_schema(generator);
        duration.insert("x-minimum".to_owned(), "10ms".into());
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

/// Tokens per KV block.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum BlockSize {
    /// The block size is taken from the first engine that reports it.
    #[default]
    Auto,
    /// This many tokens.
    #[serde(untagged)]
    Tokens(#[schemars(range(min = 1, max = 65_536))] u32),
}

/// The cache hit threshold: the share of a prompt's tokens that must be cached.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum HitThreshold {
    /// The router learns the share above which a local prefill is faster than a remote one.
    Auto,
    /// A fixed share.
    #[serde(untagged)]
    Ratio(#[schemars(range(min = 0.0, max = 1.0))] f64),
}
