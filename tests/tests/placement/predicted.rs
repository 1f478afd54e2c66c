//! Placement by predicted times: what is learned of workers, what a second policy would have
//! done, and what is shown of either.

use serde_json::Value;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, prompt, streamed};
use splitrail_tests::{Cluster, Spec};

const PREDICTED: &str = "{ kind: predicted_ttft }";

async fn worker(cluster: &Cluster, id: &str) -> Value {
    let all = cluster.admin.get("/admin/workers").await.json();
    all["workers"].as_array().unwrap().iter().find(|one| one["id"] == id).unwrap().clone()
}

#[tokio::test]
async fn a_slow_worker_is_found_out_and_gets_little() {
    let spec = Spec {
        policy: PREDICTED,
        engine: |name, config| {
            config.prefill_us_per_token = if name == "p1" { 1000 } else { 20 };
        },
        ..Spec::default()
    };
    let cluster = Cluster::start(spec).await;
    for i in 0..24 {
        let body = completion(&prompt(30, &format!("a{i}x")));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
    }
    let cost = async |id| worker(&cluster, id).await["costs"].clone();
    let per_token = |costs: &Value| costs["costs"]["prefill_us_per_token"].as_f64().unwrap();
    let (quick, slow) = (cost("p0").await, cost("p1").await);
    assert!(slow["prefill"]["observations"].as_u64().unwrap() > 0, "it was tried: {slow}");
    assert!(per_token(&slow) > per_token(&quick), "{slow} {quick}");
    let mut to_slow = 0;
    for i in 0..24 {
        let reply =
            cluster.http.post(COMPLETIONS, &completion(&prompt(30, &format!("b{i}y")))).await;
        to_slow += usize::from(reply.route("prefill").unwrap() == "p1");
    }
    assert!(to_slow <= 6, "{to_slow} of 24 to a worker that is fifty times as slow");
    cluster.quiet().await;
}

#[tokio::test]
async fn a_prompt_returns_to_its_holder_and_the_terms_sum_to_the_cost() {
    let cluster = Cluster::start(Spec { policy: PREDICTED, ..Spec::default() }).await;
    let body = completion(&prompt(120, "c"));
    let first = cluster.http.post(COMPLETIONS, &body).await;
    cluster.settle().await;
    let told = cluster
        .admin
        .post_with("/admin/explain", &[("content-type", "application/json")], body.to_string())
        .await
        .json();
    assert_eq!(told["explanation"]["cost_unit"], "ms");
    let steps = told["explanation"]["prompts"][0]["steps"].as_array().unwrap().clone();
    assert_eq!(steps[0]["chosen"], first.route("prefill").unwrap());
    assert!(steps[0]["margin"].as_f64().unwrap() > 0.0);
    for candidate in steps.iter().flat_map(|step| step["candidates"].as_array().unwrap()) {
        let terms = candidate["terms"].as_object().unwrap();
        let sum: f64 = terms.values().map(|term| term.as_f64().unwrap()).sum();
        let cost = candidate["cost"].as_f64().unwrap();
        assert!((sum - cost).abs() <= 1e-6 * cost.max(1.0), "{candidate}");
    }
    let again = cluster.http.post(COMPLETIONS, &body).await;
    assert_eq!(again.route("prefill"), first.route("prefill"));
}

#[tokio::test]
async fn steps_and_hand_offs_are_learned_from_streams() {
    let cluster = Cluster::start(Spec { policy: PREDICTED, ..Spec::default() }).await;
    for i in 0..6 {
        let body = streamed(&completion(&prompt(20, &format!("d{i}z"))));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
    }
    let mut seen = [0; 2];
    for id in ["d0", "d1"] {
        let costs = worker(&cluster, id).await["costs"].clone();
        seen[0] += costs["step"]["observations"].as_u64().unwrap();
        seen[1] += costs["hand_off"]["observations"].as_u64().unwrap();
    }
    // Each worker forgets its first request if the next ones take less than half as long.
    assert!((4..=6).contains(&seen[0]) && seen[1] > 0, "{seen:?}");
}

