//! The sequence of KV event batches: gaps, replays, restarts and overflows lead to the right
//! actions.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const LIMITS: BufferLimits = BufferLimits { max_batches: 4, max_bytes: 64 };

/// Batch `sequence` of the engine's process number `process`.
fn batch(process: u8, sequence: u64) -> NumberedBatch {
    let payload = Bytes::from(format!("{process}/{sequence}"));
    NumberedBatch { sequence, payload }
}

fn actions(act: impl FnOnce(&mut Vec<Action>)) -> Vec<Action> {
    let mut out = Vec::new();
    act(&mut out);
    out
}

fn deliver(sequence: u64) -> Action {
    Action::Deliver(batch(0, sequence))
}

/// A sequencer that has replayed `0..count` and is live.
fn synced(count: u64) -> Sequencer {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        (0..count).for_each(|sequence| s.replayed(batch(0, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let mut expected = vec![Action::Replay { from: 0 }];
    expected.extend((0..count).map(deliver));
    expected.push(Action::Synced(SyncOutcome::Replayed));
    assert_eq!(out, expected);
    s
}

#[test]
fn live_batches_during_the_first_replay_wait_and_duplicates_are_dropped() {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.live(batch(0, 1), out);
        s.replayed(batch(0, 0), out);
        s.live(batch(0, 2), out);
        s.replayed(batch(0, 1), out);
        s.replay_ended(ReplayEnd::Complete, out);
        s.live(batch(0, 3), out);
    });
    let expected = [
        Action::Replay { from: 0 },
        deliver(0),
        deliver(1),
        deliver(2),
        Action::Synced(SyncOutcome::Replayed),
        deliver(3),
    ];
    assert_eq!(out, expected);
}

#[test]
fn a_live_batch_that_was_already_replayed_is_dropped() {
    let mut s = synced(3);
    assert_eq!(actions(|out| s.live(batch(0, 2), out)), []);
    assert_eq!(actions(|out| s.live(batch(0, 3), out)), [deliver(3)]);
}

#[test]
fn a_gap_is_filled_from_the_anchor() {
    let mut s = synced(2);
    assert_eq!(actions(|out| s.live(batch(0, 4), out)), [Action::Replay { from: 1 }]);
    let out = actions(|out| {
        (1..5).for_each(|sequence| s.replayed(batch(0, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
    });
    assert_eq!(out, [deliver(2), deliver(3), deliver(4)]);
}

#[test]
fn a_batch_lost_before_the_first_live_one_is_noticed() {
    let mut s = synced(0);
    assert_eq!(actions(|out| s.live(batch(0, 1), out)), [Action::Replay { from: 0 }]);
}

#[test]
fn a_gap_beyond_the_replays_reach_resets_before_anything_newer() {
    let mut s = synced(2);
    let out = actions(|out| {
        s.live(batch(0, 9), out);
        s.replayed(batch(0, 7), out);
        s.replayed(batch(0, 8), out);
        s.replayed(batch(0, 9), out);
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let reset = Action::Reset(ResetReason::ReplayTooShort);
    assert_eq!(out, [Action::Replay { from: 1 }, reset, deliver(7), deliver(8), deliver(9)]);
}

#[test]
fn a_gap_whose_replay_fails_causes_a_reset_and_the_stream_continues() {
    let mut s = synced(2);
    let out = actions(|out| {
        s.live(batch(0, 9), out);
        s.replay_ended(ReplayEnd::Failed, out);
        s.live(batch(0, 10), out);
    });
    let reset = Action::Reset(ResetReason::ReplayFailed);
    assert_eq!(out, [Action::Replay { from: 1 }, reset, deliver(9), deliver(10)]);
}

#[test]
fn an_engine_that_restarted_with_a_lower_number_resets_and_replays_from_0() {
    let mut s = synced(5);
    let out = actions(|out| {
        s.connected(out);
        s.replay_ended(ReplayEnd::Complete, out);
        s.replayed(batch(1, 0), out);
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let expected = [
        Action::Replay { from: 4 },
        Action::Reset(ResetReason::EngineRestarted),
        Action::Replay { from: 0 },
        Action::Deliver(batch(1, 0)),
        Action::Synced(SyncOutcome::Replayed),
    ];
    assert_eq!(out, expected);
}

#[test]
fn a_restarted_engine_with_a_higher_number_is_detected() {
    let mut s = synced(3);
    let out = actions(|out| {
        s.connected(out);
        s.live(batch(1, 3), out);
        s.replayed(batch(1, 2), out);
        (0..4).for_each(|sequence| s.replayed(batch(1, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let mut expected = vec![
        Action::Replay { from: 2 },
        Action::Reset(ResetReason::EngineRestarted),
        Action::Replay { from: 0 },
    ];
    expected.extend((0..4).map(|sequence| Action::Deliver(batch(1, sequence))));
    expected.push(Action::Synced(SyncOutcome::Replayed));
    assert_eq!(out, expected);
}

#[test]
fn the_same_engine_continues_after_a_reconnect_without_a_reset() {
    let mut s = synced(3);
    let out = actions(|out| {
        s.disconnected();
        s.connected(out);
        s.replayed(batch(0, 2), out);
        s.replayed(batch(0, 3), out);
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let synced = Action::Synced(SyncOutcome::Replayed);
    assert_eq!(out, [Action::Replay { from: 2 }, deliver(3), synced]);
}

#[test]
fn a_copy_of_the_last_batch_is_left_out() {
    for has_replay in [true, false] {
        let mut s = Sequencer::new(has_replay, LIMITS);
        actions(|out| {
            s.connected(out);
            s.replay_ended(ReplayEnd::Complete, out);
            s.live(batch(0, 0), out);
        });
        assert_eq!(actions(|out| s.live(batch(0, 0), out)), []);
        assert_eq!(actions(|out| s.live(batch(0, 1), out)), [deliver(1)]);
        let restarted = actions(|out| s.live(batch(1, 1), out));
        assert_eq!(restarted[0], Action::Reset(ResetReason::EngineRestarted), "another batch");
    }
}

#[test]
fn numbers_that_fall_on_one_connection_are_a_restart() {
    let mut s = synced(0);
    let out = actions(|out| {
        (0..3).for_each(|sequence| s.live(batch(0, sequence), out));
        s.live(batch(1, 0), out);
    });
    let reset = Action::Reset(ResetReason::EngineRestarted);
    assert_eq!(out, [deliver(0), deliver(1), deliver(2), reset, Action::Replay { from: 0 }]);
}

#[test]
fn without_a_replay_endpoint_gaps_and_reconnects_reset() {
    let mut s = Sequencer::new(false, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.live(batch(0, 5), out);
        s.live(batch(0, 6), out);
        s.live(batch(0, 8), out);
        s.connected(out);
        s.live(batch(0, 9), out);
        s.live(batch(1, 0), out);
    });
    let expected = [
        Action::Synced(SyncOutcome::NoReplay),
        deliver(5),
        deliver(6),
        Action::Reset(ResetReason::Gap),
        deliver(8),
        Action::Reset(ResetReason::Unverified),
        Action::Synced(SyncOutcome::NoReplay),
        deliver(9),
        Action::Reset(ResetReason::EngineRestarted),
        Action::Deliver(batch(1, 0)),
    ];
    assert_eq!(out, expected);
}

#[test]
fn an_overflowing_buffer_causes_another_replay_and_loses_nothing() {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.replayed(batch(0, 0), out);
        (1..10).for_each(|sequence| s.live(batch(0, sequence), out));
        s.replayed(batch(0, 1), out);
        s.replay_ended(ReplayEnd::Complete, out);
        (1..8).for_each(|sequence| s.replayed(batch(0, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let mut expected = vec![Action::Replay { from: 0 }, deliver(0), deliver(1)];
    expected.push(Action::Replay { from: 1 });
    expected.extend((2..10).map(deliver));
    expected.push(Action::Synced(SyncOutcome::Replayed));
    assert_eq!(out, expected);
}

#[test]
fn the_buffer_is_bounded_by_count_and_bytes() {
    let mut s = Sequencer::new(true, LIMITS);
    s.connected(&mut Vec::new());
    for sequence in 0..100 {
        let payload = Bytes::from(vec![0; 30 * (sequence as usize % 2)]);
        s.live(NumberedBatch { sequence, payload }, &mut Vec::new());
        assert!(s.buffer.len() <= LIMITS.max_batches);
        let bytes = s.buffer.iter().map(|batch| batch.payload.len()).sum::<usize>();
        assert!(bytes == s.buffered_bytes && bytes <= LIMITS.max_bytes);
    }
}

#[test]
fn an_idle_stream_is_checked_and_what_was_missed_is_fetched() {
    let mut s = synced(2);
    let out = actions(|out| {
        s.check(out);
        s.replayed(batch(0, 1), out);
        s.replayed(batch(0, 2), out);
        s.replay_ended(ReplayEnd::Complete, out);
    });
    assert_eq!(out, [Action::Replay { from: 1 }, deliver(2)]);
}

#[test]
fn a_check_that_fails_reconnects_before_it_resets() {
    let mut s = synced(2);
    let out = actions(|out| {
        s.check(out);
        s.replay_ended(ReplayEnd::Failed, out);
    });
    assert_eq!(out, [Action::Replay { from: 1 }, Action::Reconnect]);
    let out = actions(|out| {
        s.connected(out);
        s.replay_ended(ReplayEnd::Failed, out);
    });
    let expected = [
        Action::Replay { from: 1 },
        Action::Reset(ResetReason::ReplayFailed),
        Action::Synced(SyncOutcome::ReplayFailed),
    ];
    assert_eq!(out, expected);
}

#[test]
fn a_replay_that_failed_is_repeated_from_the_beginning() {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.replay_ended(ReplayEnd::Failed, out);
        s.live(batch(0, 3), out);
    });
    let synced = Action::Synced(SyncOutcome::ReplayFailed);
    assert_eq!(out, [Action::Replay { from: 0 }, synced, deliver(3)]);
    assert!(s.is_incomplete());
    let out = actions(|out| {
        s.retry(out);
        s.live(batch(0, 4), out);
        (0..5).for_each(|sequence| s.replayed(batch(0, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
        s.retry(out);
    });
    let mut expected = vec![Action::Replay { from: 0 }, Action::Reset(ResetReason::ReplayFailed)];
    expected.extend((0..5).map(deliver));
    assert_eq!(out, expected);
    assert!(!s.is_incomplete());
}

#[test]
fn a_repeated_replay_that_fails_too_voids_nothing() {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.replay_ended(ReplayEnd::Failed, out);
        s.live(batch(0, 3), out);
        s.retry(out);
        s.live(batch(0, 4), out);
        s.replay_ended(ReplayEnd::Failed, out);
        s.live(batch(0, 5), out);
    });
    let replay = || Action::Replay { from: 0 };
    let synced = Action::Synced(SyncOutcome::ReplayFailed);
    assert_eq!(out, [replay(), synced, deliver(3), replay(), deliver(4), deliver(5)]);
    assert!(s.is_incomplete());
}

#[test]
fn a_reconnect_after_a_failed_replay_fetches_what_is_missing() {
    let mut s = Sequencer::new(true, LIMITS);
    let out = actions(|out| {
        s.connected(out);
        s.replay_ended(ReplayEnd::Failed, out);
        s.live(batch(0, 1), out);
        s.disconnected();
        s.connected(out);
        (0..2).for_each(|sequence| s.replayed(batch(0, sequence), out));
        s.replay_ended(ReplayEnd::Complete, out);
    });
    let replay = || Action::Replay { from: 0 };
    let expected = [
        replay(),
        Action::Synced(SyncOutcome::ReplayFailed),
        deliver(1),
        replay(),
        Action::Reset(ResetReason::ReplayFailed),
        deliver(0),
        deliver(1),
        Action::Synced(SyncOutcome::Replayed),
    ];
    assert_eq!(out, expected);
}

/// What may happen to a stream.
#[derive(Clone, Debug)]
enum Step {
    /// A batch is published, and may be lost.
    Publish { arrives: bool },
    /// One message of the running replay arrives.
    ReplayMessage,
    /// The running replay fails.
    ReplayFails,
    /// The connection breaks and is made again.
    Reconnect,
    /// The engine restarts.
    Restart,
    /// The stream has been idle.
    Check,
    /// It is time to repeat a failed replay.
    Retry,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => any::<bool>().prop_map(|arrives| Step::Publish { arrives }),
        16 => Just(Step::ReplayMessage),
        1 => Just(Step::ReplayFails),
        1 => Just(Step::Reconnect),
        1 => Just(Step::Restart),
        1 => Just(Step::Check),
        1 => Just(Step::Retry),
    ]
}

/// An engine that keeps its last batches for replays, and what its subscriber received since the
/// last reset.
struct World {
    sequencer: Sequencer,
    process: u8,
    published: u64,
    kept: u64,
    /// The numbers that the running replay has still to send.
    replay: Option<std::ops::Range<u64>>,
    known: Vec<NumberedBatch>,
}

impl World {
    fn new(kept: u64, has_replay: bool) -> Self {
        let sequencer = Sequencer::new(has_replay, LIMITS);
        Self { sequencer, process: 0, published: 0, kept, replay: None, known: Vec::new() }
    }

    fn act(&mut self, act: impl FnOnce(&mut Sequencer, &mut Vec<Action>)) {
        let mut out = Vec::new();
        act(&mut self.sequencer, &mut out);
        for action in out {
            match action {
                Action::Deliver(batch) => {
                    if let Some(last) = self.known.last() {
                        let process = |batch: &NumberedBatch| batch.payload[0];
                        assert_eq!(batch.sequence, last.sequence + 1, "gap or duplicate");
                        assert_eq!(process(&batch), process(last), "two processes mixed");
                    }
                    self.known.push(batch);
                }
                Action::Reset(_) => self.known.clear(),
                Action::Replay { from } => {
                    let oldest = self.published.saturating_sub(self.kept);
                    self.replay = Some(from.max(oldest)..self.published);
                }
                Action::Synced(_) => {}
                Action::Reconnect => return self.reconnect(),
            }
        }
    }

    fn reconnect(&mut self) {
        self.replay = None;
        self.sequencer.disconnected();
        self.act(Sequencer::connected);
    }

    fn publish(&mut self, arrives: bool) {
        let batch = batch(self.process, self.published);
        self.published += 1;
        if arrives {
            self.act(|s, out| s.live(batch, out));
        }
    }

    fn replay_message(&mut self) {
        let Some(replay) = &mut self.replay else {
            return;
        };
        match replay.next() {
            Some(sequence) => {
                let batch = batch(self.process, sequence);
                self.act(|s, out| s.replayed(batch, out));
            }
            None => {
                self.replay = None;
                self.act(|s, out| s.replay_ended(ReplayEnd::Complete, out));
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Publish { arrives } => self.publish(arrives),
            Step::ReplayMessage => self.replay_message(),
            Step::ReplayFails if self.replay.take().is_some() => {
                self.act(|s, out| s.replay_ended(ReplayEnd::Failed, out));
            }
            Step::ReplayFails => {}
            Step::Reconnect => self.reconnect(),
            Step::Restart => {
                self.process += 1;
                self.published = 0;
                self.reconnect();
            }
            Step::Check => self.act(Sequencer::check),
            Step::Retry => self.act(Sequencer::retry),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is lost and whenever the engine restarts: the known batches are consecutive and
    /// from one process, and when the network works again, they include the newest one.
    #[test]
    fn known_batches_are_consecutive_up_to_the_newest(
        kept in 2_u64..12,
        has_replay in any::<bool>(),
        steps in proptest::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new(kept, has_replay);
        world.act(Sequencer::connected);
        for step in steps {
            world.step(step);
        }
        world.publish(true);
        while world.replay.is_some() {
            world.replay_message();
        }
        prop_assert_eq!(world.known.last(), Some(&batch(world.process, world.published - 1)));
        if has_replay {
            // Everything that a failed replay missed is fetched, as far as the engine keeps it.
            world.act(Sequencer::retry);
            while world.replay.is_some() {
                world.replay_message();
            }
            prop_assert!(!world.sequencer.is_incomplete());
            let oldest = world.published.saturating_sub(kept);
            prop_assert!(world.known[0].sequence <= oldest, "{:?} {oldest}", world.known[0]);
        }
    }
}
