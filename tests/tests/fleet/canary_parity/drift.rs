//! A worker whose cache is not what its events say.

use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Client, Cluster, Spec};

use super::support::{ask, overlap, text, worker};

const DRIFT: [(&str, &str); 2] = [("worker", "w0"), ("reason", "drift")];

/// Acts after few replies, and again as soon as there are as many.
fn drifting(drift: &str) -> Spec {
    let drift = format!("drift: {{ samples_min: 4, over_blocks_max: 2{drift} }}");
    Spec { model: drift, ..Spec::aggregated(1) }
}

/// Prompts of several blocks.
fn prompts(count: usize) -> Vec<String> {
    (0..count).map(|i| text(30, &format!("prompt{i}-"))).collect()
}

/// The engine's cache is emptied, and its events do not say so.
async fn forget_in_silence(cluster: &Cluster, in_replay: bool) {
    cluster.quiet().await;
    let engine = cluster.engine("w0");
    engine.set_fault(Fault { kind: FaultKind::HideRemovals { in_replay }, times: None });
    let direct = Client::new(engine.http_addr());
    assert_eq!(direct.post_with("/reset_prefix_cache", &[], "").await.status, 200);
}

#[tokio::test]
async fn a_worker_that_lost_blocks_silently_is_discounted_resynchronised_and_trusted_again() {
    // The replay knows better than the stream.
    let cluster = Cluster::start(drifting(", resyncs_max: 1")).await;
    let prompts = prompts(12);
    for prompt in &prompts {
        ask(&cluster, prompt).await;
    }
    cluster.settle().await;
    forget_in_silence(&cluster, false).await;
    // Each is promised, and none is there.
    let mut asked = 0;
    eventually("its events are read anew", async || {
        if cluster.metric("splitrail_index_resyncs_total", &DRIFT).await == 0.0 && asked < 8 {
            ask(&cluster, &prompts[asked]).await;
            asked += 1;
        }
        cluster.metric("splitrail_index_resyncs_total", &DRIFT).await == 1.0
            && worker(&cluster, "w0").await["events_current"] == true
    })
    .await;
    cluster.engine("w0").clear_faults();
    cluster.settle().await;
    // What was lost is not promised any more, and what is there is.
    assert!(asked < 8, "it took {asked}");
    let lost = ask(&cluster, &prompts[8]).await;
    assert_eq!(overlap(&cluster, &lost).await, (0, 0.0));
    let held = ask(&cluster, &prompts[0]).await;
    let (blocks, discount) = overlap(&cluster, &held).await;
    assert!(blocks > 0 && discount == 0.0);
    let seen = worker(&cluster, "w0").await;
    assert_eq!((&seen["kv_routing"], &seen["drift"]["given_up"]), (&true.into(), &false.into()));
    assert_eq!(seen["drift"]["over_resyncs"], 1);
    for prompt in &prompts[..4] {
        ask(&cluster, prompt).await;
    }
    assert_eq!(worker(&cluster, "w0").await["drift"]["over_resyncs"], 0, "it has helped");
    assert_eq!(cluster.metric("splitrail_index_resyncs_total", &DRIFT).await, 1.0);
}

