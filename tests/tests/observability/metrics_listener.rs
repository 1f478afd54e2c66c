//! The listener for metrics: what it serves, in which format, and how it is protected.

use splitrail_tests::cluster::eventually;
use splitrail_tests::tls::{TlsClient, fixture};
use splitrail_tests::{Client, Cluster, Spec};
use tokio::task::JoinSet;

async fn listening(more: &str) -> (Cluster, Client) {
    let listen = format!(", metrics: {{ address: \"127.0.0.1:0\"{more} }}");
    let limits = "{ drain_delay: 4s, drain_grace: 5s }";
    let cluster =
        Cluster::start(Spec { admin_access: listen.leak(), limits, ..Spec::default() }).await;
    let client = Client::new(cluster.running.addresses.metrics.unwrap());
    (cluster, client)
}

#[tokio::test]
async fn the_metrics_listener_serves_metrics_and_probes_and_nothing_else() {
    let (cluster, metrics) = listening("").await;
    assert_eq!(metrics.get("/health").await.status, 200);
    assert_eq!(metrics.get("/ready").await.status, 200);
    let text = metrics.get("/metrics").await.text();
    assert!(text.contains("\nsplitrail_build_info{"), "{text}");
    let of_process = ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds"];
    for name in of_process {
        assert!(text.contains(&format!("\nprocess_{name} ")), "{name}");
    }
    for path in ["/", "/admin/workers", "/admin/config", "/v1/models"] {
        assert_eq!(metrics.get(path).await.status, 404, "{path}");
    }
    for path in ["/admin/reload", "/admin/workers", "/v1/chat/completions"] {
        assert_eq!(metrics.post_with(path, &[], "").await.status, 404, "{path}");
    }
    assert_eq!(metrics.post_with("/metrics", &[], "").await.status, 405);
    // The admin listener has them as well.
    assert_eq!(cluster.admin.get("/metrics").await.status, 200);
}

#[tokio::test]
async fn the_format_is_the_one_that_the_scraper_prefers() {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
    let (_cluster, metrics) = listening("").await;
    for (accept, expected) in [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        ("application/openmetrics-text", OPEN_METRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.2, text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;version=9.0.0, */*;q=0.1", TEXT),
        // Prometheus 2.42.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;\
             q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            OPEN_METRICS,
        ),
    ] {
        let reply = metrics.get_with("/metrics", &[("accept", accept)]).await;
        assert_eq!(reply.header("content-type"), expected, "{accept}");
        assert_eq!(reply.text().ends_with("# EOF\n"), expected == OPEN_METRICS, "{accept}");
    }
}

#[tokio::test]
async fn the_metrics_listener_serves_until_a_drain_has_ended() {
    let (cluster, metrics) = listening("").await;
    let Cluster { running, files: _files, engines: _engines, .. } = cluster;
    let mut draining = JoinSet::new();
    draining.spawn(running.drain());
    eventually("the drain is seen", async || {
        metrics.get("/metrics").await.text().contains("\nsplitrail_draining 1\n")
    })
    .await;
    assert_eq!(draining.join_next().await.unwrap().unwrap(), 0);
    assert!(metrics.try_get("/health").await.is_err(), "it ends with the router");
}

#[tokio::test]
async fn the_metrics_listener_may_have_tls_and_require_client_certificates() {
    let path = |name: &str| fixture(name).display().to_string();
    let (cert, key, ca) = (path("router.pem"), path("router.key"), path("clients/ca.pem"));
    let tls = format!(", tls: {{ cert: \"{cert}\", key: \"{key}\", client_ca: \"{ca}\" }}");
    let (cluster, plain) = listening(&tls).await;
    assert!(plain.try_get("/metrics").await.map_or(true, |reply| reply.status != 200));
    let address = cluster.running.addresses.metrics.unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let stranger = TlsClient::default().exchange(address, request).await;
    assert!(!stranger.text().contains("200 OK"), "no certificate, no metrics");
    let known = TlsClient { identity: Some("clients/acme"), ..TlsClient::default() };
    let reply = known.exchange(address, request).await.text();
    assert!(reply.starts_with("HTTP/1.1 200 OK") && reply.contains("splitrail_build_info"));
    let expires = "splitrail_certificate_expires_timestamp_seconds{listener=\"metrics\"}";
    assert!(reply.contains(expires), "{reply}");
}
