//! Keys from a URL, over real connections.

use std::path::PathBuf;
use std::time::Duration;

use splitrail_config::JwtAuth;
use splitrail_config::jwks::JwksUrl;
use splitrail_telemetry::Metrics;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::server::{KeyServer, LOOPBACK_TLS, NAMED_TLS, Reply, found, status, tls_fixture};
use super::support::{NOW, Signer, acme, auth, claims, jwks};
use crate::jwt::fetch::{FetchError, Fetcher};
use crate::jwt::source::Pace;
use crate::jwt::{JwksSource, JwtRefusal, Verifier};

/// A pace at which tests need not wait. The timeout is for replies that come.
const FAST: Pace = Pace {
    file_interval: Duration::from_millis(5),
    fetch_interval_min: Duration::from_millis(5),
    fetch_timeout: Duration::from_secs(20),
};

/// A running source, which ends when it is dropped.
struct Running {
    verifier: Verifier,
    metrics: Metrics,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Running {
    fn start(jwks: String, pace: Pace) -> Self {
        let metrics = Metrics::new().unwrap();
        let source = JwksSource::new(&JwtAuth { jwks, ..auth() }, &metrics).unwrap();
        let (verifier, stop, mut tasks) =
            (source.verifier(), CancellationToken::new(), JoinSet::new());
        tasks.spawn(source.run_at(pace, stop.clone()));
        Self { verifier, metrics, stop, tasks }
    }

    fn refreshes(&self, result: &str) -> u64 {
        let labels = ["https://id.example", result];
        self.metrics.jwks_refreshes.with_label_values(&labels).get()
    }

    /// Waits until a token has this result.
    async fn until(&self, token: &str, result: Result<(), JwtRefusal>) {
        while self.verifier.verify(token, NOW).map(drop) != result {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until this many more refreshes have had this result. Asks for them with a token of an
    /// unknown key.
    async fn until_refreshed(&self, result: &str, more: u64) {
        let stranger = Signer::ed("stranger").token(&claims());
        let wanted = self.refreshes(result) + more;
        while self.refreshes(result) < wanted {
            assert_eq!(self.verifier.verify(&stranger, NOW), Err(JwtRefusal::UnknownKey));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test]
async fn keys_are_fetched_at_the_start_and_when_a_token_names_an_unknown_key() {
    let (first, second) = (Signer::ed("first"), Signer::ec("second"));
    let server = KeyServer::start(found(&jwks(&[&first]))).await;
    let source = Running::start(server.url(), FAST);
    source.until(&first.token(&claims()), Ok(())).await;
    let request = server.last_request();
    assert!(request.starts_with("GET /keys?of=issuer HTTP/1.1\r\n"), "{request}");
    assert!(request.contains(&format!("host: {}\r\n", server.address)), "{request}");
    server.reply_with(found(&jwks(&[&first, &second])));
    source.until(&second.token(&claims()), Ok(())).await;
    // A key that the issuer has withdrawn is not accepted, even if the token is remembered.
    server.reply_with(found(&jwks(&[&second])));
    assert_eq!(source.verifier.verify(&first.token(&claims()), NOW), Ok(acme()));
    source.until_refreshed("changed", 1).await;
    source.until(&first.token(&claims()), Err(JwtRefusal::UnknownKey)).await;
    let text = source.metrics.encode();
    assert!(text.contains("splitrail_jwks_keys{issuer=\"https://id.example\"} 1"), "{text}");
}

#[tokio::test]
async fn an_unnamed_key_that_is_replaced_is_fetched_when_a_signature_is_wrong() {
    let (first, second) = (Signer::ed("first"), Signer::ed("second"));
    let unnamed = |signer: &Signer| signer.with_header(&serde_json::json!({ "alg": "EdDSA" }));
    let server = KeyServer::start(found(&jwks(&[&first]))).await;
    let source = Running::start(server.url(), FAST);
    source.until(&unnamed(&first), Ok(())).await;
    server.reply_with(found(&jwks(&[&second])));
    source.until(&unnamed(&second), Ok(())).await;
}

#[tokio::test]
async fn tokens_are_refused_until_there_are_keys() {
    let signer = Signer::ed("k");
    let server = KeyServer::start(Reply::Close).await;
    let source = Running::start(server.url(), FAST);
    while source.refreshes("failed") < 3 {
        let token = signer.token(&claims());
        assert_eq!(source.verifier.verify(&token, NOW), Err(JwtRefusal::UnknownKey));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.reply_with(found(&jwks(&[&signer])));
    source.until(&signer.token(&claims()), Ok(())).await;
}

#[tokio::test]
async fn a_source_that_fails_keeps_the_earlier_keys() {
    let signer = Signer::ed("k");
    let (keys, token) = (jwks(&[&signer]), signer.token(&claims()));
    let other = KeyServer::start(found(&jwks(&[&Signer::ed("other")]))).await;
    let redirect = format!("location: {}\r\n", other.url());
    let many = vec![signer.jwk(); 257];
    let many = serde_json::json!({ "keys": many }).to_string();
    let server = KeyServer::start(found(&keys)).await;
    let source = Running::start(server.url(), FAST);
    source.until(&token, Ok(())).await;
    for reply in [
        Reply::Close,
        Reply::Bytes(b"SSH-2.0-OpenSSH\r\n".to_vec()),
        Reply::Bytes(Vec::new()),
        Reply::Bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{\"keys\":".to_vec()),
        found(b""),
        found(b"<html>sign in</html>"),
        found(b"{\"keys\":[]}"),
        found(b"{\"keys\":[{\"kty\":\"oct\",\"k\":\"AAAA\"}]}"),
        found(many.as_bytes()),
        found(&[b' '; 10_000_000]),
        status("404 Not Found", "", &keys),
        status("500 Internal Server Error", "", &keys),
        status("204 No Content", "", b""),
        status("302 Found", &redirect, b""),
        status("308 Permanent Redirect", &redirect, &keys),
        Reply::Endless(b"HTTP/1.1 200 OK\r\n\r\n".to_vec()),
        Reply::Endless(b"HTTP/1.1 200 OK\r\nx: ".to_vec()),
    ] {
        server.reply_with(reply);
        // The reply to a fetch that has begun before may be the earlier one.
        source.until_refreshed("failed", 2).await;
        assert_eq!(source.verifier.verify(&token, NOW), Ok(acme()));
    }
    assert!(other.times().is_empty(), "the redirect was followed");
    assert_eq!(source.refreshes("changed"), 1);
    server.reply_with(found(&keys));
    source.until_refreshed("unchanged", 1).await;
    assert_eq!(source.verifier.verify(&token, NOW), Ok(acme()));
}

fn fetcher(url: &str, ca: Option<PathBuf>) -> Fetcher {
    Fetcher { url: JwksUrl::parse(url).unwrap(), ca }
}

#[tokio::test]
async fn a_server_that_does_not_finish_in_time_is_left() {
    let head = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
    let body = b"HTTP/1.1 200 OK\r\ncontent-length: 900000\r\n\r\n{".to_vec();
    for reply in [Reply::Silence, Reply::Trickle(head), Reply::Trickle(body)] {
        let server = KeyServer::start(reply).await;
        let result = fetcher(&server.url(), None).fetch(Duration::from_millis(50)).await;
        assert!(matches!(result, Err(FetchError::Timeout)), "{result:?}");
    }
}

#[tokio::test]
async fn failures_have_their_own_messages() {
    let message = async |url: &str, reply| {
        let server = KeyServer::start(reply).await;
        let url = url.replace("SERVER", &server.address.to_string());
        let result = fetcher(&url, None).fetch(Duration::from_secs(20)).await;
        result.unwrap_err().to_string()
    };
    let url = "http://SERVER/";
    let redirect = status("302 Found", "location: http://127.0.0.1/\r\n", b"");
    assert!(message(url, redirect).await.contains("redirect, which is not followed: status 302"));
    let error = status("503 Service Unavailable", "", b"secret");
    assert_eq!(message(url, error).await, "the server replied with status 503");
    assert!(message(url, found(&[b' '; 1_048_577])).await.contains("larger than 1 MiB"));
    assert!(message(url, Reply::Close).await.contains("not valid HTTP"));
    assert!(message("https://SERVER/", Reply::Close).await.contains("no TLS connection"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let away = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    assert!(message(&away, Reply::Close).await.contains("no connection to the server"));
}

#[tokio::test]
async fn a_body_of_exactly_one_mebibyte_is_read() {
    let server = KeyServer::start(found(&[b' '; 1 << 20])).await;
    let body = fetcher(&server.url(), None).fetch(Duration::from_secs(20)).await;
    assert_eq!(body.unwrap().len(), 1 << 20);
}

#[tokio::test]
async fn the_server_must_have_a_certificate_of_the_authority() {
    let fetch = async |server: &KeyServer, ca: Option<PathBuf>| {
        let url = format!("https://{}/", server.address);
        fetcher(&url, ca).fetch(Duration::from_secs(20)).await
    };
    let ca = |folder, name| Some(tls_fixture(folder, name));
    let server = KeyServer::start_tls(found(b"{}"), LOOPBACK_TLS).await;
    assert_eq!(fetch(&server, ca(LOOPBACK_TLS, "ca.pem")).await.unwrap(), b"{}");
    let other = fetch(&server, ca(LOOPBACK_TLS, "stranger.pem")).await;
    assert!(matches!(other, Err(FetchError::Tls(_))), "{other:?}");
    let missing = fetch(&server, ca(LOOPBACK_TLS, "missing.pem")).await;
    assert!(matches!(missing, Err(FetchError::Authority(_))), "{missing:?}");
    // Without `jwks_ca`, the authorities of the system count, and none has signed this.
    let system = fetch(&server, None).await;
    assert!(matches!(system, Err(FetchError::Tls(_) | FetchError::NoAuthorities)), "{system:?}");
    // This certificate is of the authority, but for another name.
    let named = KeyServer::start_tls(found(b"{}"), NAMED_TLS).await;
    let wrong = fetch(&named, ca(NAMED_TLS, "ca.pem")).await;
    assert!(matches!(wrong, Err(FetchError::Tls(_))), "{wrong:?}");
}

// Virtual time: it advances only while all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_storm_of_unknown_keys_causes_at_most_one_fetch_in_ten_seconds() {
    let signer = Signer::ed("k");
    let server = KeyServer::start(found(&jwks(&[&signer]))).await;
    let source = Running::start(server.url(), Pace::default());
    source.until(&signer.token(&claims()), Ok(())).await;
    let storm: Vec<_> = (0..50).map(|_| Signer::ed("stranger").token(&claims())).collect();
    for _ in 0..100 {
        for token in &storm {
            assert_eq!(source.verifier.verify(token, NOW), Err(JwtRefusal::UnknownKey));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let times = server.times();
    let gaps: Vec<_> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    assert!((9..=11).contains(&times.len()), "{gaps:?}");
    assert!(gaps.iter().all(|gap| *gap >= 9.99), "{gaps:?}");
    // Afterwards, only the refresh interval causes fetches.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let after_storm = server.times().len();
    tokio::time::sleep(Duration::from_secs(3000)).await;
    assert_eq!(server.times().len(), after_storm);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(server.times().len() > after_storm);
}

#[tokio::test]
async fn a_source_ends_on_request() {
    for reply in [Reply::Silence, found(&jwks(&[&Signer::ed("k")]))] {
        let server = KeyServer::start(reply).await;
        let mut source = Running::start(server.url(), FAST);
        while server.times().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        source.stop.cancel();
        source.tasks.join_next().await.unwrap().unwrap();
    }
}
