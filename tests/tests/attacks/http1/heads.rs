//! What a request must say of itself, so that no web page and no other host's name can use the
//! router.

use serde_json::json;
use splitrail_tests::raw::{RawReply, exchange};
use splitrail_tests::solo::{Solo, whole_reply};

const PATHS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/v1/messages"];

fn body(path: &str) -> String {
    match path {
        "/v1/completions" => json!({"model": "sim", "max_tokens": 4, "prompt": "a"}),
        _ => {
            let messages = json!([{"role": "user", "content": "a"}]);
            json!({"model": "sim", "max_tokens": 4, "messages": messages})
        }
    }
    .to_string()
}

async fn post(solo: &Solo, version: &str, target: &str, fields: &str) -> RawReply {
    let body = body("/v1/completions");
    let length = body.len();
    let request = format!(
        "POST {target} HTTP/{version}\r\n{fields}content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    exchange(solo.router.http, request.as_bytes()).await.expect("a reply")
}

const JSON: &str = "content-type: application/json\r\n";

/// A browser sends these across sites without asking the router first.
#[tokio::test]
async fn a_body_without_the_content_type_json_is_a_415_and_no_engine_sees_it() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    for path in PATHS {
        for fields in [
            "",
            "content-type: text/plain\r\n",
            "content-type: application/x-www-form-urlencoded\r\n",
            "content-type: multipart/form-data; boundary=x\r\n",
            "content-type: text/plain; application/json\r\n",
            "content-type: text/plain\r\ncontent-type: application/json\r\n",
            "content-type: application/json\r\ncontent-type: text/plain\r\n",
        ] {
            let body = body(path);
            let request = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\norigin: http://evil.example\r\n{fields}\
                 content-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            let reply = exchange(solo.router.http, request.as_bytes()).await.unwrap();
            assert_eq!(reply.status(), 415, "{path} {fields}");
            assert!(!reply.head.contains("access-control"), "{}", reply.head);
            let error: serde_json::Value = serde_json::from_str(&reply.text()).unwrap();
            assert_eq!(error["error"]["code"], "unsupported_media", "{error}");
            assert_eq!(error["type"] == "error", path == "/v1/messages", "{error}");
        }
    }
    assert!(!solo.post.heard().iter().any(|heard| heard.is_inference()));
    for value in ["application/json", "Application/JSON; charset=utf-8", "application/x+json"] {
        let fields = format!("host: x\r\ncontent-type: {value}\r\n");
        assert_eq!(post(&solo, "1.1", PATHS[0], &fields).await.status(), 200, "{value}");
    }
}

/// The question that a browser asks before it sends JSON across sites.
#[tokio::test]
async fn a_preflight_gets_no_permission() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    for path in PATHS {
        let request = format!(
            "OPTIONS {path} HTTP/1.1\r\nhost: x\r\norigin: http://evil.example\r\n\
             access-control-request-method: POST\r\n\
             access-control-request-headers: content-type\r\nconnection: close\r\n\r\n"
        );
        let reply = exchange(solo.router.http, request.as_bytes()).await.unwrap();
        assert_eq!(reply.status(), 405, "{path}");
        assert!(!reply.head.contains("access-control"), "{}", reply.head);
    }
}

#[tokio::test]
async fn a_request_names_one_host() {
    let solo = Solo::start("{}", |_| whole_reply()).await;
    let path = PATHS[0];
    let absolute = format!("http://a.example{path}");
    for (version, target, fields, status) in [
        ("1.1", path, "host: x\r\n", 200),
        ("1.1", path, "", 400),
        ("1.1", path, "host: x\r\nhost: x\r\n", 400),
        ("1.1", path, "host: x\r\nHost: y\r\n", 400),
        ("1.1", path, "host: user@x\r\n", 400),
        ("1.1", &absolute, "host: x\r\n", 200),
        ("1.1", &absolute, "", 400),
        ("1.0", path, "", 200),
        ("1.0", path, "host: x\r\nhost: y\r\n", 400),
    ] {
        let before = solo.post.heard().len();
        let reply = post(&solo, version, target, &format!("{fields}{JSON}")).await;
        assert_eq!(reply.status(), status, "{version} {target} {fields}: {}", reply.text());
        if status == 400 {
            assert!(reply.head.contains("connection: close"), "{}", reply.head);
            let asked = solo.post.heard().iter().skip(before).any(|heard| heard.is_inference());
            assert!(!asked, "{fields}");
        }
    }
}

/// A web page whose own name was made to lead here (DNS rebinding) calls by that name.
#[tokio::test]
async fn a_router_with_a_list_of_its_names_is_called_by_no_other() {
    let listen = "http_hosts: [llm.example, 127.0.0.1]";
    let solo = Solo::start_listening(listen, "{}", |_| whole_reply()).await;
    let ask = async |host: &str| {
        let fields = format!("host: {host}\r\norigin: http://{host}\r\n{JSON}");
        post(&solo, "1.1", PATHS[0], &fields).await.status()
    };
    for (host, status) in
        [("llm.example", 200), ("LLM.example:8000", 200), ("evil.example", 403), ("localhost", 403)]
    {
        assert_eq!(ask(host).await, status, "{host}");
    }
    let fields = format!("host: evil.example\r\nx-request-id: mine\r\n{JSON}");
    let refused = post(&solo, "1.1", "/v1/messages", &fields).await;
    assert_eq!(refused.status(), 403, "{}", refused.text());
    for header in ["x-request-id: mine", "request-id: mine"] {
        let has_id = refused.head.lines().any(|line| line == header);
        assert!(has_id, "the id that is in the access log: {}", refused.head);
    }
    let models = b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n";
    assert_eq!(exchange(solo.router.http, models).await.unwrap().status(), 403);
    let health = b"GET /health HTTP/1.1\r\nhost: 10.1.2.3\r\nconnection: close\r\n\r\n";
    assert_eq!(exchange(solo.router.http, health).await.unwrap().status(), 200);
}
