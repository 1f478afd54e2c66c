//! Sections that are a mapping, or the text `none`.

use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The text for a section that is off.
const NONE: &str = "none";

/// How such a section is written. Only the schema is of this type.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the schema has this type, and no value does")]
pub(super) enum OrNone<T> {
    /// The section is off.
    None(Off),
    /// The keys of the section.
    Section(T),
}

/// A section that is off.
#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(dead_code, reason = "the schema has this type, and no value does")]
pub(super) enum Off {
    /// The section is off.
    None,
}

pub(super) fn serialize<T: Serialize, S: Serializer>(
    section: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match section {
        None => serializer.serialize_str(NONE),
        Some(section) => section.serialize(serializer),
    }
}

pub(super) fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    match value.as_str() {
        Some(NONE) => Ok(None),
        _ => serde_json::from_value(value).map(Some).map_err(D::Error::custom),
    }
}
