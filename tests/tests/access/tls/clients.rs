//! Certificates of clients.

use rustls::AlertDescription;
use splitrail_tests::tls::{EACH_VERSION, Exchanged, TlsClient};

use super::support::{ROUTER, SecureCluster, whole_or_events};

const CA: &str = "client_ca: clients/ca.pem";

fn is_served(reply: &Exchanged) -> bool {
    reply.error.is_none() && reply.text().contains("\"ok\"")
}

#[tokio::test]
async fn required_certificates_must_be_of_the_authority() {
    let router =
        SecureCluster::start(&format!("{ROUTER}, {CA}, client_certificates: required")).await;
    let mut refused = 0;
    for versions in EACH_VERSION {
        let client = |identity| TlsClient { identity, versions, ..TlsClient::default() };
        assert!(is_served(&router.complete(client(Some("clients/acme"))).await));
        for (identity, alert) in [
            (None, None),
            (Some("stranger"), Some(AlertDescription::UnknownCA)),
            (Some("clients/lapsed"), Some(AlertDescription::CertificateExpired)),
        ] {
            let reply = router.complete(client(identity)).await;
            assert!(reply.bytes.is_empty(), "{identity:?}: {reply:?}");
            assert!(reply.alert().is_some(), "{identity:?}: {reply:?}");
            assert!(alert.is_none() || reply.alert() == alert, "{identity:?}: {reply:?}");
            refused += 1;
            router.until_cut("tls_client_certificate", refused).await;
        }
    }
}

#[tokio::test]
async fn a_foreign_certificate_is_refused_even_if_certificates_are_optional() {
    let router =
        SecureCluster::start(&format!("{ROUTER}, {CA}, client_certificates: optional")).await;
    for (identity, expected) in
        [(None, true), (Some("clients/acme"), true), (Some("stranger"), false)]
    {
        let reply = router.complete(TlsClient { identity, ..TlsClient::default() }).await;
        assert_eq!(is_served(&reply), expected, "{identity:?}: {reply:?}");
    }
}

#[tokio::test]
async fn certificates_are_required_unless_other_credentials_are_configured() {
    let tls = format!("{ROUTER}, {CA}");
    let router = SecureCluster::start(&tls).await;
    assert!(!is_served(&router.complete(TlsClient::default()).await));
    let auth = "auth: [{ kind: client_certificate, tenant: san_uri }]";
    let router = SecureCluster::start_with(&tls, "{}", auth, whole_or_events).await;
    let reply = router.complete(TlsClient::default()).await;
    assert!(reply.error.is_none() && reply.text().starts_with("HTTP/1.1 "), "{reply:?}");
}
