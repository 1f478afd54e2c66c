//! Routers that refuse the shim, and routers that the shim cannot work with.

use splitrail_proto::v1::Welcome;

use super::super::Token;
use super::*;

async fn refuses(change: impl FnOnce(&mut Welcome)) {
    let mut wrong = welcome(2);
    change(&mut wrong);
    let router = FakeRouter::start(wrong).await;
    let mirror = small_mirror();
    let mut engine = Engine::new(1, mirror.clone());
    let shim = Shim::start(mirror, config(&[&router]));
    shim.wait_for("a refusal", |status| status.stage == Stage::Refused).await;
    assert!(!engine.is_mirrored(), "what cannot be believed decides nothing");
    assert_eq!(router.known().snapshots, 0);
    assert!(router.known().loads.is_empty());

    // The shim tries again, and the router may have been corrected in the meantime.
    let router_id = router.known().welcome.router_id.clone();
    router.known().welcome = Welcome { router_id, ..welcome(2) };
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    engine.work(20);
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn a_router_with_another_protocol_is_refused() {
    refuses(|welcome| welcome.protocol = 2).await;
}

#[tokio::test]
async fn a_router_with_another_hash_layout_is_refused() {
    refuses(|welcome| welcome.hash_layout += 1).await;
}

#[tokio::test]
async fn a_router_with_another_block_size_than_the_engine_is_refused() {
    refuses(|welcome| welcome.block_size = 16).await;
}

#[tokio::test]
async fn a_router_with_another_seed_is_refused_while_earlier_ones_are_attached() {
    let first = FakeRouter::start(welcome(2)).await;
    let second = FakeRouter::start(Welcome { hash_seed: 8, ..welcome(2) }).await;
    let mirror = small_mirror();
    let mut config = config(&[&first]);
    config.status = RouterStatuses::default();
    let shim = Shim::start(mirror.clone(), config.clone());
    first.wait_for("a snapshot", |known| known.snapshots == 1).await;

    let mut other = config.clone();
    other.routers = vec![second.address.to_string().parse().unwrap()];
    other.status = RouterStatuses::default();
    let second_shim = Shim::start(mirror, other);
    second_shim.wait_for("a refusal", |status| status.stage == Stage::Refused).await;
    let error = second_shim.router().last_error.unwrap();
    assert!(error.contains("hash_seed"), "{error}");
    assert_eq!(second.known().snapshots, 0);

    drop(shim);
    second.wait_for("a snapshot", |known| known.snapshots == 1).await;
}

#[tokio::test]
async fn a_shim_authenticates_with_the_current_token() {
    let router = FakeRouter::start(welcome(2)).await;
    router.known().bearer = Some("Bearer right".to_owned());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "wrong\n").unwrap();
    let mut config = config(&[&router]);
    config.token = Some(Token::File(file.path().to_owned()));
    let shim = Shim::start(small_mirror(), config);
    shim.wait_for("a refusal", |status| status.stage == Stage::Refused).await;
    assert!(shim.status.all_refuse());
    assert_eq!(router.known().attached, 0);
    std::fs::write(file.path(), "right\nwrong\n").unwrap();
    router.wait_for("a snapshot", |known| known.snapshots == 1).await;
    assert!(!shim.status.all_refuse());
}
