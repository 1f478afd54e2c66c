//! Keeps the keys of an issuer current: from a file that is read when it changes, or from a URL that
//! is fetched at intervals and when a token names an unknown key.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use splitrail_config::JwtAuth;
use splitrail_config::jwks::{BadJwksUrl, JwksUrl};
use splitrail_telemetry::Metrics;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

mod file;
mod outcome;

use super::Verifier;
use super::claims::ClaimRules;
use super::fetch::Fetcher;
use super::keys::CurrentKeys;
use file::KeyFile;
use outcome::IssuerKeys;

/// How often keys may be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Time between two looks at a file.
    pub(super) file_interval: Duration,
    /// Minimum time between the starts of two fetches, whatever clients send.
    pub(super) fetch_interval_min: Duration,
    /// Maximum duration of a fetch.
    pub(super) fetch_timeout: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            file_interval: Duration::from_secs(1),
            fetch_interval_min: Duration::from_secs(10),
            fetch_timeout: Duration::from_secs(10),
        }
    }
}

/// Maximum number of times that the pause after failed fetches doubles.
const DOUBLINGS_MAX: u32 = 5;

impl Pace {
    /// The time between the starts of two fetches that no token asked for, after this many failures
    /// in a row.
    fn pause(&self, refresh_interval: Duration, failures: u32) -> Duration {
        match failures.checked_sub(1) {
            None => refresh_interval,
            Some(more) => {
                let pause = self.fetch_interval_min * (1 << more.min(DOUBLINGS_MAX));
                pause.min(refresh_interval)
            }
        }
    }
}

/// Reads the keys of one issuer. If they cannot be read, those that were read before stay in use.
/// A clone reads the same keys, for the same verifiers.
#[derive(Clone)]
pub struct JwksSource {
    place: Place,
    keys: Arc<IssuerKeys>,
    rules: Arc<ClaimRules>,
}

#[derive(Clone)]
enum Place {
    File(KeyFile),
    Url(Fetcher, Duration),
}

impl JwksSource {
    /// The source of the configured keys. A file is read at once; a URL is fetched when the source
    /// runs. Keys that cannot be read are logged, not an error: they may be there later.
    ///
    /// # Errors
    /// If `jwks` is a URL that cannot be used.
    pub fn new(auth: &JwtAuth, metrics: &Metrics) -> Result<Self, BadJwksUrl> {
        let current = Arc::new(CurrentKeys::new(&auth.issuer));
        let keys = Arc::new(IssuerKeys::new(&auth.issuer, current, metrics));
        let place = match auth.jwks_file() {
            Some(path) => {
                let mut file = KeyFile::new(path);
                file.read_now(&keys);
                Place::File(file)
            }
            None => {
                let (url, ca) = (JwksUrl::parse(&auth.jwks)?, auth.jwks_ca.clone());
                Place::Url(Fetcher { url, ca }, auth.refresh_interval)
            }
        };
        Ok(Self { place, keys, rules: Arc::new(ClaimRules::new(auth)) })
    }

    /// A verifier that uses the keys which this source has read last.
    #[must_use]
    pub fn verifier(&self) -> Verifier {
        Verifier { rules: Arc::clone(&self.rules), keys: Arc::clone(&self.keys.current) }
    }

    /// Keeps the keys current until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        self.run_at(Pace::default(), stop).await;
    }

    pub(super) async fn run_at(self, pace: Pace, stop: CancellationToken) {
        let Self { place, keys, .. } = self;
        let following = async {
            match place {
                Place::File(file) => follow_file(file, &keys, pace).await,
                Place::Url(fetcher, interval) => follow_url(&fetcher, interval, &keys, pace).await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = following => {}
        }
    }
}

async fn follow_file(mut file: KeyFile, keys: &IssuerKeys, pace: Pace) {
    loop {
        sleep(pace.file_interval).await;
        file.read(keys).await;
    }
}

async fn follow_url(fetcher: &Fetcher, interval: Duration, keys: &IssuerKeys, pace: Pace) {
    let mut failures = 0_u32;
    loop {
        // This fetch answers all tokens that have asked for newer keys so far.
        tokio::select! {
            biased;
            () = keys.current.refresh_wanted() => {}
            () = ready(()) => {}
        }
        let start = Instant::now();
        let is_read = keys.accept(fetcher.fetch(pace.fetch_timeout).await);
        failures = if is_read { 0 } else { failures.saturating_add(1) };
        let asked = async {
            keys.current.refresh_wanted().await;
            sleep_until(start + pace.fetch_interval_min).await;
        };
        tokio::select! {
            () = asked => {}
            () = sleep_until(start + pace.pause(interval, failures)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_followed_by_longer_pauses_up_to_the_refresh_interval() {
        let seconds = |interval, failures| {
            Pace::default().pause(Duration::from_secs(interval), failures).as_secs()
        };
        let pauses: Vec<_> = (0..8).map(|failures| seconds(3600, failures)).collect();
        assert_eq!(pauses, [3600, 10, 20, 40, 80, 160, 320, 320]);
        assert_eq!(seconds(30, 5), 30);
        assert_eq!(seconds(30, u32::MAX), 30);
    }
}
