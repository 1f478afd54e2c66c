//! A client that holds many connections leaves room for others.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use serde_json::json;
use splitrail_tests::binary::built;
use splitrail_tests::cluster::eventually;
use splitrail_tests::process::Process;
use splitrail_tests::raw::{connect_from, request};
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{arguments, engine, yaml};

const MINE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Connections that go on sending a body, slowly enough to last and quickly enough to be allowed.
/// How many of them there are for now.
async fn dribblers(solo: &Solo, count: usize) -> Vec<TcpStream> {
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                content-length: 60000\r\n\r\n{";
    let mut open = Vec::new();
    for _ in 0..count {
        let mut socket = connect_from(MINE, solo.router.http).await;
        // One that was refused may be closed already.
        let _closed = socket.write_all(head.as_bytes()).await;
        open.push(socket);
    }
    open
}

async fn ask(solo: &Solo, own: Ipv4Addr, request: &[u8]) -> String {
    ask_at(solo.router.http, own, request).await
}

async fn ask_at(router: SocketAddr, own: Ipv4Addr, request: &[u8]) -> String {
    let mut socket = connect_from(own, router).await;
    // One that is refused may be closed already.
    let _closed = socket.write_all(request).await;
    read(&mut socket).await
}

async fn read(socket: &mut TcpStream) -> String {
    let mut reply = String::new();
    // A reset is an end like any other.
    let _end = socket.read_to_string(&mut reply).await;
    reply
}

#[tokio::test]
async fn one_address_with_all_the_connections_it_can_get_leaves_room_for_others() {
    const MAX: usize = 200;
    let solo = Solo::start("{ connections_max: 200 }", |_| whole_reply()).await;
    let held = dribblers(&solo, MAX + 50).await;
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a"}).to_string();
    let completion = request("POST", "/v1/completions", &[], body.as_bytes());
    let health = request("GET", "/health", &[], b"");
    for request in [&completion, &health] {
        let reply = ask(&solo, OTHER, request).await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    }
    let open = solo.metric("splitrail_connections", &[("listener", "http")]).await;
    assert!(open > (MAX * 3 / 4) as f64, "one address alone gets nearly all: {open}");
    let refused = [("listener", "http"), ("reason", "connections_per_address")];
    assert!(solo.metric("splitrail_connections_cut_total", &refused).await >= 50.0);
    drop(held);
}

#[tokio::test]
async fn an_address_has_no_more_connections_than_it_may() {
    let limits = "{ connections_per_address_max: 5 }";
    let solo = Solo::start(limits, |_| whole_reply()).await;
    // Those of the test's own clients are from the same address.
    let held = dribblers(&solo, 10).await;
    let health = request("GET", "/health", &[], b"");
    let refused = read(&mut connect_from(MINE, solo.router.http).await).await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(refused.contains("retry-after: 1\r\n"), "{refused}");
    let other = ask(&solo, OTHER, &health).await;
    assert!(other.starts_with("HTTP/1.1 200 "), "{other}");
    drop(held);
    eventually("those that have gone do not count", async || {
        ask(&solo, MINE, &health).await.starts_with("HTTP/1.1 200 ")
    })
    .await;
}

/// With `connections_max` alone, the connections of one address would take all files.
#[tokio::test]
async fn one_address_leaves_others_as_many_files_as_they_need_to_be_served() {
    let (engine, folder) = (engine().await, tempfile::tempdir().unwrap());
    let limited = ["-c", "ulimit -n 256 && exec \"$0\" \"$@\""].map(str::to_owned);
    let router = [built("splitrail").display().to_string()];
    let serve = arguments(folder.path(), &yaml(&engine.url(), "", ""));
    let args = [&limited[..], &router, &serve].concat();
    let process = Process::run(Path::new("/bin/sh"), "router", folder.path(), &args, &[]).await;
    let http: SocketAddr = process.told("http").parse().unwrap();
    let mut held = Vec::new();
    for _ in 0..500 {
        held.push(connect_from(MINE, http).await);
    }
    let body = json!({"model": "sim", "max_tokens": 4, "prompt": "a"}).to_string();
    let completion = request("POST", "/v1/completions", &[], body.as_bytes());
    for _ in 0..5 {
        let reply = ask_at(http, OTHER, &completion).await;
        assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    }
    assert!(!process.log().contains("no connection can be accepted"), "{}", process.log());
    drop(held);
}
