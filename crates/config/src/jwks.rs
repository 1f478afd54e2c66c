//! The keys of an issuer of JSON Web Tokens: a JSON Web Key Set (RFC 7517, RFC 7518, RFC 8037).
//!
//! Only public keys for RS256, ES256 and EdDSA (Ed25519) are usable. Other keys of a set, which
//! issuers publish for other purposes, are counted and left out.

use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use splitrail_settings::process::open_regular;

mod url;

pub use url::{BadJwksUrl, JwksUrl};

/// Maximum size of a key set in bytes.
pub const JWKS_MAX_BYTES: usize = 1 << 20;

/// Maximum number of keys in a set, including those that are not usable.
const KEYS_MAX: usize = 256;

/// Sizes of RSA moduli that are accepted, in bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// The usable keys of a JSON Web Key Set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySet {
    /// The usable keys, in the order of the set.
    pub keys: Vec<IssuerKey>,
    /// The number of keys that are not usable.
    pub unusable: usize,
    /// Whether a key contains private or symmetric parts. These parts are not kept.
    pub has_secrets: bool,
}

/// A public key of an issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerKey {
    /// The name of the key, `kid`. Several keys may have the same name.
    pub id: Option<String>,
    /// The key.
    pub key: PublicKey,
}

/// The value of a public key. Its kind determines the one algorithm for which the key is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicKey {
    /// RS256. Both numbers are big-endian without leading zeros.
    Rsa {
        /// The modulus, from 2048 to 8192 bits.
        modulus: Vec<u8>,
        /// The public exponent: odd, at least 3, and at most 32 bits.
        exponent: Vec<u8>,
    },
    /// ES256: a point of P-256 in uncompressed form.
    P256([u8; 65]),
    /// EdDSA with Ed25519.
    Ed25519([u8; 32]),
}

/// Why a text is no key set that can be used. The messages contain nothing of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JwksError {
    /// The text is larger than [`JWKS_MAX_BYTES`].
    #[error("it is larger than 1 MiB")]
    TooLarge,
    /// The text is not a JSON object with a list `keys`.
    #[error("it is not a JSON object with a list `keys`")]
    NotAKeySet,
    /// The set has more than 256 keys.
    #[error("it has more than 256 keys")]
    TooManyKeys,
    /// No key of the set is usable.
    #[error("it has no public key for RS256 (2048 to 8192 bits), ES256 or EdDSA (Ed25519)")]
    NoUsableKey,
}

impl KeySet {
    /// Reads the text of a key set.
    ///
    /// # Errors
    /// If the text is not a key set within the bounds, or has no usable key.
    pub fn parse(text: &[u8]) -> Result<Self, JwksError> {
        #[derive(Deserialize)]
        struct Set<'a> {
            #[serde(borrow)]
            keys: Vec<&'a RawValue>,
        }
        if text.len() > JWKS_MAX_BYTES {
            return Err(JwksError::TooLarge);
        }
        let set: Set<'_> = serde_json::from_slice(text).map_err(|_| JwksError::NotAKeySet)?;
        if set.keys.len() > KEYS_MAX {
            return Err(JwksError::TooManyKeys);
        }
        let mut found = Self::default();
        for text in set.keys {
            let jwk: Option<Jwk> = serde_json::from_str(text.get()).ok();
            found.has_secrets |= jwk.as_ref().is_some_and(|jwk| jwk.d.is_some() || jwk.k.is_some());
            match jwk.and_then(Jwk::into_key) {
                Some(key) => found.keys.push(key),
                None => found.unusable += 1,
            }
        }
        if found.keys.is_empty() { Err(JwksError::NoUsableKey) } else { Ok(found) }
    }
}

/// Reads at most one byte more than [`JWKS_MAX_BYTES`] of a file, so that [`KeySet::parse`] can
/// tell that the file is too large.
///
/// # Errors
/// If the file cannot be read.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    open_regular(path)?.take(JWKS_MAX_BYTES as u64 + 1).read_to_end(&mut text)?;
    Ok(text)
}

/// The members of a JSON Web Key that matter here. Members with the same name make a key unusable.
#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    r#use: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
    d: Option<IgnoredAny>,
    k: Option<IgnoredAny>,
}

impl Jwk {
    /// The key, if it is meant for signatures and is of a supported kind.
    fn into_key(self) -> Option<IssuerKey> {
        let for_signatures = self.r#use.as_deref().is_none_or(|purpose| purpose == "sig")
            && self.key_ops.as_ref().is_none_or(|all| all.iter().any(|one| one == "verify"));
        let (algorithms, key): (&[&str], _) = match (self.kty.as_str(), self.crv.as_deref()) {
            ("RSA", None) => (&["RS256"], rsa(self.n?, self.e?)?),
            ("EC", Some("P-256")) => (&["ES256"], p256(self.x?, self.y?)?),
            // RFC 9864 gives EdDSA with this curve a name of its own.
            ("OKP", Some("Ed25519")) => {
                (&["EdDSA", "Ed25519"], PublicKey::Ed25519(bytes(&self.x?)?.try_into().ok()?))
            }
            _ => return None,
        };
        let agrees = self.alg.as_deref().is_none_or(|name| algorithms.contains(&name));
        (for_signatures && agrees).then_some(IssuerKey { id: self.kid, key })
    }
}

fn rsa(modulus: String, exponent: String) -> Option<PublicKey> {
    let (modulus, exponent) = (number(&modulus)?, number(&exponent)?);
    let bits = modulus.len() * 8 - modulus.first()?.leading_zeros() as usize;
    let is_odd = |number: &[u8]| number.last().is_some_and(|byte| byte % 2 == 1);
    let is_usable = RSA_BITS.contains(&bits)
        && is_odd(&modulus)
        && is_odd(&exponent)
        && exponent.len() <= 4
        && exponent != [1];
    is_usable.then_some(PublicKey::Rsa { modulus, exponent })
}

fn p256(x: String, y: String) -> Option<PublicKey> {
    let (x, y) = (bytes(&x)?, bytes(&y)?);
    if x.len() != 32 || y.len() != 32 {
        return None;
    }
    let point = [&[4], x.as_slice(), y.as_slice()].concat();
    Some(PublicKey::P256(point.try_into().ok()?))
}

/// A big-endian number without its leading zeros, which some issuers write.
fn number(text: &str) -> Option<Vec<u8>> {
    let bytes = bytes(text)?;
    let start = bytes.iter().position(|byte| *byte != 0)?;
    Some(bytes[start..].to_vec())
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
