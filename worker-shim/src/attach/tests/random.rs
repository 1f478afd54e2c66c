//! Whatever happens between a shim and its routers, they end up knowing the same.

use proptest::prelude::*;

use super::*;

/// What can happen.
#[derive(Clone, Copy, Debug)]
enum Step {
    Work(usize),
    Cut(usize),
    Pause(usize, bool),
    AskAgain(usize),
    RestartRouter(usize),
    RestartEngine(u16),
    /// Until both routers have had their turn.
    Breathe,
}

fn step() -> impl Strategy<Value = Step> {
    let router = || 0_usize..2;
    prop_oneof![
        8 => (1_usize..40).prop_map(Step::Work),
        2 => router().prop_map(Step::Cut),
        3 => (router(), any::<bool>()).prop_map(|(router, on)| Step::Pause(router, on)),
        2 => router().prop_map(Step::AskAgain),
        1 => router().prop_map(Step::RestartRouter),
        1 => (0_u16..2).prop_map(Step::RestartEngine),
        4 => Just(Step::Breathe),
    ]
}

async fn play(seed: u64, steps: &[Step]) {
    let routers = [FakeRouter::start(welcome(2)).await, FakeRouter::start(welcome(2)).await];
    let mirror = small_mirror();
    let mut engine = Engine::new(seed, mirror.clone());
    let shim = Shim::start(mirror, config(&[&routers[0], &routers[1]]));
    shim.wait_for("a router", |router| router.attached > 0).await;
    for step in steps {
        match *step {
            Step::Work(events) => engine.work(events),
            Step::Cut(router) => routers[router].cut(),
            Step::Pause(router, on) => routers[router].pause(on),
            Step::AskAgain(router) => routers[router].ask_again(),
            Step::RestartRouter(router) => routers[router].restart(),
            Step::RestartEngine(rank) => engine.restart(rank),
            Step::Breathe => tokio::time::sleep(Duration::from_millis(3)).await,
        }
        tokio::task::yield_now().await;
    }
    for router in &routers {
        router.pause(false);
        shim.agrees(&engine, router).await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn no_gap_and_no_change_twice(seed: u64, steps in prop::collection::vec(step(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(play(seed, &steps));
    }
}
