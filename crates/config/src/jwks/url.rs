//! The URL from which the keys of an issuer are fetched.

use http::Uri;
use http::uri::Scheme;
use splitrail_settings::endpoint::is_loopback;

/// An `https://` URL, or an `http://` URL of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwksUrl {
    /// Whether the scheme is `https`.
    pub is_tls: bool,
    /// A name or an IP address, without brackets.
    pub host: String,
    /// The port; without one in the URL, that of the scheme.
    pub port: u16,
    /// Host and port as in the URL, for the header `host`.
    pub authority: String,
    /// Path and query.
    pub target: String,
}

/// Why a text is no URL that can be used. The messages contain nothing of the text, which may
/// contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadJwksUrl {
    /// The text is not a URL with a host.
    #[error("is not a URL with a scheme and a host")]
    NotAUrl,
    /// The scheme is neither `https` nor `http`.
    #[error("has another scheme than https")]
    Scheme,
    /// The scheme is `http`, and the host may be another machine.
    #[error("uses http for another machine, where anyone between could replace the keys")]
    Plain,
    /// The URL has a user name or a password.
    #[error("has a user or password")]
    User,
    /// The URL has a fragment.
    #[error("has a fragment")]
    Fragment,
}

impl JwksUrl {
    /// Reads a URL.
    ///
    /// # Errors
    /// If the text is not a URL that can be used.
    pub fn parse(text: &str) -> Result<Self, BadJwksUrl> {
        if text.contains('#') {
            return Err(BadJwksUrl::Fragment);
        }
        let uri: Uri = text.parse().map_err(|_| BadJwksUrl::NotAUrl)?;
        let authority = uri.authority().ok_or(BadJwksUrl::NotAUrl)?;
        if authority.as_str().contains('@') {
            return Err(BadJwksUrl::User);
        }
        let is_tls = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            _ => return Err(BadJwksUrl::Scheme),
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = match authority.as_str().len() == authority.host().len() {
            true => Some(if is_tls { 443 } else { 80 }),
            false => authority.port_u16().filter(|port| *port > 0),
        };
        let port = port.filter(|_| !host.is_empty()).ok_or(BadJwksUrl::NotAUrl)?;
        if !is_tls && !is_loopback(authority.as_str()) {
            return Err(BadJwksUrl::Plain);
        }
        let target = uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        Ok(Self { is_tls, host, port, authority: authority.as_str().to_owned(), target })
    }
}
