//! Alerts about load and tenants, and the requests that bring them about.

use splitrail_sim::{Fault, FaultKind};
use splitrail_tests::Spec;
use splitrail_tests::cluster::eventually;
use splitrail_tests::trial::{COMPLETIONS, completion};
use tokio::task::JoinSet;

use super::{CHAT, Watched, chat};

#[tokio::test]
async fn a_tenant_that_has_used_most_of_its_day_fires_tenant_near_daily_quota() {
    let top = "defaults: { tenant: acme }\ntenants:\n  - name: acme\n    limits: { tokens_per_day: 2000 }";
    let watched = Watched::start(Spec { top: top.into(), ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    let of_the_day = [("tenant", "acme"), ("limit", "tokens_per_day")];
    eventually("most of the tokens are used", async || {
        assert_eq!(watched.cluster.http.post(CHAT, &chat("some more")).await.status, 200);
        watched.cluster.metric("splitrail_tenant_limit_used_ratio", &of_the_day).await > 0.9
    })
    .await;
    watched.fires(&["SplitrailTenantNearDailyQuota"]).await;
}

#[tokio::test]
async fn bodies_that_fill_the_memory_of_requests_fire_request_memory_saturated() {
    let limits = "{ body_size_max: 1000000, request_memory_max: 2000000, drain_delay: 10ms, drain_grace: 1s }";
    let watched = Watched::start(Spec { limits, ..Spec::aggregated(1) }).await;
    watched.is_healthy().await;
    watched.cluster.engine("w0").set_fault(Fault { kind: FaultKind::Hang, times: None });
    let mut hanging = JoinSet::new();
    let mut sent = 0;
    eventually("the memory of requests is nearly full", async || {
        let (http, body) = (watched.cluster.http.clone(), completion(&"x".repeat(20_000)));
        hanging.spawn(async move { http.post(COMPLETIONS, &body).await });
        sent += 1;
        eventually("the request hangs", async || {
            watched.cluster.metric("splitrail_worker_requests", &[]).await == f64::from(sent)
        })
        .await;
        let [used, all] = ["splitrail_request_memory_bytes", "splitrail_request_memory_max_bytes"];
        let used = watched.cluster.metric(used, &[]).await;
        used > 0.8 * watched.cluster.metric(all, &[]).await
    })
    .await;
    watched.fires(&["SplitrailRequestMemorySaturated"]).await;
    hanging.shutdown().await;
}

#[tokio::test]
async fn a_request_that_fills_the_cache_fires_kv_cache_full() {
    let spec = Spec {
        engine: |_, config| {
            // One block cannot be used; a request needs all others.
            (config.kv_blocks, config.block_size) = (65, 16);
            config.decode_us_per_step = 500_000;
        },
        ..Spec::aggregated(1)
    };
    let watched = Watched::start(spec).await;
    watched.is_healthy().await;
    let http = watched.cluster.http.clone();
    let mut filling = JoinSet::new();
    filling.spawn(async move {
        for turn in 0.. {
            let mut body = completion("");
            body["prompt"] = (0..1000).map(|token| 100 + (token + turn) % 200).collect();
            (body["max_tokens"], body["ignore_eos"]) = (24.into(), true.into());
            body["stream"] = true.into();
            http.stream(COMPLETIONS, &body).await.rest().await;
        }
    });
    watched.fires(&["SplitrailKvCacheFull"]).await;
    filling.shutdown().await;
}
