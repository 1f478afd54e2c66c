use std::convert::Infallible;

use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::wire::*;

async fn pair() -> (Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (Connection::new(near, None), listener.accept().await.unwrap().0)
}

/// A connection that has carried a reply before.
async fn kept_pair() -> (Connection, TcpStream) {
    let (wire, engine) = pair().await;
    (Connection { is_kept: true, ..wire }, engine)
}

fn ask(body: Bytes) -> EngineRequest {
    let mut ask = EngineRequest::new("POST", &"engine:8000".parse().unwrap(), "/v1/x", body.into());
    ask.id("x-request-id", &HeaderValue::from_static("id"));
    ask.ended()
}

async fn all(wire: &mut Connection, mut begun: Head) -> Result<Vec<u8>, ReplyError> {
    let mut all = Vec::new();
    while let Some(piece) = poll_fn(|context| wire.poll_piece(&mut begun.framing, context)).await {
        all.extend_from_slice(&piece?);
    }
    Ok(all)
}

const EXPECTED: &str =
    "POST /v1/x HTTP/1.1\r\nhost: engine:8000\r\ncontent-length: 4\r\nx-request-id: id\r\n\r\nbody";

#[tokio::test]
async fn a_request_is_written_as_it_is_and_its_answer_read_to_its_end() {
    let (mut wire, mut engine) = pair().await;
    for answer in [
        "content-length: 5\r\n\r\nhello",
        "transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    ] {
        let request = ask("body".into());
        let exchange = wire.exchange(&request);
        let engine = async {
            let mut request = vec![0; EXPECTED.len()];
            engine.read_exact(&mut request).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&request), EXPECTED);
            let interim = "HTTP/1.1 102 Processing\r\n\r\n";
            let answer = format!("{interim}HTTP/1.1 200 OK\r\n{answer}");
            engine.write_all(answer.as_bytes()).await.unwrap();
        };
        let (begun, ()) = tokio::join!(exchange, engine);
        let begun = begun.unwrap();
        assert_eq!((begun.status, begun.keeps), (StatusCode::OK, true));
        assert_eq!(all(&mut wire, begun).await.unwrap(), b"hello");
        assert_eq!(wire.arrived(), ArrivedData::Nothing);
    }
}

#[tokio::test]
async fn a_new_id_changes_nothing_else_in_a_request() {
    let (mut wire, mut engine) = pair().await;
    let mut request = ask("body".into());
    request.set_id(&HeaderValue::from_static("di"));
    let written = async {
        let mut written = vec![0; EXPECTED.len()];
        engine.read_exact(&mut written).await.unwrap();
        drop(engine);
        written
    };
    let (_unanswered, written) = tokio::join!(wire.exchange(&request), written);
    assert_eq!(String::from_utf8_lossy(&written), EXPECTED.replace("-id: id", "-id: di"));
}

#[tokio::test]
async fn an_error_before_the_end_of_a_request_counts_and_the_connection_is_spent() {
    let answer = "HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n";
    for hangs_up in [false, true] {
        let (mut wire, mut engine) = pair().await;
        engine.write_all(answer.as_bytes()).await.unwrap();
        if hangs_up {
            engine.shutdown().await.unwrap();
        }
        let request = ask(vec![0; 64 << 20].into());
        let begun = wire.exchange(&request).await.unwrap();
        assert_eq!((begun.status.as_u16(), begun.keeps), (413, false), "hangs up: {hangs_up}");
    }
}

#[tokio::test]
async fn a_success_before_the_end_of_a_request_is_not_its_reply() {
    let early = NoReplyReason::Early;
    let (fresh, kept) = (pair().await, kept_pair().await);
    assert_eq!(answered_early(fresh, 200).await, Err(early));
    assert_eq!(answered_early(kept, 200).await, Err(STALE));
}

#[tokio::test]
async fn an_early_refusal_on_a_kept_connection_may_be_that_of_another_request() {
    for status in [401, 413, 503, 504] {
        assert_eq!(answered_early(pair().await, status).await, Ok(status));
    }
    for status in [401, 503, 504] {
        assert_eq!(answered_early(kept_pair().await, status).await, Err(STALE), "{status}");
    }
    assert_eq!(answered_early(kept_pair().await, 413).await, Ok(413));
}

const STALE: NoReplyReason = NoReplyReason::Stale { sent: true };

