//! The tokens by which shims authenticate.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::credentials::Workers;
use splitrail_config::model::{FleetConfig, Secret};

/// The file is read no more often than this, however many call.
const FRESH: Duration = Duration::from_secs(1);

/// The tokens that are accepted now: those in the configured files, each on a line of its own.
pub(super) struct Tokens {
    sources: Vec<Source>,
    read_at: Mutex<Instant>,
}

/// A file or variable with tokens, and the workers that they are for.
struct Source {
    /// Its key in the configuration.
    key: String,
    secret: Secret,
    workers: Workers,
    known: Mutex<Vec<String>>,
}

impl Tokens {
    /// Reads them for the first time; `None` if no tokens are configured.
    ///
    /// # Errors
    /// They cannot be had, or are none: with the key of the configuration.
    pub(super) fn open(config: &FleetConfig, now: Instant) -> Result<Option<Self>, String> {
        let shared =
            config.token.iter().map(|secret| ("fleet.token".to_owned(), secret, Workers::Any));
        let bound = config.tokens.iter().enumerate().map(|(place, token)| {
            let workers = Workers::Listed(token.workers.clone().into());
            (format!("fleet.tokens[{place}].token"), &token.token, workers)
        });
        let sources: Result<Vec<Source>, String> = shared
            .chain(bound)
            .map(|(key, secret, workers)| {
                let known = secret.resolve_lines().map_err(|error| format!("{key}: {error}"))?;
                Ok(Source { key, secret: secret.clone(), workers, known: Mutex::new(known) })
            })
            .collect();
        let sources = sources?;
        Ok((!sources.is_empty()).then(|| Self { sources, read_at: Mutex::new(now) }))
    }

    /// The workers that the value of an `authorization` header is for; `None` if it names no
    /// token that is accepted. How long that takes says nothing of any token but its length.
    pub(super) fn accept(
        &self,
        authorization: Option<&[u8]>,
        now: Instant,
    ) -> Option<Vec<Workers>> {
        const SCHEME: &[u8] = b"bearer ";
        self.look_again(now);
        let (scheme, given) = authorization.and_then(|value| value.split_at_checked(7))?;
        let mut accepted = Vec::new();
        for source in &self.sources {
            let mut is_one = false;
            for token in source.known.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                is_one |= same(given, token.as_bytes());
            }
            if is_one {
                accepted.push(source.workers.clone());
            }
        }
        (!accepted.is_empty() && scheme.eq_ignore_ascii_case(SCHEME)).then_some(accepted)
    }

    /// Reads the files again, if that was not done just now.
    fn look_again(&self, now: Instant) {
        let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(*read_at) < FRESH {
            return;
        }
        *read_at = now;
        for source in &self.sources {
            match source.secret.resolve_lines() {
                Ok(tokens) => {
                    *source.known.lock().unwrap_or_else(PoisonError::into_inner) = tokens;
                }
                // It may be in the middle of being exchanged.
                Err(error) => {
                    tracing::error!(%error, "{}: the earlier ones still hold", source.key);
                }
            }
        }
    }
}

/// Whether two texts are the same, looking at every byte wherever they differ.
pub(super) fn same(given: &[u8], known: &[u8]) -> bool {
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
    use splitrail_config::model::FleetToken;

    #[test]
    fn every_line_is_accepted_and_a_new_file_replaces_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "one-token\n\n  two-token \n").unwrap();
        let start = Instant::now();
        let token = Some(Secret::File { path: path.clone() });
        let config = FleetConfig { token, ..FleetConfig::default() };
        let tokens = Tokens::open(&config, start).unwrap().unwrap();
        let accepts = |token: &str, now| {
            tokens.accept(Some(format!("Bearer {token}").as_bytes()), now).is_some()
        };
        assert!(accepts("one-token", start) && accepts("two-token", start));
        for other in ["", "one-toke", "one-tokenX", "one-tokem", "one-token two-token"] {
            assert!(!accepts(other, start), "{other}");
        }
        assert!(tokens.accept(None, start).is_none());
        assert!(tokens.accept(Some(b"one-token"), start).is_none());
        assert!(tokens.accept(Some(b"Basic  one-token"), start).is_none());

        std::fs::write(&path, "two-token\nthree-token").unwrap();
        assert!(accepts("one-token", start), "not looked at again so soon");
        let later = start + FRESH;
        assert!(!accepts("one-token", later));
        assert!(accepts("two-token", later) && accepts("three-token", later));

        std::fs::remove_file(&path).unwrap();
        assert!(accepts("three-token", later + FRESH), "until there are others");
    }

    #[test]
    fn a_token_is_for_the_workers_of_every_entry_that_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            Secret::File { path }
        };
        let entry = |token, workers: &str| FleetToken { token, workers: vec![workers.to_owned()] };
        let config = FleetConfig {
            tokens: vec![entry(file("a", "one\nboth"), "p*"), entry(file("b", "two\nboth"), "d*")],
            ..FleetConfig::default()
        };
        let now = Instant::now();
        let tokens = Tokens::open(&config, now).unwrap().unwrap();
        let of = |text: &str| Workers::Listed([text.to_owned()].into());
        assert_eq!(tokens.accept(Some(b"Bearer one"), now), Some(vec![of("p*")]));
        assert_eq!(tokens.accept(Some(b"Bearer both"), now), Some(vec![of("p*"), of("d*")]));
        assert_eq!(tokens.accept(Some(b"Bearer three"), now), None);
        assert!(Tokens::open(&FleetConfig::default(), now).unwrap().is_none());
    }
}
