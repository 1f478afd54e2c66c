//! kill -9 of engines, shims and routers.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::traffic::Traffic;

/// Seeds with which something was wrong once.
const SEEDS: [u64; 0] = [];

/// The number of rounds, unless `SPLITRAIL_CHAOS_ROUNDS` says another one.
const ROUNDS: u64 = 200;
/// Maximum time before killed processes start again, in milliseconds.
const PAUSE_MAX_MS: u64 = 300;

/// Runs with a random seed, or the one that is set, after those in [`SEEDS`].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_any_kill_every_index_is_right_again_and_no_reply_was_wrong() {
    let _alone = super::ALONE.lock().await;
    let rounds = setting("SPLITRAIL_CHAOS_ROUNDS").unwrap_or(ROUNDS);
    let seed = setting("SPLITRAIL_CHAOS_SEED").unwrap_or_else(rand::random);
    for (seed, rounds) in SEEDS.map(|seed| (seed, 20)).into_iter().chain([(seed, rounds)]) {
        run_seed(seed, rounds).await;
    }
}

/// The processes that a round kills.
fn victims(stand: &ProcessCluster, rng: &mut StdRng) -> Vec<usize> {
    let mut victims = Vec::new();
    for _ in 0..if rng.random_bool(0.2) { 2 } else { 1 } {
        let kind =
            *[ProcessKind::Engine, ProcessKind::Shim, ProcessKind::Router].choose(rng).unwrap();
        let victim = *stand.of(kind).choose(rng).unwrap();
        if !victims.contains(&victim) {
            victims.push(victim);
        }
    }
    victims
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// What it prints is shown where the test fails.
#[allow(clippy::print_stderr)]
async fn run_seed(seed: u64, rounds: u64) {
    eprintln!("SPLITRAIL_CHAOS_SEED={seed} SPLITRAIL_CHAOS_ROUNDS={rounds}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stand = ProcessCluster::start(Plan::default()).await;
    let routers: Vec<_> =
        stand.of(ProcessKind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, seed).await;
    for round in 0..rounds {
        traffic.go_on();
        tokio::time::sleep(Duration::from_millis(rng.random_range(50..250))).await;
        let mut victims = victims(&stand, &mut rng);
        let name = |at: &usize| format!("{:?} {}", stand.posts[*at].kind, stand.posts[*at].name);
        let names: Vec<_> = victims.iter().map(name).collect();
        for at in &victims {
            stand.kill(*at);
        }
        // Requests go on meanwhile.
        let pause = Duration::from_millis(rng.random_range(0..PAUSE_MAX_MS));
        tokio::time::sleep(pause).await;
        // A shim that starts needs its engine.
        victims.sort_by_key(|at| stand.posts[*at].kind);
        for at in victims {
            stand.run(at).await;
        }
        traffic.pause().await;
        traffic.check();
        stand.true_picture(&format!("round {round} of seed {seed}: {}", names.join(", "))).await;
    }
    let tally = &traffic.tally;
    let (right, told) = (tally.right.load(Relaxed), tally.told.load(Relaxed));
    let broken = tally.broken.load(Relaxed);
    eprintln!("{rounds} rounds: {right} right replies, {told} errors, {broken} cut off");
    assert!(right > rounds, "{right}");
}
