//! What the router says of a request's way, before and after, and what that leaves untouched.
#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};
use splitrail_tests::client::Reply;
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt};
use splitrail_tests::{Client, Cluster, Spec};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

async fn ask(admin: &Client, query: &str, headers: &[(&str, &str)], body: &Value) -> Reply {
    let headers = [&JSON, headers].concat();
    admin.post_with(&format!("/admin/explain{query}"), &headers, body.to_string()).await
}

async fn explained(admin: &Client, headers: &[(&str, &str)], body: &Value) -> Value {
    let reply = ask(admin, "", headers, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["explanation"].clone()
}

fn step<'a>(told: &'a Value, name: &str) -> &'a Value {
    let steps = told["prompts"][0]["steps"].as_array().unwrap();
    steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("no {name}: {told}"))
}

#[tokio::test]
async fn what_is_explained_is_what_then_happens() {
    let cluster = Cluster::start(Spec::default()).await;
    let body = completion(&prompt(60, "a"));
    let warm = cluster.http.post(COMPLETIONS, &body).await;
    cluster.settle().await;
    let told = explained(&cluster.admin, &[], &body).await;
    let prefill = step(&told, "prefill");
    // The one that holds the prompt, by as many blocks as it holds.
    assert_eq!(prefill["chosen"], warm.route("prefill").unwrap());
    assert_eq!(told["cost_unit"], "blocks");
    let first = &prefill["candidates"][0];
    assert_eq!((&first["chosen"], &first["worker"]), (&json!(true), &prefill["chosen"]));
    assert_eq!(prefill["margin"], first["overlap_blocks"].as_f64().unwrap());
    assert_eq!(first["overlap_by_tier"]["device"], first["overlap_blocks"]);
    assert_eq!(told["prompts"][0]["prompt_blocks"], first["overlap_blocks"]);
    let condition = &prefill["conditions"][0];
    assert_eq!(condition["events_current"], true);
    assert!(prefill["conditions"].as_array().unwrap().iter().any(|c| c["index_age_ms"].is_u64()));
    let again = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(again.route("prefill").unwrap(), prefill["chosen"].as_str().unwrap());
    assert_eq!(again.route("decode").unwrap(), step(&told, "decode")["chosen"].as_str().unwrap());
}

#[tokio::test]
async fn explaining_serves_books_and_counts_nothing() {
    let cluster = Cluster::start(Spec { policy: "{ kind: round_robin }", ..Spec::default() }).await;
    let before = cluster.admin.get("/metrics").await.text();
    let mut body = chat(&prompt(40, "b"));
    // What a client may not send is counted when it is sent.
    body["kv_transfer_params"] = json!({"do_remote_prefill": true});
    let first = explained(&cluster.admin, &[], &body).await;
    for _ in 0..5 {
        let told = explained(&cluster.admin, &[], &body).await;
        assert_eq!(step(&told, "prefill")["chosen"], step(&first, "prefill")["chosen"], "no turn");
    }
    let counted = |text: &str| -> Vec<String> {
        let of_requests = [
            "requests_total",
            "removed_fields",
            "prompts_unknown",
            "overlap_blocks",
            "worker_requests",
            "stage_seconds",
        ];
        let is_one = |line: &&str| of_requests.iter().any(|name| line.contains(name));
        text.lines().filter(is_one).map(str::to_owned).collect()
    };
    assert_eq!(counted(&cluster.admin.get("/metrics").await.text()), counted(&before));
    let posts = |engine: &splitrail_sim::SimEngine| {
        engine.requests().iter().filter(|request| request.path == CHAT).count()
    };
    assert!(cluster.engines.iter().all(|(_, engine)| posts(engine) == 0));
    assert_eq!(cluster.admin.get("/admin/decisions").await.json()["decisions"], json!([]));
}

