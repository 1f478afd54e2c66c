//! KV moves only between workers of one transfer group, in each flow and after failures.

use serde_json::{Value, json};
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, Trial, completion, prompt};

/// Workers with a 1 in their names are of another group.
fn group(name: &str) -> &'static str {
    if name.ends_with('1') { ", transfer_group: new" } else { ", transfer_group: old" }
}

fn body(salt: &str) -> Value {
    completion(&prompt(60, salt))
}

/// The workers of both legs, if there were two.
fn pair(reply: &splitrail_tests::Reply) -> Option<(&str, &str)> {
    reply.route("prefill").zip(reply.route("decode"))
}

async fn drain(trial: &Trial, worker: &str) {
    let path = format!("/admin/workers/{worker}/drain");
    assert_eq!(trial.cluster.admin.post(&path, &json!({})).await.status, 200);
}

async fn each_pair_is_of_one_group(flow: &'static str) {
    let policy = "{ kind: round_robin }";
    let spec = Spec { flow, worker: group, policy, ..Spec::default() };
    let mut trial = Trial::start(spec).await;
    let mut pairs = Vec::new();
    for salt in ["a", "b", "c", "d", "e", "f"] {
        let reply = trial.post("ok", COMPLETIONS, &body(salt)).await;
        let (prefill, decode) = pair(&reply).expect("the prompt is new");
        assert_eq!(prefill[1..], decode[1..], "{flow}");
        pairs.push(prefill.to_owned());
    }
    assert!(["p0", "p1"].iter().all(|worker| pairs.iter().any(|used| used == worker)), "{pairs:?}");
    // A failed leg is tried again within a group.
    trial.fault("d0", FaultKind::Status { status: 500 }, Some(1));
    for salt in ["g", "h"] {
        let reply = trial.post("ok", COMPLETIONS, &body(salt)).await;
        let (prefill, decode) = pair(&reply).expect("the prompt is new");
        assert_eq!(prefill[1..], decode[1..], "{flow}");
    }
    trial.finish().await;
}

#[tokio::test]
async fn each_pair_is_of_one_group_in_prefill_first() {
    each_pair_is_of_one_group("prefill_first").await;
}

#[tokio::test]
async fn each_pair_is_of_one_group_in_decode_first() {
    each_pair_is_of_one_group("decode_first").await;
}

#[tokio::test]
async fn a_group_without_prefill_workers_serves_alone_if_no_other_has_both() {
    let mut trial = Trial::start(Spec { worker: group, ..Spec::default() }).await;
    drain(&trial, "p1").await;
    for salt in ["a", "b"] {
        let reply = trial.post("ok", COMPLETIONS, &body(salt)).await;
        assert_eq!(pair(&reply), Some(("p0", "d0")));
    }
    drain(&trial, "d0").await;
    let reply = trial.post("ok", COMPLETIONS, &body("c")).await;
    assert_eq!((reply.route("prefill"), reply.route("decode")), (None, Some("d1")));
    assert_eq!(reply.route("local"), Some("no_prefill"));
    let workers = trial.cluster.admin.get("/admin/workers").await.json()["workers"].clone();
    let groups = workers.as_array().unwrap().iter().map(|worker| worker["transfer_group"].clone());
    assert_eq!(groups.collect::<Vec<_>>(), ["old", "new", "old", "new"].map(Value::from));
    trial.finish().await;
}

async fn a_prompt_whose_group_loses_its_decode_worker_is_prefilled_in_another(flow: &'static str) {
    let engine = |name: &str, config: &mut SimConfig| {
        config.prefill_us_per_token = if name.starts_with('p') { 5_000 } else { 10 };
    };
    let mut trial = Trial::start(Spec { flow, engine, worker: group, ..Spec::default() }).await;
    let body = body("a");
    let (reply, left) = {
        let busy = |worker: &str| trial.cluster.engine(worker).state().running > 0;
        let leaving = async {
            eventually("a prefill runs", async || busy("p0") || busy("p1")).await;
            let decode = if busy("p0") { "d0" } else { "d1" };
            let lines = trial.cluster.yaml.lines();
            let rest = lines.filter(|line| !line.contains(&format!("id: {decode},")));
            let yaml = rest.map(|line| format!("{line}\n")).collect::<String>();
            assert_eq!(trial.cluster.reload(&yaml).await.status, 200);
            decode
        };
        tokio::join!(trial.cluster.http.post(COMPLETIONS, &body), leaving)
    };
    assert_eq!(reply.status, 200, "{}", reply.text());
    let (prefill, decode) = pair(&reply).expect("the prompt is new");
    assert_eq!(prefill[1..], decode[1..], "{flow}");
    assert_ne!(decode, left);
    trial.expect("ok");
    trial.finish().await;
}

