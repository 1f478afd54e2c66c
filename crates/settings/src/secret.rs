//! Secrets: where they are stored, and a type that does not print them.

use std::fmt;
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};

use http::HeaderValue;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::process::read_bounded;

/// Maximum size of a secret in bytes; larger files are refused.
const SECRET_MAX_BYTES: u64 = 64 << 10;

/// A reference to a secret, which is never written inline.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Secret {
    /// The content of a file, without surrounding white space.
    File {
        /// The path of the file.
        path: PathBuf,
    },
    /// The value of an environment variable.
    Env {
        /// The name of the variable.
        name: String,
    },
}

impl Secret {
    /// Joins a relative path of a file with the folder of the configuration file.
    pub fn anchor(&mut self, base_dir: &Path) {
        if let Self::File { path } = self {
            *path = base_dir.join(&*path);
        }
    }
}

/// Why a secret cannot be resolved. Never contains any part of it.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// Its file cannot be read.
    #[error("the secret's file cannot be read: {0}")]
    File(#[source] io::Error),
    /// Its environment variable is not set, or is not UTF-8.
    #[error("the secret's environment variable is not set")]
    Env,
    /// Its file is larger than any credential.
    #[error("the secret's file is larger than {SECRET_MAX_BYTES} bytes")]
    TooLarge,
    /// The secret consists of white space only.
    #[error("the secret is empty")]
    Empty,
    /// The secret contains a space, a line break or another character that a bearer token cannot have.
    #[error("the secret holds a character that no header can carry")]
    Characters,
}

/// A secret's value. Printing it shows `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct ResolvedSecret {
    text: String,
    bearer: HeaderValue,
}

impl ResolvedSecret {
    fn new(text: &str) -> Result<Self, SecretError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(SecretError::Empty);
        }
        if !text.chars().all(|c| c.is_ascii_graphic()) {
            return Err(SecretError::Characters);
        }
        let mut bearer = HeaderValue::from_str(&format!("Bearer {text}"))
            .map_err(|_| SecretError::Characters)?;
        bearer.set_sensitive(true);
        Ok(Self { text: text.to_owned(), bearer })
    }

    /// The secret itself: visible ASCII, at least one character. Must never be logged.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// The value of an `authorization` header, marked as sensitive.
    #[must_use]
    pub fn bearer(&self) -> HeaderValue {
        self.bearer.clone()
    }
}

impl fmt::Debug for ResolvedSecret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("***")
    }
}

impl Secret {
    /// Reads the secret, without the white space around it.
    ///
    /// # Errors
    /// The secret is missing, not readable, empty, or cannot be part of a header.
    pub fn resolve(&self) -> Result<ResolvedSecret, SecretError> {
        ResolvedSecret::new(&self.text()?)
    }

    /// Reads the secret as the whole value of a header, which may contain spaces. The value is marked
    /// as sensitive.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_header(&self) -> Result<HeaderValue, SecretError> {
        let text = self.text()?;
        let text = text.trim();
        if text.is_empty() {
            return Err(SecretError::Empty);
        }
        if !text.chars().all(|c| c == ' ' || c.is_ascii_graphic()) {
            return Err(SecretError::Characters);
        }
        let mut value = HeaderValue::from_str(text).map_err(|_| SecretError::Characters)?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Reads the secrets of a file or variable with one secret per line, without empty lines and
    /// without the white space around each. The result has at least one secret.
    ///
    /// # Errors
    /// The file or variable is missing, not readable or has no secret, or one of the secrets cannot
    /// be part of a header.
    pub fn resolve_lines(&self) -> Result<Vec<String>, SecretError> {
        let text = self.text()?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let values: Vec<String> = lines.map(str::to_owned).collect();
        if values.is_empty() {
            return Err(SecretError::Empty);
        }
        if !values.iter().all(|value| value.chars().all(|c| c.is_ascii_graphic())) {
            return Err(SecretError::Characters);
        }
        Ok(values)
    }

    fn text(&self) -> Result<String, SecretError> {
        match self {
            // No environment variable can have such a name.
            Self::Env { name } if name.is_empty() || name.contains(['=', '\0']) => {
                Err(SecretError::Env)
            }
            Self::Env { name } => std::env::var(name).map_err(|_| SecretError::Env),
            Self::File { path } => {
                let bytes =
                    read_bounded(path, SECRET_MAX_BYTES).map_err(|error| match error.kind() {
                        io::ErrorKind::FileTooLarge => SecretError::TooLarge,
                        _ => SecretError::File(error),
                    })?;
                String::from_utf8(bytes).map_err(|_| SecretError::Characters)
            }
        }
    }
}

/// Whether two secrets are equal, in a time that does not depend on where they differ.
pub fn is_same(given: &[u8], known: &[u8]) -> bool {
    let mut differs = u8::from(given.len() != known.len());
    for (given, known) in given.iter().zip(known) {
        differs = black_box(differs | (given ^ known));
    }
    black_box(differs) == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_values_or_with_a_space_in_one_has_no_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let read = || Secret::File { path: path.clone() }.resolve_lines();
        assert!(matches!(read(), Err(SecretError::File(_))));
        for (text, wrong) in [("\n \n", "empty"), ("two words\n", "character")] {
            std::fs::write(&path, text).unwrap();
            assert!(read().unwrap_err().to_string().contains(wrong), "{text:?}");
        }
    }
}
