//! Random failures between a shim and its routers: afterwards all of them know the same blocks.

use proptest::prelude::*;

use super::*;

/// One random event of a run.
#[derive(Clone, Copy, Debug)]
enum Step {
    Work(usize),
    Disconnect(usize),
    Backoff(usize, bool),
    AskAgain(usize),
    RestartRouter(usize),
    RestartEngine(u16),
    /// A short wait, so that the routers' tasks run.
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    let router = || 0_usize..2;
    prop_oneof![
        8 => (1_usize..40).prop_map(Step::Work),
        2 => router().prop_map(Step::Disconnect),
        3 => (router(), any::<bool>()).prop_map(|(router, on)| Step::Backoff(router, on)),
        2 => router().prop_map(Step::AskAgain),
        1 => router().prop_map(Step::RestartRouter),
        1 => (0_u16..2).prop_map(Step::RestartEngine),
        4 => Just(Step::Wait),
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
            Step::Disconnect(router) => routers[router].disconnect(),
            Step::Backoff(router, on) => routers[router].pause(on),
            Step::AskAgain(router) => routers[router].ask_again(),
            Step::RestartRouter(router) => routers[router].restart(),
            Step::RestartEngine(rank) => engine.restart(rank),
            Step::Wait => tokio::time::sleep(Duration::from_millis(3)).await,
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
    fn routers_miss_no_change_and_see_none_twice(seed: u64, steps in prop::collection::vec(step(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(play(seed, &steps));
    }
}
