//! What the router says of a request's way, before and after, and what that leaves untouched.

use serde_json::{Value, json};
use splitrail_sim::{Fault, FaultKind, SimConfig};
use splitrail_tests::client::Reply;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{CHAT, COMPLETIONS, chat, completion, prompt, streamed};
use splitrail_tests::{Client, Cluster, Spec, Trial};

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
async fn an_explanation_predicts_what_then_happens() {
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
            "untokenized_prompts",
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
async fn an_explained_gate_names_its_requirement_its_component_and_the_next_leg() {
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
async fn excluded_workers_are_named_with_their_reasons() {
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
async fn explain_refuses_what_the_front_door_refuses_with_the_same_message() {
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
    let form = [("content-type", "text/plain")];
    let reply = admin.post_with("/admin/explain", &form, completion("x").to_string()).await;
    assert_eq!(reply.status, 415, "a page elsewhere cannot ask without being asked first");
}

/// The decision of the only request with an id.
async fn decision(admin: &Client, id: &str) -> Value {
    let told = admin.get(&format!("/admin/decisions?request_id={id}")).await.json();
    told["decisions"][0].clone()
}

/// Sends a completion under an id.
async fn named(cluster: &Cluster, id: &str, more: &[(&str, &str)], body: &Value) -> Reply {
    let headers = [&JSON[..], &[("x-request-id", id)], more].concat();
    cluster.http.post_with(COMPLETIONS, &headers, body.to_string()).await
}

/// Why a worker was no candidate for a leg, by a past decision.
fn vetoed<'a>(decision: &'a Value, leg: &str, worker: &str) -> Option<&'a Value> {
    let vetoed = decision["vetoed"].as_array()?;
    let one = vetoed.iter().find(|veto| veto["leg"] == leg && veto["worker"] == worker)?;
    assert!(one.as_object().unwrap().contains_key("index_age_ms"), "{one}");
    Some(&one["reason"])
}

/// The candidate of a past decision.
fn candidate<'a>(decision: &'a Value, leg: &str, worker: &str) -> &'a Value {
    let candidates = decision["candidates"].as_array().unwrap();
    let is_one = |one: &&Value| one["leg"] == leg && one["worker"] == worker;
    candidates.iter().find(is_one).unwrap_or_else(|| panic!("no {worker}: {decision}"))
}

#[tokio::test]
async fn a_past_decision_says_who_was_vetoed_and_how_old_each_index_was() {
    let model = "breaker: { failures: 0 }".into();
    let cluster = Cluster::start(Spec { model, ..Spec::default() }).await;
    named(&cluster, "first", &[], &completion(&prompt(40, "x"))).await;
    cluster.settle().await;
    cluster.admin.post_with("/admin/workers/p1/drain", &JSON, "").await;
    let first = decision(&cluster.admin, "first").await;
    let sick = first["decode_worker"].as_str().unwrap();
    let fault = Fault { kind: FaultKind::Status { status: 500 }, times: Some(1) };
    cluster.engine(sick).set_fault(fault);
    // Ties are drawn: sooner or later the sick one is asked.
    let mut turn = 0;
    let second = loop {
        turn += 1;
        let id = format!("second{turn}");
        assert_eq!(named(&cluster, &id, &[], &completion(&prompt(40, &id))).await.status, 200);
        let told = decision(&cluster.admin, &id).await;
        if told["attempts"].as_u64() > Some(1) {
            break told;
        }
        assert!(turn < 64, "it is never asked");
    };
    assert_eq!(vetoed(&second, "decode", sick), Some(&json!("failed")), "{second}");
    assert_eq!(candidate(&second, "prefill", "p1")["veto"], "draining", "{second}");
    assert!(candidate(&second, "prefill", "p0")["index_age_ms"].is_u64(), "{second}");
    let id = second["request_id"].as_str().unwrap();
    let told = ask(&cluster.admin, &format!("?request_id={id}"), &[], &json!(null)).await;
    assert_eq!(told.json()["decisions"][0]["decision"]["vetoed"], second["vetoed"]);
}

