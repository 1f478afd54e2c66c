//! Connections to engines over TLS: when a kept one is usable, and how replies and handshakes end.

use std::future::poll_fn;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{AlertDescription, RootCertStore, ServerConfig};
use splitrail_config::EngineTls;
use splitrail_config::engine_tls::EngineTlsFiles;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::{TlsAcceptor, server};

use super::*;
use crate::tls::TlsSettings;
use crate::wire::{Connection, EngineRequest, NoReplyReason, ReplyError};

type Engine = server::TlsStream<TcpStream>;

const SOON: Duration = Duration::from_secs(10);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tls/engines").join(name)
}

fn acceptor(demands_certificate: bool) -> TlsAcceptor {
    let provider = Arc::new(default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = if demands_certificate {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
        config.with_client_cert_verifier(verifier.build().unwrap())
    } else {
        config.with_no_client_auth()
    };
    let certificate = CertificateDer::from_pem_file(fixture("engine.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(fixture("engine.key")).unwrap();
    Arc::new(config.with_single_cert(vec![certificate], key).unwrap()).into()
}

fn settings() -> Arc<TlsSettings> {
    let section = EngineTls { ca: Some(fixture("ca.pem")), ..EngineTls::default() };
    TlsSettings::new(EngineTlsFiles::read(&section).unwrap())
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (near, listener.accept().await.unwrap().0)
}

/// A connection after its handshake.
async fn pair() -> (Stream, Engine) {
    let (near, far) = sockets().await;
    let (settings, acceptor) = (settings(), acceptor(false));
    let (near, far) = tokio::join!(settings.connect("localhost", near, SOON), acceptor.accept(far));
    (near.unwrap(), far.unwrap())
}

/// Waits until the socket has bytes that were not read.
async fn has_arrived(stream: &Stream) {
    let Stream::Tls(secured) = stream else { panic!("a stream over TLS") };
    let until = async {
        while arrived(secured.stream.get_ref().0.socket()) != ArrivedData::Bytes {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, until).await.unwrap();
}

/// Reads what has arrived, until `expected` is the result.
async fn becomes(stream: &mut Stream, expected: ArrivedData) {
    let until = async {
        while stream.arrived() != expected {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, until).await.unwrap();
}

/// The record into which an engine encrypts these bytes.
fn record(engine: &mut Engine, bytes: &[u8]) -> Vec<u8> {
    let session = engine.get_mut().1;
    session.writer().write_all(bytes).unwrap();
    let mut record = Vec::new();
    while session.wants_write() {
        session.write_tls(&mut record).unwrap();
    }
    record
}

#[tokio::test]
async fn session_tickets_and_new_keys_are_not_part_of_a_reply() {
    let (mut near, mut engine) = pair().await;
    // The tickets follow the handshake.
    has_arrived(&near).await;
    assert_eq!(near.arrived(), ArrivedData::Nothing);
    engine.get_mut().1.refresh_traffic_keys().unwrap();
    engine.flush().await.unwrap();
    has_arrived(&near).await;
    assert_eq!(near.arrived(), ArrivedData::Nothing);
    engine.write_all(b"late").await.unwrap();
    becomes(&mut near, ArrivedData::Bytes).await;
}

#[tokio::test]
async fn a_connection_has_ended_after_close_notify_and_after_the_end_of_tcp() {
    let (mut near, mut engine) = pair().await;
    engine.get_mut().1.send_close_notify();
    engine.flush().await.unwrap();
    becomes(&mut near, ArrivedData::End).await;
    let (mut near, mut engine) = pair().await;
    engine.get_mut().0.shutdown().await.unwrap();
    becomes(&mut near, ArrivedData::End).await;
}

#[tokio::test]
async fn a_connection_is_not_usable_in_the_middle_of_a_record() {
    let (mut near, mut engine) = pair().await;
    has_arrived(&near).await;
    assert_eq!(near.arrived(), ArrivedData::Nothing);
    let late = record(&mut engine, b"late");
    for (from, to) in [(0, 3), (3, 5), (5, late.len() - 1)] {
        engine.get_mut().0.write_all(&late[from..to]).await.unwrap();
        becomes(&mut near, ArrivedData::End).await;
    }
    engine.get_mut().0.write_all(&late[late.len() - 1..]).await.unwrap();
    becomes(&mut near, ArrivedData::Bytes).await;
}

#[tokio::test]
async fn messages_of_tls_without_end_make_a_connection_unusable() {
    let (mut near, mut engine) = pair().await;
    let key_updates = async {
        for _ in 0..BETWEEN_MAX_BYTES {
            if engine.get_mut().1.refresh_traffic_keys().is_err() || engine.flush().await.is_err() {
                break;
            }
        }
    };
    tokio::join!(key_updates, becomes(&mut near, ArrivedData::End));
}

fn ask() -> EngineRequest {
    let body = Bytes::from_static(b"body");
    EngineRequest::new("POST", &"engine:8000".parse().unwrap(), "/v1/x", body.into()).ended()
}

async fn answer_of(wire: &mut Connection) -> Result<Vec<u8>, ReplyError> {
    let mut head = wire.exchange(&ask()).await.unwrap();
    let mut all = Vec::new();
    while let Some(piece) = poll_fn(|context| wire.poll_piece(&mut head.framing, context)).await {
        all.extend_from_slice(&piece?);
    }
    Ok(all)
}

#[tokio::test]
async fn only_close_notify_ends_an_answer_that_ends_with_its_connection() {
    for is_orderly in [true, false] {
        let (near, mut engine) = pair().await;
        let mut wire = Connection::new(near, None);
        let answers = async {
            engine.read_exact(&mut [0; 16]).await.unwrap();
            engine.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello").await.unwrap();
            engine.flush().await.unwrap();
            match is_orderly {
                true => engine.shutdown().await.unwrap(),
                false => engine.get_mut().0.shutdown().await.unwrap(),
            }
        };
        let (answer, ()) = tokio::join!(answer_of(&mut wire), answers);
        match is_orderly {
            true => assert_eq!(answer.unwrap(), b"hello"),
            false => assert_eq!(answer, Err(ReplyError::Closed)),
        }
    }
}

#[tokio::test]
async fn a_connection_over_tls_serves_one_request_after_another() {
    let (near, mut engine) = pair().await;
    let mut wire = Connection::new(near, None);
    for _ in 0..3 {
        let answers = async {
            let mut request = Vec::new();
            while !request.ends_with(b"body") {
                engine.read_buf(&mut request).await.unwrap();
            }
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
            engine.write_all(answer.as_bytes()).await.unwrap();
            engine.flush().await.unwrap();
        };
        let (answer, ()) = tokio::join!(answer_of(&mut wire), answers);
        assert_eq!(answer.unwrap(), b"ok");
    }
}

#[tokio::test]
async fn a_request_that_the_socket_did_not_take_at_once_is_sent_whole() {
    // TLS takes the whole request, and the sockets only a part of it.
    const BODY_BYTES: usize = 60_000;
    const SOCKET_BYTES: u32 = 8 << 10;
    let (socket, near) = (TcpSocket::new_v4().unwrap(), TcpSocket::new_v4().unwrap());
    socket.set_recv_buffer_size(SOCKET_BYTES).unwrap();
    near.set_send_buffer_size(SOCKET_BYTES).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let near = near.connect(listener.local_addr().unwrap()).await.unwrap();
    let (settings, acceptor) = (settings(), acceptor(false));
    let accept = acceptor.accept(listener.accept().await.unwrap().0);
    let (near, engine) = tokio::join!(settings.connect("localhost", near, SOON), accept);
    let (mut wire, mut engine) = (Connection::new(near.unwrap(), None), engine.unwrap());

    let body = Bytes::from(vec![b'~'; BODY_BYTES]);
    let authority = "engine:8000".parse().unwrap();
    let request = EngineRequest::new("POST", &authority, "/v1/x", body.into()).ended();
    // The engine begins to read when the router has written what it can.
    let answers = async {
        let mut read = Vec::new();
        while read.iter().filter(|byte| **byte == b'~').count() < BODY_BYTES {
            engine.read_buf(&mut read).await.unwrap();
        }
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        engine.write_all(answer.as_bytes()).await.unwrap();
        engine.flush().await.unwrap();
    };
    let both = async { tokio::join!(biased; wire.exchange(&request), answers) };
    let (head, ()) = tokio::time::timeout(SOON, both).await.unwrap();
    assert_eq!(head.unwrap().status, 200);
}

#[tokio::test]
async fn a_refusal_of_the_routers_certificate_is_known_as_such() {
    let (near, far) = sockets().await;
    let (settings, acceptor) = (settings(), acceptor(true));
    let exchange = async {
        let near = settings.connect("localhost", near, SOON).await.unwrap();
        Connection::new(near, None).exchange(&ask()).await
    };
    let (answer, refused) = tokio::join!(exchange, acceptor.accept(far));
    assert!(refused.is_err());
    assert_eq!(answer.err(), Some(NoReplyReason::Refused(AlertDescription::CertificateRequired)));
}

#[tokio::test]
async fn a_failed_handshake_names_its_problem() {
    let acceptor = acceptor(false);
    let connect = async |host: &str, settings: Arc<TlsSettings>| {
        let (near, far) = sockets().await;
        let (near, _far) = tokio::join!(settings.connect(host, near, SOON), acceptor.accept(far));
        near.err().map(|error| error.to_string())
    };
    for host in ["localhost", "LOCALHOST", "localhost.", "127.0.0.1"] {
        assert_eq!(connect(host, settings()).await, None, "{host}");
    }
    for (host, why) in [
        ("[::1]", "its certificate is not for the name ::1"),
        ("localhost.example", "its certificate is not for the name localhost.example"),
        ("a..b", "its host is not a name that a certificate can have: set engine_tls.server_name"),
    ] {
        assert_eq!(connect(host, settings()).await.as_deref(), Some(why));
    }
}

#[tokio::test]
async fn an_engine_that_does_not_finish_the_handshake_is_given_up() {
    let (near, mut far) = sockets().await;
    let late = settings().connect("localhost", near, Duration::from_millis(20)).await;
    assert_eq!(late.err().unwrap().kind(), io::ErrorKind::TimedOut);
    let (near, plain) = sockets().await;
    let settings = settings();
    let speaks_http = async {
        let mut plain = plain;
        plain.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        plain
    };
    let (refused, _plain) = tokio::join!(settings.connect("localhost", near, SOON), speaks_http);
    assert_eq!(refused.err().unwrap().to_string(), "it does not speak TLS");
    // The first handshake ended with its connection.
    let mut hello = Vec::new();
    far.read_to_end(&mut hello).await.unwrap();
    assert!(!hello.is_empty());
}

#[test]
fn neither_keys_nor_certificates_are_shown() {
    let shown = format!("{:?}", settings());
    assert!(!shown.contains("CERT") && !shown.contains("45, 45"), "{shown}");
}
