//! kill -9 of engines, shims and routers.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use splitrail_tests::stand::{Kind, Plan, Stand};
use splitrail_tests::traffic::Traffic;

/// Seeds with which something was wrong once.
const SEEDS: [u64; 0] = [];

pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_any_kill_every_index_is_right_again_and_no_answer_was_wrong() {
    let _alone = super::ALONE.lock().await;
    let rounds = setting("SPLITRAIL_CHAOS_ROUNDS").unwrap_or(200) as usize;
    let seed = setting("SPLITRAIL_CHAOS_SEED").unwrap_or_else(rand::random);
    for (seed, rounds) in SEEDS.map(|seed| (seed, 20)).into_iter().chain([(seed, rounds)]) {
        run(seed, rounds).await;
    }
}

/// What it prints is shown where the test fails.
#[allow(clippy::print_stderr)]
async fn run(seed: u64, rounds: usize) {
    eprintln!("SPLITRAIL_CHAOS_SEED={seed} SPLITRAIL_CHAOS_ROUNDS={rounds}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut stand = Stand::start(Plan::default()).await;
    let routers: Vec<_> =
        stand.of(Kind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, seed).await;
    for round in 0..rounds {
        traffic.go_on();
        tokio::time::sleep(Duration::from_millis(rng.random_range(50..250))).await;
        let mut victims = Vec::new();
        for _ in 0..if rng.random_bool(0.2) { 2 } else { 1 } {
            let kind = *[Kind::Engine, Kind::Shim, Kind::Router].choose(&mut rng).unwrap();
            let at = *stand.of(kind).choose(&mut rng).unwrap();
            if !victims.contains(&at) {
                victims.push(at);
            }
        }
        let names: Vec<_> = victims
            .iter()
            .map(|at| format!("{:?} {}", stand.posts[*at].kind, stand.posts[*at].name))
            .collect();
        for at in &victims {
            stand.kill(*at);
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..300))).await;
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
    eprintln!(
        "{rounds} rounds: {right} answered rightly, {told} told of a failure, {broken} cut off"
    );
    assert!(right > rounds as u64, "{right}");
}
