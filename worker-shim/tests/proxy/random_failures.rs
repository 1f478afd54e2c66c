//! Random failures of many concurrent requests: all counts return to zero.

use proptest::prelude::*;
use tokio::task::JoinSet;

use crate::support::*;

/// What the engine does with a request.
#[derive(Clone, Copy, Debug)]
enum EngineBehaviour {
    Whole,
    Stream,
    ResetBefore,
    ResetAfterHead,
    ResetInStream,
    Hang,
    HangInStream,
}

/// When the client disconnects.
#[derive(Clone, Copy, Debug)]
enum Disconnect {
    Never,
    AfterHead,
    InBody,
    AfterRequest,
    AfterReplyHead,
    InReply,
}

fn behaviour() -> impl Strategy<Value = EngineBehaviour> {
    use EngineBehaviour::*;
    proptest::sample::select(vec![
        Whole,
        Stream,
        ResetBefore,
        ResetAfterHead,
        ResetInStream,
        Hang,
        HangInStream,
    ])
}

fn disconnect() -> impl Strategy<Value = Disconnect> {
    use Disconnect::*;
    proptest::sample::select(vec![Never, AfterHead, InBody, AfterRequest, AfterReplyHead, InReply])
}

const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\
    transfer-encoding: chunked\r\n\r\n";

/// Reads the engine's behaviour from the head of the request, and acts accordingly.
async fn serve_request(mut connection: Raw) {
    // The client may have disconnected before its head was forwarded.
    let head = connection.head_if_any().await;
    let Some(behaviour) = head.lines().find_map(|line| line.strip_prefix("x-behaviour: ")) else {
        return;
    };
    match behaviour {
        "ResetBefore" => return,
        "Whole" => {
            connection
                .try_write("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
                .await;
        }
        "Hang" => {}
        "ResetAfterHead" => {
            connection.try_write(HEAD).await;
            return;
        }
        _ => {
            connection.try_write(HEAD).await;
            connection.try_write("3\r\nabc\r\n").await;
            match behaviour {
                "ResetInStream" => return,
                "Stream" => connection.try_write("0\r\n\r\n").await,
                _ => {}
            }
        }
    }
    // Read until the proxy closes. A hanging request ends when its client disconnects.
    connection.drain().await;
}

/// Sends a request and disconnects at the given point, or at the end if the request hangs.
async fn send_request(mut client: Raw, behaviour: EngineBehaviour, disconnect: Disconnect) {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-behaviour: {behaviour:?}\r\ncontent-length: 2000\r\n\
         x-splitrail-prefill-tokens: 33\r\nconnection: close\r\n\r\n"
    );
    client.write(head).await;
    if matches!(disconnect, Disconnect::AfterHead) {
        return;
    }
    client.try_write(&"x".repeat(1000)).await;
    if matches!(disconnect, Disconnect::InBody) {
        return;
    }
    client.try_write(&"x".repeat(1000)).await;
    if matches!((disconnect, behaviour), (Disconnect::AfterRequest, _) | (_, EngineBehaviour::Hang))
    {
        return;
    }
    let reply = client.head_if_any().await;
    if matches!(disconnect, Disconnect::AfterReplyHead) || reply.is_empty() {
        return;
    }
    if matches!(
        (disconnect, behaviour),
        (Disconnect::InReply, _) | (_, EngineBehaviour::HangInStream)
    ) {
        return;
    }
    client.drain().await;
}

async fn run_all(visits: Vec<(EngineBehaviour, Disconnect)>) {
    let engine = RawEngine::start().await;
    let mut proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let serving = async {
        let mut connections = JoinSet::new();
        loop {
            connections.spawn(serve_request(engine.accept_any().await));
        }
    };
    let visiting = async {
        let mut clients = JoinSet::new();
        for (behaviour, disconnect) in &visits {
            clients.spawn(send_request(proxy.connect().await, *behaviour, *disconnect));
        }
        within_timeout("all requests", clients.join_all()).await;
        // Serving ends once every connection has ended.
        proxy.stop.cancel();
        within_timeout("an end", proxy.serving.join_next()).await.unwrap().unwrap();
    };
    tokio::select! {
        () = serving => {}
        () = visiting => {}
    }
    assert_eq!(proxy.counts(), (0, 0));
    assert_eq!(proxy.traffic.staged(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn counts_return_to_zero_after_random_failures(visits in proptest::collection::vec((behaviour(), disconnect()), 1..40)) {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(run_all(visits));
    }
}
