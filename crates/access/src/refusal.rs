//! Why a credential is refused.

use splitrail_api::error::{Error, ErrorKind};

/// Why a request is refused because of its credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request has no credential.
    Missing,
    /// The credential is not valid: it is not known, has been revoked, or is malformed.
    Unknown,
    /// The credential was valid until it expired.
    Expired,
    /// The credential is valid, but names no tenant of this router.
    NoTenant,
    /// The credential is valid, but is not for this listener: a tenant's on the admin listener, or
    /// an operator's for requests to models.
    WrongUse,
}

impl Refusal {
    /// The label of the metric, and the reason in the audit file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Unknown => "unknown",
            Self::Expired => "expired",
            Self::NoTenant => "no_tenant",
            Self::WrongUse => "wrong_use",
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let (kind, message) = match refusal {
            Refusal::Missing => (
                ErrorKind::Unauthenticated,
                "the request has no credential: send `authorization: Bearer KEY` or `x-api-key: KEY`",
            ),
            Refusal::Unknown => (ErrorKind::Unauthenticated, "the API key or token is not valid"),
            Refusal::Expired => (ErrorKind::Unauthenticated, "the API key or token has expired"),
            Refusal::NoTenant => {
                (ErrorKind::NotPermitted, "the credential names no tenant of this router")
            }
            Refusal::WrongUse => (ErrorKind::NotPermitted, "the credential is not for this use"),
        };
        Self::new(kind, message)
    }
}