#[tokio::test]
async fn a_past_decision_says_where_the_time_of_its_request_went() {
    let cluster = Cluster::start(Spec::default()).await;
    let whole = completion(&prompt(40, "whole"));
    let mut stream = completion(&prompt(40, "stream"));
    stream["stream"] = true.into();
    for (id, body) in [("whole", &whole), ("stream", &stream)] {
        let reply = named(&cluster, id, &[], body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        cluster.settle().await;
        let told = decision(&cluster.admin, id).await;
        let total_ms = told["total_ms"].as_f64().unwrap();
        let stages = told["stages_ms"].as_object().unwrap();
        for stage in ["receive", "tokenize", "match", "pick", "prefill", "first_token"] {
            assert!(stages[stage].is_f64(), "{stage}: {told}");
        }
        let sum_ms: f64 = stages.values().map(|took_ms| took_ms.as_f64().unwrap()).sum();
        match told["ttft_ms"].as_f64() {
            Some(ttft_ms) => {
                assert_eq!(id, "stream");
                assert!((sum_ms - ttft_ms).abs() < 1e-3 && ttft_ms <= total_ms, "{told}");
            }
            None => assert!(id == "whole" && sum_ms <= total_ms + 1e-3, "{told}"),
        }
    }
}

#[tokio::test]
async fn an_engine_is_vetoed_for_its_own_hand_off_and_for_too_few_blocks() {
    let pair = Cluster::start(Spec { prefill: 0, decode: 0, both: 2, ..Spec::default() }).await;
    named(&pair, "pair", &[], &completion(&prompt(40, "x"))).await;
    let told = decision(&pair.admin, "pair").await;
    let prefill = told["prefill_worker"].as_str().unwrap();
    assert_eq!(vetoed(&told, "decode", prefill), Some(&json!("same_worker")), "{told}");

    let spec =
        Spec { flow: "decode_first", model: "gate: { kind: router }".into(), ..Spec::default() };
    let cluster = Cluster::start(spec).await;
    let always = [("x-splitrail-cache-hit-threshold", "0.0")];
    let body = completion(&prompt(40, "y"));
    named(&cluster, "warm", &always, &body).await;
    cluster.settle().await;
    named(&cluster, "hit", &[("x-splitrail-cache-hit-threshold", "0.5")], &body).await;
    let hit = decision(&cluster.admin, "hit").await;
    let holder = hit["decode_worker"].as_str().unwrap();
    let other = if holder == "d0" { "d1" } else { "d0" };
    assert_eq!(hit["decode_try"], "served", "{hit}");
    assert!(hit["cache_hit_ratio"].as_f64().unwrap() >= 0.5, "{hit}");
    assert_eq!(vetoed(&hit, "aggregated", other), Some(&json!("too_few_blocks")), "{hit}");
    let headers = [("x-splitrail-cache-hit-threshold", "0.5")];
    let told = explained(&cluster.admin, &headers, &body).await;
    let dry = step(&told, "decode_try")["vetoed"].as_array().unwrap().clone();
    assert!(dry.contains(&json!({"worker": other, "reasons": ["too_few_blocks"]})), "{dry:?}");
    let gate = &told["prompts"][0]["gate"];
    assert_eq!(gate["cache_hit_ratio"], hit["cache_hit_ratio"]);
}

/// One request at a time, and a long time for each token.
fn slow(name: &str, config: &mut SimConfig) {
    if name == "d0" {
        config.max_num_seqs = 1;
        config.decode_us_per_step = 300_000;
    }
}

#[tokio::test]
async fn a_decode_worker_whose_queue_outlasts_the_lease_is_vetoed_for_the_lease() {
    let model = "lease: 500ms\nretries: { decode: 0 }\nrequest_flows: [aggregated]";
    let spec = Spec { prefill: 1, decode: 2, engine: slow, model: model.into(), ..Spec::default() };
    let trial = Trial::start(spec).await;
    let cluster = &trial.cluster;
    let drain = "/admin/workers/d1/drain";
    assert_eq!(cluster.admin.post_with(drain, &[], "").await.status, 200);
    // What d0 begins to answer takes minutes: two more wait behind it.
    trial.fault("d0", FaultKind::SlowFirstByte { delay_ms: 400 }, Some(1));
    let alone = [("x-splitrail-flow", "aggregated")];
    let [first, second, third] = ["a", "b", "c"].map(|salt| {
        let mut body = streamed(&completion(&prompt(3, salt)));
        (body["max_tokens"], body["ignore_eos"]) = (1000.into(), true.into());
        body
    });
    let occupying = async {
        let first = named(cluster, "first", &alone, &first);
        let others = async {
            trial.until_running("d0").await;
            tokio::join!(
                named(cluster, "second", &alone, &second),
                named(cluster, "third", &alone, &third)
            )
        };
        tokio::join!(first, others);
        panic!("they take minutes");
    };
    let asking = async {
        let ask = completion(&prompt(30, "late"));
        let waiting = async || cluster.engine("d0").state().waiting == 2;
        eventually("two wait at d0", waiting).await;
        assert_eq!(cluster.admin.delete(drain).await.status, 200);
        eventually("the queue of d0 is longer than the lease", async || {
            let told = explained(&cluster.admin, &[], &ask).await;
            let steps = told["prompts"][0]["steps"].as_array().unwrap();
            let decode = steps.iter().find(|step| step["step"] == "decode");
            let vetoed = decode.and_then(|step| step["vetoed"].as_array());
            let lease = json!({"worker": "d0", "reasons": ["lease"]});
            vetoed.is_some_and(|vetoed| vetoed.contains(&lease))
        })
        .await;
        let reply = named(cluster, "late", &[], &ask).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let late = decision(&cluster.admin, "late").await;
        assert_eq!(late["decode_worker"], "d1", "{late}");
        assert_eq!(vetoed(&late, "decode", "d0"), Some(&json!("lease")), "{late}");
    };
    tokio::select! {
        () = occupying => {}
        () = asking => {}
    }
}
