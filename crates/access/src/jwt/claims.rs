//! The claims of a token, and what is required of them.

use serde::Deserialize;
use splitrail_api::json::JsonObject;
use splitrail_config::JwtAuth;

use super::JwtRefusal;
use crate::OperatorRole;

/// How far the clocks of router and issuer may differ, in seconds.
pub const LEEWAY_S: u64 = 30;

/// Maximum length of the name of a tenant in a token, in bytes: as long as a SPIFFE id may be.
const TENANT_MAX_BYTES: usize = 2048;

/// What a valid token says about its bearer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// The value of `tenant_claim`: from 1 to 2048 bytes.
    pub tenant: String,
    /// The greatest role in `role_claim`, if that is configured.
    pub role: Option<OperatorRole>,
    /// The time after which the token is not valid any more, in seconds since 1970, without leeway.
    pub expires_unix_s: u64,
}

/// A token whose signature and claims have been checked, except for the time.
#[derive(Debug)]
pub(super) struct VerifiedToken {
    claims: Claims,
    /// The time from which the token is valid, in seconds since 1970, without leeway.
    valid_from_unix_s: u64,
}

impl VerifiedToken {
    pub(super) fn new(claims: Claims, valid_from_unix_s: u64) -> Self {
        Self { claims, valid_from_unix_s }
    }

    /// The claims, if the token is valid at this time.
    pub(super) fn at(&self, now_unix_s: u64) -> Result<Claims, JwtRefusal> {
        if now_unix_s >= self.claims.expires_unix_s.saturating_add(LEEWAY_S) {
            return Err(JwtRefusal::Expired);
        }
        if now_unix_s.saturating_add(LEEWAY_S) < self.valid_from_unix_s {
            return Err(JwtRefusal::NotYetValid);
        }
        Ok(self.claims.clone())
    }

    /// The time after which the token is not valid any more, in seconds since 1970, without leeway.
    pub(super) fn expires_unix_s(&self) -> u64 {
        self.claims.expires_unix_s
    }
}

/// The values that claims must have, and the claims that are read.
#[derive(Debug)]
pub(super) struct ClaimRules {
    issuer: String,
    audience: String,
    tenant_claim: String,
    role_claim: Option<String>,
}

/// A claim that is one text or a list of texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

impl Texts {
    fn as_slice(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Several(texts) => texts,
        }
    }
}

impl ClaimRules {
    pub(super) fn new(auth: &JwtAuth) -> Self {
        Self {
            issuer: auth.issuer.clone(),
            audience: auth.audience.clone(),
            tenant_claim: auth.tenant_claim.clone(),
            role_claim: auth.role_claim.clone(),
        }
    }

    /// Checks `iss`.
    pub(super) fn check_issuer(&self, claims: &JsonObject) -> Result<(), JwtRefusal> {
        let is_issuer = claim::<String>(claims, "iss").is_some_and(|issuer| issuer == self.issuer);
        if is_issuer { Ok(()) } else { Err(JwtRefusal::Issuer) }
    }

    /// Reads all claims other than `iss`.
    pub(super) fn read(&self, claims: &JsonObject) -> Result<VerifiedToken, JwtRefusal> {
        let audiences = claim::<Texts>(claims, "aud").ok_or(JwtRefusal::Audience)?;
        if !audiences.as_slice().contains(&self.audience) {
            return Err(JwtRefusal::Audience);
        }
        let expires_unix_s = time(claims, "exp")?.ok_or(JwtRefusal::Malformed)?;
        let (not_before, issued) = (time(claims, "nbf")?, time(claims, "iat")?);
        let valid_from_unix_s = not_before.max(issued).unwrap_or(0);
        let tenant = claim::<String>(claims, &self.tenant_claim)
            .filter(|tenant| (1..=TENANT_MAX_BYTES).contains(&tenant.len()))
            .ok_or(JwtRefusal::NoTenant)?;
        let role = self.role_claim.as_deref().and_then(|name| claim::<Texts>(claims, name));
        let role = role.and_then(|names| {
            names.as_slice().iter().filter_map(|name| OperatorRole::from_name(name)).max()
        });
        let claims = Claims { tenant, role, expires_unix_s };
        Ok(VerifiedToken::new(claims, valid_from_unix_s))
    }
}

/// A claim of this type; `None` if the claim is absent or of another type.
fn claim<T: for<'de> Deserialize<'de>>(claims: &JsonObject, name: &str) -> Option<T> {
    serde_json::from_str(claims.raw(name)?).ok()
}

/// A time in whole seconds since 1970, rounded down; times before 1970 are 0. The number may have
/// a fraction (`NumericDate` of RFC 7519).
fn time(claims: &JsonObject, name: &str) -> Result<Option<u64>, JwtRefusal> {
    let Some(raw) = claims.raw(name) else { return Ok(None) };
    if let Ok(whole) = serde_json::from_str::<u64>(raw) {
        return Ok(Some(whole));
    }
    let seconds = serde_json::from_str::<f64>(raw).map_err(|_| JwtRefusal::Malformed)?;
    Ok(Some(seconds as u64))
}
