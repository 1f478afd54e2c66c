//! kill -9 of the broker between routers and shims, and sometimes of another process with it.

use rand::RngExt;
use splitrail_tests::process_cluster::ProcessKind;

use super::kills::{Kills, engine_shim_or_router};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_any_kill_of_the_broker_every_index_is_right_again() {
    let kills = Kills {
        rounds_variable: "SPLITRAIL_CHAOS_BROKER_ROUNDS",
        rounds: 20,
        broker: true,
        pause_max_ms: 1500,
        victims: |stand, rng| {
            let mut victims = vec![stand.place(ProcessKind::Broker, "nats")];
            if rng.random_bool(0.3) {
                victims.push(engine_shim_or_router(stand, rng));
            }
            victims
        },
    };
    kills.run().await;
}
