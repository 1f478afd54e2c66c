//! How streams reach clients.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// How streams reach clients.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StreamsConfig {
    /// The heartbeat: when no event has gone out for this long, a [comment](http.md#silence) does.
    /// `none`: never.
    #[serde(
        deserialize_with = "scalar::duration_or_none",
        serialize_with = "scalar::duration_or_none_text"
    )]
    #[schemars(with = "scalar::DurationOrNone")]
    pub keep_alive: Option<Duration>,
}

impl Default for StreamsConfig {
    fn default() -> Self {
        Self { keep_alive: Some(Duration::from_secs(15)) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::parse;

    #[test]
    fn the_interval_is_a_duration_or_none() {
        let read = |streams: &str| {
            let text = format!(
                "{streams}\nmodels:\n  - name: m\n    tokenizer: none\n    workers: ['http://127.0.0.1:1']\n"
            );
            let loaded = parse("splitrail.yaml", &text, Path::new("/"));
            loaded.map(|loaded| loaded.config.streams.keep_alive).map_err(|e| e.to_string())
        };
        assert_eq!(read("").unwrap(), Some(Duration::from_secs(15)));
        assert_eq!(read("streams: { keep_alive: 1m }").unwrap(), Some(Duration::from_secs(60)));
        assert_eq!(read("streams: { keep_alive: none }").unwrap(), None);
        for (value, told) in [("5ms", "cannot be 5ms"), ("15", "`15s`"), ("never", "duration")] {
            let problems = read(&format!("streams: {{ keep_alive: {value} }}")).unwrap_err();
            assert!(problems.contains(told), "{value}: {problems}");
        }
    }
}
