//! Certificates and authorities are read again at a reload.

use splitrail_tests::cluster::eventually;
use splitrail_tests::tls_server::{ServerCertificate, fixture};
use splitrail_tests::trial::{either, prompt};
use splitrail_tests::{Cluster, Spec};

use super::{behind, handshakes, section};

/// A model whose authority is the file `authority.pem` beside the configuration; that file is made
/// by `put`.
const RELATIVE: &str = "engine_tls: { ca: authority.pem }";

fn put(cluster: &Cluster, authority: &str) {
    let from = fixture(&format!("{authority}.pem"));
    std::fs::copy(from, cluster.files.path().join("authority.pem")).unwrap();
}

async fn status(cluster: &Cluster, salt: &str) -> u16 {
    let (path, body) = either(0, &prompt(8, salt));
    cluster.http.post(path, &body).await.status.as_u16()
}

async fn is_up(cluster: &Cluster) -> bool {
    cluster.metric("splitrail_worker_up", &[("worker", "w0")]).await == 1.0
}

#[tokio::test]
async fn another_authority_in_the_same_file_is_in_use_after_a_reload() {
    let spec = behind(ServerCertificate::VALID, section(""), Spec::aggregated(1));
    let cluster = Cluster::start(spec).await;
    put(&cluster, "engines/ca");
    let yaml = cluster.yaml.replacen(&section(""), RELATIVE, 1);
    let report = cluster.reload(&yaml).await.json();
    assert_eq!(report["result"], "changed", "{report}");
    assert_eq!(status(&cluster, "a").await, 200);

    put(&cluster, "ca");
    assert_eq!(status(&cluster, "b").await, 200, "nothing was reloaded yet");
    let report = cluster.reload(&yaml).await.json();
    assert_eq!(report["renewed"][0], "models[sim].engine_tls", "{report}");
    eventually("the engine's certificate is refused", async || !is_up(&cluster).await).await;
    assert_eq!(status(&cluster, "c").await, 502);

    put(&cluster, "engines/ca");
    cluster.reload(&yaml).await;
    eventually("the engine's certificate is accepted", async || is_up(&cluster).await).await;
    assert_eq!(status(&cluster, "d").await, 200);
}

#[tokio::test]
async fn a_reload_with_an_unusable_file_is_refused_and_changes_nothing() {
    let spec = behind(ServerCertificate::VALID, section(""), Spec::aggregated(1));
    let cluster = Cluster::start(spec).await;
    let yaml = cluster.yaml.replacen(&section(""), RELATIVE, 1);
    let reply = cluster.reload(&yaml).await;
    assert!(reply.status.is_client_error(), "{}", reply.text());
    assert!(reply.text().contains("`models[0].engine_tls.ca` cannot be read"), "{}", reply.text());
    assert_eq!(status(&cluster, "a").await, 200);
}

#[tokio::test]
async fn a_reload_that_changes_nothing_keeps_the_connections() {
    let spec = behind(ServerCertificate::VALID, section(""), Spec::aggregated(1));
    let cluster = Cluster::start(spec).await;
    assert_eq!(status(&cluster, "a").await, 200);
    let before = handshakes(&cluster, "w0");
    let report = cluster.reload(&cluster.yaml).await.json();
    assert_eq!(report["result"], "unchanged", "{report}");
    assert_eq!(status(&cluster, "b").await, 200);
    // The router's own questions may have opened one connection more.
    assert!(handshakes(&cluster, "w0") <= before + 1);
}
