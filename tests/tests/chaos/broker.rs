//! kill -9 of the broker between routers and shims, and sometimes of somebody else with it.
//!
//! `SPLITRAIL_CHAOS_BROKER_ROUNDS` says how often; the seed is that of the other kills.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use splitrail_tests::stand::{Kind, Plan, Stand};
use splitrail_tests::traffic::Traffic;

use super::kills::setting;

/// Seeds with which something was wrong once.
const SEEDS: [u64; 0] = [];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_any_kill_of_the_broker_every_index_is_right_again() {
    let _alone = super::ALONE.lock().await;
    let rounds = setting("SPLITRAIL_CHAOS_BROKER_ROUNDS").unwrap_or(20) as usize;
    let seed = setting("SPLITRAIL_CHAOS_SEED").unwrap_or_else(rand::random);
    for (seed, rounds) in SEEDS.map(|seed| (seed, 20)).into_iter().chain([(seed, rounds)]) {
        run(seed, rounds).await;
    }
}

/// What it prints is shown where the test fails.
#[allow(clippy::print_stderr)]
async fn run(seed: u64, rounds: usize) {
    eprintln!("SPLITRAIL_CHAOS_SEED={seed} SPLITRAIL_CHAOS_BROKER_ROUNDS={rounds}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stand = Stand::start(Plan { broker: true, ..Plan::default() }).await;
    let routers: Vec<_> =
        stand.of(Kind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, seed).await;
    let broker = stand.place(Kind::Broker, "nats");
    for round in 0..rounds {
        traffic.go_on();
        tokio::time::sleep(Duration::from_millis(rng.random_range(50..250))).await;
        let mut victims = vec![broker];
        if rng.random_bool(0.3) {
            let kind = *[Kind::Engine, Kind::Shim, Kind::Router].choose(&mut rng).unwrap();
            victims.push(*stand.of(kind).choose(&mut rng).unwrap());
        }
        let names: Vec<_> = victims.iter().map(|at| stand.posts[*at].name.clone()).collect();
        for at in &victims {
            stand.kill(*at);
        }
        // Requests go on without it.
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..1500))).await;
        victims.sort_by_key(|at| stand.posts[*at].kind);
        for at in victims {
            stand.run(at).await;
        }
        traffic.pause().await;
        traffic.check();
        stand.true_picture(&format!("round {round} of seed {seed}: {}", names.join(", "))).await;
    }
    let right = traffic.tally.right.load(Relaxed);
    eprintln!("{rounds} rounds: {right} answered rightly");
    assert!(right > rounds as u64, "{right}");
}
