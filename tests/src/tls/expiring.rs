//! A client's certificate that expires while a test runs.

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;

use super::fixture;

/// DER tags (X.690, section 8).
const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// `notAfter` in the certificate that is the template: 2120-01-01.
const TEMPLATE_END: &[u8] = b"21200101000000Z";

/// The certificate of `clients/acme` with another end, signed by `clients/issuing`.
pub struct ExpiringIdentity {
    folder: TempDir,
    /// The first moment at which it is not valid any more.
    end: SystemTime,
}

impl ExpiringIdentity {
    /// A certificate that is valid for `validity`, up to a second less.
    pub fn new(validity: Duration) -> Self {
        let not_after = SystemTime::now() + validity - Duration::from_secs(1);
        let text = humantime::format_rfc3339_seconds(not_after).to_string();
        let text: String = text.chars().filter(|c| !"-T:".contains(*c)).collect();
        let since = not_after.duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970");
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs() + 1);
        let folder = tempfile::tempdir().expect("a folder");
        let key = folder.path().join("identity.key");
        std::fs::copy(fixture("clients/acme.key"), key).expect("a key");
        let base64 = STANDARD.encode(signed(text.as_bytes()));
        let pem = format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n");
        std::fs::write(folder.path().join("identity.pem"), pem).expect("a certificate");
        Self { folder, end }
    }

    /// Its name, for [`TlsClient::identity`](super::TlsClient::identity).
    pub fn name(&self) -> String {
        self.folder.path().join("identity").display().to_string()
    }

    /// Whether it has expired.
    pub fn has_expired(&self) -> bool {
        SystemTime::now() >= self.end
    }

    /// Waits until it has expired.
    pub async fn expired(&self) {
        while let Ok(left) = self.end.duration_since(SystemTime::now()) {
            tokio::time::sleep(left.max(Duration::from_millis(1))).await;
        }
    }
}

/// The certificate with this `notAfter`.
fn signed(not_after: &[u8]) -> Vec<u8> {
    let template = CertificateDer::from_pem_file(fixture("clients/acme.pem")).expect("a fixture");
    // A certificate is a sequence of the part that is signed, the algorithm and the signature.
    let parts = &template[header_bytes(&template)..];
    let signed_bytes = whole_bytes(parts);
    let algorithm = &parts[signed_bytes..][..whole_bytes(&parts[signed_bytes..])];
    let mut content = parts[..signed_bytes].to_vec();
    let at = content.windows(TEMPLATE_END.len()).position(|bytes| bytes == TEMPLATE_END);
    content[at.expect("the template's end")..][..not_after.len()].copy_from_slice(not_after);

    let key = PrivateKeyDer::from_pem_file(fixture("clients/issuing.key")).expect("a fixture");
    let key = any_ecdsa_type(&key).expect("a key");
    let signer = key.choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256]).expect("a scheme");
    let mut signature = vec![0];
    signature.extend(signer.sign(&content).expect("a signature"));

    content.extend(algorithm);
    content.extend(element(BIT_STRING, &signature));
    element(SEQUENCE, &content)
}

/// Number of bytes of an element's tag and length.
fn header_bytes(element: &[u8]) -> usize {
    match element[1] {
        0..=127 => 2,
        long => 2 + usize::from(long - 128),
    }
}

/// Number of bytes of an element with its tag and length.
fn whole_bytes(element: &[u8]) -> usize {
    let header = header_bytes(element);
    let length = match header {
        2 => usize::from(element[1]),
        _ => element[2..header].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)),
    };
    header + length
}

fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len();
    let mut element = match u8::try_from(length) {
        Ok(short @ 0..=127) => vec![tag, short],
        _ => vec![tag, 0x82, (length >> 8) as u8, length as u8],
    };
    element.extend(content);
    element
}
