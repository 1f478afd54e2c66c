//! Reports to routers that are not about blocks.

use super::*;

#[tokio::test]
async fn a_router_learns_the_identity_capabilities_and_load_of_a_worker() {
    let router = FakeRouter::start(welcome(2)).await;
    let shim = Shim::start(small_mirror(), config(&[&router]));
    router.wait_for("load", |known| !known.loads.is_empty()).await;
    let hello = router.known().hello.clone().unwrap();
    assert_eq!((hello.protocol, hello.worker_id.as_str()), (1, "p0"));
    assert_eq!((hello.role(), hello.model.as_str()), (WorkerRole::Prefill, "engine-model"));
    assert_eq!(hello.capabilities.unwrap().block_size, Some(2));

    shim.load.send_modify(|load| load.running = Some(3));
    router
        .wait_for("new load", |known| {
            known.loads.last().is_some_and(|load| load.running == Some(3))
        })
        .await;
    // Periodically, even if nothing changes.
    let told = router.known().loads.len();
    router.wait_for("the same again", |known| known.loads.len() >= told + 3).await;
    let ages: Vec<_> = router.known().loads[told..].iter().map(|load| load.age_ms).collect();
    assert!(ages.is_sorted() && ages[0] < ages[2], "figures grow old: {ages:?}");

    shim.capabilities.send_modify(|known| known.ranks = Some(2));
    router
        .wait_for("capabilities", |known| known.capabilities.as_ref().unwrap().ranks == Some(2))
        .await;
}

#[tokio::test]
async fn a_leaving_shim_announces_it_once_and_stays_attached() {
    let router = FakeRouter::start(welcome(2)).await;
    let mirror = small_mirror();
    let mut engine = Engine::new(1, mirror.clone());
    let shim = Shim::start(mirror, config(&[&router]));
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    shim.leaving.cancel();
    router.wait_for("a bye", |known| !known.byes.is_empty()).await;
    assert_eq!(router.known().byes[0].grace_ms, 3000);
    engine.work(50);
    shim.agrees(&engine, &router).await;
    assert_eq!(router.known().byes.len(), 1);
    assert_eq!(router.known().attached, 1);
    // After a reconnection the router is informed again.
    router.disconnect();
    router.wait_for("another bye", |known| known.byes.len() == 2).await;
}
