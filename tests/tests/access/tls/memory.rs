//! The memory of idle connections.

use splitrail_tests::binary::RouterProcess;
use splitrail_tests::proc::{memory, reset_peak};
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::tls::{TlsClient, ask, fixture, over};
use tokio::net::TcpStream;

use super::support::yaml;

const CLIENTS: u64 = 1000;

#[tokio::test]
async fn a_thousand_idle_connections_take_little_memory() {
    let post = ScriptedServer::start(|_| ScriptedReply::json(200, "{}")).await;
    let path = |name: &str| fixture(name).display().to_string();
    let tls = format!("cert: {:?}, key: {:?}", path("router.pem"), path("router.key"));
    let listener = format!("{{ address: 127.0.0.1:0, tls: {{ {tls} }} }}");
    let listen = format!("{{ http: {listener}, grpc: 127.0.0.1:0, admin: 127.0.0.1:0 }}");
    let yaml = yaml(&listen, "{ header_timeout: 600s, idle_timeout: 600s }", "", &post.url());
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("router.log");
    let router = RouterProcess::serve(folder.path(), &yaml, &[], &log).await;
    let config = std::sync::Arc::new(TlsClient::default().config());
    let connect = async || {
        let socket = TcpStream::connect(router.http).await.unwrap();
        let mut stream = over(socket, config.clone()).await.unwrap();
        assert_eq!(ask(&mut stream, "/health").await, 200);
        stream
    };
    // What the first connections take once is no connection's own.
    for _ in 0..20 {
        connect().await;
    }
    let before = memory(router.pid());
    reset_peak(router.pid());
    let mut idle = Vec::new();
    for _ in 0..CLIENTS {
        idle.push(connect().await);
    }
    let grown_kib = memory(router.pid()).peak_kib.saturating_sub(before.now_kib);
    println!("{} KiB for each", grown_kib as f64 / CLIENTS as f64);
    assert!(grown_kib < 64 * CLIENTS, "{grown_kib} KiB for {CLIENTS} connections");
    for stream in idle.iter_mut().step_by(100) {
        assert_eq!(ask(stream, "/health").await, 200, "the connection is still open");
    }
}
