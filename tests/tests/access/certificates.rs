//! Client certificates as credentials, over HTTP and gRPC.

use std::sync::Arc;
use std::time::Duration;

use rustls::HandshakeKind;
use splitrail_proto::v1::ListModelsRequest;
use splitrail_proto::v1::front_door_service_client::FrontDoorServiceClient;
use splitrail_tests::raw;
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::tls::expiring::ExpiringIdentity;
use splitrail_tests::tls::{EACH_VERSION, Exchanged, TlsClient, ask, exchange, fixture, over};
use splitrail_tests::trial::COMPLETIONS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::tls::support::{ROUTER, SecureCluster, whole_or_events};

/// The certificate of a client, which has each of these names: the URIs
/// `spiffe://clusters.example/tenant/acme` and `urn:acme:batch`, the DNS names `acme.example` and
/// `*.acme.example`.
const ACME: &str = "clients/acme";

const CA: &str = "client_ca: clients/ca.pem";

/// A router that accepts client certificates, and keys of the tenant `keyed`, which may use no
/// model. `identities` are those of the tenant `acme`.
async fn start(keys: &Keys, tls: &str, kind: &str, identities: &str, top: &str) -> SecureCluster {
    let file = keys.path().display().to_string();
    let top = format!(
        "auth: [ {{ kind: keys, file: {file:?} }}, {{ kind: client_certificate, tenant: {kind} }} ]
tenants:
- {{ name: acme, identities: [{identities}] }}
- {{ name: keyed, models: [] }}
{top}"
    );
    SecureCluster::start_with(
        &format!("{ROUTER}, {tls}"),
        "{ header_timeout: 60s }",
        &top,
        whole_or_events,
    )
    .await
}

fn client(identity: Option<&'static str>) -> TlsClient<'static> {
    TlsClient { identity, ..TlsClient::default() }
}

fn request(key: Option<&str>) -> Vec<u8> {
    let authorization = key.map(bearer).unwrap_or_default();
    let headers: &[_] =
        if key.is_some() { &[("authorization", authorization.as_str())] } else { &[] };
    let body = br#"{"model": "sim", "max_tokens": 4, "prompt": "a"}"#;
    raw::request("POST", COMPLETIONS, headers, body)
}

/// The status of a reply; `None` if there is none.
fn status(reply: &Exchanged) -> Option<u16> {
    reply.text().split(' ').nth(1).and_then(|status| status.parse().ok())
}

/// The status of a completion over HTTP. The tenant `keyed` gets a 403 about the model.
async fn http(
    router: &SecureCluster,
    client: TlsClient<'_>,
    key: Option<&str>,
) -> (Option<u16>, bool) {
    let reply = client.exchange(router.running.addresses.http, &request(key)).await;
    (status(&reply), reply.text().contains("may not use the model"))
}

/// Lists the models over gRPC: their number, or the code of the refusal.
async fn grpc(
    router: &SecureCluster,
    identity: Option<&str>,
    key: Option<&str>,
) -> Result<usize, Code> {
    let read = |name: &str| std::fs::read(fixture(name)).unwrap();
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read("ca.pem")))
        .domain_name("localhost");
    if let Some(name) = identity {
        let pair = (read(&format!("{name}.pem")), read(&format!("{name}.key")));
        tls = tls.identity(Identity::from_pem(pair.0, pair.1));
    }
    let address = router.running.addresses.grpc.unwrap();
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    let endpoint = endpoint.tls_config(tls).unwrap();
    let channel = endpoint.connect().await.map_err(|_| Code::Unavailable)?;
    let mut call = tonic::Request::new(ListModelsRequest {});
    if let Some(key) = key {
        call.metadata_mut().insert("authorization", bearer(key).parse().unwrap());
    }
    let listed = FrontDoorServiceClient::new(channel).list_models(call).await;
    listed.map(|listed| listed.into_inner().models.len()).map_err(|status| status.code())
}

