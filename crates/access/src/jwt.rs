//! JSON Web Tokens (RFC 7519) as credentials: signed tokens in the compact form (RFC 7515), with
//! RS256, ES256 or EdDSA.
//!
//! A [`Verifier`] checks tokens against the current keys of the issuer, which a [`JwksSource`] reads
//! from a file or a URL. `ring` verifies signatures: it is part of every build through rustls, whereas
//! the crate `jsonwebtoken` (11.1) works only with a second implementation of cryptography. The
//! advice of RFC 8725 is followed:
//!
//! - The key determines the algorithm, and the header of the token must name the same. There is no
//!   code for `none` and for HMAC.
//! - Extensions that must be understood (`crit`) are refused, and so are tokens for other purposes
//!   (`typ`). Keys inside a token (`jwk`, `jku`, `x5c`) are ignored.
//! - A name that occurs twice in the header or among the claims is refused, since readers differ in
//!   which value they use.

mod claims;
mod fetch;
mod keys;
mod remembered;
mod source;
mod token;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::sync::Arc;

use ring::digest::{SHA256, digest};
use splitrail_config::JwtAuth;
use splitrail_config::jwks::{JwksError, KeySet};

use claims::ClaimRules;
use keys::{CurrentKeys, has_signed};
use token::Token;

pub use claims::{Claims, LEEWAY_S};
pub use source::JwksSource;
pub use token::TOKEN_MAX_BYTES;

/// Why a token is refused. A refusal contains nothing of the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum JwtRefusal {
    /// The text is not a signed token in the compact form within the bounds, a member is missing or
    /// has a wrong type, or the token is for another purpose.
    #[error("the token is not a valid JSON Web Token")]
    Malformed,
    /// The algorithm is not supported, or is not that of the key.
    #[error("the token is signed with an algorithm that is not accepted")]
    Algorithm,
    /// The issuer has no such key, as far as is known.
    #[error("the token is signed with an unknown key")]
    UnknownKey,
    /// The signature is not that of the key.
    #[error("the signature of the token is wrong")]
    Signature,
    /// The time is after `exp`.
    #[error("the token has expired")]
    Expired,
    /// The time is before `nbf` or `iat`.
    #[error("the token is not valid yet")]
    NotYetValid,
    /// `iss` is not the configured issuer.
    #[error("the token is from another issuer")]
    Issuer,
    /// `aud` does not contain the configured audience.
    #[error("the token is for another audience")]
    Audience,
    /// The claim that names the tenant is absent, not a text, empty, or too long.
    #[error("the token names no tenant")]
    NoTenant,
}

/// Checks the tokens of one issuer. Copies share the keys.
#[derive(Clone, Debug)]
pub struct Verifier {
    rules: Arc<ClaimRules>,
    keys: Arc<CurrentKeys>,
}

impl Verifier {
    /// A verifier whose keys never change. `jwks` is the text of a key set.
    ///
    /// # Errors
    /// If the text is not a key set with a usable key.
    pub fn with_keys(auth: &JwtAuth, jwks: &[u8]) -> Result<Self, JwksError> {
        let keys = CurrentKeys::new(&auth.issuer);
        keys.replace(KeySet::parse(jwks)?);
        Ok(Self { rules: Arc::new(ClaimRules::new(auth)), keys: Arc::new(keys) })
    }

    /// Whether keys of the issuer have been read.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The claims of a token, if the token is valid at `now_unix_s`. The result depends on the
    /// token, the time and the current keys only. A token of an unknown key asks the source for
    /// newer keys.
    ///
    /// The issuer is checked before the keys are searched, so that tokens of another configured
    /// issuer do not cause a search for new keys.
    ///
    /// # Errors
    /// Why the token is refused.
    pub fn verify(&self, token: &str, now_unix_s: u64) -> Result<Claims, JwtRefusal> {
        if token.len() > TOKEN_MAX_BYTES {
            return Err(JwtRefusal::Malformed);
        }
        let keys = self.keys.load();
        let token_digest = digest(&SHA256, token.as_bytes());
        if let Some(result) = keys.remembered.claims_at(token_digest.as_ref(), now_unix_s) {
            return result;
        }
        let token = Token::parse(token)?;
        self.rules.check_issuer(&token.claims)?;
        let key_id = token.header.key_id.as_deref();
        let mut candidates = match keys.find(token.header.algorithm, key_id) {
            Ok(candidates) => candidates,
            Err(refusal) => {
                if refusal == JwtRefusal::UnknownKey {
                    self.keys.ask_for_refresh();
                }
                return Err(refusal);
            }
        };
        if !candidates.any(|key| has_signed(key, token.signed, &token.signature)) {
            if key_id.is_none() {
                // The key may be new, which tokens without a key id cannot tell.
                self.keys.ask_for_refresh();
            }
            return Err(JwtRefusal::Signature);
        }
        let verified = self.rules.read(&token.claims)?;
        let claims = verified.at(now_unix_s)?;
        keys.remembered.insert(token_digest.as_ref(), verified);
        Ok(claims)
    }
}
