//! A router that ends in order.

use std::sync::Arc;

use super::admissions::Admissions;
use super::flood::Flood;
use super::support::{
    Plan, REQUEST, REST_TOKENS, ROUTERS, Routers, body, limited_by_tokens, within,
};

const LEAVER: usize = ROUTERS - 1;

/// Requests that the router admits before it ends.
const USED: u64 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_unused_share_of_a_stopped_router_is_free_at_once() {
    let tenant = limited_by_tokens("acme", 160);
    let mut routers = Routers::start(Plan::plain(&[tenant])).await;
    within(20, "all routers have shares", async || {
        let shares = routers.shares(tenant.name).await;
        shares.len() == ROUTERS && shares.iter().all(|share| *share >= USED * REQUEST)
    })
    .await;
    for _ in 0..USED {
        let reply = routers.post(LEAVER, tenant.name, &body(0)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    routers.stop(LEAVER).await;
    let admissions = Arc::new(Admissions::default());
    let mut flood = Flood::new();
    for router in 0..LEAVER {
        flood.add(&routers, router, tenant.name, &admissions);
    }
    // Long before a lease and a minute have passed.
    let rest = tenant.tokens - USED * REQUEST;
    within(20, "the others admit the rest of the limit", async || {
        admissions.since(0).tokens + REST_TOKENS >= rest
    })
    .await;
    flood.stop().await;
    let admitted = admissions.since(0).tokens;
    assert!(admitted <= rest, "{admitted} of {rest}");
}
