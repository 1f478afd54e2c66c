//! The tokens that side-cars prove themselves with.

use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::SecretError;
use crate::config::model::Secret;

/// A file of tokens is no longer than this.
const FILE_MAX_BYTES: u64 = 64 << 10;
/// The file is read no more often than this, however many call.
const FRESH: Duration = Duration::from_secs(1);

/// The tokens that are accepted now: those in the configured file, each on a line of its own.
pub struct Tokens {
    source: Secret,
    known: Mutex<(Instant, Vec<String>)>,
}

impl Tokens {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// They cannot be had, or are none.
    pub fn open(source: Secret, now: Instant) -> Result<Self, SecretError> {
        let known = Mutex::new((now, Self::read(&source)?));
        Ok(Self { source, known })
    }

    /// What a file or variable has on its lines.
    ///
    /// # Errors
    /// It cannot be had; or a line holds what no header can carry; or there is none.
    pub fn read(source: &Secret) -> Result<Vec<String>, SecretError> {
        let text = match source {
            Secret::Env { name } if name.is_empty() || name.contains(['=', '\0']) => {
                return Err(SecretError::Env);
            }
            Secret::Env { name } => std::env::var(name).map_err(|_| SecretError::Env)?,
            Secret::File { path } => {
                let mut bytes = Vec::new();
                File::open(path)
                    .and_then(|file| file.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes))
                    .map_err(SecretError::File)?;
                if bytes.len() as u64 > FILE_MAX_BYTES {
                    return Err(SecretError::TooLarge);
                }
                String::from_utf8(bytes).map_err(|_| SecretError::Characters)?
            }
        };
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let tokens: Vec<String> = lines.map(str::to_owned).collect();
        if tokens.is_empty() {
            return Err(SecretError::Empty);
        }
        if !tokens.iter().all(|token| token.chars().all(|c| c.is_ascii_graphic())) {
            return Err(SecretError::Characters);
        }
        Ok(tokens)
    }

    /// Whether the value of an `authorization` header names one of them. How long it takes
    /// says nothing of any but its length.
    pub fn accept(&self, authorization: Option<&[u8]>, now: Instant) -> bool {
        const SCHEME: &[u8] = b"bearer ";
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(known.0) >= FRESH {
            known.0 = now;
            match Self::read(&self.source) {
                Ok(tokens) => known.1 = tokens,
                // It may be in the middle of being exchanged.
                Err(error) => tracing::error!(%error, "fleet.token: the earlier ones still hold"),
            }
        }
        let Some((scheme, given)) = authorization.and_then(|value| value.split_at_checked(7))
        else {
            return false;
        };
        let mut accepted = false;
        for token in &known.1 {
            accepted |= same(given, token.as_bytes());
        }
        accepted & scheme.eq_ignore_ascii_case(SCHEME)
    }
}

/// Whether two texts are the same, looking at every byte wherever they differ.
fn same(given: &[u8], known: &[u8]) -> bool {
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
    fn every_line_is_accepted_and_a_new_file_replaces_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "one-token\n\n  two-token \n").unwrap();
        let start = Instant::now();
        let tokens = Tokens::open(Secret::File { path: path.clone() }, start).unwrap();
        let accepts =
            |token: &str, now| tokens.accept(Some(format!("Bearer {token}").as_bytes()), now);
        assert!(accepts("one-token", start) && accepts("two-token", start));
        for other in ["", "one-toke", "one-tokenX", "one-tokem", "one-token two-token"] {
            assert!(!accepts(other, start), "{other}");
        }
        assert!(!tokens.accept(None, start));
        assert!(!tokens.accept(Some(b"one-token"), start));
        assert!(!tokens.accept(Some(b"Basic  one-token"), start));

        std::fs::write(&path, "two-token\nthree-token").unwrap();
        assert!(accepts("one-token", start), "not looked at again so soon");
        let later = start + FRESH;
        assert!(!accepts("one-token", later));
        assert!(accepts("two-token", later) && accepts("three-token", later));

        std::fs::remove_file(&path).unwrap();
        assert!(accepts("three-token", later + FRESH), "until there are others");
    }

    #[test]
    fn nothing_is_no_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let read = || Tokens::read(&Secret::File { path: path.clone() });
        assert!(matches!(read(), Err(SecretError::File(_))));
        for (text, wrong) in [("\n \n", "empty"), ("two words\n", "character")] {
            std::fs::write(&path, text).unwrap();
            assert!(read().unwrap_err().to_string().contains(wrong), "{text:?}");
        }
    }
}
