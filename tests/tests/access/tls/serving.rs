//! Requests over TLS.

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::HandshakeKind;
use rustls::version::TLS13;
use splitrail_proto::v1;
use splitrail_proto::v1::front_door_service_client::FrontDoorServiceClient;
use splitrail_tests::grpc::text_request;
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::tls::{EACH_VERSION, TlsClient, ask, exchange, fixture, over};
use splitrail_tests::{Client, raw};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use super::support::{COMPLETIONS, ROUTER, SecureCluster, completion, run, whole_or_events, yaml};

const H1: TlsClient<'_> =
    TlsClient { authority: "ca", identity: None, protocols: &["http/1.1"], versions: &[&TLS13] };
const H2: TlsClient<'_> = TlsClient { protocols: &["h2", "http/1.1"], ..H1 };

#[tokio::test]
async fn http1_is_served_over_tls_and_ends_with_close_notify() {
    let router = SecureCluster::start(ROUTER).await;
    for versions in EACH_VERSION {
        for protocols in [&[][..], &["http/1.1"], &["h3", "http/1.1"]] {
            let client = TlsClient { protocols, versions, ..TlsClient::default() };
            let reply = router.complete(client).await;
            assert!(reply.error.is_none(), "{reply:?}");
            assert!(reply.text().contains("\"ok\""), "{}", reply.text());
        }
    }
    let stream = H1.connect(router.running.addresses.http).await.unwrap();
    let reply = exchange(stream, &completion(true)).await;
    assert!(reply.error.is_none() && reply.text().contains("[DONE]"), "{reply:?}");
    assert_eq!(router.cut().await, 0.0);
}

#[tokio::test]
async fn http2_is_preferred_where_the_client_offers_it() {
    let router = SecureCluster::start(ROUTER).await;
    let stream = H2.connect(router.running.addresses.http).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    for i in 0..20 {
        let body = format!("{{\"model\":\"sim\",\"max_tokens\":4,\"prompt\":\"{i}\"}}");
        let request = Request::post(format!("https://localhost{COMPLETIONS}"))
            .version(Version::HTTP_2)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let reply = sender.send_request(request).await.unwrap();
        assert_eq!(reply.status(), 200);
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&body).contains("\"ok\""));
    }
}

#[tokio::test]
async fn grpc_is_served_over_tls_by_http2_only() {
    let router = SecureCluster::start(ROUTER).await;
    let address = router.running.addresses.grpc.unwrap();
    let authority = std::fs::read(fixture("ca.pem")).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(authority))
        .domain_name("localhost");
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    let channel = endpoint.tls_config(tls).unwrap().connect().await.unwrap();
    let mut client = FrontDoorServiceClient::new(channel);
    let models = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner();
    assert_eq!(models.models.len(), 1);
    let mut events = client.generate(text_request("a", "")).await.unwrap().into_inner();
    let mut count = 0;
    while events.message().await.unwrap().is_some() {
        count += 1;
    }
    assert!(count > 0);

    let error = H1.connect(address).await.unwrap_err();
    assert!(error.to_string().contains("NoApplicationProtocol"), "{error}");
}

#[tokio::test]
async fn a_plain_request_to_a_tls_port_gets_an_explanation() {
    let router = SecureCluster::start(ROUTER).await;
    let address = router.running.addresses.http;
    for request in [completion(false), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()] {
        let reply = raw::exchange(address, &request).await.expect("a reply");
        assert_eq!(reply.status(), 400);
        assert_eq!(reply.text(), "This port speaks TLS: use https://.\n");
    }
    router.until_cut("plain_text", 2).await;
    assert!(router.post.heard().iter().all(|heard| !heard.is_inference()));
}

#[tokio::test]
async fn a_listener_may_speak_both_for_a_migration() {
    let router = SecureCluster::start(&format!("{ROUTER}, plain_text: true")).await;
    let address = router.running.addresses.http;
    let reply = router.complete(TlsClient::default()).await;
    assert!(reply.error.is_none() && reply.text().contains("\"ok\""), "{reply:?}");
    let reply = raw::exchange(address, &completion(false)).await.expect("a reply");
    assert_eq!(reply.status(), 200);
    let reply = Client::new(address).get("/health").await;
    assert_eq!(reply.status, 200);
    let garbage = raw::exchange(address, b"\x80\0\r\n\r\n").await.expect("a reply");
    assert_eq!(garbage.status(), 400);
}