#[tokio::test]
async fn a_certificate_names_its_tenant_by_the_configured_kind_of_name() {
    let keys = Keys::empty();
    for (kind, identity, expected) in [
        ("san_uri", "\"spiffe://clusters.example/tenant/acme\"", 200),
        ("san_uri", "\"urn:acme:batch\"", 200),
        ("san_uri", "\"acme.example\"", 403),
        ("san_uri", "\"spiffe://clusters.example/tenant/acm\"", 403),
        ("san_uri", "\"spiffe://clusters.example/tenant/acme2\"", 403),
        ("san_dns", "\"acme.example\"", 200),
        ("san_dns", "\"*.acme.example\"", 200),
        // A wildcard in a certificate is a name like any other.
        ("san_dns", "\"batch.acme.example\"", 403),
        ("san_dns", "\"urn:acme:batch\"", 403),
        ("san_dns", "\"ops@acme.example\", \"10.0.0.1\"", 403),
    ] {
        let router = start(&keys, CA, kind, identity, "").await;
        for versions in EACH_VERSION {
            let client = TlsClient { versions, ..client(Some(ACME)) };
            assert_eq!(http(&router, client, None).await, (Some(expected), false), "{identity}");
        }
        let listed = if expected == 200 { Ok(1) } else { Err(Code::PermissionDenied) };
        assert_eq!(grpc(&router, Some(ACME), None).await, listed, "{kind} {identity}");
        for (listener, times) in [("http", 2.0), ("grpc", 1.0)] {
            let labels = [("listener", listener), ("reason", "no_tenant")];
            let refused = router.metric("splitrail_refused_credentials_total", &labels).await;
            assert_eq!(refused, if expected == 200 { 0.0 } else { times }, "{kind} {identity}");
        }
    }
}

#[tokio::test]
async fn a_certificate_without_a_name_of_the_configured_kind_names_no_tenant() {
    let keys = Keys::empty();
    // That of a shim has one DNS name.
    let router = start(&keys, "client_ca: ca.pem", "san_uri", "\"shim\"", "").await;
    assert_eq!(http(&router, client(Some("shim")), None).await, (Some(403), false));
    assert_eq!(grpc(&router, Some("shim"), None).await, Err(Code::PermissionDenied));
    let router = start(&keys, "client_ca: ca.pem", "san_dns", "\"shim\"", "").await;
    assert_eq!(http(&router, client(Some("shim")), None).await, (Some(200), false));
}

#[tokio::test]
async fn a_key_has_precedence_over_a_certificate() {
    let mut keys = Keys::empty();
    let (key, expired) = (keys.tenant("keyed"), keys.expired("acme"));
    let router = start(&keys, CA, "san_uri", "\"urn:acme:batch\"", "").await;
    let none = (Some(401), false);
    for (identity, key, over_http, over_grpc) in [
        (None, None, none, Err(Code::Unauthenticated)),
        (None, Some(&*key), (Some(403), true), Ok(0)),
        (Some(ACME), None, (Some(200), false), Ok(1)),
        (Some(ACME), Some(&*key), (Some(403), true), Ok(0)),
        // A wrong key is wrong, whatever the certificate says.
        (Some(ACME), Some("sr-wrong"), none, Err(Code::Unauthenticated)),
        (Some(ACME), Some(""), none, Err(Code::Unauthenticated)),
        (Some(ACME), Some(&*expired), none, Err(Code::Unauthenticated)),
    ] {
        let what = format!("{identity:?} {key:?}");
        assert_eq!(http(&router, client(identity), key).await, over_http, "{what}");
        assert_eq!(grpc(&router, identity, key).await, over_grpc, "{what}");
    }
}

#[tokio::test]
async fn a_certificate_of_another_authority_fails_the_handshake() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let router = start(&keys, CA, "san_dns", "\"shim\", \"urn:acme:batch\"", "").await;
    // One of another authority, one of the router's own, and one that has expired. A valid key
    // does not help.
    for (place, identity) in ["stranger", "shim", "clients/lapsed"].into_iter().enumerate() {
        for (again, versions) in EACH_VERSION.into_iter().enumerate() {
            let client = TlsClient { versions, ..client(Some(identity)) };
            let reply = client.exchange(router.running.addresses.http, &request(Some(&key))).await;
            assert!(reply.bytes.is_empty() && reply.alert().is_some(), "{identity}: {reply:?}");
            router.until_cut("tls_client_certificate", 2 * place + again + 1).await;
        }
        assert!(grpc(&router, Some(identity), Some(&key)).await.is_err(), "{identity}");
    }
    let heard = router.post.heard();
    assert!(!heard.iter().any(splitrail_tests::scripted_server::ReceivedRequest::is_inference));
    let refused = router.metric("splitrail_refused_credentials_total", &[]).await;
    assert_eq!(refused, 0.0, "no request was read");
    assert_eq!(http(&router, client(None), Some(&key)).await, (Some(200), false));
}

#[tokio::test]
async fn the_default_tenant_is_for_clients_without_a_certificate() {
    let keys = Keys::empty();
    let defaults = "defaults: { tenant: keyed }";
    let router = start(&keys, CA, "san_uri", "\"spiffe://other.example\"", defaults).await;
    assert_eq!(http(&router, client(None), None).await, (Some(403), true));
    assert_eq!(grpc(&router, None, None).await, Ok(0));
    assert_eq!(http(&router, client(Some(ACME)), None).await, (Some(403), false));
    assert_eq!(grpc(&router, Some(ACME), None).await, Err(Code::PermissionDenied));
}

