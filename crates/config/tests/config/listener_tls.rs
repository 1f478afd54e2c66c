//! Rules about TLS on the listeners for clients and operators.

use crate::support::{folder, only_problem, parse};
use splitrail_config::ClientCertificates::{Optional, Required};
use splitrail_config::{Auth, CertificateName};

const CERT: &str = "cert: tls/router.pem, key: tls/router.key";

/// A configuration in which one listener has this `tls`.
fn with(listener: &str, tls: &str) -> String {
    format!(
        "listen:\n  {listener}: {{ address: 127.0.0.1:1, tls: {{ {tls} }} }}\nmodels:\n  - name: m\n    \
         tokenizer: {{ kind: none }}\n    flow: aggregated\n    \
         workers: [{{ id: w, role: both, url: 'http://w:1' }}]\n"
    )
}

fn warnings(text: &str) -> Vec<String> {
    let loaded = parse(text).unwrap_or_else(|problems| panic!("{problems}"));
    loaded.warnings.into_iter().map(|warning| warning.message).collect()
}

#[test]
fn files_that_are_absent_or_do_not_fit_are_reported_at_their_keys() {
    for listener in ["http", "grpc", "admin"] {
        for (tls, key, part) in [
            ("cert: nowhere, key: tls/router.key", "cert", "cannot be read"),
            ("cert: tls/router.pem, key: nowhere", "key", "cannot be read"),
            ("cert: tls/router.pem, key: engine.key", "key", "cannot be used"),
            ("cert: tls/router.pem, key: tls/expired.key", "cert", "cannot be used"),
            ("cert: engine.key, key: tls/router.key", "cert", "holds no certificate"),
            (&format!("{CERT}, client_ca: nowhere"), "client_ca", "cannot be read"),
            (&format!("{CERT}, client_ca: engine.key"), "client_ca", "cannot be used"),
        ] {
            let text = with(listener, tls);
            let (line, column, told) = only_problem(&text);
            let expected = format!("`listen.{listener}.tls.{key}`");
            assert!(told.contains(&expected) && told.contains(part), "{tls}: {told}");
            let value = text.lines().nth(1).unwrap().split_once(&format!("{key}: ")).unwrap().0;
            assert_eq!((line, column), (2, value.len() + key.len() + 3), "{tls}: {told}");
        }
    }
}

#[test]
fn client_certificates_need_an_authority() {
    for wanted in ["required", "optional"] {
        let tls = format!("{CERT}, client_certificates: {wanted}");
        let told = only_problem(&with("http", &tls)).2;
        assert!(told.contains("`listen.http.tls.client_certificates` needs an authority"));
        let tls = format!("{tls}, client_ca: tls/ca.pem");
        assert_eq!(warnings(&with("http", &tls)), [""; 0]);
    }
    assert!(parse(&with("http", &format!("{CERT}, client_certificates: maybe"))).is_err());
    assert!(parse(&with("http", "cert: tls/router.pem")).is_err(), "there is no key");
    assert!(parse(&with("http", &format!("{CERT}, ca: x"))).is_err(), "there is no such key");
}

#[test]
fn plain_text_and_an_expired_certificate_are_warnings() {
    assert_eq!(warnings(&with("grpc", CERT)), [""; 0]);
    assert_eq!(warnings(&with("grpc", &format!("{CERT}, plain_text: false"))), [""; 0]);
    let told = warnings(&with("grpc", &format!("{CERT}, plain_text: true")));
    assert!(
        told.len() == 1 && told[0].contains("credentials may travel in clear text"),
        "{told:?}"
    );
    let told = warnings(&with("grpc", "cert: tls/expired.pem, key: tls/expired.key"));
    assert_eq!(told, ["`listen.grpc.tls.cert` has expired"]);
}

#[test]
fn certificates_are_required_unless_other_credentials_are_configured() {
    let tls = |more: &str| {
        let text = with("http", &format!("{CERT}, client_ca: tls/ca.pem{more}"));
        parse(&text).unwrap().config.listen.http.tls.unwrap()
    };
    let auth = [Auth::ClientCertificate { tenant: CertificateName::SanUri }];
    assert_eq!(tls("").client_certificates(&[]), Required);
    assert_eq!(tls("").client_certificates(&auth), Optional);
    assert_eq!(tls(", client_certificates: optional").client_certificates(&[]), Optional);
    assert_eq!(tls(", client_certificates: required").client_certificates(&auth), Required);
    assert_eq!(tls("").cert, folder().join("tls/router.pem"), "paths start at the file's folder");
}
