//! `/inference/v1/generate`: token ids in, token ids out.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;

use crate::support::*;

const GENERATE: &str = "/inference/v1/generate";

fn recorded() -> Value {
    serde_json::from_str(include_str!("../fixtures/generate-vllm-0.32.0.json")).unwrap()
}

/// Keys in their order, with those of the usage and of the first choice.
fn shape(reply: &Value) -> [Vec<String>; 3] {
    let keys = |value: &Value| {
        value.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default()
    };
    [keys(reply), keys(&reply["usage"]), keys(&reply["choices"][0])]
}

fn body(max_tokens: u32) -> Value {
    json!({"token_ids": prompt(1, 40), "sampling_params": {"max_tokens": max_tokens}})
}

#[tokio::test]
async fn replies_have_the_recorded_shape() {
    let engine = start(SimConfig::default()).await;
    let whole = post(&engine, GENERATE, body(3)).await.json();
    assert_eq!(shape(&whole), shape(&recorded()["whole"]));
    let mut body = body(3);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = post(&engine, GENERATE, body).await.chunks();
    let recorded = recorded();
    let recorded = recorded["chunks"].as_array().unwrap();
    assert_eq!(chunks.len(), recorded.len());
    for (ours, theirs) in chunks.iter().zip(recorded) {
        assert_eq!(shape(ours), shape(theirs));
    }
}

#[tokio::test]
async fn generate_returns_the_tokens_of_a_completion() {
    let engine = start(SimConfig::default()).await;
    let completion =
        json!({"prompt": prompt(1, 40), "max_tokens": 12, "n": 2, "return_token_ids": true});
    let expected = post(&engine, "/v1/completions", completion).await.json();
    let mut body = body(12);
    body["sampling_params"]["n"] = json!(2);
    let whole = post(&engine, GENERATE, body.clone()).await.json();
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    body["stream"] = json!(true);
    let chunks = post(&engine, GENERATE, body).await.chunks();
    for index in 0..2 {
        let ids = &expected["choices"][index]["token_ids"];
        assert_eq!(&whole["choices"][index]["token_ids"], ids);
        let of_choice = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let streamed: Vec<Value> = of_choice
            .filter(|choice| choice["index"] == index)
            .flat_map(|choice| choice["token_ids"].as_array().unwrap().clone())
            .collect();
        assert_eq!(&json!(streamed), ids);
    }
}

#[tokio::test]
async fn requests_without_token_ids_or_parameters_are_refused() {
    let engine = start(SimConfig::default()).await;
    for (body, param) in [
        (json!({"prompt": "x", "sampling_params": {}}), "body.token_ids"),
        (json!({"token_ids": ["x"], "sampling_params": {}}), "body.token_ids"),
        (json!({"token_ids": [1, 2]}), "body.sampling_params"),
    ] {
        let reply = post(&engine, GENERATE, body).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[tokio::test]
async fn the_seed_changes_the_samples_and_temperature_0_makes_them_equal() {
    let engine = start(SimConfig::default()).await;
    let texts = async |extra: Value| {
        let mut body = json!({"prompt": prompt(1, 40), "max_tokens": 12});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = post(&engine, "/v1/completions", body).await.json();
        let choices = reply["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>()
    };
    let three = texts(json!({"n": 3, "seed": 7})).await;
    assert_ne!(three[0], three[1]);
    assert_eq!(texts(json!({"n": 2, "seed": 8})).await, three[1..]);
    let greedy = texts(json!({"n": 2, "temperature": 0, "seed": 7})).await;
    assert_eq!(greedy[0], greedy[1]);
}
