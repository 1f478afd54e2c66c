//! The file with the hashes of API keys, which `auth` names with `kind: keys`.

use std::collections::HashMap;
use std::path::Path;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_settings::problem::ProblemReport;
use splitrail_settings::process::open_regular;
use splitrail_settings::tree::Node;
use splitrail_settings::{Problems, file};

use crate::file_profiles::KEYS_PROFILE;

/// A file of API keys.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KeysFile {
    /// The keys; a revoked key is deleted, or has a past `expires`.
    pub keys: Vec<KeyEntry>,
}

/// One API key. The file contains the hash of the key, never the key itself.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// The name of the key in logs and in the audit file.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub id: String,
    /// The tenant of requests with the key. A key has either a tenant or a role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub tenant: Option<String>,
    /// What the key allows on the admin listener. A key with a role cannot be used for requests to
    /// models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<OperatorRole>,
    /// The SHA-256 of the key, in hexadecimal digits.
    #[schemars(length(min = 64, max = 64), regex(pattern = r"^[0-9a-f]+$"))]
    pub sha256: String,
    /// When the key was made (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// When the key stops being valid (RFC 3339). Without a value, never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// A text for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub note: Option<String>,
}

/// What a credential allows on the admin listener.
#[derive(
    Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord,
)]
#[serde(rename_all = "snake_case")]
pub enum OperatorRole {
    /// Read: metrics, configuration, workers, decisions.
    Read,
    /// Read, and change: drain, reload, add and remove workers.
    Admin,
}

impl OperatorRole {
    /// The role with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Read, Self::Admin].into_iter().find(|role| role.name() == name)
    }

    /// The name of the role in files, tokens and the audit file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Admin => "admin",
        }
    }
}

impl KeyEntry {
    /// When the key stops being valid; `None` if never.
    pub fn expires_at(&self) -> Option<SystemTime> {
        self.expires.as_deref().and_then(time)
    }

    /// The hash of the key; `None` if the text is not a hash, which the checks of a file exclude.
    pub fn digest(&self) -> Option<[u8; 32]> {
        let mut digest = [0; 32];
        let digits = self.sha256.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(digest)
    }
}

/// A time in the form of RFC 3339; the time of day may be left out.
fn time(text: &str) -> Option<SystemTime> {
    let whole = || humantime::parse_rfc3339(text);
    let day = || humantime::parse_rfc3339(&format!("{text}T00:00:00Z"));
    whole().or_else(|_| day()).ok()
}

/// Reads and checks a file of keys.
///
/// # Errors
/// All mistakes in the file, each with its place; or that the file cannot be read. No message
/// contains any text of the file other than known names: a key may have been written into it.
pub fn load(path: &Path) -> Result<KeysFile, Problems> {
    let name = path.display().to_string();
    let text = file::read_from(open_regular(path), &name, &KEYS_PROFILE)?;
    parse(&name, &text)
}

/// Checks the text of a file of keys, which is called `name` in problems.
///
/// # Errors
/// All mistakes in the text, each with its place.
pub fn parse(name: &str, text: &str) -> Result<KeysFile, Problems> {
    let schema = schemars::schema_for!(KeysFile).to_value();
    Ok(file::parse(name, text, &schema, &KEYS_PROFILE, rules)?.value)
}

fn rules(root: &mut Node, report: &mut ProblemReport) {
    let mut seen = [HashMap::new(), HashMap::new()];
    let keys = root.get("keys").map(Node::items).unwrap_or_default();
    for (index, key) in keys.iter().enumerate() {
        for (name, seen) in ["id", "sha256"].into_iter().zip(&mut seen) {
            let Some(node) = key.get(name) else { continue };
            let Some(first) = node.text().and_then(|text| seen.insert(text, index)) else {
                continue;
            };
            let message = format!("`keys[{index}].{name}` is that of `keys[{first}]`, too");
            report.error(node.at, message, "give each key an entry of its own");
        }
        match (key.get("tenant"), key.get("role")) {
            (Some(_), None) | (None, Some(_)) => {}
            (Some(_), Some(role)) => {
                let message = format!("`keys[{index}]` has a `tenant` and a `role`");
                report.error(role.at, message, "make a key of its own for the admin listener");
            }
            (None, None) => {
                let message = format!("`keys[{index}]` has no `tenant`");
                report.error(key.at, message, "add `tenant: NAME`, or `role: admin | read`");
            }
        }
        for name in ["created", "expires"] {
            let Some(node) = key.get(name) else { continue };
            if node.text().is_some_and(|text| time(text).is_none()) {
                let message = format!("`keys[{index}].{name}` is not a time");
                report.error(node.at, message, "a day, or a time as `2027-01-31T12:00:00Z`");
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const HASH: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    fn problems(text: &str) -> String {
        parse("keys.yaml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_key_has_a_tenant_or_a_role_and_a_hash() {
        let file = format!(
            "keys:\n- {{ id: a, tenant: acme, sha256: {HASH}, expires: 2027-01-31 }}\n\
             - {{ id: b, role: admin, sha256: '{}', created: '2026-01-02T03:04:05Z' }}\n",
            HASH.replace('9', "8"),
        );
        let keys = parse("keys.yaml", &file).unwrap().keys;
        assert_eq!(keys[0].digest().unwrap()[..2], [0x9f, 0x86]);
        let expires = keys[0].expires_at().unwrap();
        assert_eq!(humantime::format_rfc3339(expires).to_string(), "2027-01-31T00:00:00Z");
        assert_eq!((keys[1].role, keys[1].expires_at()), (Some(OperatorRole::Admin), None));
    }

    #[test]
    fn mistakes_are_located_and_show_no_hash() {
        for (text, expected) in [
            ("", "empty"),
            ("keys: [ { id: a, sha256: HASH } ]", "no `tenant`"),
            ("keys: [ { id: a, tenant: t, role: read, sha256: HASH } ]", "a `tenant` and a `role`"),
            ("keys: [ { id: a, tenant: t, sha256: abc } ]", "sha256"),
            ("keys: [ { id: a, tenant: t, sha256: HASH, expires: soon } ]", "not a time"),
            (
                "keys: [ { id: a, tenant: t, sha256: HASH }, { id: b, tenant: t, sha256: HASH } ]",
                "keys[1].sha256",
            ),
            ("keys: [ { id: a, tenant: t, sha256: HASH, secret: x } ]", "unknown key"),
        ] {
            let told = problems(&text.replace("HASH", HASH));
            assert!(told.starts_with("keys.yaml:1:") && told.contains(expected), "{text}: {told}");
            assert!(!told.contains(HASH), "{told}");
        }
    }

    #[test]
    fn no_message_shows_a_key_that_was_written_in_place_of_its_hash() {
        for text in [
            "KEY",
            "KEY: acme",
            "keys: KEY",
            "keys: [ KEY ]",
            "keys: { KEY: acme }",
            "keys: [ { KEY: acme } ]",
            "keys: [ { id: a, tenant: t, sha256: KEY } ]",
            "keys: [ { id: a, tenant: t, sha256: [KEY] } ]",
            "keys: [ { id: a, tenant: t, key: KEY } ]",
            "keys: [ { id: a, role: KEY, sha256: HASH } ]",
            "keys: [ { id: a, tenant: t, expires: KEY, sha256: HASH } ]",
        ] {
            let told = problems(&text.replace("KEY", "sr-f00d").replace("HASH", HASH));
            assert!(!told.contains("f00d"), "{text}: {told}");
        }
    }
}
