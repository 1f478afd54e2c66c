//! Reads typed values from the tree of a file.

use serde::de::DeserializeOwned;
use splitrail_settings::tree::Node;

/// The typed value under `key`; `None` if the key is absent or its value is invalid.
pub(crate) fn typed<T: DeserializeOwned>(node: &Node, key: &str) -> Option<T> {
    serde_json::from_value(node.get(key)?.to_json()).ok()
}

/// The typed value under `key`; `default` if the key is absent, `None` if its value is invalid.
pub(crate) fn typed_or<T: DeserializeOwned>(node: &Node, key: &str, default: T) -> Option<T> {
    if node.get(key).is_some() { typed(node, key) } else { Some(default) }
}
