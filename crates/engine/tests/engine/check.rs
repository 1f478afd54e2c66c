//! Single questions to an engine's event sockets.

use std::time::Duration;

use splitrail_engine::kv_events::{ReplayCheckError, Subscription};
use splitrail_engine::zmtp::WireError;

use crate::fake_engine::{FakeEngine, ReplayForm, payload};

fn subscription(engine: &FakeEngine) -> Subscription {
    Subscription::new(engine.events.clone(), Some(engine.replay.clone()))
}

#[tokio::test]
async fn a_replay_service_answers_without_sending_a_batch() {
    for form in [ReplayForm::TwoFrames, ReplayForm::EmptyFirst, ReplayForm::TopicFirst] {
        let mut engine = FakeEngine::start(form).await;
        assert_eq!(subscription(&engine).check_replay().await, Ok(()));
        engine.lose(payload(1.0));
        assert_eq!(subscription(&engine).check_replay().await, Ok(()), "{form:?}");
    }
}

#[tokio::test]
async fn exchanged_addresses_of_events_and_replay_are_noticed() {
    let engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mixed = Subscription::new(engine.replay.clone(), Some(engine.events.clone()));
    assert_eq!(mixed.listen().await.err(), Some(WireError::WrongSocket { expected: "PUB" }));
    let wrong = WireError::WrongSocket { expected: "ROUTER" };
    assert_eq!(mixed.check_replay().await, Err(ReplayCheckError::Wire(wrong)));
}

#[tokio::test]
async fn a_port_at_which_nothing_listens_is_refused_at_once() {
    let closed: Subscription = Subscription::new(
        "tcp://127.0.0.1:1".parse().unwrap(),
        Some("tcp://127.0.0.1:1".parse().unwrap()),
    );
    let refused = WireError::Network(std::io::ErrorKind::ConnectionRefused);
    assert_eq!(closed.listen().await.err(), Some(refused.clone()));
    assert_eq!(closed.check_replay().await, Err(ReplayCheckError::Wire(refused)));
}

#[tokio::test]
async fn events_published_after_the_connection_are_read() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut stream = subscription(&engine).listen().await.unwrap();
    // A publisher drops what it sends before it has seen the subscription.
    let events = loop {
        engine.publish(payload(1.0)).await;
        let next = tokio::time::timeout(Duration::from_millis(20), stream.next()).await;
        if let Ok(next) = next {
            break next.unwrap().unwrap();
        }
    };
    assert_eq!(events, [splitrail_kv::KvEvent::Cleared]);
}
