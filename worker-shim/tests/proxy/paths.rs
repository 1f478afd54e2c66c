//! Which paths lead to the engine, and what a client is told where none does.

use http::Method;
use serde_json::{Value, json};
use splitrail_shim::proxy::ExtraPath;
use splitrail_sim::{SimConfig, SimEngine};

use crate::support::*;

#[tokio::test]
async fn only_listed_paths_lead_to_the_engine() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let stand = Stand::before(engine.http_addr()).await;
    for path in ["/health", "/version", "/load", "/metrics", "/v1/models", "/kv_event_sources"] {
        let reply = ask(stand.address, Method::GET, path, &[], "").await;
        assert_eq!(reply.status, 200, "{path}");
    }
    let body = json!({"prompt": "a b c"});
    assert_eq!(post(stand.address, "/tokenize", &[], &body).await.status, 200);
    for path in ["/sim/state", "/reset_prefix_cache", "/v1/models/", "/splitrail/none"] {
        let refused = (404, "unknown_path".to_owned(), Value::Null);
        assert_eq!(post(stand.address, path, &[], &body).await.error(), refused, "{path}");
    }
    let reply = ask(stand.address, Method::DELETE, "/v1/models", &[], "").await;
    assert_eq!(reply.error(), (405, "method_not_allowed".to_owned(), Value::Null));
    let reply = ask(stand.address, Method::GET, "/splitrail/status", &[], "").await;
    assert_eq!((reply.status, reply.text()), (200, "here"));
    assert_eq!(stand.outcomes("refused_path"), 5);
    assert_eq!(stand.outcomes("local"), 1);
    assert_eq!(stand.outcomes("forwarded"), 7);
}

#[tokio::test]
async fn further_paths_can_be_configured() {
    let engine = SimEngine::start(SimConfig::default()).await.unwrap();
    let stand = Stand::with(engine.http_addr(), |config| {
        let path = "/sim/state".to_owned();
        config.extra_paths.push(ExtraPath { method: Method::GET, path, computes: false });
    });
    let stand = stand.await;
    assert_eq!(ask(stand.address, Method::GET, "/sim/state", &[], "").await.status, 200);
    assert_eq!(ask(stand.address, Method::POST, "/sim/state", &[], "{}").await.status, 405);
}

#[tokio::test]
async fn an_engine_that_is_gone_is_worth_a_retry_and_one_that_broke_off_is_not() {
    let engine = RawEngine::start().await;
    let stand = Stand::before(engine.address).await;
    // Larger than what sockets hold: the reply must arrive all the same.
    let body = json!({"prompt": "x".repeat(8 << 20)});
    let broken = post(stand.address, "/v1/completions", &[], &body);
    let breaking = async {
        let mut connection = engine.accept().await;
        connection.head().await;
    };
    let (reply, ()) = tokio::join!(broken, breaking);
    assert_eq!(reply.error(), (502, "engine_failed".to_owned(), Value::Null));
    assert!(!reply.headers.contains_key("retry-after"));
    drop(engine);
    let reply = post(stand.address, "/v1/completions", &[], &body).await;
    assert_eq!(reply.error(), (503, "engine_unreachable".to_owned(), Value::Null));
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!((stand.outcomes("engine_failed"), stand.outcomes("engine_unreachable")), (1, 1));
    assert_eq!(stand.counts(), (0, 0));
}
