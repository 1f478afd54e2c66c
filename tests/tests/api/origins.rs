//! Pages of other sites: only those of listed origins may read replies.

use bytes::Bytes;
use http::{Method, StatusCode};
use splitrail_tests::client::Reply;
use splitrail_tests::scripted_server::ScriptedReply;
use splitrail_tests::solo::Solo;
use splitrail_tests::trial::{CHAT, chat};

const PAGE: &str = "https://chat.example";

async fn solo(listen: &str) -> Solo {
    Solo::start_listening(listen, "{}", |_| ScriptedReply::json(200, r#"{"choices":[]}"#)).await
}

#[tokio::test]
async fn a_page_of_a_listed_origin_may_ask_and_read_and_no_other_page() {
    let solo = solo("http_origins: [https://chat.example]").await;
    let asks = [
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let preflight = async |path: &str, origin: &str| {
        let headers = [&[("origin", origin)], &asks[..]].concat();
        let reply = solo.http.send(solo.http.request(Method::OPTIONS, path, &headers, "")).await;
        Reply { status: reply.status(), headers: reply.headers().clone(), body: Bytes::new() }
    };
    for path in [CHAT, "/v1/models"] {
        let asked = preflight(path, PAGE).await;
        assert_eq!(
            (asked.status, asked.header("access-control-allow-origin")),
            (StatusCode::NO_CONTENT, PAGE)
        );
        assert_eq!(asked.header("access-control-allow-headers"), "authorization,content-type");
        assert!(asked.header("access-control-allow-methods").contains("POST"), "{path}");
    }
    let other = preflight(CHAT, "https://chat.example.evil").await;
    assert_eq!(
        (other.status, other.header("access-control-allow-origin")),
        (StatusCode::METHOD_NOT_ALLOWED, "")
    );

    let headers = |origin| [("origin", origin), ("content-type", "application/json")];
    for (path, body, status) in
        [(CHAT, chat("x").to_string(), 200), (CHAT, "{".into(), 400), ("/v1/x", "{}".into(), 404)]
    {
        let read = solo.http.post_with(path, &headers(PAGE), body.clone()).await;
        assert_eq!(read.status, status, "{path}: {}", read.text());
        assert_eq!(read.header("access-control-allow-origin"), PAGE, "{path}");
        assert!(read.header("access-control-expose-headers").contains("x-request-id"));
        assert!(read.header("vary").contains("origin"));
        let hidden = solo.http.post_with(path, &headers("http://chat.example"), body).await;
        assert_eq!(hidden.header("access-control-allow-origin"), "", "{path}");
    }
}

#[tokio::test]
async fn no_page_may_by_default_and_any_page_with_a_star() {
    for (listen, granted) in [("http_hosts: []", ""), ("http_origins: ['*']", PAGE)] {
        let solo = solo(listen).await;
        let reply = solo.http.get_with("/v1/models", &[("origin", PAGE)]).await;
        assert_eq!(
            (reply.status, reply.header("access-control-allow-origin")),
            (StatusCode::OK, granted)
        );
    }
}