#[tokio::test]
async fn the_admin_listener_speaks_tls() {
    let listen =
        format!("{{ http: 127.0.0.1:0, admin: {{ address: 127.0.0.1:0, tls: {{ {ROUTER} }} }} }}");
    let post =
        splitrail_tests::scripted_server::ScriptedServer::start(|_| ScriptedReply::json(200, "{}"))
            .await;
    let running = run(&yaml(&listen, "{}", "", &post.url())).await;
    let mut stream = H1.connect(running.addresses.admin).await.unwrap();
    assert_eq!(ask(&mut stream, "/ready").await, 200);
    let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let reply = H1.exchange(running.addresses.admin, request).await.text();
    // 2120-01-01.
    let expires = "splitrail_certificate_expires_timestamp_seconds{listener=\"admin\"} 4733510400";
    assert!(reply.contains(expires), "{reply}");
    let plain = Client::new(running.addresses.http).get("/health").await;
    assert_eq!(plain.status, 200);
}

#[tokio::test]
async fn sessions_are_resumed_and_early_data_is_not_accepted() {
    let router = SecureCluster::start(ROUTER).await;
    let address = router.running.addresses.http;
    for versions in EACH_VERSION {
        let mut config = TlsClient { versions, ..TlsClient::default() }.config();
        config.enable_early_data = true;
        let config = std::sync::Arc::new(config);
        let connect = async || {
            let socket = TcpStream::connect(address).await.unwrap();
            over(socket, config.clone()).await.unwrap()
        };
        let mut first = connect().await;
        assert_eq!(first.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));
        // Tickets arrive with the reply.
        assert_eq!(ask(&mut first, "/health").await, 200);
        let mut second = connect().await;
        assert_eq!(second.get_ref().1.handshake_kind(), Some(HandshakeKind::Resumed));
        assert!(!second.get_ref().1.is_early_data_accepted());
        assert!(second.get_mut().1.early_data().is_none());
        assert_eq!(ask(&mut second, "/health").await, 200);
    }
}

#[tokio::test]
async fn a_drain_completes_replies_and_closes_idle_connections_properly() {
    let limits = "{ drain_delay: 10ms, drain_grace: 60s }";
    let router = SecureCluster::start_with(ROUTER, limits, "", |heard| {
        if !heard.text().contains("\"stream\":true") {
            return whole_or_events(heard);
        }
        let ScriptedReply::Bytes(bytes) = whole_or_events(heard) else {
            return whole_or_events(heard);
        };
        let at = bytes.windows(4).rposition(|four| four == b"data").unwrap_or_default();
        ScriptedReply::Held { first: bytes[..at].to_vec(), last: bytes[at..].to_vec() }
    })
    .await;
    let address = router.running.addresses.http;
    // One has sent nothing, one has been answered, and one is being answered.
    let silent = H1.connect(address).await.unwrap();
    let mut idle = H1.connect(address).await.unwrap();
    assert_eq!(ask(&mut idle, "/health").await, 200);
    let mut tasks = JoinSet::new();
    let streaming = H1.connect(address).await.unwrap();
    tasks.spawn(async move { exchange(streaming, &completion(true)).await });
    splitrail_tests::cluster::eventually("the engine has the request", async || {
        router
            .post
            .heard()
            .iter()
            .any(splitrail_tests::scripted_server::ReceivedRequest::is_inference)
    })
    .await;
    let SecureCluster { running, post, .. } = router;
    let mut draining = JoinSet::new();
    draining.spawn(running.drain());
    for stream in [silent, idle] {
        let end = exchange(stream, b"").await;
        assert!(end.bytes.is_empty() && end.error.is_none(), "{end:?}");
    }
    post.release();
    let reply = tasks.join_next().await.unwrap().unwrap();
    assert!(reply.error.is_none() && reply.text().contains("[DONE]"), "{reply:?}");
    assert_eq!(draining.join_next().await.unwrap().unwrap(), 0, "no request is cut off");
}
