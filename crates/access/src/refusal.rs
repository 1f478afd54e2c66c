//! Why a credential is refused.

use http::HeaderMap;
use http::header::AUTHORIZATION;
use splitrail_api::error::{Error, ErrorKind};

use crate::credential::X_API_KEY;

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

    /// The error for the client, which names the header at fault.
    pub fn to_error(self, headers: &HeaderMap) -> Error {
        let kind = match self {
            Self::Missing | Self::Unknown | Self::Expired => ErrorKind::Unauthenticated,
            Self::NoTenant | Self::WrongUse => ErrorKind::NotPermitted,
        };
        let fault = match self {
            Self::Missing => {
                let message = "the request has no credential: send `authorization: Bearer KEY` or \
                               `x-api-key: KEY`";
                return Error::new(kind, message);
            }
            // The names of a client's certificate.
            _ if !headers.contains_key(AUTHORIZATION) && !headers.contains_key(X_API_KEY) => {
                return Error::new(kind, "the certificate names no tenant of this router");
            }
            Self::Unknown => "is not valid",
            Self::Expired => "has expired",
            Self::NoTenant => "names no tenant of this router",
            Self::WrongUse => "is not for this use",
        };
        let message = match (headers.contains_key(AUTHORIZATION), headers.contains_key(X_API_KEY)) {
            (false, _) => format!("the API key in `x-api-key` {fault}"),
            (true, _) if !has_scheme(headers) => {
                "`authorization` is not valid: write `Bearer ` before the key".to_owned()
            }
            (true, false) => format!("the API key or token in `authorization: Bearer` {fault}"),
            (true, true) => format!(
                "the API key or token in `authorization: Bearer` {fault}; `x-api-key` counts only \
                 without that header"
            ),
        };
        Error::new(kind, message)
    }
}

/// Whether the header begins with the name of the scheme, as in `Bearer KEY`.
fn has_scheme(headers: &HeaderMap) -> bool {
    let scheme = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().get(..7));
    scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "))
}
