//! An issuer of JSON Web Tokens, as the configuration names it.

use std::sync::{Mutex, PoisonError};

use splitrail_config::JwtAuth;
use splitrail_config::jwks::BadJwksUrl;
use splitrail_telemetry::{Metrics, TaskName, restart_on_panic};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::jwt::{Claims, JwksSource, JwtRefusal, Verifier};
use crate::refusal::Refusal;

/// The part of a configuration that the verification of tokens needs.
fn verified(auth: &JwtAuth) -> JwtAuth {
    JwtAuth { tenants: None, ..auth.clone() }
}

/// An issuer of tokens. A reload that does not change its configuration keeps it, with its keys.
/// Dropping it ends the task that keeps the keys current.
pub(crate) struct Issuer {
    auth: JwtAuth,
    verifier: Verifier,
    /// The source of the keys, until its task is started.
    source: Mutex<Option<JwksSource>>,
    stop: CancellationToken,
    _stops: DropGuard,
}

impl Issuer {
    /// An issuer whose keys are not fetched yet.
    ///
    /// # Errors
    /// The URL of the keys cannot be used.
    pub(crate) fn new(auth: &JwtAuth, metrics: &Metrics) -> Result<Self, BadJwksUrl> {
        let source = JwksSource::new(auth, metrics)?;
        let stop = CancellationToken::new();
        Ok(Self {
            auth: verified(auth),
            verifier: source.verifier(),
            source: Mutex::new(Some(source)),
            _stops: stop.clone().drop_guard(),
            stop,
        })
    }

    /// The name of the issuer, as its tokens state it.
    pub(crate) fn name(&self) -> &str {
        &self.auth.issuer
    }

    /// Whether keys of the issuer have been read. Without them, each of its tokens is refused.
    pub(crate) fn has_keys(&self) -> bool {
        self.verifier.has_keys()
    }

    /// Whether the issuer's tokens are verified with this configuration.
    pub(crate) fn is_configured_as(&self, auth: &JwtAuth) -> bool {
        self.auth == verified(auth)
    }

    /// The claims of a token; `None` if the token is of another issuer.
    pub(crate) fn claims(&self, token: &str, now_unix_s: u64) -> Option<Result<Claims, Refusal>> {
        match self.verifier.verify(token, now_unix_s) {
            Ok(claims) => Some(Ok(claims)),
            Err(JwtRefusal::Issuer) => None,
            Err(JwtRefusal::Expired) => Some(Err(Refusal::Expired)),
            Err(JwtRefusal::NoTenant) => Some(Err(Refusal::NoTenant)),
            Err(refusal) => {
                // Clients are not told, and the metric has one reason for all of these.
                tracing::debug!(reason = %refusal, "a JSON Web Token is refused");
                Some(Err(Refusal::Unknown))
            }
        }
    }

    /// The task that keeps the keys current, also after a panic; `None` after the first call.
    pub(crate) fn take_task(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let source = self.source.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let stop = self.stop.clone();
        let issuer = Some(self.name().to_owned());
        let name = TaskName { source: issuer, ..TaskName::new("keys of an issuer of tokens") };
        Some(restart_on_panic(name, move || source.clone().run(stop.clone())))
    }
}
