//! Connections to the engine: reuse, closing, and replies that arrive early.

use tokio::io::AsyncWriteExt;

use crate::support::*;

const ASK: &str = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

async fn expect_ok(client: &mut Raw) {
    assert!(client.head().await.starts_with("HTTP/1.1 200 "));
    client.expect("ok").await;
}

#[tokio::test]
async fn a_connection_closed_by_the_engine_loses_no_request() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    for reply in [OK.to_owned(), OK.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n")] {
        client.write(ASK).await;
        let mut connection = engine.accept().await;
        connection.head().await;
        connection.write(reply).await;
        expect_ok(&mut client).await;
    }
    assert_eq!(proxy.outcomes("forwarded"), 2);
}

#[tokio::test]
async fn concurrent_requests_use_separate_connections_which_are_reused() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let (mut first, mut second) = (proxy.connect().await, proxy.connect().await);
    first.write(ASK).await;
    let mut one = engine.accept().await;
    one.head().await;
    second.write(ASK).await;
    let mut other = engine.accept().await;
    other.head().await;
    for (connection, client) in [(&mut one, &mut first), (&mut other, &mut second)] {
        connection.write(OK).await;
        expect_ok(client).await;
    }
    // The connection that was used last is reused first.
    for (connection, client) in [(&mut other, &mut first), (&mut one, &mut second)] {
        client.write(ASK).await;
        connection.head().await;
    }
}

#[tokio::test]
async fn a_reply_before_the_end_of_the_request_does_not_abort_the_request() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 8\r\n\r\n";
    client.write(format!("{head}abcd")).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    connection.expect("abcd").await;
    connection.write(OK).await;
    expect_ok(&mut client).await;
    client.write("efgh").await;
    connection.expect("efgh").await;
    proxy.until_counts((0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unread_reply_does_not_block_the_request() {
    const UPLOAD: usize = 96 << 20;
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {UPLOAD}\r\n\r\n");
    client.write(format!("{head}x")).await;
    let mut connection = engine.accept().await;
    connection.head().await;
    connection.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    client.head().await;
    let (reading, writing) = connection.socket.split();
    let (mut reading, mut writing) = (reading, writing);
    let answering = async {
        let chunk = format!("10000\r\n{}\r\n", "y".repeat(1 << 16));
        while writing.write_all(chunk.as_bytes()).await.is_ok() {}
    };
    let uploading = async {
        let piece = vec![b'x'; 1 << 20];
        let mut left = UPLOAD - 1;
        while left > 0 {
            let size = left.min(piece.len());
            client.socket.write_all(&piece[..size]).await.unwrap();
            left -= size;
        }
    };
    let taking = async {
        let mut taken = 0;
        let mut bytes = vec![0; 1 << 20];
        while taken < UPLOAD - 1 {
            taken += tokio::io::AsyncReadExt::read(&mut reading, &mut bytes).await.unwrap();
        }
    };
    let through = within_timeout("the whole request", async { tokio::join!(uploading, taking) });
    tokio::select! {
        _ = through => {}
        () = answering => panic!("the reply broke off"),
    }
}
