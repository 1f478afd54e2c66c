//! What ranks have to do is booked for each, and given back.

use serde_json::Value;
use splitrail_sim::{FaultKind, SimConfig};
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion, streamed};
use splitrail_tests::{Spec, Trial};

use super::support::{known, pinned, served, text, two, workers};

fn slow(name: &str, config: &mut SimConfig) {
    two(name, config);
    config.decode_us_per_step = 20_000;
}

/// A request for so many tokens.
fn of_tokens(number: usize, tokens: u32) -> Value {
    let mut body = completion(&text(number));
    body["max_tokens"] = tokens.into();
    body
}

#[tokio::test]
async fn requests_spread_over_ranks_by_what_each_has_to_do() {
    let mut trial = Trial::start(Spec { engine: slow, ..Spec::aggregated(1) }).await;
    known(&trial.cluster, true).await;
    let mut streams = Vec::new();
    for number in 0..4 {
        // They last until their clients leave.
        streams.push(trial.stream("cancelled", COMPLETIONS, &of_tokens(number, 2000)).await);
    }
    let requests = async || -> Vec<u64> {
        let shown = workers(&trial.cluster).await;
        let ranks = shown[0]["ranks"].as_array().unwrap().clone();
        ranks.iter().map(|rank| rank["requests"].as_u64().unwrap()).collect()
    };
    assert_eq!(requests().await, [2, 2]);
    drop(streams);
    eventually("each rank's bookings are back", async || requests().await == [0, 0]).await;
    trial.finish().await;
}

#[tokio::test]
async fn a_drained_worker_lets_its_ranks_finish_and_gets_nothing_more() {
    let mut trial = Trial::start(Spec { engine: slow, ..Spec::aggregated(2) }).await;
    known(&trial.cluster, true).await;
    let mut streams = Vec::new();
    for number in 0..4 {
        streams.push(trial.stream("ok", COMPLETIONS, &of_tokens(number, 200)).await);
    }
    let reply = trial.cluster.admin.post_with("/admin/workers/w0/drain", &[], "").await;
    assert!(reply.status.is_success(), "{}", reply.text());
    let before = served(&trial, "w0").len();
    assert_eq!(before, 2, "four requests on four ranks");
    for number in 4..8 {
        trial.post("ok", COMPLETIONS, &of_tokens(number, 2)).await;
    }
    assert_eq!(served(&trial, "w0").len(), before);
    for stream in &mut streams {
        assert_eq!(stream.rest().await.last().unwrap(), "[DONE]");
    }
    trial.finish().await;
}

#[tokio::test]
async fn an_answer_that_moves_is_pinned_where_it_goes_on() {
    let model = "migrate: true\nbreaker: { failures: 0 }".to_owned();
    let mut trial = Trial::start(Spec { engine: two, model, ..Spec::aggregated(2) }).await;
    known(&trial.cluster, true).await;
    trial.fault("w0", FaultKind::DieMidStream { after_chunks: 3 }, None);
    for number in 0..8 {
        let body = streamed(&completion(&text(number)));
        let chunks = trial.stream("ok", COMPLETIONS, &body).await.chunks().await;
        assert!(!chunks.is_empty());
    }
    let resumed = [("outcome", "resumed")];
    assert!(trial.cluster.metric("splitrail_migrations_total", &resumed).await >= 1.0);
    for engine in ["w0", "w1"] {
        for request in served(&trial, engine) {
            assert!(pinned(&request).is_some_and(|rank| rank < 2), "{request:?}");
        }
    }
    trial.finish().await;
}
