//! Which paths are forwarded to the engine, and the errors for all others.

use http::Method;
use serde_json::{Value, json};
use splitrail_sim::{SimConfig, SimEngine};

use crate::support::*;

#[tokio::test]
async fn only_listed_paths_are_forwarded_to_the_engine() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let proxy = ProxyUnderTest::in_front_of(engine.http_addr()).await;
    for path in ["/health", "/version", "/load", "/metrics", "/v1/models", "/kv_event_sources"] {
        let reply = ask(proxy.address, Method::GET, path, &[], "").await;
        assert_eq!(reply.status, 200, "{path}");
    }
    let body = json!({"prompt": "a b c"});
    assert_eq!(post(proxy.address, "/tokenize", &[], &body).await.status, 200);
    for path in ["/sim/state", "/reset_prefix_cache", "/v1/models/", "/splitrail/none"] {
        let refused = (404, "unknown_path".to_owned(), Value::Null);
        assert_eq!(post(proxy.address, path, &[], &body).await.error(), refused, "{path}");
    }
    let reply = ask(proxy.address, Method::DELETE, "/v1/models", &[], "").await;
    assert_eq!(reply.error(), (405, "method_not_allowed".to_owned(), Value::Null));
    let reply = ask(proxy.address, Method::GET, "/splitrail/status", &[], "").await;
    assert_eq!((reply.status, reply.text()), (200, "here"));
    assert_eq!(proxy.outcomes("refused_path"), 5);
    assert_eq!(proxy.outcomes("local"), 1);
    assert_eq!(proxy.outcomes("forwarded"), 7);
}

#[tokio::test]
async fn an_unreachable_engine_gives_503_with_retry_after_and_a_broken_reply_502() {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    // Larger than the socket buffers: the reply must still arrive.
    let body = json!({"prompt": "x".repeat(8 << 20)});
    let broken = post(proxy.address, "/v1/completions", &[], &body);
    let breaking = async {
        let mut connection = engine.accept().await;
        connection.head().await;
    };
    let (reply, ()) = tokio::join!(broken, breaking);
    assert_eq!(reply.error(), (502, "engine_failed".to_owned(), Value::Null));
    assert!(!reply.headers.contains_key("retry-after"));
    drop(engine);
    let reply = post(proxy.address, "/v1/completions", &[], &body).await;
    assert_eq!(reply.error(), (503, "engine_unreachable".to_owned(), Value::Null));
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!((proxy.outcomes("engine_failed"), proxy.outcomes("engine_unreachable")), (1, 1));
    assert_eq!(proxy.counts(), (0, 0));
}
