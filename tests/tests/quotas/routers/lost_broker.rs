//! A broker that is killed and started again.

use super::support::{
    Plan, REQUEST, REST_TOKENS, ROUTERS, Routers, body, limited_by_tokens, within,
};

const REMAINING: &str = "x-ratelimit-remaining-tokens";

/// Sends requests to a router until one is refused; returns the tokens of those that were admitted.
async fn exhaust(routers: &Routers, router: usize, tenant: &str) -> u64 {
    let mut admitted = 0;
    loop {
        let reply = routers.post(router, tenant, &body(0)).await;
        match reply.status.as_u16() {
            200 => admitted += REQUEST,
            429 => return admitted,
            _ => panic!("{}: {}", reply.status, reply.text()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_broker_routers_admit_their_shares_and_after_the_lease_the_floor() {
    let [early, late] = ["early", "late"].map(|name| limited_by_tokens(name, 160));
    let limit = early.tokens;
    let floor = limit / 32;
    let mut routers = Routers::start(Plan::plain(&[early, late])).await;
    for tenant in [early, late] {
        within(20, "the limit is divided evenly", async || {
            let shares = routers.shares(tenant.name).await;
            shares.len() == ROUTERS
                && shares.iter().sum::<u64>() == limit
                && shares.iter().all(|share| share.abs_diff(limit / ROUTERS as u64) <= 1)
        })
        .await;
    }

    routers.broker.kill();
    let mut admitted = 0;
    for router in 0..ROUTERS {
        let own = exhaust(&routers, router, early.name).await;
        assert!(own > floor, "a router uses its share while the lease lasts: {own}");
        admitted += own;
    }
    assert!(admitted <= limit && admitted + REST_TOKENS >= limit, "{admitted} of {limit}");
    for router in 0..ROUTERS {
        within(30, "the lease ends", async || {
            routers.told(router, late.name, REMAINING).await == floor
        })
        .await;
        assert_eq!(exhaust(&routers, router, late.name).await, floor / REQUEST * REQUEST);
        assert_eq!(exhaust(&routers, router, early.name).await, 0, "the share was used up");
    }

    routers.broker.run().await;
    let mut admitted = ROUTERS as u64 * (floor / REQUEST * REQUEST);
    within(30, "the whole limit is admitted", async || {
        for router in 0..ROUTERS {
            admitted += exhaust(&routers, router, late.name).await;
        }
        assert!(admitted <= limit, "{admitted} of {limit}");
        admitted + REST_TOKENS >= limit
    })
    .await;
}
