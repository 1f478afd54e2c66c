//! The token that authenticates a shim to routers.

use std::fmt;
use std::io::{self, Read as _};
use std::path::PathBuf;

use splitrail_settings::process::open_regular;
use tonic::metadata::{Ascii, MetadataValue};

/// Maximum number of bytes of a file of tokens that are read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Maximum length of a token in bytes.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// A bearer token. It is not shown in logs or debug output.
#[derive(Clone)]
pub enum Token {
    /// A file with the token in its first line that is not empty; the others are for routers. It is
    /// read again for each connection, so it can be replaced at any time.
    File(PathBuf),
    /// The same as a text.
    Text(String),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(_) => f.write_str("Text(..)"),
        }
    }
}

impl Token {
    /// Returns the value of the header `authorization`.
    ///
    /// # Errors
    /// If the file cannot be read, or does not contain a valid token.
    pub(super) async fn bearer(&self) -> io::Result<MetadataValue<Ascii>> {
        let text = match self {
            Self::Text(text) => text.clone(),
            Self::File(path) => {
                let path = path.clone();
                let read = tokio::task::spawn_blocking(move || {
                    io::read_to_string(open_regular(&path)?.take(FILE_BYTES_MAX))
                });
                read.await.map_err(io::Error::other)??
            }
        };
        let token = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        let is_token = !token.is_empty()
            && token.len() <= TOKEN_BYTES_MAX
            && token.bytes().all(|byte| byte.is_ascii_graphic());
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "it is not a bearer token");
        let value = is_token.then(|| format!("Bearer {token}")).ok_or_else(invalid)?;
        let mut value: MetadataValue<Ascii> = value.parse().map_err(|_| invalid())?;
        value.set_sensitive(true);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn of_several_tokens_a_shim_shows_the_first() {
        let text = "\n  new \r\nold\n";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        for token in [Token::File(file.path().to_owned()), Token::Text(text.to_owned())] {
            assert_eq!(token.bearer().await.unwrap(), "Bearer new");
        }
    }

    #[tokio::test]
    async fn the_token_file_is_read_for_each_connection_and_never_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let token = Token::File(file.path().to_owned());
        for secret in ["s3cret", "an0ther"] {
            std::fs::write(file.path(), format!("{secret}\n")).unwrap();
            let bearer = token.bearer().await.unwrap();
            assert_eq!(bearer.to_str().unwrap(), format!("Bearer {secret}"));
            assert!(!format!("{bearer:?}").contains(secret));
        }
        assert!(!format!("{:?}", Token::Text("s3cret".to_owned())).contains("s3cret"));
        for invalid in ["", " \n", "two words", "two words\nfit", "ünfit"] {
            assert!(Token::Text(invalid.to_owned()).bearer().await.is_err(), "{invalid:?}");
        }
    }
}
