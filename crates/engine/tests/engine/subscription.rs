//! A subscription to an engine's sockets.

use std::time::Duration;

use bytes::Bytes;
use rmp::encode as mp;
use splitrail_engine::kv_events::{
    GarbageError, Pacing, ResetReason, Subscription, SyncOutcome, Update,
};
use splitrail_engine::zmtp::{Endpoint, Pace};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::fake_engine::{FakeEngine, ReplayForm, payload};
use crate::support::fixture;

/// Enough for a slow machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running subscription.
struct Follower {
    updates: mpsc::Receiver<Update>,
    cancel: CancellationToken,
    tasks: JoinSet<()>,
    gaps: u32,
}

/// The parts of updates that tests compare.
#[derive(Debug, PartialEq)]
enum Seen {
    /// Number and time of a batch.
    Batch(u64, f64),
    Reset(ResetReason),
    Synced(SyncOutcome),
    Garbage(Option<u64>),
    Disconnected,
    Fresh(u64),
}

impl Follower {
    fn start(subscription: Subscription) -> Self {
        let (sink, updates) = mpsc::channel(4);
        let cancel = CancellationToken::new();
        let mut tasks = JoinSet::new();
        tasks.spawn(subscription.run(sink, cancel.clone()));
        Self { updates, cancel, tasks, gaps: 0 }
    }

    fn of(engine: &FakeEngine) -> Self {
        Self::start(subscription(&engine.events, Some(&engine.replay)))
    }

    /// The next update except gaps, which are counted.
    async fn next(&mut self) -> Seen {
        loop {
            let update = tokio::time::timeout(PATIENCE, self.updates.recv()).await;
            return match update.expect("an update in time").expect("a running subscription") {
                Update::Batch { sequence, batch } => Seen::Batch(sequence, batch.timestamp_s),
                Update::Reset { reason } => Seen::Reset(reason),
                Update::Synced { outcome } => Seen::Synced(outcome),
                Update::Garbage { sequence, .. } => Seen::Garbage(sequence),
                Update::Disconnected { .. } => Seen::Disconnected,
                Update::Gap { .. } => {
                    self.gaps += 1;
                    continue;
                }
                Update::Fresh { ask } => Seen::Fresh(ask),
            };
        }
    }

    async fn expect(&mut self, expected: impl IntoIterator<Item = Seen>) {
        for expected in expected {
            assert_eq!(self.next().await, expected);
        }
    }

    /// Publishes batches until one arrives live; they all arrive in order. A publisher handles a
    /// subscription some time after the handshake, and drops what it publishes before. Returns the
    /// next batch's number.
    async fn go_live(&mut self, engine: &mut FakeEngine, first: u64) -> u64 {
        let mut published = first;
        let mut expected = first;
        loop {
            engine.publish(payload(published as f64)).await;
            published += 1;
            let soon = Duration::from_millis(100);
            while let Ok(update) = tokio::time::timeout(soon, self.updates.recv()).await {
                let Some(Update::Batch { sequence, .. }) = update else { panic!("{update:?}") };
                assert_eq!(sequence, expected);
                expected += 1;
                if expected == published {
                    return published;
                }
            }
        }
    }
}

fn subscription(events: &Endpoint, replay: Option<&Endpoint>) -> Subscription {
    let mut subscription = Subscription::new(events.clone(), replay.cloned());
    subscription.timing.idle_check = None;
    subscription
}

fn batch(sequence: u64) -> Seen {
    Seen::Batch(sequence, sequence as f64)
}

/// A batch that removes the given number of blocks.
fn removed(timestamp_s: f64, blocks: u32) -> Bytes {
    let mut bytes = Vec::new();
    mp::write_array_len(&mut bytes, 2).unwrap();
    mp::write_f64(&mut bytes, timestamp_s).unwrap();
    mp::write_array_len(&mut bytes, 1).unwrap();
    mp::write_array_len(&mut bytes, 2).unwrap();
    mp::write_str(&mut bytes, "BlockRemoved").unwrap();
    mp::write_array_len(&mut bytes, blocks).unwrap();
    (0..blocks).for_each(|block| mp::write_u32(&mut bytes, block).unwrap());
    bytes.into()
}

const SYNCED: Seen = Seen::Synced(SyncOutcome::Replayed);

