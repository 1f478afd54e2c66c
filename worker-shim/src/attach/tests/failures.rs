//! Routers that are disconnected, slow or restarted.

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::*;

#[tokio::test]
async fn a_router_that_reconnects_soon_needs_no_snapshot() {
    let router = FakeRouter::start(welcome(2)).await;
    let mirror = Mirror::new(mirror::MirrorConfig::default());
    let mut engine = Engine::new(1, mirror.clone());
    let shim = Shim::start(mirror, config(&[&router]));
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    engine.work(50);
    shim.agrees(&engine, &router).await;
    router.disconnect();
    engine.work(50);
    router.wait_for("another stream", |known| known.continued == 1).await;
    shim.agrees(&engine, &router).await;
    assert_eq!(router.known().snapshots, 1);
    let sequence = shim.mirror.position().borrow().sequence;
    shim.wait_for("the last ack", |status| status.acked_sequence == sequence).await;
    assert_eq!((shim.router().stage, shim.router().lag()), (Stage::Live, 0));
}

#[tokio::test]
async fn a_router_that_stops_reading_delays_no_other_and_gets_a_snapshot_later() {
    let routers = [FakeRouter::start(welcome(2)).await, FakeRouter::start(welcome(2)).await];
    let mirror = small_mirror();
    let mut engine = Engine::new(2, mirror.clone());
    let shim = Shim::start(mirror, config(&[&routers[0], &routers[1]]));
    for router in &routers {
        router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    }
    routers[0].pause(true);
    for _ in 0..50 {
        engine.work(40);
        shim.agrees(&engine, &routers[1]).await;
    }
    let behind = routers[0].known().sequence;
    assert!(behind < shim.mirror.position().borrow().sequence);
    routers[0].pause(false);
    shim.agrees(&engine, &routers[0]).await;
    assert!(routers[0].known().snapshots >= 2);
    assert_eq!(routers[0].known().attached, 1, "a slow router stays attached");
}

#[tokio::test]
async fn a_router_that_restarts_gets_a_snapshot() {
    let router = FakeRouter::start(welcome(2)).await;
    let mirror = Mirror::new(mirror::MirrorConfig::default());
    let mut engine = Engine::new(3, mirror.clone());
    let shim = Shim::start(mirror, config(&[&router]));
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    engine.work(300);
    router.restart();
    router.wait_for("another snapshot", |known| known.snapshots == 2).await;
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn an_engine_restart_starts_an_empty_mirror_with_a_new_id() {
    let router = FakeRouter::start(welcome(2)).await;
    let mirror = Mirror::new(mirror::MirrorConfig::default());
    let mut engine = Engine::new(4, mirror.clone());
    let shim = Shim::start(mirror, config(&[&router]));
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    engine.work(200);
    shim.agrees(&engine, &router).await;
    let before = router.known().mirror_id.clone();
    engine.restart(0);
    engine.restart(1);
    shim.agrees(&engine, &router).await;
    assert_ne!(router.known().mirror_id, before);
    assert_eq!(router.known().sequence, 0);
    engine.work(20);
    shim.agrees(&engine, &router).await;
}

/// Forwards bytes until the returned sender is set to `true`, and then discards them.
async fn tunnel(to: std::net::SocketAddr) -> (String, watch::Sender<bool>, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (swallows, swallowing) = watch::channel(false);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut streams = JoinSet::new();
        while let Ok((mut from, _)) = listener.accept().await {
            let mut swallowing = swallowing.clone();
            streams.spawn(async move {
                let mut to = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = copy_bidirectional(&mut from, &mut to) => {}
                    _ = swallowing.wait_for(|swallows| *swallows) => {}
                }
                // The connection stays open, but nothing is forwarded.
                let _ended = swallowing.wait_for(|swallows| !swallows).await;
            });
        }
    });
    (address, swallows, tasks)
}

#[tokio::test]
async fn a_connection_that_loses_all_bytes_is_closed() {
    let router = FakeRouter::start(welcome(2)).await;
    let (address, swallows, _tunnel) = tunnel(router.address).await;
    let mut config = config(&[]);
    config.routers = vec![address.parse().unwrap()];
    config.timing.ping_interval = Duration::from_millis(50);
    config.timing.ping_timeout = Duration::from_millis(100);
    config.timing.connect_timeout = Duration::from_millis(300);
    let mirror = small_mirror();
    let mut engine = Engine::new(5, mirror.clone());
    let shim = Shim::start(mirror, config);
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    swallows.send_replace(true);
    shim.wait_for("a cut", |status| status.stage == Stage::Connecting).await;
    engine.work(100);
    swallows.send_replace(false);
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn a_router_with_two_addresses_gets_one_stream() {
    let router = FakeRouter::start(welcome(2)).await;
    let (address, _swallows, _tunnel) = tunnel(router.address).await;
    let mut config = config(&[&router]);
    config.routers.push(address.parse().unwrap());
    let mirror = small_mirror();
    let mut engine = Engine::new(6, mirror.clone());
    let shim = Shim::start(mirror, config);
    router.wait_for("both streams", |known| known.attached >= 2).await;
    shim.wait_for("one of them to wait", |status| status.stage == Stage::Duplicate).await;
    let attached = router.known().attached;
    for _ in 0..20 {
        engine.work(10);
        shim.agrees(&engine, &router).await;
    }
    assert_eq!(router.known().attached, attached, "they do not take turns");
    // If the remaining stream fails, the other address takes its place.
    router.disconnect();
    router.wait_for("another stream", |known| known.attached > attached).await;
    engine.work(10);
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn a_stream_without_progress_is_closed() {
    let router = FakeRouter::start(welcome(2)).await;
    let mut config = config(&[&router]);
    config.timing.stall_timeout = Duration::from_millis(300);
    let mirror = small_mirror();
    let mut engine = Engine::new(7, mirror.clone());
    let shim = Shim::start(mirror, config);
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    router.pause(true);
    engine.work(300);
    // The messages fill all buffers on the way.
    shim.wait_for("an end", |status| {
        status.last_error.as_deref() == Some("the router has stopped reading")
    })
    .await;
    router.pause(false);
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn a_large_snapshot_arrives_complete_while_changes_continue() {
    let routers = [FakeRouter::start(welcome(2)).await, FakeRouter::start(welcome(2)).await];
    let mirror = small_mirror();
    let mut engine = Engine::new(8, mirror.clone());
    let shim = Shim::start(mirror, config(&[&routers[0]]));
    routers[0].wait_for("a snapshot", |known| known.snapshots == 1).await;
    engine.work(1500);
    let second = Shim::start(shim.mirror.clone(), config(&[&routers[1]]));
    routers[1].wait_for("a stream", |known| known.attached == 1).await;
    for _ in 0..30 {
        engine.work(5);
        routers[1].ask_again();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    second.agrees(&engine, &routers[1]).await;
    shim.agrees(&engine, &routers[0]).await;
    assert!(routers[1].known().parts_max > 1);
}