#[tokio::test]
async fn plain_connections_have_no_certificate() {
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let tls = format!("{CA}, plain_text: true");
    let router = start(&keys, &tls, "san_uri", "\"urn:acme:batch\"", "").await;
    let address = router.running.addresses.http;
    for (key, expected) in [(None, 401), (Some(&*key), 200)] {
        let reply = raw::exchange(address, &request(key)).await.expect("a reply");
        assert_eq!(reply.status(), expected, "{}", reply.text());
    }
    // The names of a certificate in headers, as some proxies send them.
    let headers = [
        ("x-forwarded-client-cert", "URI=urn:acme:batch"),
        ("x-ssl-client-cert", "urn:acme:batch"),
        ("ssl-client-verify", "SUCCESS"),
    ];
    let claimed = raw::request("POST", COMPLETIONS, &headers, b"{}");
    assert_eq!(raw::exchange(address, &claimed).await.expect("a reply").status(), 401);
}

#[tokio::test]
async fn no_session_is_resumed_where_clients_have_certificates() {
    let keys = Keys::empty();
    let router = start(&keys, CA, "san_uri", "\"urn:acme:batch\"", "").await;
    let address = router.running.addresses.http;
    for versions in EACH_VERSION {
        for (identity, expected) in [(Some(ACME), 200), (None, 401)] {
            let config = Arc::new(TlsClient { versions, ..client(identity) }.config());
            for again in [false, true] {
                let socket = TcpStream::connect(address).await.unwrap();
                let stream = over(socket, Arc::clone(&config)).await.unwrap();
                let kind = stream.get_ref().1.handshake_kind();
                assert_eq!(kind, Some(HandshakeKind::Full), "{identity:?} {again}");
                let reply = exchange(stream, &request(None)).await;
                assert_eq!(status(&reply), Some(expected), "{identity:?} {again}");
            }
        }
    }
}

/// How long certificates of tests are valid that expire while the test runs.
const VALIDITY: Duration = Duration::from_secs(20);

/// The status of the reply to a request whose head is complete once the certificate has expired;
/// before that, the connection has served another request.
async fn status_after_the_end(
    router: &SecureCluster,
    client: TlsClient<'_>,
    brief: &ExpiringIdentity,
) -> Option<u16> {
    let mut stream = client.connect(router.running.addresses.http).await.unwrap();
    assert_eq!(ask(&mut stream, "/v1/models").await, 200);
    let request = request(None);
    let (begun, rest) = request.split_at(20);
    stream.write_all(begun).await.unwrap();
    stream.flush().await.unwrap();
    assert!(!brief.has_expired(), "the machine is too slow for this test");
    brief.expired().await;
    status(&exchange(stream, rest).await)
}

#[tokio::test]
async fn an_expired_certificate_is_no_credential_on_an_open_connection_or_a_new_one() {
    let keys = Keys::empty();
    let issuing = "client_ca: clients/issuing.pem";
    let router = start(&keys, issuing, "san_uri", "\"urn:acme:batch\"", "").await;
    let brief = ExpiringIdentity::new(VALIDITY);
    let identity = brief.name();
    let client =
        |versions| TlsClient { identity: Some(&identity), versions, ..TlsClient::default() };
    let [old, new] = EACH_VERSION.map(client);
    let (over_old, over_new) = tokio::join!(
        status_after_the_end(&router, old, &brief),
        status_after_the_end(&router, new, &brief),
    );
    assert_eq!((over_old, over_new), (Some(401), Some(401)));
    let reply = new.exchange(router.running.addresses.http, &request(None)).await;
    assert!(reply.bytes.is_empty() && reply.alert().is_some(), "{reply:?}");
}

#[tokio::test]
async fn a_connection_is_asked_to_end_when_its_certificate_expires() {
    let keys = Keys::empty();
    let issuing = "client_ca: clients/issuing.pem";
    let router = start(&keys, issuing, "san_uri", "\"urn:acme:batch\"", "").await;
    let brief = ExpiringIdentity::new(VALIDITY);
    let identity = brief.name();
    let client = TlsClient { identity: Some(&identity), ..TlsClient::default() };
    let mut stream = client.connect(router.running.addresses.http).await.unwrap();
    assert_eq!(ask(&mut stream, "/v1/models").await, 200);
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "the router ends it");
    router.until_cut("tls_client_certificate", 1).await;
}
