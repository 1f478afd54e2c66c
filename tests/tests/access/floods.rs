//! Floods of wrong credentials take no memory, fill no log, and do not affect other clients.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use serde_json::Value;
use splitrail_tests::Client;
use splitrail_tests::binary::RouterProcess;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::solo::whole_reply;
use splitrail_tests::tenants::{Keys, bearer};
use splitrail_tests::trial::COMPLETIONS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::issuer::{Signer, jwks, jwt};
use super::tls::support::yaml;

const REQUESTS: usize = 200_000;
const CONNECTIONS: usize = 16;

/// Requests before the flood, which take the memory that a busy router has.
const WARM_REQUESTS: usize = 5_000;

/// What the router may grow by during the flood. Half of it is what is kept about the honest
/// requests; with 50 bytes for each wrong key, the growth would be larger.
const GROWTH_KIB: u64 = 8 << 10;

/// Length of the longest wrong keys in bytes, which is that of the longest credential.
const LONGEST: usize = 16 << 10;

/// Maximum number of lines in a second about refused credentials in the audit file.
const LINES_PER_SECOND: u64 = 10;

/// A wrong credential; no two are equal.
fn wrong(number: usize) -> String {
    let bytes = match number % 16 {
        0 => LONGEST,
        1 => LONGEST + 100,
        2 => 2000,
        3 => 8,
        // Those of keys.
        _ => 67,
    };
    // Each fifth has the form of a token.
    let separator = if number.is_multiple_of(5) { "." } else { "" };
    let start = format!("sr-{number:x}{separator}x{separator}");
    let rest = bytes.saturating_sub(start.len());
    start + &"f".repeat(rest)
}

fn request(number: usize) -> String {
    let credential = wrong(number);
    let header = match number % 3 {
        0 => format!("x-api-key: {credential}"),
        _ => format!("authorization: {}", bearer(&credential)),
    };
    match number % 2 {
        0 => format!("GET /v1/models HTTP/1.1\r\nhost: r\r\n{header}\r\n\r\n"),
        _ => {
            let body = "{\"model\":\"sim\",\"prompt\":\"a\"}";
            let length = body.len();
            format!(
                "POST {COMPLETIONS} HTTP/1.1\r\nhost: r\r\n{header}\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            )
        }
    }
}

/// Reads one reply from a connection; its head.
async fn reply(socket: &mut TcpStream, buffer: &mut Vec<u8>) -> String {
    buffer.clear();
    let mut piece = [0; 4096];
    loop {
        let count = socket.read(&mut piece).await.expect("a reply");
        assert!(count > 0, "the connection ended");
        buffer.extend_from_slice(&piece[..count]);
        let Some(head) = buffer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
        let length = text.split("content-length: ").nth(1).expect("a length");
        let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
        if buffer.len() >= head + 4 + length {
            return text;
        }
    }
}

/// Sends the requests from one number to another over some connections that are kept.
async fn flood(address: SocketAddr, from: usize, to: usize) {
    let next = Arc::new(AtomicUsize::new(from));
    let mut clients = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let next = Arc::clone(&next);
        clients.spawn(async move {
            let mut socket = TcpStream::connect(address).await.expect("a connection");
            let mut buffer = Vec::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                if number >= to {
                    return;
                }
                socket.write_all(request(number).as_bytes()).await.expect("a request");
                let head = reply(&mut socket, &mut buffer).await;
                assert!(head.starts_with("HTTP/1.1 401 "), "{number}: {head}");
            }
        });
    }
    clients.join_all().await;
}

fn lines(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// The number of series of all metrics.
fn series(metrics: &str) -> usize {
    metrics.lines().filter(|line| !line.starts_with('#')).count()
}

/// Checks the lines about refused credentials, of which there were `refused` in `seconds`.
fn check_audit(file: &Path, refused: u64, seconds: u64) {
    let lines: Vec<Value> =
        lines(file).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| line["event"] == "refused_credential"));
    let written = lines.len() as u64;
    let left_out: u64 = lines.iter().filter_map(|line| line["left_out"].as_u64()).sum();
    // The first and the last second may have begun before and end after the flood.
    assert!(written <= LINES_PER_SECOND * (seconds + 2), "{written} lines in {seconds} s");
    assert!(written + left_out <= refused);
    assert!(left_out > refused / 2, "{left_out} of {refused} are said to be left out");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_take_no_memory_fill_no_log_and_affect_no_other_client() {
    let post = ScriptedServer::start(|heard| match heard.is_inference() {
        true => whole_reply(),
        false => ScriptedReply::json(200, "{}"),
    })
    .await;
    let mut keys = Keys::empty();
    let key = keys.tenant("acme");
    let (key_file, set) = (keys.path().display().to_string(), keys.folder().join("jwks.json"));
    std::fs::write(&set, jwks(&[&Signer::ed("e")])).unwrap();
    let audit = keys.folder().join("audit.jsonl");
    let top = format!(
        "auth: [ {{ kind: keys, file: {key_file:?} }}, {} ]
tenants: [ {{ name: acme }} ]
audit: {{ path: {:?} }}",
        jwt(&set.display().to_string()),
        audit.display().to_string()
    );
    let listen = "{ http: 127.0.0.1:0, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }";
    // Heads have room for the longest credential.
    let yaml = yaml(listen, "{ header_size_max: 32768 }", &top, &post.url());
    let log = keys.folder().join("router.log");
    let router = RouterProcess::serve(keys.folder(), &yaml, &[], &log).await;
    let (http, admin) = (Client::new(router.http), Client::new(router.admin));
    let authorization = bearer(&key);
    let headers = [("authorization", authorization.as_str())];
    let body = "{\"model\":\"sim\",\"prompt\":\"a\",\"max_tokens\":1}";
    eventually("the router serves", async || {
        http.post_with(COMPLETIONS, &headers, body).await.status == 200
    })
    .await;
    // Some figures of a worker are shown after some requests only.
    for _ in 0..4 {
        assert_eq!(http.post_with(COMPLETIONS, &headers, body).await.status, 200);
    }

    let started = Instant::now();
    flood(router.http, 0, WARM_REQUESTS).await;
    let metrics = admin.get("/metrics").await.text();
    let (logged, before) = (lines(&log).len(), memory(router.pid()));
    reset_peak(router.pid());
    let is_over = AtomicBool::new(false);
    let honest = async {
        let mut answered = 0;
        while !is_over.load(Relaxed) {
            let reply = http.post_with(COMPLETIONS, &headers, body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            answered += 1;
        }
        answered
    };
    let flooding = async {
        flood(router.http, WARM_REQUESTS, REQUESTS).await;
        is_over.store(true, Relaxed);
    };
    let (answered, ()) = tokio::join!(honest, flooding);
    let grown_kib = memory(router.pid()).peak_kib.saturating_sub(before.now_kib);
    let seconds = started.elapsed().as_secs();
    println!("{grown_kib} KiB more, {answered} honest requests, {seconds} s");
    assert!(grown_kib < GROWTH_KIB, "{grown_kib} KiB");
    assert!(answered > 0);

    let after = admin.get("/metrics").await.text();
    let refused = metric_in(&after, "splitrail_refused_credentials_total", &[]);
    assert_eq!(refused, REQUESTS as f64);
    assert_eq!(series(&after), series(&metrics), "no series of a credential's own");
    let said = lines(&log).split_off(logged);
    assert!(said.len() < 10, "{said:?}");
    router.end();
    check_audit(&audit, REQUESTS as u64, seconds);
}