#[tokio::test]
async fn a_cold_start_delivers_the_history_then_what_is_live() {
    for form in [ReplayForm::TwoFrames, ReplayForm::EmptyFirst, ReplayForm::TopicFirst] {
        let mut engine = FakeEngine::start(form).await;
        for sequence in 0..20 {
            engine.lose(payload(f64::from(sequence)));
        }
        let mut follower = Follower::of(&engine);
        follower.expect((0..20).map(batch)).await;
        follower.expect([SYNCED]).await;
        follower.go_live(&mut engine, 20).await;
    }
}

#[tokio::test]
async fn a_recorded_replay_is_delivered() {
    let mut engine = FakeEngine::start(ReplayForm::TopicFirst).await;
    for index in 0..5 {
        let number = fixture(&format!("kv/replay/replay5_{index:04}.frame1.bin"));
        let number = u64::from_be_bytes(number.try_into().unwrap());
        let payload = fixture(&format!("kv/replay/replay5_{index:04}.frame2.bin"));
        engine.keep(number, payload.into());
    }
    let end = fixture("kv/replay/replay5_0005.frame1.bin");
    assert_eq!(end, u64::MAX.to_be_bytes());
    let mut follower = Follower::of(&engine);
    for sequence in 5..10 {
        let Seen::Batch(number, _) = follower.next().await else { panic!("not a batch") };
        assert_eq!(number, sequence);
    }
    follower.expect([SYNCED]).await;
}

#[tokio::test]
async fn a_gap_is_filled_by_a_replay() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut follower = Follower::of(&engine);
    follower.expect([SYNCED]).await;
    let next = follower.go_live(&mut engine, 0).await;
    engine.lose(payload(next as f64));
    engine.lose(payload((next + 1) as f64));
    engine.publish(payload((next + 2) as f64)).await;
    let gaps = follower.gaps;
    follower.expect((next..next + 3).map(batch)).await;
    assert_eq!(follower.gaps, gaps + 1);
}

#[tokio::test]
async fn a_gap_beyond_the_replays_reach_resets_first() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut follower = Follower::of(&engine);
    follower.expect([SYNCED]).await;
    let next = follower.go_live(&mut engine, 0).await;
    for lost in next..next + 10 {
        engine.lose(payload(lost as f64));
    }
    engine.forget_before(next + 5);
    engine.publish(payload((next + 10) as f64)).await;
    follower.expect([Seen::Reset(ResetReason::ReplayTooShort)]).await;
    follower.expect((next + 5..next + 11).map(batch)).await;
}

#[tokio::test]
async fn a_restarted_engine_voids_the_old_ones_batches() {
    let form = ReplayForm::EmptyFirst;
    let mut engine = FakeEngine::start(form).await;
    for sequence in 0..3 {
        engine.lose(payload(f64::from(sequence)));
    }
    let mut follower = Follower::of(&engine);
    follower.expect((0..3).map(batch)).await;
    follower.expect([SYNCED]).await;

    // Its number is the same or higher: numbers alone show nothing.
    for count in [3, 5] {
        engine = engine.restart(form).await;
        for sequence in 0..count {
            engine.lose(payload(1000.0 * count as f64 + sequence as f64));
        }
        let batches = (0..count)
            .map(|sequence| Seen::Batch(sequence, 1000.0 * count as f64 + sequence as f64));
        let mut expected = vec![Seen::Disconnected, Seen::Reset(ResetReason::EngineRestarted)];
        expected.extend(batches);
        expected.push(SYNCED);
        follower.expect(expected).await;
    }

    // The next process has sent no batch yet.
    engine = engine.restart(form).await;
    let reset = Seen::Reset(ResetReason::EngineRestarted);
    follower.expect([Seen::Disconnected, reset, SYNCED]).await;
    follower.go_live(&mut engine, 0).await;
}

#[tokio::test]
async fn a_payload_that_cannot_be_decoded_resets_and_the_stream_goes_on() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut follower = Follower::of(&engine);
    follower.expect([SYNCED]).await;
    let next = follower.go_live(&mut engine, 0).await;
    engine.publish(Bytes::from_static(b"nonsense")).await;
    engine.publish(payload((next + 1) as f64)).await;
    let reset = Seen::Reset(ResetReason::Garbage);
    follower.expect([Seen::Garbage(Some(next)), reset]).await;
    // The earlier batches are fetched again; the invalid ones in this replay do not cause another
    // replay.
    for sequence in 0..next {
        follower.expect([batch(sequence)]).await;
    }
    let reset = Seen::Reset(ResetReason::Garbage);
    follower.expect([Seen::Garbage(Some(next)), reset, batch(next + 1)]).await;
    engine.publish(Bytes::from_static(b"more of it")).await;
    engine.publish(payload((next + 3) as f64)).await;
    let reset = Seen::Reset(ResetReason::Garbage);
    follower.expect([Seen::Garbage(Some(next + 2)), reset, batch(next + 3)]).await;
}

