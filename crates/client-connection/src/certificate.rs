//! The certificates of clients.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use splitrail_config::tls::not_after_unix_s;
use webpki::EndEntityCert;

/// Maximum number of names of each kind.
const NAMES_MAX: usize = 16;

/// Maximum length of a name in bytes; that of a SPIFFE ID (SPIFFE-ID, section 2.3).
const NAME_MAX_BYTES: usize = 2048;

/// The names in a client's certificate, which the authority `client_ca` of the listener has signed:
/// its subject alternative names (RFC 5280, section 4.2.1.6).
///
/// Of each kind, the first 16 names are kept that have up to 2,048 visible ASCII characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The names of type `uniformResourceIdentifier`, as they are in the certificate.
    pub uris: Vec<Box<str>>,
    /// The names of type `dNSName`, as they are in the certificate. A wildcard (`*.example`) is
    /// possible.
    pub dns_names: Vec<Box<str>>,
    /// The last second in which the certificate is valid, in seconds since 1970; 0 if it cannot be
    /// read.
    pub not_after_unix_s: u64,
}

impl ClientCertificate {
    /// Reads the names and the end; there are no names if the bytes are not a certificate.
    pub fn read(certificate: &CertificateDer<'_>) -> Self {
        let not_after = not_after_unix_s(certificate).and_then(|seconds| seconds.try_into().ok());
        let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Self::default() };
        Self {
            uris: bounded(certificate.valid_uri_names()),
            dns_names: bounded(certificate.valid_dns_names()),
            not_after_unix_s: not_after.unwrap_or_default(),
        }
    }

    /// For how long the certificate is still valid; `None` if it has expired.
    pub fn remaining(&self, now: SystemTime) -> Option<Duration> {
        let end = Duration::from_secs(self.not_after_unix_s.checked_add(1)?);
        UNIX_EPOCH.checked_add(end)?.duration_since(now).ok().filter(|left| !left.is_zero())
    }
}

fn bounded<'n>(names: impl Iterator<Item = &'n str>) -> Vec<Box<str>> {
    let is_sane = |name: &&str| {
        (1..=NAME_MAX_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic())
    };
    names.filter(is_sane).take(NAMES_MAX).map(Box::from).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustls::pki_types::pem::PemObject;

    use super::*;

    fn fixture(name: &str) -> CertificateDer<'static> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tls/clients/");
        CertificateDer::from_pem_file(format!("{folder}{name}.pem")).unwrap()
    }

    #[test]
    fn uris_and_dns_names_are_read_and_nothing_else() {
        let acme = ClientCertificate::read(&fixture("acme"));
        let texts = |names: &[Box<str>]| names.iter().map(|name| name.to_string()).collect();
        let (uris, dns_names): (Vec<String>, Vec<String>) =
            (texts(&acme.uris), texts(&acme.dns_names));
        assert_eq!(uris, ["spiffe://clusters.example/tenant/acme", "urn:acme:batch"]);
        assert_eq!(dns_names, ["acme.example", "*.acme.example"]);
        let router = ClientCertificate::read(&fixture("router"));
        assert_eq!((router.uris.len(), &*router.dns_names[0]), (0, "localhost"));
        assert_eq!(ClientCertificate::read(&CertificateDer::from(&b"x"[..])).uris.len(), 0);
    }

    #[test]
    fn a_certificate_is_valid_until_its_end_and_not_after() {
        let second = Duration::from_secs(1);
        let acme = ClientCertificate::read(&fixture("acme"));
        // 2120-01-01.
        let last = UNIX_EPOCH + Duration::from_secs(4_733_510_400);
        assert_eq!(acme.remaining(last - second), Some(2 * second));
        assert_eq!(acme.remaining(last), Some(second));
        assert_eq!(acme.remaining(last + second), None);
        let unreadable = ClientCertificate::read(&CertificateDer::from(&b"x"[..]));
        assert_eq!(unreadable.remaining(last), None);
    }

    #[test]
    fn names_are_bounded_in_number_and_length() {
        let long = "x".repeat(NAME_MAX_BYTES + 1);
        let first = &long[..NAME_MAX_BYTES];
        let names = [first, &long, "", "a b", "a\nb", "\u{e9}"];
        assert_eq!(bounded(names.into_iter()), [Box::from(first)]);
        assert_eq!(bounded(std::iter::repeat_n("x", 1000)).len(), NAMES_MAX);
    }
}
