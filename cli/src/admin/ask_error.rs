//! Why a replica did not do what it was asked, in words for the person who asked.

use std::io;

use rustls::CertificateError;
use serde_json::Value;
use splitrail_settings::command::{Failure, exit};
use splitrail_settings::scalar::format_duration;

use super::address::AdminAddress;
use crate::safe_text::printable;

/// Maximum width of a replica's own words in a message.
const WORDS_MAX_COLUMNS: usize = 2000;

/// Kinds of errors, which differ in their exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskErrorKind {
    /// The replica cannot be reached, or what answers is not an admin listener.
    Unreachable,
    /// The replica asks for a credential, or for another one.
    Credential,
    /// The replica refused the request.
    Refused,
}

/// Why a replica did not do what it was asked.
#[derive(Clone, Debug)]
pub(crate) struct AskError {
    /// The kind.
    pub(crate) kind: AskErrorKind,
    /// What is wrong.
    message: String,
    /// What to do about it.
    hint: Option<&'static str>,
    /// The code of the replica's error object; empty if it has none.
    pub(crate) code: String,
    /// The whole reply of a refusal.
    pub(crate) reply: Box<Value>,
}

impl std::fmt::Display for AskError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.message)?;
        self.hint.map_or(Ok(()), |hint| write!(out, "\n  hint: {hint}"))
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl AskError {
    /// The replica cannot be reached, or what answers is not an admin listener.
    pub(super) fn unreachable(message: impl Into<String>, hint: Option<&'static str>) -> Self {
        let kind = AskErrorKind::Unreachable;
        Self { kind, message: message.into(), hint, code: String::new(), reply: Box::default() }
    }

    /// No connection was made.
    pub(super) fn connect(address: &AdminAddress, error: &io::Error) -> Self {
        let at = address.authority();
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::unreachable(
                format!("nothing listens at {at}"),
                Some("is the router running, and is this its `listen.admin`? Name it by --admin"),
            ),
            _ => Self::unreachable(
                format!("{at} cannot be reached: {error}"),
                Some("name the router's `listen.admin` by --admin or SPLITRAIL_ADMIN"),
            ),
        }
    }

    /// There was no complete reply in time.
    pub(super) fn timeout(address: &AdminAddress, time_max: std::time::Duration) -> Self {
        let time = format_duration(time_max);
        let message = format!("{} did not reply within {time}", address.authority());
        Self::unreachable(message, Some("--admin-timeout sets how long to wait"))
    }

    /// The TLS handshake failed.
    pub(super) fn tls(address: &AdminAddress, error: &io::Error) -> Self {
        use rustls::AlertDescription as Alert;
        let at = address.authority();
        let cause = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
        match cause {
            Some(rustls::Error::InvalidMessage(_)) => Self::unreachable(
                format!("{at} does not speak TLS"),
                Some("write http:// instead of https:// if `listen.admin` has no `tls`"),
            ),
            Some(rustls::Error::InvalidCertificate(why)) => Self::certificate(at, why),
            Some(rustls::Error::AlertReceived(Alert::CertificateRequired)) => {
                Self::client_certificate(at)
            }
            Some(other) => Self::unreachable(format!("{at}: TLS: {other}"), None),
            None => Self::unreachable(
                format!("{at} ended the connection during the TLS handshake: {error}"),
                Some("write http:// instead of https:// if `listen.admin` has no `tls`"),
            ),
        }
    }

    fn certificate(at: &str, why: &CertificateError) -> Self {
        use CertificateError as Why;
        let (what, hint) = match why {
            Why::UnknownIssuer => (
                "is not from a trusted authority".to_owned(),
                Some("name the file with the authority's certificate by --admin-ca"),
            ),
            Why::NotValidForName | Why::NotValidForNameContext { .. } => {
                ("is for another name".to_owned(), Some("name the router as its certificate does"))
            }
            Why::Expired | Why::ExpiredContext { .. } => ("has expired".to_owned(), None),
            other => (format!("is not valid: {other}"), None),
        };
        Self::unreachable(format!("the certificate of {at} {what}"), hint)
    }

    fn client_certificate(at: &str) -> Self {
        Self {
            kind: AskErrorKind::Credential,
            hint: Some("give one by --admin-cert and --admin-cert-key"),
            ..Self::unreachable(format!("{at} asks for a client certificate"), None)
        }
    }

    /// The connection broke, or what came over it is not HTTP. In TLS 1.3, a listener that misses a
    /// client's certificate says so after the handshake.
    pub(super) fn exchange(address: &AdminAddress, error: &hyper::Error) -> Self {
        let alert = causes(error).find_map(|cause| {
            let cause = cause.downcast_ref::<io::Error>()?.get_ref()?;
            cause.downcast_ref::<rustls::Error>().cloned()
        });
        let at = address.authority();
        match alert {
            Some(rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired)) => {
                Self::client_certificate(at)
            }
            Some(other) => Self::unreachable(format!("{at}: TLS: {other}"), None),
            None => {
                let hint = "if `listen.admin` has `tls`, write https://";
                let hint = (!address.is_tls()).then_some(hint);
                Self::unreachable(format!("{at} broke off the connection: {error}"), hint)
            }
        }
    }

    /// A reply that is no success. `body` is what came with it.
    pub(super) fn refused(address: &AdminAddress, status: u16, body: &[u8]) -> Self {
        let at = address.authority();
        let reply: Value = serde_json::from_slice(body).unwrap_or_default();
        let Some(words) = reply["error"]["message"].as_str() else {
            return Self::foreign(address, status, body);
        };
        let words = printable(words, WORDS_MAX_COLUMNS);
        let code = reply["error"]["code"].as_str().unwrap_or_default().to_owned();
        let (kind, message, hint) = match status {
            401 => (
                AskErrorKind::Credential,
                format!("{at} asks for a credential: {words}"),
                Some("give a key of an operator by --admin-key-file or SPLITRAIL_ADMIN_KEY"),
            ),
            403 if code == "forbidden_host" => (
                AskErrorKind::Credential,
                words,
                Some(
                    "call the router by its IP address, or list the name under \
                     `listen.admin_hosts`; beyond loopback, a key of the role `read` \
                     (--admin-key-file) does as well",
                ),
            ),
            403 if code == "forbidden" => (
                AskErrorKind::Credential,
                words,
                Some(
                    "run the command on the router's own host, or give a key of the role `admin` \
                     by --admin-key-file",
                ),
            ),
            403 => (
                AskErrorKind::Credential,
                words,
                Some("`splitrail keys new --role admin` makes a key that may change something"),
            ),
            404 if code == "path_not_found" => (
                AskErrorKind::Unreachable,
                format!("{at} is not an admin listener of this version: {words}"),
                Some("--admin is the address of `listen.admin`, not of `listen.http`"),
            ),
            409 if code == "ambiguous" && reply["models"].is_array() => {
                (AskErrorKind::Refused, words, Some("name the model by --model"))
            }
            _ => (AskErrorKind::Refused, words, None),
        };
        Self { kind, message, hint, code, reply: Box::new(reply) }
    }

    /// A reply that no admin listener sends.
    fn foreign(address: &AdminAddress, status: u16, body: &[u8]) -> Self {
        let at = address.authority();
        let text = String::from_utf8_lossy(body);
        if status == 400 && text.contains("https://") {
            let hint = "write https:// instead of http://";
            return Self::unreachable(format!("{at} speaks TLS"), Some(hint));
        }
        Self::unreachable(
            format!("{at} is not an admin listener: it replied with status {status}"),
            Some("--admin is the address of `listen.admin`"),
        )
    }

    /// A stream on which nothing came in time.
    pub(crate) fn silent(name: &str) -> Self {
        Self::unreachable(format!("{name} sent no snapshot in time"), None)
    }

    /// A reply that is not what the path should have.
    pub(super) fn unreadable(address: &AdminAddress) -> Self {
        Self::unreachable(
            format!("the reply of {} cannot be read", address.authority()),
            Some("use the `splitrail` of the router's release"),
        )
    }

    /// The exit code of a command that fails with this error.
    pub(crate) fn exit_code(&self) -> u8 {
        match self.kind {
            AskErrorKind::Unreachable => exit::UNAVAILABLE,
            AskErrorKind::Credential => exit::NO_PERMISSION,
            AskErrorKind::Refused => exit::DATA_ERROR,
        }
    }

    /// What is wrong, without the hint.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

/// An error and its causes.
fn causes<'e>(
    error: &'e (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'e (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}