/// The events of several samples come between each other, and with a hand-off two legs come before
/// the first event.
#[tokio::test]
async fn nothing_is_learned_from_the_times_of_several_samples() {
    const STEP: &str = "step_base_ms: 20, step_us_per_request: 0, step_ns_per_context_token: 0";
    for flow in ["aggregated", "prefill_first"] {
        let spec = Spec {
            policy: PREDICTED,
            flow,
            model: format!("costs: {{ {STEP} }}"),
            engine: |_, config| config.decode_us_per_step = 20_000,
            ..Spec { prefill: 1, decode: 1, ..Spec::default() }
        };
        let cluster = Cluster::start(match flow {
            "aggregated" => Spec { prefill: 0, decode: 0, both: 1, ..spec },
            _ => spec,
        })
        .await;
        let id = if flow == "aggregated" { "w0" } else { "d0" };
        for i in 0..8 {
            let mut body = streamed(&completion(&prompt(20, &format!("n{i}z"))));
            body["n"] = 4.into();
            assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
        }
        let costs = worker(&cluster, id).await["costs"].clone();
        let step_ms = costs["costs"]["step_base_ms"].as_f64().unwrap();
        assert!((0.8..2.0).contains(&(step_ms / 20.0)), "{flow}: {costs}");
        let observations = ["step", "hand_off"].map(|part| &costs[part]["observations"]);
        assert_eq!(observations, [0, 0], "{flow}: {costs}");
        let gaps = cluster.metric("splitrail_inter_token_seconds_count", &[]).await;
        assert_eq!(gaps, 0.0, "{flow}");
    }
}

#[tokio::test]
async fn a_worker_that_has_enough_is_spared_while_others_have_not() {
    let spec = Spec {
        policy: "{ kind: kv_overlap }",
        model: "saturation: { requests: 1 }\n".into(),
        engine: |_, config| config.prefill_us_per_token = 2000,
        ..Spec::default()
    };
    let cluster = std::sync::Arc::new(Cluster::start(spec).await);
    let body = completion(&prompt(60, "f"));
    let holder = cluster.http.post(COMPLETIONS, &body).await.route("prefill").unwrap().to_owned();
    cluster.settle().await;
    // It works on something else that begins alike, and would be the best for this as well.
    let (http, mut long) = (std::sync::Arc::clone(&cluster), completion(&prompt(60, "f")));
    let more = format!("{}{}", long["prompt"].as_str().unwrap(), prompt(300, "g"));
    long["prompt"] = more.into();
    let mut at_work = tokio::task::JoinSet::new();
    at_work.spawn(async move { http.http.post(COMPLETIONS, &long).await });
    eventually("it is at work", async || {
        let labels = [("worker", holder.as_str())];
        cluster.metric("splitrail_worker_requests", &labels).await == 1.0
    })
    .await;
    let reply = cluster.http.post(COMPLETIONS, &body).await;
    assert_ne!(reply.route("prefill").unwrap(), holder);
    let id = reply.header("x-request-id");
    let decision = &cluster.decisions(id).await[0];
    let candidates = decision["candidates"].as_array().unwrap();
    let spared = candidates.iter().find(|one| one["worker"] == holder.as_str()).unwrap();
    assert_eq!(spared["veto"], "busy", "{decision}");
    assert_eq!(at_work.join_next().await.unwrap().unwrap().status, 200);
    cluster.quiet().await;
}

#[tokio::test]
async fn a_decode_worker_without_room_for_the_prompt_is_spared() {
    let spec = Spec {
        prefill: 1,
        policy: PREDICTED,
        engine: |name, config| {
            config.decode_us_per_step = 20_000;
            if name == "d1" {
                config.kv_blocks = 100;
            }
        },
        ..Spec::default()
    };
    let cluster = Cluster::start(spec).await;
    // About 1,000 tokens each, which are 63 blocks.
    let long = |i: usize| {
        let mut body = completion(&prompt(170, &format!("r{i}x")));
        body["max_tokens"] = 300.into();
        body
    };
    let mut streams = Vec::new();
    eventually("the small worker has a request", async || {
        streams.push(
            cluster.http.stream_with(COMPLETIONS, &[], &streamed(&long(streams.len()))).await,
        );
        worker(&cluster, "d1").await["engine_kv_used_ratio"].as_f64() > Some(0.5)
    })
    .await;
    let to_small = || cluster.engine("d1").requests().len();
    let before = to_small();
    for i in 0..6 {
        let mut body = long(100 + i);
        body["max_tokens"] = 2.into();
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.route("decode"), Some("d0"));
    }
    assert_eq!(to_small(), before);
}
