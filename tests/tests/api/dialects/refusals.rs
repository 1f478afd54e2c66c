//! What is refused, and in whose words.

use http::HeaderMap;
use splitrail_sim::{FaultKind, KvConnector};
use splitrail_tests::shape::openai_error;
use splitrail_tests::trial::error_of;

use super::support::*;

#[tokio::test]
async fn errors_are_openai_s_and_of_messages_anthropic_s_around_them() {
    let mut trial = Trial::start(Spec::default()).await;
    for path in BOTH {
        let mut nobody = request(path, "hello", 5);
        nobody["model"] = "nobody".into();
        let reply = trial.post("model_not_found", path, &nobody).await;
        let error = openai_error(&reply, 404);
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("model_not_found"), &json!("not_found_error"))
        );
        error_of(&reply.json());
        let is_anthropic = reply.json()["type"] == "error";
        assert_eq!(is_anthropic, path == MESSAGES);

        trial.expect("invalid_request");
        let reply = trial.cluster.http.post_with(path, &[], "{").await;
        assert_eq!(openai_error(&reply, 400)["code"], "invalid_json");
        assert_eq!(reply.json()["type"] == "error", path == MESSAGES);

        let reply = trial.cluster.http.get(path).await;
        assert_eq!(openai_error(&reply, 405)["code"], "method_not_allowed");
        assert_eq!(reply.json()["type"] == "error", path == MESSAGES);
    }
    let reply = trial.cluster.http.post("/v1/messages/batches", &json!({})).await;
    assert_eq!(reply.json()["type"], "error");
    assert_eq!(openai_error(&reply, 404)["type"], "not_found_error");
    // In the engine's own words.
    for (path, members) in [
        (MESSAGES, json!({"model": "sim", "messages": [{"role": "user", "content": "a"}]})),
        (RESPONSES, json!({"model": "sim", "input": [{"role": "user", "content": 5}]})),
    ] {
        let reply = trial.post("engine_rejected", path, &members).await;
        assert_eq!(openai_error(&reply, 400)["code"], "engine_rejected");
    }
    trial.finish().await;
}

/// The id that Anthropic's clients read in the head of a reply.
fn id_of(headers: &HeaderMap) -> &str {
    let [own, id] = ["x-request-id", "request-id"].map(|name| headers[name].to_str().unwrap());
    assert_eq!(id, own);
    id
}

#[tokio::test]
async fn anthropic_s_clients_read_the_id_of_each_reply_and_of_each_error() {
    const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
    let mut trial = Trial::start(Spec::aggregated(1)).await;
    let body = request(MESSAGES, "hello", 5);
    for path in [MESSAGES, COUNT_TOKENS] {
        let reply = trial.post("ok", path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        id_of(&reply.headers);
        let mut nobody = body.clone();
        nobody["model"] = "nobody".into();
        trial.expect("unsupported_media");
        for reply in [
            trial.post("model_not_found", path, &nobody).await,
            trial.cluster.http.post_with(path, &[("content-type", "text/plain")], "{").await,
            trial.cluster.http.get(path).await,
            trial.cluster.http.get("/v1/messages/batches").await,
        ] {
            assert_eq!(reply.json()["request_id"], id_of(&reply.headers), "{}", reply.text());
        }
    }
    trial.fault("w0", FaultKind::DieMidStream { after_chunks: 6 }, Some(1));
    let long = request(MESSAGES, "hello", 20);
    let mut events = trial.stream("decode_lost", MESSAGES, &long).await;
    let id = id_of(&events.headers).to_owned();
    assert_eq!(events.named().await.last().unwrap().1["request_id"], id);
    let reply = trial.post("ok", RESPONSES, &request(RESPONSES, "hello", 5)).await;
    assert_eq!(reply.header("request-id"), "", "OpenAI's clients read `x-request-id`");
    trial.finish().await;
}

#[tokio::test]
async fn requests_that_need_a_stored_response_are_refused_before_any_engine() {
    let mut trial = Trial::start(Spec::default()).await;
    for (member, value) in [
        ("background", json!(true)),
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!("conv_1")),
    ] {
        let mut body = request(RESPONSES, "hello", 5);
        body[member] = value;
        let reply = trial.post("invalid_request", RESPONSES, &body).await;
        let error = openai_error(&reply, 400);
        assert_eq!(error["param"], member);
        assert!(error["message"].as_str().unwrap().contains("not"), "{error}");
    }
    assert_eq!(trial.counts(["p0", "p1", "d0", "d1"]), [0; 4]);
    for said in [json!(null), json!(false), json!(true)] {
        let mut body = request(RESPONSES, "hello", 5);
        body["store"] = said;
        assert_eq!(trial.post("ok", RESPONSES, &body).await.status, 200);
    }
    for reply in [
        trial.cluster.http.get("/v1/responses/resp_1").await,
        trial.cluster.http.delete("/v1/responses/resp_1").await,
    ] {
        assert_eq!(openai_error(&reply, 404)["code"], "response_not_found");
    }
    trial.finish().await;
}

#[tokio::test]
async fn tools_that_an_engine_runs_by_itself_keep_a_prompt_on_one_worker() {
    let mut trial = Trial::start(Spec::default()).await;
    for (tools, local) in [
        (json!([{"type": "web_search_preview"}]), Some("engine_tools")),
        (json!([{"type": "function", "name": "f", "parameters": {}}]), None),
    ] {
        let mut body = request(RESPONSES, &prompt(30, "tools"), 5);
        body["tools"] = tools;
        let reply = trial.post("ok", RESPONSES, &body).await;
        assert_eq!(reply.route("local"), local);
        assert_eq!(reply.route("prefill").is_some(), local.is_none());
    }
    trial.finish().await;
}

#[tokio::test]
async fn engines_that_do_nothing_alone_are_not_asked_for_what_they_have_no_pair_for() {
    let mut trial = Trial::start(Spec { connector: KvConnector::Sglang, ..Spec::default() }).await;
    let mut body = request(RESPONSES, "hello", 5);
    body["tools"] = json!([{"type": "web_search_preview"}]);
    let reply = trial.post("invalid_request", RESPONSES, &body).await;
    assert_eq!(openai_error(&reply, 400)["param"], "tools");
    assert_eq!(trial.counts(["p0", "p1", "d0", "d1"]), [0; 4]);
    trial.finish().await;
}
