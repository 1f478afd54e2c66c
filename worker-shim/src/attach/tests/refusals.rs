//! Routers that say no, and routers that cannot be believed.

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

    // It is asked again, and may have been mended meanwhile.
    let router_id = router.known().welcome.router_id.clone();
    router.known().welcome = Welcome { router_id, ..welcome(2) };
    router.wait_for("a copy", |known| known.snapshots == 1).await;
    engine.work(20);
    shim.agrees(&engine, &router).await;
}

#[tokio::test]
async fn another_protocol_is_refused() {
    refuses(|welcome| welcome.protocol = 2).await;
}

#[tokio::test]
async fn another_hash_layout_is_refused() {
    refuses(|welcome| welcome.hash_layout += 1).await;
}

#[tokio::test]
async fn another_block_size_than_the_engines_is_refused() {
    refuses(|welcome| welcome.block_size = 16).await;
}

#[tokio::test]
async fn routers_that_differ_are_refused_until_those_before_them_are_gone() {
    let first = FakeRouter::start(welcome(2)).await;
    let second = FakeRouter::start(Welcome { hash_seed: 8, ..welcome(2) }).await;
    let mirror = small_mirror();
    let mut config = config(&[&first]);
    config.status = Status::default();
    let shim = Shim::start(mirror.clone(), config.clone());
    first.wait_for("a copy", |known| known.snapshots == 1).await;

    let mut other = config.clone();
    other.routers = vec![second.address.to_string().parse().unwrap()];
    other.status = Status::default();
    let second_shim = Shim::start(mirror, other);
    second_shim.wait_for("a refusal", |status| status.stage == Stage::Refused).await;
    let error = second_shim.router().last_error.unwrap();
    assert!(error.contains("hash_seed"), "{error}");
    assert_eq!(second.known().snapshots, 0);

    drop(shim);
    second.wait_for("a copy", |known| known.snapshots == 1).await;
}

#[tokio::test]
async fn a_shim_proves_who_it_is_with_the_token_that_is_there_now() {
    let router = FakeRouter::start(welcome(2)).await;
    router.known().bearer = Some("Bearer right".to_owned());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "wrong\n").unwrap();
    let mut config = config(&[&router]);
    config.token = Some(Token::File(file.path().to_owned()));
    let shim = Shim::start(small_mirror(), config);
    shim.wait_for("a refusal", |status| status.stage == Stage::Refused).await;
    assert_eq!(router.known().attached, 0);
    std::fs::write(file.path(), "right\n").unwrap();
    router.wait_for("a copy", |known| known.snapshots == 1).await;
}
