//! [Why is the time to first token high?](../../../docs/guides/high-ttft.md): the leaves about single
//! workers.

use splitrail_sim::FaultKind;
use splitrail_tests::Client;
use splitrail_tests::Spec;
use splitrail_tests::cluster::{eventually, metric_in};
use splitrail_tests::trial::{COMPLETIONS, completion, prompt};
use tokio::task::JoinSet;

use super::walk::{Walk, fresh, value};

const PAGE: &str = "high-ttft";

#[tokio::test]
async fn a_slow_prefill_worker_is_found_by_its_legs_and_its_costs() {
    let spec = Spec {
        prefill: 2,
        decode: 1,
        policy: "{ kind: round_robin }",
        engine: |name, config| {
            if name == "p0" {
                config.prefill_us_per_token = 3_000;
            }
        },
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.load(2, |client, turn| fresh(50, client, turn));
    walk.largest_part_is("prefill", "[step 3]").await;
    walk.page.says(3, "one worker is much slower", "`prefill_us_per_token`");
    walk.until(3, "splitrail_worker_leg_seconds_bucket", |legs| {
        let [p0, p1] = ["p0", "p1"].map(|p| value(legs, &[("worker", p), ("leg", "prefill")]));
        p1 > 0.0 && p0 > 3.0 * p1
    })
    .await;
    let costs = |worker: &serde_json::Value| worker["costs"].as_f64().unwrap_or(0.0);
    let slow = walk.worker(3, "p0", |worker| costs(worker) > 1_000.0).await;
    // Until its second request, a worker is expected to be like the usual one.
    walk.worker(3, "p1", |worker| 3.0 * costs(worker) < costs(&slow)).await;
    walk.fires(&["SplitrailWorkerSlow"]).await;
}

#[tokio::test]
async fn a_worker_that_hangs_is_found_by_its_state() {
    let spec = Spec {
        prefill: 2,
        decode: 1,
        policy: "{ kind: round_robin }",
        model: "timeouts: { prefill: 500ms }\nretries: { budget_percent: 100 }".into(),
        ..Spec::default()
    };
    let mut walk = Walk::start(PAGE, spec).await;
    walk.fault("p0", FaultKind::Hang);
    walk.load(4, |client, turn| fresh(40, client, turn));
    walk.page.says(1, "| `failed`", "[step 6]");
    let failed = [("stage", "failed")];
    walk.until(1, "engine_stage_seconds_bucket", |now| value(now, &failed) > 0.2).await;
    walk.page.says(6, "retries", "`reason` is the outcome of the failed attempt");
    let retry = [("leg", "prefill"), ("reason", "engine_timeout")];
    walk.until(6, "splitrail_retries_total", |now| value(now, &retry) > 0.0).await;
    walk.page.says(3, "a worker hangs", "`stuck`");
    let p0 = [("worker", "p0"), ("leg", "prefill"), ("reason", "engine_timeout")];
    walk.until(3, "splitrail_worker_leg_failures_total", |now| value(now, &p0) > 0.0).await;
    walk.worker(3, "p0", |worker| worker["state"] == "stuck").await;
    walk.fires(&["SplitrailWorkerDown"]).await;
}

#[tokio::test]
async fn an_engine_that_others_use_is_found_by_its_own_queue() {
    let spec = Spec {
        engine: |_, config| (config.max_num_seqs, config.decode_us_per_step) = (1, 100_000),
        ..Spec::aggregated(1)
    };
    let mut walk = Walk::start(PAGE, spec).await;
    // Clients that do not come through the router.
    let mut others = JoinSet::new();
    for other in 0..6 {
        let direct = Client::new(walk.engines.engine("w0").http_addr());
        others.spawn(async move {
            for turn in 0.. {
                let mut body = completion(&prompt(4, &format!("o{other}t{turn}")));
                body["max_tokens"] = 4.into();
                direct.post(COMPLETIONS, &body).await;
            }
        });
    }
    walk.load(1, |client, turn| {
        let mut body = fresh(4, client, turn);
        body["max_tokens"] = 2.into();
        body
    });
    walk.largest_part_is("first_token", "[step 5]").await;
    walk.page.says(
        3,
        "a high `engine_waiting` with few `requests`",
        "other clients than this router",
    );
    let crowded = |worker: &serde_json::Value| {
        worker["engine_waiting"].as_u64().unwrap_or(0) >= 3
            && worker["requests"].as_u64().unwrap_or(9) <= 1
    };
    walk.worker(3, "w0", crowded).await;
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_drained_worker_is_found_by_its_state() {
    let walk = Walk::start(PAGE, Spec::default()).await;
    assert_eq!(walk.admin.post_with("/admin/workers/p0/drain", &[], "").await.status, 200);
    walk.page.says(3, "workers are down, ejected or draining", "`state_why` says why");
    let drained = walk.worker(3, "p0", |worker| worker["state"] == "draining").await;
    assert!(drained["state_why"].as_str().is_some_and(|why| why.contains("operator")), "{drained}");
    walk.fires(&[]).await;
}

#[tokio::test]
async fn a_slow_fetch_is_found_by_its_outcome() {
    let spec = Spec {
        prefill: 2,
        decode: 1,
        policy: "{ kind: predicted_ttft }",
        model: "peer_fetch: two_step\npeer_fetch_min_tokens: 16\ntimeouts: { peer_fetch: 1s }\n\
                costs: { fetch_base_ms: 0, prefill_us_per_token: 1000000 }"
            .into(),
        engine: |name, config| {
            // It sends what `p1` fetches.
            if name == "d0" {
                config.transfer_us_per_block = 500_000;
            }
        },
        ..Spec::default()
    };
    let walk = Walk::start(PAGE, spec).await;
    let [p0, p1] = ["p0", "p1"].map(|worker| format!("/admin/workers/{worker}/drain"));
    assert_eq!(walk.admin.post_with(&p1, &[], "").await.status, 200);
    walk.http.stream(COMPLETIONS, &fresh(60, 0, 0)).await.rest().await;
    let metric = async |name: &str, labels: &[(&str, &str)]| {
        metric_in(&walk.admin.get("/metrics").await.text(), name, labels)
    };
    eventually("the index has what p0 holds", async || {
        metric("splitrail_index_blocks", &[("worker", "p0")]).await > 1.0
    })
    .await;
    assert_eq!(walk.admin.delete(&p1).await.status, 200);
    assert_eq!(walk.admin.post_with(&p0, &[], "").await.status, 200);
    walk.http.stream(COMPLETIONS, &fresh(60, 0, 0)).await.rest().await;
    walk.largest_part_is("peer_fetch", "if `splitrail_peer_fetches_total` has other outcomes")
        .await;
    assert_eq!(metric("splitrail_peer_fetches_total", &[("outcome", "timed_out")]).await, 1.0);
    walk.fires(&[]).await;
}
