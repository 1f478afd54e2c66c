//! The tokens by which shims authenticate.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::credentials::{TokenScope, Workers};
use splitrail_config::model::{FleetConfig, Secret};
use splitrail_settings::secret::is_same;

/// Minimum time between two reads of the files.
const READ_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// Maximum time that a shim waits for the files to be read.
const READ_MAX: Duration = Duration::from_secs(2);

/// The accepted tokens: those in the configured files, one on each line.
pub(super) struct ShimTokens {
    sources: Arc<[TokenSource]>,
    read_at: Mutex<Instant>,
}

/// A file or variable with tokens, and the workers that they are for.
struct TokenSource {
    /// Its key in the configuration.
    key: String,
    secret: Secret,
    scope: TokenScope,
    known: Mutex<Vec<String>>,
    /// Whether the file is being read.
    is_being_read: AtomicBool,
}

impl TokenSource {
    fn read_again(&self) {
        match self.secret.resolve_lines() {
            Ok(tokens) => *self.known.lock().unwrap_or_else(PoisonError::into_inner) = tokens,
            // The file may be in the middle of being replaced.
            Err(error) => {
                tracing::error!(%error, "{}: the previous tokens stay in use", self.key);
            }
        }
        self.is_being_read.store(false, Relaxed);
    }
}

impl ShimTokens {
    /// Reads the tokens for the first time; `None` if no tokens are configured.
    ///
    /// # Errors
    /// The tokens cannot be read, or a source has none. The message names the key in the
    /// configuration.
    pub(super) fn open(config: &FleetConfig, now: Instant) -> Result<Option<Self>, String> {
        let everything = TokenScope { workers: Workers::Any, models: None };
        let shared = config
            .token
            .iter()
            .map(|secret| ("fleet.token".to_owned(), secret, everything.clone()));
        let bound = config.tokens.iter().enumerate().map(|(place, token)| {
            let workers = Workers::Listed(token.workers.clone().into());
            let models = token.models.as_deref().map(Arc::from);
            let scope = TokenScope { workers, models };
            (format!("fleet.tokens[{place}].token"), &token.token, scope)
        });
        let sources: Result<Vec<TokenSource>, String> = shared
            .chain(bound)
            .map(|(key, secret, scope)| {
                let known = secret.resolve_lines().map_err(|error| format!("{key}: {error}"))?;
                let (secret, known) = (secret.clone(), Mutex::new(known));
                Ok(TokenSource { key, secret, scope, known, is_being_read: AtomicBool::new(false) })
            })
            .collect();
        let sources = sources?;
        Ok((!sources.is_empty())
            .then(|| Self { sources: sources.into(), read_at: Mutex::new(now) }))
    }

    /// The workers that the token in an `authorization` header is for; `None` if the token is not
    /// accepted. The duration depends on the length of a token, not on its content.
    pub(super) async fn accept(
        &self,
        authorization: Option<&[u8]>,
        now: Instant,
    ) -> Option<Vec<TokenScope>> {
        const SCHEME: &[u8] = b"bearer ";
        self.read_again(now).await;
        let (scheme, given) = authorization.and_then(|value| value.split_at_checked(7))?;
        let mut accepted = Vec::new();
        for source in &*self.sources {
            let mut is_one = false;
            for token in source.known.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                is_one |= is_same(given, token.as_bytes());
            }
            if is_one {
                accepted.push(source.scope.clone());
            }
        }
        (!accepted.is_empty() && scheme.eq_ignore_ascii_case(SCHEME)).then_some(accepted)
    }

    /// Reads the files again, at most once per `READ_INTERVAL_MIN`. Other calls do not wait for
    /// that.
    async fn read_again(&self, now: Instant) {
        {
            let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
            if now.saturating_duration_since(*read_at) < READ_INTERVAL_MIN {
                return;
            }
            *read_at = now;
        }
        // A file whose read does not end keeps no other from being read.
        let is_free = |place: &usize| !self.sources[*place].is_being_read.swap(true, Relaxed);
        let read = |place: usize| {
            let sources = Arc::clone(&self.sources);
            (place, tokio::task::spawn_blocking(move || sources[place].read_again()))
        };
        let reads: Vec<_> = (0..self.sources.len()).filter(is_free).map(read).collect();
        let until = tokio::time::Instant::now() + READ_MAX;
        for (place, read) in reads {
            // The reader has ended, with the runtime or by a panic, which is logged.
            if tokio::time::timeout_at(until, read).await.is_err() {
                let key = &self.sources[place].key;
                tracing::error!("{key}: reading the file does not end: its tokens stay in use");
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use splitrail_config::model::FleetToken;

    #[tokio::test]
    async fn each_line_of_the_token_file_is_accepted_and_a_new_file_replaces_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "one-token\n\n  two-token \n").unwrap();
        let start = Instant::now();
        let token = Some(Secret::File { path: path.clone() });
        let config = FleetConfig { token, ..FleetConfig::default() };
        let tokens = ShimTokens::open(&config, start).unwrap().unwrap();
        let accepts = async |token: &str, now| {
            tokens.accept(Some(format!("Bearer {token}").as_bytes()), now).await.is_some()
        };
        assert!(accepts("one-token", start).await && accepts("two-token", start).await);
        for other in ["", "one-toke", "one-tokenX", "one-tokem", "one-token two-token"] {
            assert!(!accepts(other, start).await, "{other}");
        }
        assert!(tokens.accept(None, start).await.is_none());
        assert!(tokens.accept(Some(b"one-token"), start).await.is_none());
        assert!(tokens.accept(Some(b"Basic  one-token"), start).await.is_none());

        std::fs::write(&path, "two-token\nthree-token").unwrap();
        assert!(accepts("one-token", start).await, "the file is not read again so soon");
        let later = start + READ_INTERVAL_MIN;
        assert!(!accepts("one-token", later).await);
        assert!(accepts("two-token", later).await && accepts("three-token", later).await);

        std::fs::remove_file(&path).unwrap();
        assert!(
            accepts("three-token", later + READ_INTERVAL_MIN).await,
            "the previous tokens stay until there are others"
        );
    }

    #[tokio::test]
    async fn a_token_is_for_the_workers_of_every_entry_that_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            Secret::File { path }
        };
        let entry = |token, workers: &str| FleetToken {
            token,
            workers: vec![workers.to_owned()],
            models: None,
        };
        let config = FleetConfig {
            tokens: vec![entry(file("a", "one\nboth"), "p*"), entry(file("b", "two\nboth"), "d*")],
            ..FleetConfig::default()
        };
        let now = Instant::now();
        let tokens = ShimTokens::open(&config, now).unwrap().unwrap();
        let of = |text: &str| TokenScope {
            workers: Workers::Listed([text.to_owned()].into()),
            models: None,
        };
        assert_eq!(tokens.accept(Some(b"Bearer one"), now).await, Some(vec![of("p*")]));
        assert_eq!(tokens.accept(Some(b"Bearer both"), now).await, Some(vec![of("p*"), of("d*")]));
        assert_eq!(tokens.accept(Some(b"Bearer three"), now).await, None);
        assert!(ShimTokens::open(&FleetConfig::default(), now).unwrap().is_none());
    }
}
