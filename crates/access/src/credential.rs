//! The credential of a request, as its headers contain it.

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName};

/// The header in which Anthropic's clients send API keys.
pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Maximum length of a credential in bytes. A longer one is not valid.
const CREDENTIAL_MAX_BYTES: usize = 16 << 10;

/// The API key or token of a request; `None` if it has none.
///
/// The result is the text after `Authorization: Bearer`, or that of `x-api-key`. `Authorization` has
/// precedence, also with a scheme that is not supported; the result is empty in that case, which is no
/// valid credential.
pub fn of(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        return Some(value.to_str().ok().and_then(bearer).unwrap_or_default());
    }
    let key = headers.get(X_API_KEY)?.to_str().unwrap_or_default().trim();
    Some(if key.len() > CREDENTIAL_MAX_BYTES { "" } else { key })
}

/// RFC 6750, section 2.1. The name of the scheme is not case sensitive (RFC 9110, section 11.1).
fn bearer(value: &str) -> Option<&str> {
    const SCHEME: &str = "bearer ";
    let (scheme, credential) = value.split_at_checked(SCHEME.len())?;
    let credential = credential.trim();
    let fits = credential.len() <= CREDENTIAL_MAX_BYTES;
    (scheme.eq_ignore_ascii_case(SCHEME) && fits).then_some(credential)
}

/// Whether a credential has the form of a JSON Web Token: three parts with dots between them.
pub fn is_token(credential: &str) -> bool {
    credential.bytes().filter(|byte| *byte == b'.').count() == 2
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_a_bearer_token_or_an_api_key() {
        let read = |fields: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.insert(*name, value.parse().unwrap());
            }
            of(&headers).map(str::to_owned)
        };
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("authorization", "Bearer abc")]).unwrap(), "abc");
        assert_eq!(read(&[("authorization", "bearer  abc ")]).unwrap(), "abc");
        assert_eq!(read(&[("x-api-key", "abc")]).unwrap(), "abc");
        assert_eq!(read(&[("authorization", "Bearer a"), ("x-api-key", "b")]).unwrap(), "a");
        for unsupported in ["Basic YTpi", "Bearer", "", "Bearerabc"] {
            let fields = [("authorization", unsupported), ("x-api-key", "b")];
            assert_eq!(read(&fields).unwrap(), "", "{unsupported}");
        }
        let long = "k".repeat(CREDENTIAL_MAX_BYTES + 1);
        assert_eq!(read(&[("x-api-key", &long)]).unwrap(), "");
    }
}
