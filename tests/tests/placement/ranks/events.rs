//! Each rank numbers its events apart, on ports that follow one another.

use serde_json::json;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Spec, Trial};

use super::support::{ask, cached, direct, in_step, indexed, known, text, two, whole_hit};

#[tokio::test]
async fn a_gap_on_one_rank_drops_that_rank_only() {
    let engine = |name: &str, config: &mut SimConfig| {
        two(name, config);
        // What was missed cannot be had again.
        config.kv_replay_port = None;
    };
    let mut trial = Trial::start(Spec { engine, ..Spec::aggregated(1) }).await;
    known(&trial.cluster, true).await;
    direct(&trial.cluster, "w0", "0", &text(0)).await;
    direct(&trial.cluster, "w0", "1", &text(1)).await;
    in_step(&trial.cluster).await;
    let held = indexed(&trial.cluster, "w0");
    assert!(held.iter().all(|blocks| *blocks > 0), "{held:?}");
    trial.fault("w0", FaultKind::DropEventBatches, Some(1));
    direct(&trial.cluster, "w0", "1", &text(2)).await;
    direct(&trial.cluster, "w0", "1", &text(3)).await;
    let resyncs = [("worker", "w0"), ("reason", "gap")];
    eventually("the rank begins anew", async || {
        trial.cluster.metric("splitrail_index_resyncs_total", &resyncs).await >= 1.0
    })
    .await;
    let all = |rank| trial.cluster.engine("w0").rank_resident(rank).len();
    eventually("what came after the gap is known", async || {
        let blocks = indexed(&trial.cluster, "w0")[1];
        blocks > 0 && blocks < all(1)
    })
    .await;
    assert_eq!(indexed(&trial.cluster, "w0")[0], held[0], "the other one stays");
    let (reply, decision) = ask(&mut trial, &text(0)).await;
    let tokens = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(cached(&reply), whole_hit(tokens), "{decision}");
    let (_, lost) = ask(&mut trial, &text(1)).await;
    assert_eq!(lost["overlap_blocks"], 0, "nothing from before the gap: {lost}");
}

#[tokio::test]
async fn unconfigured_ranks_are_learned_and_configured_ones_stay() {
    for (written, ranks, pins) in
        [("", 2, json!(true)), (", data_parallel_ranks: 1", 1, json!(null))]
    {
        let worker: fn(&str) -> &'static str = match written {
            "" => |_| "",
            _ => |_| ", data_parallel_ranks: 1",
        };
        let trial = Trial::start(Spec { engine: two, worker, ..Spec::aggregated(1) }).await;
        eventually("it is known", async || {
            let shown = super::support::workers(&trial.cluster).await;
            shown[0]["ranks"].as_array().unwrap().len() == ranks
                && shown[0]["takes_rank_header"] == pins
                && shown[0]["events_current"] == true
        })
        .await;
    }
}
