//! Limits that replicas share over a real broker. These tests need `nats-server`.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use splitrail_access::limits::replicas::Replicas;
use splitrail_access::limits::{Limits, Reservation, SteadyClock};
use splitrail_config::{BrokerLogin, NatsQuotas, Secret, TenantLimits};
use splitrail_tests::broker::NatsServer;
use splitrail_tests::cluster::eventually;
use tokio::task::JoinSet;

/// Tokens of a tenant in a minute, and of each request. The floor is ten requests.
const LIMIT: u64 = 32_000;
const REQUEST: u64 = 100;

/// A replica with its task, and what it has admitted and not refunded.
struct Replica {
    replicas: Arc<Replicas>,
    limits: Arc<Limits>,
    clock: SteadyClock,
    tasks: JoinSet<()>,
    open: Vec<Reservation>,
}

fn tenant(tokens_per_minute: u64) -> TenantLimits {
    TenantLimits { tokens_per_minute: Some(tokens_per_minute), ..TenantLimits::default() }
}

impl Replica {
    fn start(server: &NatsServer, lease: Duration, login: Option<BrokerLogin>) -> Self {
        let servers = [server.url()];
        let quotas: NatsQuotas = serde_json::from_value(json!({ "servers": servers })).unwrap();
        let quotas = NatsQuotas { lease, login, ..quotas };
        let clock = SteadyClock::start();
        let replicas = Arc::new(Replicas::new(&quotas, clock));
        let limits = replicas.limits("acme/1", &tenant(LIMIT));
        let mut tasks = JoinSet::new();
        let running = Arc::clone(&replicas);
        tasks.spawn(async move { running.run().await });
        Self { replicas, limits, clock, tasks, open: Vec::new() }
    }

    /// Sends requests until one is refused.
    fn flood(&mut self) {
        while let Ok(reservation) = self.limits.reserve(self.clock.now_ms(), REQUEST) {
            self.open.push(reservation);
        }
    }

    fn admitted(&self) -> u64 {
        self.open.len() as u64 * REQUEST
    }

    /// Refunds all, and counts what is admitted at once.
    fn at_once(&mut self) -> u64 {
        self.open.clear();
        self.flood();
        let admitted = self.admitted();
        self.open.clear();
        admitted
    }
}

/// Floods replicas until they have admitted `limit` together, but for what is too little for another
/// request of each replica. They never admit more.
async fn admit_together(replicas: &mut [Replica], limit: u64) {
    let least = limit + 1 - REQUEST * replicas.len() as u64;
    eventually("the whole limit is admitted", async || {
        replicas.iter_mut().for_each(Replica::flood);
        let sum: u64 = replicas.iter().map(Replica::admitted).sum();
        assert!(sum <= limit, "{sum} of {limit}");
        sum >= least
    })
    .await;
}

/// The same beside a dead replica, which holds less than one request more than `held`.
async fn admit_rest(replicas: &mut [Replica], limit: u64, held: u64) {
    let least = limit - held - REQUEST * (replicas.len() as u64 + 1);
    eventually("the rest of the limit is admitted", async || {
        replicas.iter_mut().for_each(Replica::flood);
        let sum: u64 = replicas.iter().map(Replica::admitted).sum();
        assert!(sum + held <= limit, "{sum} and {held} of {limit}");
        sum >= least
    })
    .await;
}