#[tokio::test]
async fn a_prompt_whose_group_loses_its_decode_worker_is_prefilled_in_another_in_prefill_first() {
    a_prompt_whose_group_loses_its_decode_worker_is_prefilled_in_another("prefill_first").await;
}

#[tokio::test]
async fn a_prompt_whose_group_loses_its_decode_worker_is_prefilled_in_another_in_decode_first() {
    a_prompt_whose_group_loses_its_decode_worker_is_prefilled_in_another("decode_first").await;
}

/// Only the prefill workers are of a transfer group, so that no decode worker can take their KV.
#[tokio::test]
async fn prefill_workers_of_which_nobody_can_take_kv_are_named_and_do_not_count() {
    let model = "on_no_prefill: fail".to_owned();
    let mut trial = Trial::start(Spec { model, ..Spec::default() }).await;
    let lines = trial.cluster.yaml.lines().map(|line| match line.contains("role: prefill") {
        true => line.replacen(" }", ", transfer_group: new }", 1) + "\n",
        false => format!("{line}\n"),
    });
    let yaml: String = lines.collect();
    assert_eq!(trial.cluster.reload(&yaml).await.status, 200);
    let reply = trial.post("no_worker", COMPLETIONS, &body("a")).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    let available = [("leg", "prefill")];
    assert_eq!(trial.cluster.metric("splitrail_available_workers", &available).await, 0.0);
    let ready = trial.cluster.admin.get("/ready").await;
    assert!(ready.status == 503 && ready.text().contains("prefill"), "{}", ready.text());
    let found = trial.cluster.admin.get("/admin/attention").await.json();
    let found = found["needs_attention"].as_array().unwrap().clone();
    let alone = found.iter().filter(|one| one["kind"] == "no_hand_off");
    let workers: Vec<_> = alone.map(|one| one["workers"].clone()).collect();
    assert_eq!(workers, [json!(["p0", "p1"]), json!(["d0", "d1"])]);
    trial.finish().await;
}

#[tokio::test]
async fn without_local_prefills_such_a_group_serves_nothing() {
    let spec = Spec {
        prefill: 1,
        worker: group,
        model: "on_no_prefill: fail".to_owned(),
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    drain(&trial, "d0").await;
    let reply = trial.post("no_worker", COMPLETIONS, &body("a")).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    trial.finish().await;
}

#[tokio::test]
async fn nothing_is_fetched_from_another_group() {
    let costs = "costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }";
    let spec = Spec {
        worker: group,
        policy: "{ kind: predicted_ttft }",
        model: format!("peer_fetch: two_step\npeer_fetch_min_tokens: 16\n{costs}"),
        ..Spec::default()
    };
    let mut trial = Trial::start(spec).await;
    drain(&trial, "p1").await;
    let reply = trial.post("ok", COMPLETIONS, &body("f")).await;
    assert_eq!(pair(&reply), Some(("p0", "d0")));
    trial.cluster.settle().await;
    assert_eq!(trial.cluster.admin.delete("/admin/workers/p1/drain").await.status, 200);
    drain(&trial, "p0").await;
    let reply = trial.post("ok", COMPLETIONS, &body("f")).await;
    assert_eq!(pair(&reply), Some(("p1", "d1")));
    assert_eq!(trial.cluster.metric("splitrail_peer_fetches_total", &[]).await, 0.0);
    trial.finish().await;
}