#[tokio::test]
async fn a_worker_is_discounted_until_it_may_be_resynchronised() {
    let cluster = Cluster::start(drifting(", resync_interval_min: 10m")).await;
    let prompts = prompts(16);
    for prompt in &prompts {
        ask(&cluster, prompt).await;
    }
    cluster.settle().await;
    forget_in_silence(&cluster, true).await;
    for prompt in &prompts[..4] {
        ask(&cluster, prompt).await;
    }
    eventually("its events are read anew", async || {
        cluster.metric("splitrail_index_resyncs_total", &DRIFT).await == 1.0
            && worker(&cluster, "w0").await["events_current"] == true
    })
    .await;
    // The replay says the same: the promise is as wrong as before.
    eventually("what was lost is promised again", async || {
        cluster.metric("splitrail_index_blocks", &[("worker", "w0")]).await
            > cluster.engine("w0").resident().len() as f64
    })
    .await;
    for prompt in &prompts[8..12] {
        ask(&cluster, prompt).await;
    }
    eventually("it is seen to be wrong", async || {
        worker(&cluster, "w0").await["overlap_discount"].as_f64().unwrap() > 0.9
    })
    .await;
    let reply = ask(&cluster, &prompts[12]).await;
    let (blocks, discount) = overlap(&cluster, &reply).await;
    assert!(blocks > 0 && discount > 0.9, "{blocks} {discount}");
    let gauge =
        cluster.metric("splitrail_worker_overlap_discount_ratio", &[("worker", "w0")]).await;
    assert!(gauge > 0.9, "{gauge}");
    assert_eq!(cluster.metric("splitrail_index_resyncs_total", &DRIFT).await, 1.0);
}

#[tokio::test]
async fn an_index_is_kept_while_its_engine_does_not_have_all_events_any_more() {
    let spec = Spec {
        engine: |_, config| config.replay_batches = 8,
        ..drifting(", resync_interval_min: 0s, resyncs_max: 2")
    };
    let cluster = Cluster::start(spec).await;
    let prompts = prompts(40);
    for prompt in &prompts {
        ask(&cluster, prompt).await;
    }
    cluster.settle().await;
    let blocks =
        async || cluster.metric("splitrail_index_blocks", &[("worker", "w0")]).await as usize;
    let all_blocks = blocks().await;
    assert_eq!(all_blocks, cluster.engine("w0").resident().len());
    forget_in_silence(&cluster, true).await;
    let resyncs = async || cluster.metric("splitrail_index_resyncs_total", &DRIFT).await;
    let attempts = async || worker(&cluster, "w0").await["drift"]["over_resyncs"].as_u64().unwrap();
    // The replay would show the last prompts only: the others' blocks stay, and count for less.
    for prompt in &prompts {
        if attempts().await == 1 {
            break;
        }
        ask(&cluster, prompt).await;
    }
    assert_eq!(attempts().await, 1, "drift is seen");
    assert!(worker(&cluster, "w0").await["overlap_discount"].as_f64().unwrap() > 0.5);
    assert!(blocks().await >= all_blocks);
    assert_eq!(resyncs().await, 0.0);
    // Before the worker is given up, what the engine still has is better than a wrong index.
    for prompt in prompts.iter().rev() {
        if attempts().await == 2 {
            break;
        }
        ask(&cluster, prompt).await;
    }
    eventually("its events are read again", async || resyncs().await == 1.0).await;
    eventually("the index has the last prompts", async || blocks().await < all_blocks / 2).await;
}

#[tokio::test]
async fn a_worker_that_resynchronising_does_not_help_is_excluded() {
    let cluster = Cluster::start(drifting(", resync_interval_min: 0s, resyncs_max: 2")).await;
    let prompts = prompts(40);
    for prompt in &prompts {
        ask(&cluster, prompt).await;
    }
    cluster.settle().await;
    forget_in_silence(&cluster, true).await;
    let mut asked = prompts.iter();
    eventually("it is given up", async || {
        // Before each, what the index promises is there again.
        if worker(&cluster, "w0").await["events_current"] == true
            && let Some(prompt) = asked.next()
        {
            ask(&cluster, prompt).await;
        }
        worker(&cluster, "w0").await["drift"]["given_up"] == true
    })
    .await;
    assert_eq!(cluster.metric("splitrail_index_resyncs_total", &DRIFT).await, 2.0);
    assert_eq!(
        cluster.metric("splitrail_worker_kv_routing_enabled", &[("worker", "w0")]).await,
        0.0
    );
    let reply = ask(&cluster, &prompts[39]).await;
    assert_eq!(overlap(&cluster, &reply).await.0, 0, "nothing is believed");
}
