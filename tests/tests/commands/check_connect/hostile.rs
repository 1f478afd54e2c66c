//! Servers that try to hold the check up, to fill its memory, or to write to the operator's terminal.

use std::net::SocketAddr;
use std::time::Duration;

use splitrail_sim::SimConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::support::{Pair, checked_with, config, decode, prefill, printed, worker};

/// What a server does with each connection.
#[derive(Clone, Copy, Debug)]
enum Malice {
    /// Reads, and never writes.
    Silence,
    /// A reply whose body never ends.
    EndlessBody,
    /// A head that never ends.
    EndlessHead,
    /// A byte of the reply now and then.
    Drip,
    /// Interim replies without end.
    Interim,
    /// A length that no memory holds.
    HugeLength,
    /// Valid JSON, nested as deeply as the bound on bytes allows.
    DeepJson,
}

const ALL: [Malice; 7] = [
    Malice::Silence,
    Malice::EndlessBody,
    Malice::EndlessHead,
    Malice::Drip,
    Malice::Interim,
    Malice::HugeLength,
    Malice::DeepJson,
];

/// A server of this kind. It ends with the set.
async fn start(malice: Malice, tasks: &mut JoinSet<()>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            connections.spawn(async move {
                // The check hangs up, which is the end of this.
                let _ended = serve(socket, malice).await;
            });
        }
    });
    address
}

async fn serve(mut socket: TcpStream, malice: Malice) -> std::io::Result<()> {
    let mut request = [0; 4096];
    let _read = socket.read(&mut request).await?;
    let mut endless = async |first: &[u8], piece: &[u8], pause: Duration| {
        socket.write_all(first).await?;
        loop {
            socket.write_all(piece).await?;
            tokio::time::sleep(pause).await;
        }
    };
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    const NO_PAUSE: Duration = Duration::ZERO;
    let with = |more: &[u8]| [HEAD, more].concat();
    match malice {
        Malice::Silence => endless(b"", b"", Duration::from_secs(1)).await,
        Malice::EndlessBody => {
            let chunk = [&b"10000\r\n"[..], &[b' '; 0x1_0000], b"\r\n"].concat();
            endless(&with(b"transfer-encoding: chunked\r\n\r\n"), &chunk, NO_PAUSE).await
        }
        Malice::EndlessHead => endless(HEAD, b"x-more: 0123456789\r\n", NO_PAUSE).await,
        Malice::Drip => endless(HEAD, b"x", Duration::from_millis(50)).await,
        Malice::Interim => endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", NO_PAUSE).await,
        Malice::HugeLength => {
            endless(&with(b"content-length: 9223372036854775807\r\n\r\n"), b"[", NO_PAUSE).await
        }
        Malice::DeepJson => {
            let body = vec![b'['; 1 << 20];
            let length = format!("content-length: {}\r\n\r\n", body.len());
            socket.write_all(&with(length.as_bytes())).await?;
            socket.write_all(&body).await
        }
    }
}

#[tokio::test]
async fn the_check_ends_whatever_a_server_does_and_the_others_are_asked() {
    let pair = Pair::sound().await;
    let mut tasks = JoinSet::new();
    let mut workers = vec![worker("d0", "decode", &pair.decode)];
    for (at, malice) in ALL.into_iter().enumerate() {
        let address = start(malice, &mut tasks).await;
        workers.push(format!(
            "{{ id: bad{at}, role: prefill, url: \"http://{address}\", kv_events: \"tcp://{address}\", \
             kv_replay: \"tcp://{address}\" }}"
        ));
    }
    workers.push(worker("p0", "prefill", &pair.prefill));
    let result = checked_with(&config("block_size: 16", &workers), &["--timeout", "10s"]).await;
    assert_eq!(result.code, Some(69));
    for (at, malice) in ALL.into_iter().enumerate() {
        let id = format!("bad{at}");
        let kinds = result.kinds();
        let of_worker = kinds.iter().find(|(worker, _)| *worker == Some(&id));
        let (_, kind) = of_worker.unwrap_or_else(|| panic!("{malice:?}: {kinds:?}"));
        assert!(["late", "not_http", "not_an_engine"].contains(kind), "{malice:?}: {kind}");
    }
    let hand_offs = result.facts("d0")["hand_offs"].as_array().unwrap();
    assert_eq!((hand_offs.len(), &hand_offs[0]["works"]), (1, &true.into()), "{:#}", result.json);
}

#[tokio::test]
async fn a_check_whose_time_is_over_says_which_workers_were_not_asked() {
    let mut tasks = JoinSet::new();
    let mut workers = Vec::new();
    for at in 0..40 {
        let address = start(Malice::Silence, &mut tasks).await;
        workers.push(format!("{{ id: w{at}, role: both, url: \"http://{address}\" }}"));
    }
    let keys = "block_size: 16\nflow: aggregated\nconnector: none";
    let result = checked_with(&config(keys, &workers), &["--timeout", "2500ms"]).await;
    let count = |wanted: &str| result.kinds().iter().filter(|(_, kind)| *kind == wanted).count();
    assert_eq!((count("late"), count("not_asked")), (32, 8), "{:#}", result.json);
}

#[tokio::test]
async fn names_of_engines_cannot_steer_the_terminal() {
    let name = "evil\u{1b}[2J\u{1b}]0;title\u{7}\nmodel sim\n  p0 ok<script>\u{202e}";
    let pair = Pair::of(SimConfig { model: name.into(), ..prefill() }, decode()).await;
    let printed = printed(&pair.yaml(), &["--connect"]).await;
    assert_eq!(printed.code, Some(69));
    assert!(printed.text.contains("evil\\u{1b}[2J"), "{}", printed.text);
    let allowed = |c: char| c == '\n' || (!c.is_control() && c != '\u{202e}');
    assert!(printed.text.chars().all(allowed), "{:?}", printed.text);
    let heads = printed.text.lines().filter(|line| line.starts_with("model ")).count();
    assert_eq!(heads, 1, "{}", printed.text);
}

#[tokio::test]
async fn a_very_long_name_is_cut() {
    let pair = Pair::of(SimConfig { model: "n".repeat(100_000), ..prefill() }, decode()).await;
    let printed = printed(&pair.yaml(), &["--connect"]).await;
    assert!(printed.text.contains("wrong_model"), "{}", printed.text);
    assert!(printed.text.lines().all(|line| line.chars().count() < 700));
}
