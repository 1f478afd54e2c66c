//! What clients of the admin listener can take from those of the front door.

use serde_json::json;
use splitrail_tests::raw::{exchange, request};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::support::Site;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn bodies_of_reads_at_the_admin_listener_take_no_memory_of_clients() {
    let limits = "limits: { body_size_max: 1MiB, request_memory_max: 8MiB }";
    let site = Site::start(limits, "", tempfile::tempdir().unwrap()).await;
    let mut slow = Vec::new();
    for bytes in [MIB, 64 << 10] {
        let mut sockets = Vec::new();
        for _ in 0..20 {
            let mut socket = TcpStream::connect(site.admin_at).await.unwrap();
            let head = "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n";
            let head = format!("{head}content-length: {bytes}\r\n\r\n");
            socket.write_all(head.as_bytes()).await.unwrap();
            sockets.push(socket);
        }
        for socket in &mut sockets {
            // The router may have closed it instead of reading.
            let _closed = socket.write_all(&vec![b'x'; bytes - 1]).await;
        }
        slow.extend(sockets);
    }
    let body = json!({"model": "sim", "prompt": "a", "user": "u".repeat(MIB / 2)});
    let reply = site.http.post("/v1/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let long = vec![b' '; 65 << 10];
    for (method, path) in [("GET", "/health"), ("HEAD", "/metrics"), ("POST", "/admin/reload")] {
        let bytes = request(method, path, &[], &long);
        let bytes = String::from_utf8(bytes).unwrap().replace("host: splitrail", "host: localhost");
        let reply = exchange(site.admin_at, bytes.as_bytes()).await.unwrap();
        assert_eq!(reply.status(), 413, "{method} {path}");
    }
    let explain =
        json!({"model": "sim", "prompt": "a", "max_tokens": 1, "user": "u".repeat(MIB / 2)});
    let headers = [("content-type", "application/json")];
    let reply = site.admin.post_with("/admin/explain", &headers, explain.to_string()).await;
    assert_eq!(reply.status, 200, "a request to be explained may be long: {}", reply.text());
}
