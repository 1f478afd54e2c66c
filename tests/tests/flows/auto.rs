//! `flow: auto`: a remote prefill where it pays, and a threshold where one is named.

use splitrail_sim::FaultKind;
use splitrail_tests::client::whole_text;
use splitrail_tests::trial::{COMPLETIONS, Reference, Trial, completion, prompt, streamed};
use splitrail_tests::{Reply, Spec};

/// A hand-off takes a while, and a decode worker computes slowly.
const COSTS: &str = "costs: { prefill_us_per_token: 50, prefill_ns_per_token_pair: 0, \
                     hand_off_base_ms: 80, step_base_ms: 1, step_us_per_request: 0 }";
const SLOW: &str = ", costs: { prefill_us_per_token: 300, prefill_ns_per_token_pair: 0, \
                    hand_off_base_ms: 80, step_base_ms: 1, step_us_per_request: 0 }";

fn spec(model: &str) -> Spec {
    let model = format!("{COSTS}\nauto: {{ tbt_goal: 10s }}\n{model}");
    let worker = |name: &str| if name == "d0" { SLOW } else { "" };
    Spec { prefill: 1, decode: 1, flow: "auto", model, worker, ..Spec::default() }
}

async fn served(trial: &mut Trial, reference: &Reference, words: usize, salt: &str) -> Reply {
    trial.cluster.settle().await;
    let body = completion(&prompt(words, salt));
    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(whole_text(&reply.json(), 0), reference.text(COMPLETIONS, &body).await);
    reply
}

#[tokio::test]
async fn a_prompt_is_prefilled_elsewhere_only_where_that_is_quicker() {
    let mut trial = Trial::start(spec("")).await;
    let reference = Reference::start().await;
    let short = served(&mut trial, &reference, 10, "short").await;
    assert_eq!((short.route("flow"), short.route("local")), (Some("aggregated"), Some("cheaper")));
    let long = served(&mut trial, &reference, 200, "long").await;
    assert_eq!((long.route("flow"), long.route("local")), (Some("prefill_first"), None));
    // Now the decode worker holds it as well.
    let warm = served(&mut trial, &reference, 200, "long").await;
    assert_eq!((warm.route("flow"), warm.route("local")), (Some("aggregated"), Some("cheaper")));
    for (reply, remote) in [(&short, false), (&long, true), (&warm, false)] {
        let record = &trial.cluster.decisions(reply.header("x-request-id")).await[0];
        let ms = |key: &str| record["auto"][key].as_f64().unwrap();
        assert_eq!(ms("remote_ms") < ms("local_ms"), remote, "{record}");
    }
    let cheaper = [("reason", "cheaper")];
    assert_eq!(trial.cluster.metric("splitrail_local_prefills_total", &cheaper).await, 2.0);
    trial.finish().await;
}

#[tokio::test]
async fn the_time_of_a_remote_prefill_with_retries_teaches_nothing() {
    let policy = "{ kind: round_robin }";
    let mut trial = Trial::start(Spec { prefill: 2, policy, ..spec("") }).await;
    trial.fault("p0", FaultKind::Status { status: 500 }, Some(1));
    for turn in 0..4 {
        let body = completion(&prompt(200, &format!("long{turn}-")));
        let reply = trial.post("ok", COMPLETIONS, &streamed(&body)).await;
        assert_eq!(reply.route("flow"), Some("prefill_first"), "{}", reply.text());
    }
    assert_eq!(trial.retries("prefill").await, 1.0);
    let models = trial.cluster.admin.get("/admin/models").await.json();
    assert_eq!(models["models"][0]["learned_threshold"]["remote"]["observations"], 3, "{models}");
    trial.finish().await;
}

#[tokio::test]
async fn a_threshold_that_is_named_goes_before_the_costs() {
    let mut trial = Trial::start(spec("gate: { kind: router }")).await;
    let mut body = completion(&prompt(10, "short"));
    body["cache_hit_threshold"] = 0.5.into();
    let cold = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!((cold.route("flow"), cold.route("try")), (Some("decode_first"), Some("skipped")));
    assert_eq!(cold.route("prefill"), Some("p0"));
    trial.cluster.settle().await;
    let warm = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!((warm.route("flow"), warm.route("try")), (Some("decode_first"), Some("served")));
    trial.finish().await;
    // The operator's word counts as well as the client's.
    let model = "cache_hit_threshold: 0.5\ngate: { kind: router }";
    let mut trial = Trial::start(spec(model)).await;
    let reply = trial.post("ok", COMPLETIONS, &completion(&prompt(10, "short"))).await;
    assert_eq!(reply.route("try"), Some("skipped"));
    trial.finish().await;
}

#[tokio::test]
async fn missing_prefill_workers_are_reported_and_not_taken_for_cheaper() {
    let mut trial = Trial::start(spec("")).await;
    trial.cluster.engines.remove(0).1.shutdown().await;
    let reference = Reference::start().await;
    let reply = served(&mut trial, &reference, 200, "long").await;
    assert_eq!(reply.route("local"), Some("no_prefill"));
    assert_eq!(trial.local_prefills().await, 1.0);
    trial.finish().await;
}

#[tokio::test]
async fn a_learned_threshold_gates_decode_first_and_is_reported() {
    let model = format!("{COSTS}\nauto: {{ tbt_goal: 10s }}\ncache_hit_threshold: auto\n");
    let worker = |name: &str| if name == "d0" { SLOW } else { "" };
    let spec =
        Spec { prefill: 1, decode: 1, flow: "decode_first", model, worker, ..Spec::default() };
    let cluster = splitrail_tests::Cluster::start(spec).await;
    let ratio = async || cluster.metric("splitrail_cache_hit_threshold_ratio", &[]).await;
    let confidence =
        async || cluster.metric("splitrail_cache_hit_threshold_confidence_ratio", &[]).await;
    assert_eq!(ratio().await, 0.8, "until something was learned");
    for i in 0..12 {
        let body = streamed(&completion(&prompt(150, &format!("s{}", i % 3))));
        assert_eq!(cluster.http.post(COMPLETIONS, &body).await.status, 200);
        cluster.settle().await;
    }
    let learned =
        &cluster.admin.get("/admin/models").await.json()["models"][0]["learned_threshold"];
    assert_eq!(learned["threshold_ratio"].as_f64().unwrap(), ratio().await);
    assert!(learned["comparisons"].as_f64().unwrap() > 5.0, "{learned}");
    assert!(confidence().await > 0.0, "{learned}");
    let newest = &cluster.admin.get("/admin/decisions?limit=1").await.json()["decisions"][0];
    // What was cached is served where it is, whatever exactly was learned.
    assert!(newest["auto"]["hit_ratio"].as_f64().unwrap() > 0.9, "{newest}");
    assert!(newest["auto"]["local_ttft_ms"].is_f64() && newest["auto"]["remote_ttft_ms"].is_f64());
    cluster.quiet().await;
}
