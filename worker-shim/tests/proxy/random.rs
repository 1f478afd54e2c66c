//! Counts return to nothing whatever happens: random fates of many requests at once.

use proptest::prelude::*;
use tokio::task::JoinSet;

use crate::support::*;

/// What an engine does with a request.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Whole,
    Stream,
    ResetBefore,
    ResetAfterHead,
    ResetInStream,
    Hang,
    HangInStream,
}

/// When a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Never,
    AfterHead,
    InBody,
    AfterRequest,
    AfterReplyHead,
    InReply,
}

fn fate() -> impl Strategy<Value = Fate> {
    use Fate::*;
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

fn leaves() -> impl Strategy<Value = Leaves> {
    use Leaves::*;
    proptest::sample::select(vec![Never, AfterHead, InBody, AfterRequest, AfterReplyHead, InReply])
}

const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\
    transfer-encoding: chunked\r\n\r\n";

/// Reads the request's fate from its head, and acts.
async fn act(mut connection: Raw) {
    // A client may have left before its head was sent on.
    let head = connection.head_if_any().await;
    let Some(fate) = head.lines().find_map(|line| line.strip_prefix("x-fate: ")) else { return };
    match fate {
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
            match fate {
                "ResetInStream" => return,
                "Stream" => connection.try_write("0\r\n\r\n").await,
                _ => {}
            }
        }
    }
    // Whatever else comes, until the proxy closes: what hangs ends with its client.
    connection.drain().await;
}

/// Sends a request and leaves when it is time; one that hangs is left after all.
async fn visit(mut client: Raw, fate: Fate, leaves: Leaves) {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-fate: {fate:?}\r\ncontent-length: 2000\r\n\
         x-splitrail-prefill-tokens: 33\r\nconnection: close\r\n\r\n"
    );
    client.write(head).await;
    if matches!(leaves, Leaves::AfterHead) {
        return;
    }
    client.try_write(&"x".repeat(1000)).await;
    if matches!(leaves, Leaves::InBody) {
        return;
    }
    client.try_write(&"x".repeat(1000)).await;
    if matches!((leaves, fate), (Leaves::AfterRequest, _) | (_, Fate::Hang)) {
        return;
    }
    let reply = client.head_if_any().await;
    if matches!(leaves, Leaves::AfterReplyHead) || reply.is_empty() {
        return;
    }
    if matches!((leaves, fate), (Leaves::InReply, _) | (_, Fate::HangInStream)) {
        return;
    }
    client.drain().await;
}

async fn all(visits: Vec<(Fate, Leaves)>) {
    let engine = RawEngine::start().await;
    let mut stand = Stand::before(engine.address).await;
    let serving = async {
        let mut connections = JoinSet::new();
        loop {
            connections.spawn(act(engine.accept_any().await));
        }
    };
    let visiting = async {
        let mut clients = JoinSet::new();
        for (fate, leaves) in &visits {
            clients.spawn(visit(stand.connect().await, *fate, *leaves));
        }
        soon("all visits", clients.join_all()).await;
        // Ends once every connection has ended, that of a hanging request by its client.
        stand.stop.cancel();
        soon("an end", stand.serving.join_next()).await.unwrap().unwrap();
    };
    tokio::select! {
        () = serving => {}
        () = visiting => {}
    }
    assert_eq!(stand.counts(), (0, 0));
    assert_eq!(stand.traffic.staged(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn counts_return_to_nothing(visits in proptest::collection::vec((fate(), leaves()), 1..40)) {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(all(visits));
    }
}