#[tokio::test]
async fn a_gate_says_what_it_needs_who_decides_and_what_follows() {
    let cluster = Cluster::start(Spec { flow: "decode_first", ..Spec::default() }).await;
    let body = chat(&prompt(60, "c"));
    let half = [("x-splitrail-cache-hit-threshold", "0.5")];
    let cold = explained(&cluster.admin, &half, &body).await;
    let gate = &cold["prompts"][0]["gate"];
    assert_eq!((&gate["verdict"], &gate["believed_blocks"]), (&json!("too_little"), &json!(0)));
    assert_eq!(gate["cache_hit_threshold"], 0.5);
    let tokens = cold["prompts"][0]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(gate["needed_blocks"], (tokens as f64 * 0.5 / 16.0).ceil() as u64);
    step(&cold, "prefill");
    cluster.http.post(CHAT, &body).await;
    cluster.settle().await;
    let warm = explained(&cluster.admin, &half, &body).await;
    assert_eq!(warm["prompts"][0]["gate"]["verdict"], "asked", "the engine honours thresholds");
    let refused = ask(&cluster.admin, "", &[("x-splitrail-flow", "aggregated")], &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
}

#[tokio::test]
async fn who_is_not_considered_is_named_with_the_reason() {
    let cluster = Cluster::start(Spec::default()).await;
    let body = completion(&prompt(40, "d"));
    cluster.admin.post_with("/admin/workers/p1/drain", &JSON, "").await;
    let told = explained(&cluster.admin, &[], &body).await;
    let prefill = step(&told, "prefill");
    assert_eq!(prefill["chosen"], "p0");
    assert_eq!(prefill["runner_up"], Value::Null);
    let vetoed = prefill["vetoed"].as_array().unwrap();
    let of = |id: &str| vetoed.iter().find(|veto| veto["worker"] == id).unwrap()["reasons"].clone();
    assert_eq!((of("p1"), of("d0")), (json!(["draining"]), json!(["role"])));
    for id in ["d0", "d1"] {
        cluster.admin.post_with(&format!("/admin/workers/{id}/drain"), &JSON, "").await;
    }
    let told = explained(&cluster.admin, &[], &body).await;
    assert_eq!(told["prompts"][0]["local_reason"], "no_decode");
}

#[tokio::test]
async fn a_request_that_was_served_is_explained_by_its_id() {
    let cluster = Cluster::start(Spec::default()).await;
    let secret = prompt(40, "canary");
    let headers = [("x-request-id", "ask-me")];
    let body = completion(&secret).to_string();
    let reply = cluster.http.post_with(COMPLETIONS, &[&JSON[..], &headers].concat(), body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let told = ask(&cluster.admin, "?request_id=ask-me", &[], &json!(null)).await;
    let one = &told.json()["decisions"][0];
    assert_eq!(one["decision"]["request_id"], "ask-me");
    assert_eq!(one["choices"][0]["chosen"], reply.route("prefill").unwrap());
    assert_eq!(one["choices"][1]["chosen"], reply.route("decode").unwrap());
    assert!(one["choices"][0]["runner_up"].is_string());
    let dry = ask(&cluster.admin, "", &[], &completion(&secret)).await;
    for text in [told.text(), dry.text()] {
        assert!(!text.contains("canary"), "{text}");
    }
    let unknown = ask(&cluster.admin, "?request_id=nobody", &[], &json!(null)).await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("limits.decisions_kept"), "{}", unknown.text());
}

#[tokio::test]
async fn what_the_front_door_refuses_is_refused_here_in_its_words() {
    let cluster = Cluster::start(Spec::default()).await;
    let admin = &cluster.admin;
    let unknown = json!({"model": "other", "prompt": "x"});
    for (body, status, word) in
        [(unknown, 404, "other"), (json!({"model": "sim", "n": -1, "prompt": "x"}), 400, "`n`")]
    {
        let reply = ask(admin, "", &[], &body).await;
        assert_eq!(reply.status, status, "{}", reply.text());
        assert!(reply.text().contains(word), "{}", reply.text());
    }
    let reply = ask(admin, "?endpoint=/v1/nothing", &[], &completion("x")).await;
    assert!(reply.status == 400 && reply.text().contains(CHAT), "{}", reply.text());
    let reply = admin.post_with("/admin/explain", &[], completion("x").to_string()).await;
    assert_eq!(reply.status, 415, "a page elsewhere cannot ask without being asked first");
}