#[tokio::test]
async fn a_batch_of_many_blocks_waits_until_those_before_it_have_been_taken() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    for number in 0..8 {
        // Half of them are decoded on another thread.
        engine.lose(removed(f64::from(number), if number % 2 == 0 { 10_000 } else { 30_000 }));
    }
    let mut follower = Follower::of(&engine);
    for sequence in 0..7 {
        let mut turns_left = 1000;
        while turns_left > 0 {
            tokio::task::yield_now().await;
            turns_left -= u32::from(!follower.updates.is_empty());
        }
        assert_eq!(follower.updates.len(), 1, "before {sequence} is taken");
        follower.expect([batch(sequence)]).await;
    }
    follower.expect([batch(7), SYNCED]).await;
}

#[tokio::test]
async fn a_message_of_another_form_is_reported_and_left_out() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut follower = Follower::of(&engine);
    follower.expect([SYNCED]).await;
    let next = follower.go_live(&mut engine, 0).await;
    engine.publish_frames(vec![Bytes::from_static(b"kv@test"), Bytes::from_static(b"?")]).await;
    engine.publish(payload(next as f64)).await;
    let update = follower.updates.recv().await.unwrap();
    let error = GarbageError::Frames { frames: 2 };
    assert!(
        matches!(&update, Update::Garbage { sequence: None, error: seen } if *seen == error),
        "{update:?}"
    );
    follower.expect([batch(next)]).await;
}

#[tokio::test]
async fn without_a_replay_endpoint_a_gap_resets() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut follower = Follower::start(subscription(&engine.events, None));
    follower.expect([Seen::Synced(SyncOutcome::NoReplay)]).await;
    // Batches that are published before the subscription is in effect are lost without notice.
    let mut next = 0;
    let mut expected = loop {
        next = engine.publish(payload(next as f64)).await + 1;
        let soon = Duration::from_millis(100);
        match tokio::time::timeout(soon, follower.updates.recv()).await {
            Ok(Some(Update::Batch { sequence, .. })) => break sequence + 1,
            Ok(other) => panic!("{other:?}"),
            Err(_) => {}
        }
    };
    while expected < next {
        follower.expect([batch(expected)]).await;
        expected += 1;
    }
    engine.lose(payload(next as f64));
    engine.publish(payload((next + 1) as f64)).await;
    follower.expect([Seen::Reset(ResetReason::Gap), batch(next + 1)]).await;
}

#[tokio::test]
async fn a_replay_endpoint_that_does_not_answer_delays_but_does_not_stop() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("tcp://{}", silent.local_addr().unwrap()).parse().unwrap();
    let mut settings = subscription(&engine.events, Some(&silent));
    settings.timing.replay_timeout = Duration::from_millis(200);
    let mut follower = Follower::start(settings);
    follower.expect([Seen::Synced(SyncOutcome::ReplayFailed)]).await;
    loop {
        engine.publish(payload(0.0)).await;
        let soon = Duration::from_millis(100);
        if let Ok(update) = tokio::time::timeout(soon, follower.updates.recv()).await {
            assert!(matches!(update, Some(Update::Batch { .. })), "{update:?}");
            break;
        }
    }
}

#[tokio::test]
async fn a_replay_that_failed_is_repeated_while_the_stream_is_busy() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    engine.lose(payload(0.0));
    let replays = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", replays.local_addr().unwrap()).parse().unwrap();
    let mut settings = subscription(&engine.events, Some(&endpoint));
    settings.timing.replay_timeout = Duration::from_millis(200);
    settings.timing.replay_retry = Duration::from_millis(300);
    let mut follower = Follower::start(settings);
    // The replay service does not answer at first.
    follower.expect([Seen::Synced(SyncOutcome::ReplayFailed)]).await;
    // Batches that are published before the subscription is in effect are lost.
    let mut last = 0;
    loop {
        last = engine.publish(payload((last + 1) as f64)).await;
        let soon = Duration::from_millis(100);
        if let Ok(update) = tokio::time::timeout(soon, follower.updates.recv()).await {
            assert!(matches!(update, Some(Update::Batch { .. })), "{update:?}");
            break;
        }
    }
    let _service = carry(replays, engine.replay.to_string());
    loop {
        if follower.next().await == Seen::Reset(ResetReason::ReplayFailed) {
            break;
        }
    }
    follower.expect((0..=last).map(batch)).await;
}

