//! What becomes of a key set that was read, or could not be: the keys in use, metrics and logs.

use std::fmt::Display;
use std::sync::Arc;

use prometheus::{Gauge, IntCounter, IntGauge};
use splitrail_config::jwks::KeySet;
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::clock::unix_ms;

use crate::jwt::keys::CurrentKeys;

/// The keys of an issuer, and what is counted of their source.
pub(super) struct IssuerKeys {
    pub(super) current: Arc<CurrentKeys>,
    issuer: String,
    changed: IntCounter,
    unchanged: IntCounter,
    failed: IntCounter,
    last_success: Gauge,
    usable_keys: IntGauge,
    failure_log: LogThrottle,
}

impl IssuerKeys {
    pub(super) fn new(issuer: &str, current: Arc<CurrentKeys>, metrics: &Metrics) -> Self {
        let counter = |result| metrics.jwks_refreshes.with_label_values(&[issuer, result]);
        Self {
            current,
            issuer: issuer.to_owned(),
            changed: counter("changed"),
            unchanged: counter("unchanged"),
            failed: counter("failed"),
            last_success: metrics.jwks_last_success.with_label_values(&[issuer]),
            usable_keys: metrics.jwks_keys.with_label_values(&[issuer]),
            failure_log: LogThrottle::default(),
        }
    }

    /// Uses the keys of this text, if there is one and it is usable; otherwise keeps the present
    /// keys. Returns whether the text is usable.
    pub(super) fn accept(&self, text: Result<Vec<u8>, impl Display>) -> bool {
        let text = text.map_err(|error| error.to_string());
        let set = text.and_then(|text| KeySet::parse(&text).map_err(|error| error.to_string()));
        match set {
            Ok(set) => self.use_set(set),
            Err(error) => {
                self.fail(&error);
                return false;
            }
        }
        true
    }

    /// Notes that the source still has the keys that are in use.
    pub(super) fn confirm(&self) {
        self.last_success.set(unix_ms() as f64 / 1e3);
    }

    fn use_set(&self, set: KeySet) {
        let (usable, unusable) = (set.keys.len(), set.unusable);
        self.usable_keys.set(usable as i64);
        self.confirm();
        if self.current.replace(set) {
            self.changed.inc();
            tracing::info!(issuer = self.issuer, usable, unusable, "the issuer has new keys");
        } else {
            self.unchanged.inc();
        }
    }

    fn fail(&self, error: &str) {
        self.failed.inc();
        if !self.failure_log.may_log() {
            return;
        }
        let issuer = &self.issuer;
        if self.current.is_empty() {
            tracing::error!(
                issuer,
                error,
                "the keys of the issuer cannot be read; until they can, its tokens are refused"
            );
        } else {
            tracing::error!(
                issuer,
                error,
                "the keys of the issuer cannot be read; the earlier keys stay in use"
            );
        }
    }
}
