//! Engines of one model with contexts of other lengths, as while a fleet is changed worker by worker.

use serde_json::{Value, json};
use splitrail_sim::SimConfig;
use splitrail_tests::cluster::eventually;
use splitrail_tests::front::Front;
use splitrail_tests::scripted_server::{ScriptedReply, ScriptedServer};
use splitrail_tests::trial::{CHAT, COMPLETIONS, completion, prompt};
use splitrail_tests::{Client, Spec, Trial};

/// The context of `w0`, `p0` and `d0`.
const SHORT_TOKENS: usize = 400;

fn short_first(name: &str, config: &mut SimConfig) {
    if name.ends_with('0') {
        config.max_model_len = SHORT_TOKENS;
    }
}

fn spec(spec: Spec) -> Spec {
    let canary = "canary: { enabled: false }\n".to_owned();
    Spec { policy: "{ kind: round_robin }", engine: short_first, model: canary, ..spec }
}

/// Waits until the router knows the contexts of all its workers.
async fn contexts_are_known(admin: &Client) {
    eventually("all contexts are known", async || {
        let shown = admin.get("/admin/workers").await.json();
        shown["workers"].as_array().unwrap().iter().all(|worker| worker["context_tokens"].is_u64())
    })
    .await;
}

/// Why workers are vetoed for the leg of a step in a dry run.
async fn vetoed(admin: &Client, body: &Value, step: &str) -> Value {
    let json = [("content-type", "application/json")];
    let reply = admin.post_with("/admin/explain", &json, body.to_string()).await;
    let told = reply.json();
    let steps = told["explanation"]["prompts"][0]["steps"].as_array().unwrap().clone();
    let found = steps.into_iter().find(|found| found["step"] == step);
    found.unwrap_or_else(|| panic!("no {step}: {told}"))["vetoed"].clone()
}

#[tokio::test]
async fn a_prompt_goes_to_a_worker_whose_context_is_long_enough_for_it_and_its_reply() {
    let mut trial = Trial::start(spec(Spec::aggregated(2))).await;
    contexts_are_known(&trial.cluster.admin).await;
    let long_prompt = completion(&prompt(200, "long"));
    let mut long_reply = completion(&prompt(30, "reply"));
    long_reply["max_tokens"] = 390.into();
    for body in [&long_prompt, &long_reply] {
        for _ in 0..4 {
            let reply = trial.post("ok", COMPLETIONS, body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        let vetoed = vetoed(&trial.cluster.admin, body, "reply").await;
        assert_eq!(vetoed, json!([{"worker": "w0", "reasons": ["context_too_short"]}]));
    }
    assert_eq!(trial.counts(["w0", "w1"]), [0, 8]);
    // What fits everywhere goes everywhere.
    for _ in 0..2 {
        trial.post("ok", COMPLETIONS, &completion("short")).await;
    }
    assert_eq!(trial.counts(["w0", "w1"]), [1, 9]);
    trial.finish().await;
}

#[tokio::test]
async fn both_legs_go_to_workers_whose_contexts_are_long_enough() {
    let mut trial = Trial::start(spec(Spec::default())).await;
    contexts_are_known(&trial.cluster.admin).await;
    let body = completion(&prompt(200, "long"));
    for _ in 0..4 {
        let reply = trial.post("ok", COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(trial.counts(["p0", "p1", "d0", "d1"]), [0, 4, 0, 4]);
    for (step, worker) in [("prefill", "p0"), ("decode", "d0")] {
        let vetoed = vetoed(&trial.cluster.admin, &body, step).await;
        let expected = json!({"worker": worker, "reasons": ["context_too_short"]});
        assert!(vetoed.as_array().unwrap().contains(&expected), "{vetoed}");
    }
    // The prefill leg needs room for one token of output only.
    let mut long_reply = completion(&prompt(30, "reply"));
    long_reply["max_tokens"] = 390.into();
    for _ in 0..2 {
        let reply = trial.post("ok", COMPLETIONS, &long_reply).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(trial.counts(["p0", "p1", "d0", "d1"]), [1, 5, 0, 6]);
    trial.finish().await;
}

/// An engine with a context of so many tokens that takes bodies of at most as many bytes.
async fn engine(context_tokens: usize) -> ScriptedServer {
    let models = json!({"data": [{"id": "sim", "max_model_len": context_tokens}]}).to_string();
    ScriptedServer::start(move |heard| match heard.is_inference() {
        false => ScriptedReply::json(200, &models),
        true if heard.body.len() > context_tokens => {
            let message = format!(
                "This model's maximum context length is {context_tokens} tokens. However, your \
                 prompt is longer. Please reduce the length of the input prompt."
            );
            let error = json!({"message": message, "type": "BadRequestError", "code": 400});
            ScriptedReply::json(400, &json!({ "error": error }).to_string())
        }
        true => ScriptedReply::json(
            200,
            &json!({
                "id": "x", "object": "chat.completion", "created": 1, "model": "sim",
                "choices": [{
                    "index": 0, "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "ok"},
                }],
                "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
            })
            .to_string(),
        ),
    })
    .await
}

#[tokio::test]
async fn a_prompt_of_unknown_length_that_an_engine_refuses_as_too_long_is_tried_on_a_longer_context()
 {
    let (short, long) = (engine(1000).await, engine(100_000).await);
    let front = Front::start("{}", "", &[short.url(), long.url()]).await;
    contexts_are_known(&front.admin).await;
    let asked = |server: &ScriptedServer| {
        server.heard().iter().filter(|heard| heard.is_inference()).count()
    };
    let chat = |bytes: usize| {
        let image = format!("data:image/png;base64,{}", "A".repeat(bytes));
        let content = json!([{"type": "image_url", "image_url": {"url": image}}]);
        json!({"model": "sim", "messages": [{"role": "user", "content": content}]})
    };
    for _ in 0..4 {
        let reply = front.http.post(CHAT, &chat(5000)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(asked(&long), 4);
    assert!(asked(&short) > 0, "the engine with the short context was asked first");
    // Too long for all: the client gets the words of the longest.
    for _ in 0..2 {
        let reply = front.http.post(CHAT, &chat(200_000)).await;
        assert_eq!(reply.status, 400);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("100000 tokens"), "{message}");
    }
}
