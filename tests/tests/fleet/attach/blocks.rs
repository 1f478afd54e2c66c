//! What shims tell of blocks and load gets into the index, whole or not at all.

use splitrail_fleet::state::WorkerState;
use splitrail_proto::v1;
use splitrail_proto::v1::attach_request::Message;
use splitrail_proto::v1::change::Change;
use splitrail_tests::cluster::eventually;
use splitrail_tests::shim::{hello, run};

use super::support::{attach, held, is_believed, router, worker};

const URL: &str = "http://127.0.0.1:9";

#[tokio::test]
async fn a_snapshot_and_the_events_behind_it_are_the_index() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    assert_eq!(shim.welcome.known_sequence, None);
    assert_eq!((shim.welcome.model.as_str(), shim.welcome.hash_seed), ("sim", 7));
    assert!(!is_believed(&router, "s0"));
    let first = v1::SnapshotPart {
        mirror_id: "m".to_owned(),
        sequence: 4,
        rank: 0,
        runs: vec![run(None, 1..=5)],
        last: false,
        rank_names: 8,
    };
    let second = v1::SnapshotPart { runs: vec![run(Some(5), 6..=8)], last: true, ..first.clone() };
    shim.say(Message::Snapshot(first)).await;
    shim.load(0, 0).await;
    eventually("its load is known", async || {
        worker(&router, "s0").is_some_and(|worker| worker.is_probed())
    })
    .await;
    assert_eq!(held(&router, "s0"), [1, 2, 3, 4, 5]);
    assert!(!is_believed(&router, "s0"), "half a snapshot is not believed");
    shim.say(Message::Snapshot(second)).await;
    shim.acked(4).await;
    assert!(is_believed(&router, "s0"));

    shim.stored(5, [1, 2, 9]).await;
    let removed = v1::Removed { names: vec![8, 2], tier: 0 };
    shim.change(6, Change::Removed(removed)).await;
    shim.acked(6).await;
    // 2 was stored twice.
    assert_eq!(held(&router, "s0"), [1, 2, 3, 4, 5, 6, 7, 9]);
    shim.change(7, Change::Cleared(v1::Cleared {})).await;
    shim.acked(7).await;
    assert!(held(&router, "s0").is_empty() && is_believed(&router, "s0"));
}

#[tokio::test]
async fn after_a_gap_nothing_is_believed_until_a_snapshot_has_come() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("m", 1, vec![run(None, 1..=3)]).await;
    shim.stored(2, [10]).await;
    shim.acked(2).await;
    shim.stored(4, [11]).await;
    assert_eq!(shim.resync().await, "gap");
    assert!(!is_believed(&router, "s0"));
    shim.stored(5, [12]).await;
    shim.snapshot("m", 5, vec![run(None, [1, 12])]).await;
    shim.acked(5).await;
    assert!(is_believed(&router, "s0"));
    assert_eq!(held(&router, "s0"), [1, 12]);
    let metric = async |name: &str| router.metric(name, &[("worker", "s0")]).await;
    assert_eq!(metric("splitrail_index_gaps_total").await, 1.0);
    assert_eq!(metric("splitrail_index_resyncs_total").await, 1.0);
}

#[tokio::test]
async fn invalid_reports_lead_to_a_resync_and_then_to_the_end_of_the_stream() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("m", 1, vec![run(None, 1..=3)]).await;
    shim.acked(1).await;
    let lame = v1::Stored { parent: None, names: vec![1, 2], hashes: vec![1], tier: 0 };
    shim.change(2, Change::Stored(lame.clone())).await;
    assert_eq!(shim.resync().await, "nonsense");
    assert!(!is_believed(&router, "s0"));
    for sequence in 2..50 {
        shim.snapshot("m", sequence, vec![]).await;
        shim.change(sequence + 1, Change::Stored(lame.clone())).await;
    }
    assert_eq!(shim.ended().await, tonic::Code::InvalidArgument);
    eventually("the worker has left", async || worker(&router, "s0").is_none()).await;
}

#[tokio::test]
async fn a_shim_that_comes_back_in_time_sends_only_what_has_changed() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("s0-mirror", 7, vec![run(None, 1..=3)]).await;
    shim.acked(7).await;
    let before = worker(&router, "s0").expect("it is there").index;
    drop(shim);
    eventually("nothing is believed meanwhile", async || !is_believed(&router, "s0")).await;
    assert_eq!(held(&router, "s0"), [1, 2, 3]);
    let mut shim = attach(&router, hello("s0", URL)).await;
    assert_eq!(shim.welcome.known_sequence, Some(7));
    assert!(!is_believed(&router, "s0"));
    shim.stored(8, [4]).await;
    shim.acked(8).await;
    assert!(is_believed(&router, "s0"));
    assert_eq!(held(&router, "s0"), [1, 2, 3, 4]);
    assert_eq!(worker(&router, "s0").expect("it is there").index, before);

    drop(shim);
    let other = v1::Hello { mirror_id: "another".to_owned(), ..hello("s0", URL) };
    let shim = attach(&router, other).await;
    assert_eq!(shim.welcome.known_sequence, None, "a mirror that began anew is another one");
}

#[tokio::test]
async fn a_shim_that_does_not_come_back_takes_its_worker_with_it() {
    let router = router("fleet: { rejoin_grace: 50ms }").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("s0-mirror", 7, vec![run(None, 1..=3)]).await;
    shim.acked(7).await;
    drop(shim);
    eventually("the worker has left", async || worker(&router, "s0").is_none()).await;
    assert_eq!(router.metric("splitrail_index_blocks", &[("worker", "s0")]).await, 0.0);
    assert_eq!(attach(&router, hello("s0", URL)).await.welcome.known_sequence, None);
}

#[tokio::test]
async fn a_shim_that_says_bye_gets_no_new_work_and_leaves_with_its_stream() {
    let router = router("").await;
    let mut shim = attach(&router, hello("s0", URL)).await;
    shim.snapshot("s0-mirror", 1, vec![]).await;
    shim.load(0, 0).await;
    shim.acked(1).await;
    shim.say(Message::Bye(v1::Bye { reason: "stopping".to_owned(), grace_ms: 1000 })).await;
    eventually("it drains", async || {
        worker(&router, "s0").is_some_and(|worker| worker.state() == WorkerState::Draining)
    })
    .await;
    drop(shim);
    eventually("the worker has left", async || worker(&router, "s0").is_none()).await;
}