/// Passes the connections of a listener on to an endpoint.
fn carry(listener: TcpListener, endpoint: String) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut near, _)) = listener.accept().await {
            let address = endpoint.trim_start_matches("tcp://").to_owned();
            connections.spawn(async move {
                let mut far = TcpStream::connect(address).await.unwrap();
                // An end that leaves ends the connection.
                let _left = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    tasks
}

#[tokio::test]
async fn an_idle_stream_is_checked_for_what_was_missed() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut settings = subscription(&engine.events, Some(&engine.replay));
    settings.timing.idle_check = Some(Duration::from_millis(50));
    let mut follower = Follower::start(settings);
    follower.expect([SYNCED]).await;
    for sequence in 0..3 {
        engine.lose(payload(sequence as f64));
        follower.expect([batch(sequence)]).await;
    }
}

#[tokio::test]
async fn an_absent_engine_is_waited_for_and_reported_once() {
    let engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let (events, replay) = (engine.events.clone(), engine.replay.clone());
    let engine = engine.restart(ReplayForm::EmptyFirst).await;
    drop(engine);
    let mut settings = subscription(&events, Some(&replay));
    settings.timing.retry_max = Duration::from_millis(100);
    let mut follower = Follower::start(settings);
    follower.expect([Seen::Disconnected]).await;
    let refused_for = Duration::from_millis(500);
    assert!(tokio::time::timeout(refused_for, follower.updates.recv()).await.is_err());
}

#[tokio::test]
async fn cancelling_ends_the_subscription_and_so_does_a_closed_sink() {
    let engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let mut cancelled = Follower::of(&engine);
    cancelled.expect([SYNCED]).await;
    cancelled.cancel.cancel();
    tokio::time::timeout(PATIENCE, cancelled.tasks.join_next()).await.unwrap();

    let mut unheard = Follower::of(&engine);
    unheard.expect([SYNCED]).await;
    unheard.updates.close();
    tokio::time::timeout(PATIENCE, unheard.tasks.join_next()).await.unwrap();
}

#[tokio::test]
async fn a_busy_stream_is_read_completely_at_read_times_and_immediately_on_request() {
    let mut engine = FakeEngine::start(ReplayForm::EmptyFirst).await;
    let (ask, asks) = watch::channel(0);
    // The read interval is longer than the test, so batches arrive only on request.
    let pace = Pace { every: Duration::from_secs(3600), since: Instant::now() };
    let mut followed = subscription(&engine.events, Some(&engine.replay));
    followed.pacing = Some(Pacing { pace, asks });
    let mut follower = Follower::start(followed);
    follower.expect([SYNCED]).await;
    let mut next = 0;
    let mut seen = 0;
    // Until one batch has to wait, and some more.
    for round in 1..=50 {
        for _ in 0..3 {
            next = engine.publish(payload(next as f64)).await + 1;
        }
        ask.send_replace(round);
        loop {
            match follower.next().await {
                Seen::Batch(sequence, _) => {
                    assert_eq!(sequence, seen, "each once, and in order");
                    seen += 1;
                }
                Seen::Fresh(answered) => {
                    assert_eq!(answered, round);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    // Batches that the publisher has not sent yet are delivered after a later request.
    let mut rounds = 51..;
    for round in rounds.by_ref() {
        ask.send_replace(round);
        while follower.next().await != Seen::Fresh(round) {
            seen += 1;
        }
        if seen == next {
            break;
        }
    }
    // A pause hides neither the engine's end nor its restart.
    let mut engine = engine.restart(ReplayForm::EmptyFirst).await;
    for round in rounds {
        ask.send_replace(round);
        match follower.next().await {
            Seen::Fresh(answered) => assert_eq!(answered, round),
            other => {
                assert_eq!(other, Seen::Disconnected);
                break;
            }
        }
    }
    engine.lose(payload(0.0));
    for expected in [Seen::Reset(ResetReason::EngineRestarted), batch(0), SYNCED] {
        let mut next = follower.next().await;
        // The last request may have been answered on the new engine's stream.
        if matches!(next, Seen::Fresh(_)) {
            next = follower.next().await;
        }
        assert_eq!(next, expected);
    }
}