fn three(server: &NatsServer, lease: Duration) -> Vec<Replica> {
    (0..3).map(|_| Replica::start(server, lease, None)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_admit_the_limit_together_wherever_the_requests_arrive() {
    let server = NatsServer::start().await;
    let mut replicas = three(&server, Duration::from_secs(60));
    admit_together(&mut replicas, LIMIT).await;
    // All requests go to one replica now, then to another.
    for busy in [0, 2] {
        replicas.iter_mut().for_each(|replica| replica.open.clear());
        admit_together(&mut replicas[busy..=busy], LIMIT).await;
    }
    replicas[2].open.clear();
    for replica in &mut replicas {
        replica.limits = replica.replicas.limits("acme/1", &tenant(LIMIT / 2));
    }
    admit_together(&mut replicas, LIMIT / 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_permissions_of_the_manual_shares_limits() {
    let manual = include_str!("../../../docs/quotas.md");
    let (_, users) = manual.split_once("```\nauthorization {").unwrap();
    let (users, _) = users.split_once("```").unwrap();
    let users = format!("authorization {{{}", users.replace("$PASSWORD", "x"));
    let server = NatsServer::start_with(&users).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("password");
    std::fs::write(&path, "x").unwrap();
    let login = BrokerLogin::User { name: "router".to_owned(), password: Secret::File { path } };
    let start = || Replica::start(&server, Duration::from_secs(60), Some(login.clone()));
    let mut replicas = [start(), start()];
    admit_together(&mut replicas, LIMIT).await;
    // The shares move, so that changes are seen.
    replicas.iter_mut().for_each(|replica| replica.open.clear());
    admit_together(&mut replicas[..1], LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_use_of_a_tenant_stays_after_it_is_removed_and_added_again() {
    let server = NatsServer::start().await;
    let mut replicas = three(&server, Duration::from_secs(20));
    admit_together(&mut replicas, LIMIT).await;
    let held = replicas[0].admitted();
    replicas[0].open.drain(..).for_each(std::mem::forget);
    replicas[0].replicas.retain(|_| false);
    replicas[0].limits = replicas[0].replicas.limits("acme/1", &tenant(LIMIT));
    replicas[1..].iter_mut().for_each(|replica| replica.open.clear());
    admit_rest(&mut replicas[..1], LIMIT, held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_as_large_as_the_limit_is_admitted_by_any_replica() {
    let server = NatsServer::start().await;
    let replicas = three(&server, Duration::from_secs(60));
    for replica in replicas.iter().rev() {
        eventually("the request is admitted", async || {
            replica.limits.reserve(replica.clock.now_ms(), LIMIT).is_ok()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_broker_replicas_use_their_shares_and_then_the_floor() {
    let mut server = NatsServer::start().await;
    let mut replicas = three(&server, Duration::from_secs(3));
    admit_together(&mut replicas, LIMIT).await;
    server.kill();
    let floor = LIMIT / 32;
    let mut highest = [0; 3];
    eventually("all leases have ended", async || {
        let now: Vec<u64> = replicas.iter_mut().map(Replica::at_once).collect();
        assert!(now.iter().all(|admitted| *admitted >= floor), "every router admits: {now:?}");
        assert!(now.iter().sum::<u64>() <= LIMIT, "together they admit at most the limit: {now:?}");
        highest = std::array::from_fn(|replica| highest[replica].max(now[replica]));
        now == [floor; 3]
    })
    .await;
    assert!(highest.iter().sum::<u64>() > 3 * floor, "shares are used while the lease lasts");
    server.run().await;
    admit_together(&mut replicas, LIMIT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_replica_s_share_is_not_used_and_that_of_one_that_leaves_is() {
    let server = NatsServer::start().await;
    let mut replicas = three(&server, Duration::from_secs(20));
    admit_together(&mut replicas, LIMIT).await;
    let mut dead = replicas.pop().unwrap();
    dead.tasks.shutdown().await;
    let held = dead.admitted();
    dead.open.clear();
    replicas.iter_mut().for_each(|replica| replica.open.clear());
    admit_rest(&mut replicas, LIMIT, held).await;
    let mut leaver = replicas.pop().unwrap();
    leaver.open.clear();
    leaver.tasks.shutdown().await;
    leaver.replicas.leave().await;
    assert!(leaver.limits.reserve(leaver.clock.now_ms(), REQUEST).is_err());
    admit_rest(&mut replicas, LIMIT, held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_has_lost_its_store_gets_the_shares_again() {
    let mut server = NatsServer::start().await;
    let mut replicas = three(&server, Duration::from_secs(60));
    admit_together(&mut replicas, LIMIT).await;
    server.kill();
    server.lose_store();
    server.run().await;
    let client = async_nats::connect(server.url()).await.unwrap();
    let context = async_nats::jetstream::new(client);
    eventually("the record has the shares of all replicas again", async || {
        for replica in &mut replicas {
            replica.open.truncate(20);
            replica.flood();
        }
        let sum: u64 = replicas.iter().map(Replica::admitted).sum();
        assert!(sum <= LIMIT, "{sum} of {LIMIT}");
        let Ok(store) = context.get_key_value("splitrail-quotas").await else { return false };
        let Ok(Some(bytes)) = store.get("v1.acme_2f1").await else { return false };
        let record: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let entries = record["replicas"].as_object().unwrap();
        let share = |entry: &serde_json::Value| entry["tokens_per_minute"]["share"].as_u64();
        entries.len() == 3
            && entries.values().map(|entry| share(entry).unwrap()).sum::<u64>() <= LIMIT
    })
    .await;
}