/// Sends a long request, of which the engine reads a few bytes before it answers.
async fn answered_early(
    (mut wire, mut engine): (Connection, TcpStream),
    status: u16,
) -> Result<u16, NoReplyReason> {
    let request = ask(vec![0; 64 << 20].into());
    let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
    let early = async {
        engine.read_exact(&mut [0; 4]).await.unwrap();
        engine.write_all(answer.as_bytes()).await.unwrap();
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        head = wire.exchange(&request) => head.map(|head| head.status.as_u16()),
        never = early => match never {},
    }
}

#[tokio::test]
async fn a_truncated_answer_is_detected() {
    for answer in [
        "",
        "HTTP/1.1 200 OK\r\ncontent-le",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhel",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n",
    ] {
        let (mut wire, mut engine) = pair().await;
        engine.write_all(answer.as_bytes()).await.unwrap();
        engine.shutdown().await.unwrap();
        match wire.exchange(&ask("x".into())).await {
            Ok(begun) => {
                assert_eq!(all(&mut wire, begun).await, Err(ReplyError::Closed), "{answer}")
            }
            Err(unanswered) => assert_eq!(unanswered, NoReplyReason::Closed, "{answer}"),
        }
    }
}

#[tokio::test]
async fn nothing_is_written_to_a_kept_connection_that_ended_or_has_bytes() {
    for (late, hangs_up) in [("HTTP/1.1 408 Late\r\n\r\n", false), ("x", false), ("", true)] {
        let (mut wire, mut engine) = kept_pair().await;
        assert_eq!(wire.arrived(), ArrivedData::Nothing);
        engine.write_all(late.as_bytes()).await.unwrap();
        if hangs_up {
            engine.shutdown().await.unwrap();
        }
        // There has been no `await` since, so the runtime cannot know of it yet.
        let request = ask("body".into());
        let unanswered = wire.exchange(&request).await.err();
        let expected = match hangs_up {
            true => NoReplyReason::Stale { sent: false },
            false => NoReplyReason::Unsolicited,
        };
        assert_eq!(unanswered, Some(expected), "{late}");
        assert!(request.body.send().is_some(), "it was not sent");
        drop(wire);
        let mut rest = Vec::new();
        // The kernel resets a connection whose bytes were not read.
        let _reset = engine.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }
}

#[tokio::test]
async fn a_kept_connection_that_ends_or_gives_up_waiting_has_not_answered() {
    for late in ["", "HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n"] {
        let (mut wire, mut engine) = kept_pair().await;
        let request = ask("body".into());
        let ends = async {
            let mut written = vec![0; EXPECTED.len()];
            engine.read_exact(&mut written).await.unwrap();
            engine.write_all(late.as_bytes()).await.unwrap();
            engine.shutdown().await.unwrap();
        };
        let (unanswered, ()) = tokio::join!(wire.exchange(&request), ends);
        assert_eq!(unanswered.err(), Some(NoReplyReason::Stale { sent: true }), "{late}");
    }
}

#[tokio::test]
async fn an_unreadable_answer_names_its_problem() {
    for (answer, why) in [
        ("SSH-2.0-OpenSSH_9.9\r\n", Malformed::Head),
        ("HTTP/1.1 101 Switching\r\n\r\n", Malformed::Switched),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n", Malformed::Coding),
    ] {
        let (mut wire, mut engine) = pair().await;
        engine.write_all(answer.as_bytes()).await.unwrap();
        let unanswered = wire.exchange(&ask("x".into())).await.err();
        assert_eq!(unanswered, Some(NoReplyReason::Malformed(why)), "{answer}");
    }
}

#[tokio::test]
async fn an_answer_that_ends_with_its_connection_is_read_to_that_end() {
    let (mut wire, mut engine) = pair().await;
    engine.write_all(b"HTTP/1.1 200 OK\r\n\r\nhello").await.unwrap();
    engine.shutdown().await.unwrap();
    let begun = wire.exchange(&ask("x".into())).await.unwrap();
    assert_eq!(all(&mut wire, begun).await.unwrap(), b"hello");
}

#[tokio::test]
async fn neither_requests_nor_connections_show_what_they_carry() {
    let (mut wire, _engine) = pair().await;
    wire.read.extend_from_slice(b"secret");
    let mut request = EngineRequest::new(
        "POST",
        &"e:1".parse().unwrap(),
        "/x",
        Bytes::from_static(b"secret").into(),
    );
    request.field("authorization", &HeaderValue::from_static("Bearer secret"));
    // In the compact and in the indented form.
    for shown in [format!("{wire:?} {request:?}"), format!("{wire:#?} {request:#?}")] {
        assert!(!shown.contains("secret") && !shown.contains("115"), "{shown}");
    }
}
