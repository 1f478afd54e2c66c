//! Reads count in the choice of the prefill worker.

use serde_json::{Value, json};
use splitrail_tests::Spec;
use splitrail_tests::trial::{COMPLETIONS, Trial};

use super::{BLOCK, complete, ids_of, of_ids, prompt_ids, reading, reads};

/// A model that places by predicted costs. Computing takes a millisecond for each token, and a read
/// or hand-off takes five.
fn priced() -> Spec {
    let model = "read_back: true\n\
        costs: { prefill_base_ms: 0, prefill_us_per_token: 1000, prefill_ns_per_token_pair: 0, \
        hand_off_base_ms: 5, kv_bytes_per_token: 1 }";
    Spec { model: model.into(), policy: "{ kind: predicted_ttft }", ..reading(2, 1, "") }
}

/// The next turn of a conversation whose first turn is served by `p0` and `d0`.
async fn next_turn(trial: &mut Trial) -> Vec<u64> {
    let first = prompt_ids(100, 1);
    let reply = complete(trial, &first, 100).await;
    trial.cluster.settle().await;
    [first, ids_of(&reply), prompt_ids(20, 2)].concat()
}

/// The candidate for the prefill leg in a list of candidates.
fn of<'a>(candidates: &'a Value, worker: &str) -> &'a Value {
    let mut all = candidates.as_array().unwrap().iter();
    all.find(|one| one["leg"] == "prefill" && one["worker"] == worker).unwrap()
}

#[tokio::test]
async fn a_worker_that_can_read_is_chosen_as_if_it_held_what_it_reads() {
    let mut trial = Trial::start(priced()).await;
    let drain = async |trial: &Trial, worker: &str| {
        let path = format!("/admin/workers/{worker}/drain");
        assert_eq!(trial.cluster.admin.post(&path, &json!({})).await.status, 200);
    };
    drain(&trial, "p1").await;
    let next = next_turn(&mut trial).await;
    let path = "/admin/workers/p1/drain";
    assert_eq!(trial.cluster.admin.delete(path).await.status, 200);
    drain(&trial, "p0").await;
    let body = of_ids(&next, 12);
    let told = trial.cluster.admin.post("/admin/explain", &body).await.json();
    let told = &told["explanation"]["prompts"][0];
    let seen = of(&told["steps"][0]["candidates"], "p1");
    // The KV of the last generated token was not computed. The prefill is that of the rest.
    let kept = 199 / BLOCK * BLOCK;
    assert_eq!(seen["read_back_blocks"], (kept / BLOCK) as u64, "{seen}");
    assert!((seen["terms"]["read_ms"].as_f64().unwrap() - 5.0).abs() < 0.001, "{seen}");
    let rest_ms = (next.len() - kept) as f64;
    assert!((seen["terms"]["prefill_ms"].as_f64().unwrap() - rest_ms).abs() < 0.001, "{seen}");
    assert_eq!(told["read_back"], json!({"worker": "d0", "tokens": kept}));

    let reply = trial.post("ok", COMPLETIONS, &body).await;
    assert_eq!(reply.route("prefill"), Some("p1"));
    let record = trial.cluster.decisions(reply.header("x-request-id")).await[0].clone();
    let chosen = of(&record["candidates"], "p1");
    assert_eq!((&chosen["read_back_blocks"], &chosen["terms"]["read_ms"]), {
        (&seen["read_back_blocks"], &seen["terms"]["read_ms"])
    });
    assert_eq!(record["ledger"]["legs"][0]["read_back"], kept);
    assert_eq!(reads(&trial, "read").await, 1.0);
    trial.finish().await;
}
