//! Limits that are changed while they are used.

use std::sync::Arc;

use super::admissions::{Admissions, MINUTE_MS};
use super::flood::Flood;
use super::support::{
    Limited, Plan, REST_REQUESTS, REST_TOKENS, ROUTERS, Routers, limited_by_requests,
    limited_by_tokens, within,
};

/// One tenant that uses up its tokens, and one that uses up its requests.
fn tenants(requests: u64) -> [Limited; 2] {
    [limited_by_tokens("words", requests), limited_by_requests("calls", requests)]
}

fn check(tenants: &[Limited], admitted: &[Arc<Admissions>], since_ms: u64) {
    for (tenant, admissions) in tenants.iter().zip(admitted) {
        let highest = admissions.highest_minute(since_ms);
        let is_within = highest.requests <= tenant.requests && highest.tokens <= tenant.tokens;
        assert!(is_within, "{highest:?} of {tenant:?} since {since_ms} ms");
    }
}

async fn until_used_up(
    seconds: u64,
    tenants: &[Limited],
    admitted: &[Arc<Admissions>],
    since_ms: u64,
) {
    within(seconds, "the whole limit is admitted", async || {
        tenants.iter().zip(admitted).all(|(tenant, admissions)| {
            let used = admissions.since(since_ms);
            used.requests + REST_REQUESTS >= tenant.requests
                || used.tokens + REST_TOKENS >= tenant.tokens
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_minute_has_at_most_the_limit_of_its_time() {
    let [first, raised, lowered] = [160, 320, 96].map(tenants);
    let admitted = [(); 2].map(|()| Arc::new(Admissions::default()));
    let routers = Routers::start(Plan::plain(&first)).await;
    let mut flood = Flood::new();
    for (tenant, admissions) in first.iter().zip(&admitted) {
        for router in 0..ROUTERS {
            flood.add(&routers, router, tenant.name, admissions);
        }
    }
    until_used_up(30, &first, &admitted, 0).await;
    check(&first, &admitted, 0);
    routers.reload(&raised).await;
    until_used_up(30, &raised, &admitted, 0).await;

    routers.reload(&lowered).await;
    let lowered_ms = routers.now_ms();
    within(80, "all that was used under the higher limit is forgotten", async || {
        routers.now_ms() > lowered_ms + MINUTE_MS
    })
    .await;
    until_used_up(30, &lowered, &admitted, lowered_ms).await;
    flood.stop().await;
    check(&raised, &admitted, 0);
    check(&lowered, &admitted, lowered_ms);
}
