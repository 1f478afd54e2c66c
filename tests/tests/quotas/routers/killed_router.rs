//! A router that dies under load.

use std::sync::Arc;

use super::admissions::{Admissions, MINUTE_MS};
use super::flood::Flood;
use super::support::{
    Limited, Plan, REST_REQUESTS, REST_TOKENS, ROUTERS, Routers, limited_by_requests,
    limited_by_tokens, within,
};

const VICTIM: usize = ROUTERS - 1;

/// Seconds until the share of a dead router is free: lease, minute and margin; with some patience.
const FREE_S: u64 = 20 + 60 + 10 + 20;

/// What a dead router keeps of a limit.
fn floor(limit: u64) -> u64 {
    limit / 32
}

/// Whether the tenant was admitted all of its limit but for `kept` parts of it, since a time.
fn is_used_up(of: &Limited, admissions: &Admissions, since_ms: u64, kept: fn(u64) -> u64) -> bool {
    let used = admissions.since(since_ms);
    used.requests + kept(of.requests) + REST_REQUESTS >= of.requests
        || used.tokens + kept(of.tokens) + REST_TOKENS >= of.tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_others_never_admit_more_than_the_limit_and_get_its_share_later() {
    let tenants = [limited_by_tokens("words", 320), limited_by_requests("calls", 320)];
    let admitted = [(); 2].map(|()| Arc::new(Admissions::default()));
    let mut routers = Routers::start(Plan::plain(&tenants)).await;
    let (mut survivors, mut victims) = (Flood::new(), Flood::new());
    for (tenant, admissions) in tenants.iter().zip(&admitted) {
        for router in 0..VICTIM {
            survivors.add(&routers, router, tenant.name, admissions);
        }
        victims.add(&routers, VICTIM, tenant.name, admissions);
    }
    within(30, "the victim is busy", async || {
        admitted.iter().all(|admissions| admissions.by(VICTIM).requests >= 20)
    })
    .await;
    routers.kill(VICTIM);
    victims.until_lost().await;
    let all = || tenants.iter().zip(&admitted);
    within(FREE_S, "the survivors admit the limit in a minute", async || {
        let minute_ago_ms = routers.now_ms().saturating_sub(MINUTE_MS);
        all().all(|(tenant, admissions)| is_used_up(tenant, admissions, minute_ago_ms, floor))
    })
    .await;
    survivors.stop().await;
    for (tenant, admissions) in all() {
        let highest = admissions.highest_minute(0);
        let is_within = highest.requests <= tenant.requests && highest.tokens <= tenant.tokens;
        assert!(is_within, "{highest:?} of {tenant:?}");
    }
}
