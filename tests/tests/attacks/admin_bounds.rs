//! What clients of the admin listener can take from those of the front door.

use serde_json::json;
use splitrail_proto::v1::explain_request::Subject;
use splitrail_proto::v1::generate_request::Prompt;
use splitrail_proto::v1::{ExplainRequest, GenerateRequest, TokenIds};
use splitrail_tests::cluster::eventually;
use splitrail_tests::grpc::{grpc_client, text_request};
use splitrail_tests::raw::{exchange, request};
use splitrail_tests::scripted_server::{ReceivedRequest, ScriptedReply, ScriptedServer};
use splitrail_tests::solo::{Solo, whole_reply};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::support::{Site, yaml};

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

#[tokio::test]
async fn requests_to_be_explained_leave_memory_and_cores_to_clients() {
    const TOKENIZE: &str = "/tokenize";
    // The engine keeps every question for tokens, so that no dry run ends.
    let engine = ScriptedServer::start(|heard| match heard.target.as_str() {
        TOKENIZE => ScriptedReply::Held { first: Vec::new(), last: Vec::new() },
        _ if heard.is_inference() => whole_reply(),
        _ => ScriptedReply::json(200, r#"{"data":[{"id":"sim"}]}"#),
    })
    .await;
    let limits = "limits: { body_size_max: 1MiB, request_memory_max: 16MiB }";
    let yaml = yaml(&engine.url(), limits, "")
        .replace("tokenizer: { kind: none }", "tokenizer: { kind: engine, timeout: 30s }");
    let site = Site::serve(engine, &yaml, tempfile::tempdir().unwrap()).await;
    // The router asks for the tokens of prompts of its own as well.
    let asked = || {
        let heard = site.engine.heard();
        let is_of_dry_run =
            |heard: &&ReceivedRequest| heard.target == TOKENIZE && heard.text().contains("u u u u");
        heard.iter().filter(is_of_dry_run).count()
    };
    let mut explains = Vec::new();
    for place in 0..20 {
        let prompt = format!("{place} {}", "u ".repeat(MIB / 8));
        let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 1}).to_string();
        let bytes = request(
            "POST",
            "/admin/explain",
            &[("content-type", "application/json")],
            body.as_bytes(),
        );
        let bytes = String::from_utf8(bytes).unwrap().replace("host: splitrail", "host: localhost");
        let mut socket = TcpStream::connect(site.admin_at).await.unwrap();
        socket.write_all(bytes.as_bytes()).await.unwrap();
        explains.push(socket);
    }
    eventually("two dry runs have asked the engine", async || asked() >= 2).await;
    // The engine is not asked for the tokens of this one.
    let body = json!({"model": "sim", "prompt": [1, 2, 3], "user": "u".repeat(MIB - 100)});
    let reply = site.http.post("/v1/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(asked(), 2, "the other eighteen wait for these two");
}

/// One body may take what is free, but a client that holds more than one thing has at most eight ninths
/// of all memory.
#[tokio::test]
async fn what_is_prepared_to_be_explained_is_in_the_share_of_its_sender() {
    let limits = "{ body_size_max: 1MiB, request_memory_max: 1MiB }";
    let solo = Solo::start_listening("grpc_explain: true", limits, |_| whole_reply()).await;
    let headers = [("content-type", "application/json")];
    for (percent, status) in [(95, 503), (75, 200)] {
        let user = "u".repeat(MIB * percent / 100);
        let body = json!({"model": "sim", "prompt": "a", "max_tokens": 1, "user": user});
        let explained = solo.admin.post_with("/admin/explain", &headers, body.to_string()).await;
        assert_eq!(explained.status, status, "{percent} %: {}", explained.text());
        let served = solo.http.post("/v1/completions", &body).await;
        assert_eq!(served.status, status, "{percent} %, as where it is served: {}", served.text());
        eventually("no request holds memory", async || {
            solo.metric("splitrail_request_memory_bytes", &[]).await == 0.0
        })
        .await;
    }
    // Over gRPC, an id takes a byte of the message, sixteen decoded, and two and a half of block hashes.
    for (percent, is_explained) in [(95, false), (75, true)] {
        let prompt = Prompt::TokenIds(TokenIds { ids: vec![100; MIB * percent / 1950] });
        let request = GenerateRequest { prompt: Some(prompt), ..text_request("", "") };
        let asked = ExplainRequest { subject: Some(Subject::Request(request)) };
        let explained = grpc_client(solo.router.grpc).explain(asked).await;
        assert_eq!(explained.is_ok(), is_explained, "{percent} %: {explained:?}");
    }
}
