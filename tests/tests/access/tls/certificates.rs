//! Certificates can be replaced while the router runs.

use splitrail_tests::cluster::eventually;
use splitrail_tests::tls::{TlsClient, ask};

use super::support::{SecureCluster, put, tls_in};

const EXPIRES: &str = "splitrail_certificate_expires_timestamp_seconds";

#[tokio::test]
async fn a_new_certificate_is_used_for_new_connections_and_open_ones_go_on() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "router");
    let router = SecureCluster::start(&tls_in(folder.path())).await;
    let address = router.running.addresses.http;
    let before = TlsClient::default();
    let after = TlsClient { authority: "clients/ca", ..before };
    let mut open = before.connect(address).await.unwrap();
    assert_eq!(ask(&mut open, "/health").await, 200);
    assert!(after.connect(address).await.is_err());

    put(folder.path(), "clients/router");
    // The files are read once a second, as connections arrive.
    eventually("the new certificate is used", async || after.connect(address).await.is_ok()).await;
    assert!(before.connect(address).await.is_err(), "the previous one is not used any more");
    assert_eq!(ask(&mut open, "/health").await, 200);

    // An expired certificate is the operator's to notice: clients refuse it.
    put(folder.path(), "clients/expired");
    eventually("the end of the certificate is shown", async || {
        let refused = after.connect(address).await.is_err();
        // 2021-01-01.
        let expires = router.metric(EXPIRES, &[("listener", "http")]).await;
        refused && expires == 1_609_459_200.0
    })
    .await;
    assert_eq!(ask(&mut open, "/health").await, 200);
}

#[tokio::test]
async fn a_broken_file_leaves_the_previous_certificate_in_use() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "router");
    let router = SecureCluster::start(&tls_in(folder.path())).await;
    let address = router.running.addresses.http;
    let client = TlsClient::default();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let breaks: [&dyn Fn(); 4] = [
        &|| write("tls.key", "half of a k"),
        &|| write("tls.pem", ""),
        // The key of another certificate.
        &|| {
            put(folder.path(), "router");
            let other = splitrail_tests::tls::fixture("clients/router.key");
            std::fs::copy(other, folder.path().join("tls.key")).unwrap();
        },
        &|| std::fs::remove_file(folder.path().join("tls.pem")).unwrap(),
    ];
    for break_files in breaks {
        break_files();
        // Longer than the interval in which the files are read.
        tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
        for _ in 0..3 {
            assert!(client.connect(address).await.is_ok());
        }
    }
    // 2120-01-01.
    assert_eq!(router.metric(EXPIRES, &[("listener", "grpc")]).await, 4_733_510_400.0);
    put(folder.path(), "clients/router");
    let after = TlsClient { authority: "clients/ca", ..client };
    eventually("a whole certificate is used", async || after.connect(address).await.is_ok()).await;
}
