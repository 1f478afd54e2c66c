//! Secrets: where they come from, and a type that does not print them.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use http::HeaderValue;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A credential is no longer than this; a larger file is not one.
const SECRET_MAX_BYTES: u64 = 64 << 10;

/// A secret, by reference: never inline.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Secret {
    /// The trimmed content of a file.
    File {
        /// Its path.
        path: PathBuf,
    },
    /// An environment variable.
    Env {
        /// Its name.
        name: String,
    },
}

/// Why a secret cannot be had. Never holds any part of it.
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
    /// There is nothing but white space in it.
    #[error("the secret is empty")]
    Empty,
    /// It holds a space, a line break or another character that no bearer token has.
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

    /// The secret itself: visible ASCII, at least one character. Never log it.
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
    /// Fetches the secret's value, without the white space around it.
    ///
    /// # Errors
    /// It is not there, not readable, empty, or no header could carry it.
    pub fn resolve(&self) -> Result<ResolvedSecret, SecretError> {
        match self {
            Self::Env { name } => {
                // Asking the system for such a name is an error of its own kind.
                if name.is_empty() || name.contains(['=', '\0']) {
                    return Err(SecretError::Env);
                }
                ResolvedSecret::new(&std::env::var(name).map_err(|_| SecretError::Env)?)
            }
            Self::File { path } => {
                let mut bytes = Vec::new();
                File::open(path)
                    .and_then(|file| file.take(SECRET_MAX_BYTES + 1).read_to_end(&mut bytes))
                    .map_err(SecretError::File)?;
                if bytes.len() as u64 > SECRET_MAX_BYTES {
                    return Err(SecretError::TooLarge);
                }
                let text = std::str::from_utf8(&bytes).map_err(|_| SecretError::Characters)?;
                ResolvedSecret::new(text)
            }
        }
    }
}
