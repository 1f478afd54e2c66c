//! Ports of pods: numbers or names.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodPort {
    /// Its number.
    Number(u16),
    /// Its name among the ports of the pod's containers.
    Name(String),
}

impl PodPort {
    /// A port's name has at most this many characters (RFC 6335).
    const NAME_MAX: usize = 15;

    /// Reads what an annotation says; `None` if it is neither.
    pub fn parse(text: &str) -> Option<Self> {
        let name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        match text.parse::<u16>() {
            Ok(0) => None,
            Ok(port) => Some(Self::Number(port)),
            Err(_) if text.is_empty() || text.len() > Self::NAME_MAX => None,
            Err(_) if !text.contains(|c: char| c.is_ascii_lowercase()) => None,
            Err(_) => text.chars().all(name).then(|| Self::Name(text.to_owned())),
        }
    }
}

impl fmt::Display for PodPort {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(port) => write!(out, "{port}"),
            Self::Name(name) => out.write_str(name),
        }
    }
}

impl Serialize for PodPort {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(port) => serializer.serialize_u16(*port),
            Self::Name(name) => serializer.serialize_str(name),
        }
    }
}

impl<'de> Deserialize<'de> for PodPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u16),
            Name(String),
        }
        let port = match Written::deserialize(deserializer)? {
            Written::Number(port) => Some(port).filter(|port| *port > 0).map(Self::Number),
            // In quotes, a number is no name.
            Written::Name(name) => Self::parse(&name).filter(|port| matches!(port, Self::Name(_))),
        };
        port.ok_or_else(|| de::Error::custom("a port from 1 to 65535, or the name of one"))
    }
}

impl JsonSchema for PodPort {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "PodPort".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": 65_535 },
                {
                    "type": "string", "minLength": 1, "maxLength": Self::NAME_MAX,
                    "pattern": "^[a-z0-9-]+$"
                }
            ]
        })
    }
}
