//! [Why are cache hits low?](../../../docs/guides/low-cache-hits.md): the leaves about KV events.

use splitrail_sim::FaultKind;
use splitrail_tests::Spec;

use super::hits::PAGE;
use super::walk::{Walk, fresh, value};

const W0: [(&str, &str); 1] = [("worker", "w0")];

#[tokio::test]
async fn a_worker_without_events_is_named() {
    let spec = Spec {
        engine: |name, config| {
            if name == "w0" {
                (config.kv_events_port, config.kv_replay_port) = (None, None);
            }
        },
        ..Spec::aggregated(2)
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(2, |client, turn| fresh(40, client, turn));
    walk.page.says(3, "a worker that publishes no KV events", "only speculative blocks");
    let silent =
        |worker: &serde_json::Value| worker["kv_events"].is_null() && worker["shim"] == false;
    walk.worker(3, "w0", silent).await;
    let w1 = [("worker", "w1")];
    let blocks = walk.until(3, "splitrail_index_blocks{", |now| value(now, &w1) > 0.0).await;
    walk.page.says(3, "`splitrail_index_blocks` is 0", "no events");
    assert_eq!(value(&blocks, &W0), 0.0, "{blocks:?}");
    walk.fires(&[]).await;
}

#[tokio::test]
async fn events_that_are_cut_off_are_seen() {
    let walk = Walk::start_with(PAGE, Spec::aggregated(2), |yaml| {
        let begin = yaml.find("kv_events: \"").unwrap() + "kv_events: \"".len();
        let end = begin + yaml[begin..].find('"').unwrap();
        format!("{}tcp://127.0.0.1:1{}", &yaml[..begin], &yaml[end..])
    })
    .await;
    walk.page.says(3, "`splitrail_index_events_current == 0`", "events are cut off");
    let w1 = [("worker", "w1")];
    let current = |now: &super::walk::Values| {
        now.len() == 2 && value(now, &W0) == 0.0 && value(now, &w1) == 1.0
    };
    walk.until(3, "splitrail_index_events_current", current).await;
    walk.worker(3, "w0", |worker| worker["events_current"] == false).await;
    walk.fires(&["SplitrailIndexEventsCutOff"]).await;
}

#[tokio::test]
async fn lost_events_are_gaps() {
    let mut walk = Walk::start(PAGE, Spec::aggregated(1)).await;
    walk.load(1, |client, turn| fresh(40, client, turn));
    walk.until(3, "splitrail_index_events_total", |now| value(now, &W0) > 0.0).await;
    let engine = walk.engines.engine("w0");
    let kind = FaultKind::DropEventBatches;
    engine.set_fault(splitrail_sim::Fault { kind, times: Some(2) });
    walk.page.says(3, "`splitrail_index_gaps_total`", "events are lost");
    walk.until(3, "splitrail_index_gaps_total", |now| value(now, &W0) > 0.0).await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_clock_that_is_late_looks_like_a_lag_of_events() {
    let spec = Spec { engine: |_, config| config.clock_ahead_s = -20, ..Spec::aggregated(1) };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(1, |client, turn| fresh(40, client, turn));
    walk.until(3, "splitrail_index_event_lag_seconds_bucket", |now| value(now, &W0) > 5.0).await;
    walk.page.says(
        3,
        "`splitrail_index_event_lag_seconds`",
        "the clocks of router and engine differ",
    );
    walk.fires(&["SplitrailIndexStale"]).await;
}

#[tokio::test]
async fn events_that_cannot_be_read_are_rejected() {
    let mut walk = Walk::start(PAGE, Spec::aggregated(1)).await;
    walk.load(1, |client, turn| fresh(40, client, turn));
    walk.until(3, "splitrail_index_events_total", |now| value(now, &W0) > 0.0).await;
    walk.fault("w0", FaultKind::GarbageEvents);
    let garbage = [("worker", "w0"), ("reason", "garbage")];
    walk.until(3, "splitrail_index_rejected_total", |now| value(now, &garbage) > 0.0).await;
    walk.page.says(3, "`splitrail_index_rejected_total` grows", "`garbage`");
    walk.fires(&["SplitrailIndexRejectsBlocks"]).await;
}

#[tokio::test]
async fn an_index_that_is_too_small_is_truncated() {
    let spec = Spec {
        limits: "{ drain_delay: 10ms, drain_grace: 5s, index_blocks_per_worker_max: 1024 }",
        ..Spec::aggregated(1)
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(4, |client, turn| fresh(400, client, turn));
    walk.page.says(3, "`splitrail_index_truncated`", "`limits.index_blocks_per_worker_max`");
    walk.until(3, "splitrail_index_truncated", |now| value(now, &W0) == 1.0).await;
    walk.fires(&["SplitrailIndexTruncated"]).await;
}
