//! What clients ask first: which models there are, whether there are WebSockets, and paths that are
//! joined in the wrong way.

use serde_json::Value;
use splitrail_tests::cluster::eventually;
use splitrail_tests::raw::{exchange, request};
use splitrail_tests::shape::{error_object, openai_error};
use splitrail_tests::{Cluster, Spec};

/// 2020.
const LONG_AGO_UNIX_S: u64 = 1_577_836_800;

async fn start() -> Cluster {
    Cluster::start(Spec {
        engine: |name, config| config.max_model_len = if name == "w0" { 400 } else { 1000 },
        ..Spec::aggregated(2)
    })
    .await
}

fn entries(list: &Value) -> Vec<Value> {
    list["data"].as_array().unwrap().clone()
}

#[tokio::test]
async fn the_list_of_models_says_how_long_a_prompt_may_be_and_since_when_a_model_is_there() {
    let cluster = start().await;
    eventually("the contexts are known", async || {
        let list = cluster.http.get("/v1/models").await.json();
        entries(&list).iter().all(|model| model["max_model_len"] == 400)
    })
    .await;
    let list = entries(&cluster.http.get("/v1/models").await.json());
    let names: Vec<_> = list.iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["default", "sim"]);
    for model in &list {
        assert!(model["created"].as_u64().unwrap() > LONG_AGO_UNIX_S, "{model}");
    }
    let one = cluster.http.get("/v1/models/sim").await.json();
    assert_eq!(one, list[1]);
}

#[tokio::test]
async fn clients_of_anthropic_get_the_list_of_models_in_its_form() {
    let cluster = start().await;
    let version = [("anthropic-version", "2023-06-01")];
    eventually("the contexts are known", async || {
        let list = cluster.http.get_with("/v1/models", &version).await.json();
        entries(&list).iter().all(|model| model["max_input_tokens"] == 400)
    })
    .await;
    let list = cluster.http.get_with("/v1/models?limit=1000", &version).await.json();
    assert_eq!((&list["first_id"], &list["last_id"]), (&"default".into(), &"sim".into()));
    assert_eq!(list["has_more"], false);
    for model in &entries(&list) {
        assert_eq!((&model["type"], &model["display_name"]), (&"model".into(), &model["id"]));
        let created = model["created_at"].as_str().unwrap();
        assert!(created.starts_with("20") && created.ends_with('Z'), "{model}");
    }
    let one = cluster.http.get_with("/v1/models/sim", &version).await.json();
    assert_eq!(one, entries(&list)[1]);
    let missing = cluster.http.get_with("/v1/models/nope", &version).await;
    assert_eq!(openai_error(&missing, 404)["type"], "not_found_error");
    assert_eq!(missing.json()["type"], "error");
}

#[tokio::test]
async fn a_client_that_asks_for_a_web_socket_is_told_to_use_http() {
    let cluster = start().await;
    let headers = [
        ("upgrade", "websocket"),
        ("connection", "upgrade"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let probe = request("GET", "/v1/responses", &headers, b"");
    let reply = exchange(cluster.running.addresses.http, &probe).await.unwrap();
    assert_eq!(reply.status(), 426, "{}", reply.head);
    assert!(reply.head.contains("\r\nupgrade: http/1.1"), "{}", reply.head);
    assert_eq!(error_object(&reply.text())["code"], "upgrade_required");
    assert_eq!(cluster.http.get("/v1/responses").await.status, 405, "no WebSocket is asked for");
}

#[tokio::test]
async fn a_path_that_is_joined_in_the_wrong_way_is_answered_with_the_right_one() {
    let cluster = start().await;
    for (path, near) in [
        ("//v1/chat/completions", Some("`/v1/chat/completions`")),
        ("/chat/completions", Some("`/v1/chat/completions`")),
        ("/v1/v1/messages", Some("`/v1/messages`")),
        ("/v1/messages/", Some("`/v1/messages`")),
        ("/v1/chat/completion", Some("`/v1/chat/completions`")),
        ("/v1/audio/speech", None),
    ] {
        let reply = cluster.http.post(path, &Value::Null).await;
        let message = openai_error(&reply, 404)["message"].as_str().unwrap().to_owned();
        assert_eq!(message.contains("did you mean"), near.is_some(), "{message}");
        assert!(near.is_none_or(|near| message.contains(near)), "{message}");
    }
}
