//! Everything is exchanged, one after the other, under load: no request notices.

use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::traffic::Traffic;

async fn stand_with_traffic() -> (ProcessCluster, Traffic) {
    let stand = ProcessCluster::start(Plan::default()).await;
    let routers: Vec<_> =
        stand.of(ProcessKind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, 7).await;
    (stand, traffic)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_workers_are_replaced_and_no_request_fails() {
    let _alone = super::ALONE.lock().await;
    let (mut stand, traffic) = stand_with_traffic().await;
    for shim in stand.of(ProcessKind::Shim) {
        let engine = stand.place(ProcessKind::Engine, &stand.posts[shim].name.clone());
        // The shim says that it goes, and waits for what is under way.
        stand.stop(shim).await;
        stand.stop(engine).await;
        stand.run(engine).await;
        stand.run(shim).await;
        traffic.pause().await;
        stand.true_picture("a worker was exchanged").await;
        traffic.check_all_answered();
        traffic.go_on();
    }
    traffic.pause().await;
    traffic.check_all_answered();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_routers_are_replaced_and_no_request_fails() {
    let _alone = super::ALONE.lock().await;
    let (mut stand, traffic) = stand_with_traffic().await;
    for router in stand.of(ProcessKind::Router) {
        stand.stop(router).await;
        stand.run(router).await;
        traffic.pause().await;
        stand.true_picture("a router was exchanged").await;
        traffic.check_all_answered();
        traffic.go_on();
    }
    traffic.pause().await;
    traffic.check_all_answered();
}
