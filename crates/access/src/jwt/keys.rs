//! The current keys of an issuer, and the check of signatures.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use splitrail_config::jwks::{KeySet, PublicKey};
use splitrail_settings::log_throttle::LogThrottle;
use tokio::sync::Notify;

use super::JwtRefusal;
use super::remembered::RememberedTokens;
use super::token::Algorithm;

/// Maximum number of keys with which one token is checked. More than one key is checked if keys
/// share a name, or if the token does not name its key.
const CANDIDATES_MAX: usize = 4;

/// A key set, with the tokens that were verified with it. A token is forgotten with its keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    set: KeySet,
    pub(super) remembered: RememberedTokens,
}

impl Keys {
    /// The keys with which a token can be signed: those with the name and the algorithm of the
    /// token's header, or, if the header has no name, those with the algorithm.
    ///
    /// # Errors
    /// [`JwtRefusal::UnknownKey`], or [`JwtRefusal::Algorithm`] if the key has another algorithm.
    pub(super) fn find(
        &self,
        algorithm: Algorithm,
        key_id: Option<&str>,
    ) -> Result<impl Iterator<Item = &PublicKey>, JwtRefusal> {
        let named = self.set.keys.iter();
        let mut named = named.filter(move |key| key_id.is_none() || key.id.as_deref() == key_id);
        let usable = named.clone().filter(move |key| algorithm_of(&key.key) == algorithm);
        if usable.clone().next().is_none() {
            let is_known = key_id.is_some() && named.next().is_some();
            return Err(if is_known { JwtRefusal::Algorithm } else { JwtRefusal::UnknownKey });
        }
        Ok(usable.take(CANDIDATES_MAX).map(|key| &key.key))
    }
}

fn algorithm_of(key: &PublicKey) -> Algorithm {
    match key {
        PublicKey::Rsa { .. } => Algorithm::Rs256,
        PublicKey::P256(_) => Algorithm::Es256,
        PublicKey::Ed25519(_) => Algorithm::Ed25519,
    }
}

/// Whether the owner of `key` has signed the text, with the algorithm of the key.
pub(super) fn has_signed(key: &PublicKey, signed: &[u8], signature: &[u8]) -> bool {
    let checked = match key {
        PublicKey::Rsa { modulus, exponent } => RsaPublicKeyComponents { n: modulus, e: exponent }
            .verify(&RSA_PKCS1_2048_8192_SHA256, signed, signature),
        PublicKey::P256(point) => {
            UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(signed, signature)
        }
        PublicKey::Ed25519(key) => UnparsedPublicKey::new(&ED25519, key).verify(signed, signature),
    };
    checked.is_ok()
}

/// The keys that are in use now, and the signal that newer ones are needed.
#[derive(Debug)]
pub(super) struct CurrentKeys {
    issuer: String,
    keys: ArcSwap<Keys>,
    refresh: Notify,
    no_keys_log: LogThrottle,
}

impl CurrentKeys {
    pub(super) fn new(issuer: &str) -> Self {
        Self {
            issuer: issuer.to_owned(),
            keys: ArcSwap::default(),
            refresh: Notify::new(),
            no_keys_log: LogThrottle::default(),
        }
    }

    pub(super) fn load(&self) -> Guard<Arc<Keys>> {
        self.keys.load()
    }

    /// Whether there have never been keys.
    pub(super) fn is_empty(&self) -> bool {
        self.load().set.keys.is_empty()
    }

    /// Uses `set` from now on. Returns whether the keys differ from the present ones; if not,
    /// nothing changes.
    pub(super) fn replace(&self, set: KeySet) -> bool {
        let differs = self.load().set != set;
        if differs {
            self.keys.store(Arc::new(Keys { set, remembered: RememberedTokens::default() }));
        }
        differs
    }

    /// Asks for newer keys. Any number of calls counts as one until the next
    /// [`CurrentKeys::refresh_wanted`].
    pub(super) fn ask_for_refresh(&self) {
        self.refresh.notify_one();
        if self.is_empty() && self.no_keys_log.may_log() {
            let issuer = &self.issuer;
            tracing::warn!(issuer, "tokens are refused: no keys of their issuer were read yet");
        }
    }

    /// Waits until newer keys are asked for.
    pub(super) async fn refresh_wanted(&self) {
        self.refresh.notified().await;
    }
}
