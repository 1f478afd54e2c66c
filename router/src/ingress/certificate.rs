//! The certificates of clients.

use rustls::pki_types::CertificateDer;
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
}

impl ClientCertificate {
    /// Reads the names; there are none if the bytes are not a certificate.
    pub(super) fn read(certificate: &CertificateDer<'_>) -> Self {
        let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Self::default() };
        Self {
            uris: bounded(certificate.valid_uri_names()),
            dns_names: bounded(certificate.valid_dns_names()),
        }
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
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tls/clients/");
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
    fn names_are_bounded_in_number_and_length() {
        let long = "x".repeat(NAME_MAX_BYTES + 1);
        let first = &long[..NAME_MAX_BYTES];
        let names = [first, &long, "", "a b", "a\nb", "\u{e9}"];
        assert_eq!(bounded(names.into_iter()), [Box::from(first)]);
        assert_eq!(bounded(std::iter::repeat_n("x", 1000)).len(), NAMES_MAX);
    }
}
