//! What a mirror makes of an engine's stream, and what it gives away.
#![allow(clippy::unwrap_used)]

use splitrail_engine::vllm::events::{EventBatch, Skipped};
use splitrail_engine::vllm::subscription::{ResetReason, SyncOutcome, Update};
use splitrail_kv::{EngineHash, HashSeed, KvEvent, Namespace, StoredBlock, Tier, chain_hashes};
use tokio::time::Instant;

use super::follow::{Intake, TRUNCATED_MIN};
use super::*;

fn terms() -> Terms {
    Terms { seed: HashSeed(7), model: "m".to_owned(), block_size: 1, blocks_max: 0 }
}

/// A mirror that is in step with an engine that holds nothing.
fn mirror(blocks_max: usize) -> (Mirror, Intake, Agreement) {
    let mirror = Mirror::new(Config { blocks_max, ..Config::default() });
    let agreement = mirror.agree(terms()).unwrap();
    mirror.update(|state| state.expect([0].into_iter()));
    let events = "tcp://127.0.0.1:1".parse().unwrap();
    let mut intake = Intake::new(mirror.clone(), Source { rank: 0, events, replay: None });
    intake.take(Update::Synced { outcome: SyncOutcome::Replayed });
    (mirror, intake, agreement)
}

fn batch(sequence: u64, rank: Option<u16>, events: Vec<KvEvent>) -> Update {
    let skipped = Skipped::default();
    Update::Batch { sequence, batch: EventBatch { timestamp_s: 1.0, rank, events, skipped } }
}

/// A prompt's blocks, each of one token, which is its name too.
fn stored(tokens: std::ops::Range<u32>) -> KvEvent {
    let block = |token: u32| StoredBlock {
        hash: EngineHash(u64::from(token)),
        tokens: vec![token],
        opaque: false,
    };
    let blocks = tokens.map(block).collect();
    KvEvent::Stored { parent: None, blocks, adapter: None, salt: None, tier: Tier::Device }
}

fn removed(tokens: std::ops::Range<u32>) -> KvEvent {
    let hashes = tokens.map(|token| EngineHash(u64::from(token))).collect();
    KvEvent::Removed { hashes, tier: Tier::Device }
}

fn holds(mirror: &Mirror, tokens: std::ops::Range<u32>) -> bool {
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 1 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(7), &tokens.collect::<Vec<_>>(), &mut hashes);
    let blocks = u32::try_from(hashes.len()).unwrap();
    mirror.holds(BlockHash(0), 0, blocks, *hashes.last().unwrap())
}

#[test]
fn the_gate_is_shut_while_anything_may_be_missing() {
    let (mirror, mut intake, _agreement) = mirror(100);
    intake.take(batch(0, None, vec![stored(0..5)]));
    assert!(holds(&mirror, 0..5) && !holds(&mirror, 0..6));
    intake.take(Update::Gap { expected: 1, sequence: 3 });
    assert!(!holds(&mirror, 0..5));
    for (sequence, opens) in [(1, false), (2, false), (3, true)] {
        intake.take(batch(sequence, None, vec![removed(4..5)]));
        assert_eq!(holds(&mirror, 0..4), opens, "{sequence}");
    }
    intake.take(Update::Disconnected { error: splitrail_engine::zmtp::WireError::TimedOut });
    assert!(!holds(&mirror, 0..4));
    intake.take(Update::Synced { outcome: SyncOutcome::Replayed });
    assert!(holds(&mirror, 0..4));
    drop(intake);
    assert!(!holds(&mirror, 0..4), "nobody follows any more");
}

#[test]
fn a_mirror_begins_anew_under_another_name_where_anything_was_known() {
    let (mirror, mut intake, _agreement) = mirror(100);
    let (_, id) = mirror.id();
    intake.take(Update::Reset { reason: ResetReason::Gap });
    assert_eq!(mirror.id().1, id, "nothing was known");
    intake.take(batch(0, None, vec![stored(0..5)]));
    assert_eq!(mirror.status().sequence, 1);
    intake.take(Update::Reset { reason: ResetReason::ReplayTooShort });
    let status = mirror.status();
    assert_ne!(status.mirror_id, id);
    assert_eq!((status.sequence, status.ranks[0].blocks[0]), (0, 0));
    assert_eq!((status.ranks[0].resets, status.ranks[0].last_reset), (2, Some("replay_too_short")));
}

#[test]
fn what_is_beyond_the_bound_is_said_and_made_good_when_there_is_room() {
    let (mirror, mut intake, _agreement) = mirror(8);
    intake.take(batch(0, None, vec![stored(0..12)]));
    let status = mirror.status();
    assert!(status.ranks[0].truncated);
    assert_eq!((status.ranks[0].blocks[0], status.ranks[0].rejected), (8, 4));
    let later = Instant::now() + TRUNCATED_MIN;
    assert!(!intake.has_room_again(later), "there is none");
    intake.take(batch(1, None, vec![removed(7..8)]));
    assert!(!intake.has_room_again(Instant::now()), "it has not been long");
    assert!(intake.has_room_again(later));
}

#[test]
fn a_stream_that_speaks_for_another_rank_is_not_believed() {
    let (mirror, mut intake, _agreement) = mirror(100);
    // As an engine that is one rank of many says it: the number itself does not matter.
    intake.take(batch(0, Some(3), vec![stored(0..5)]));
    intake.take(batch(1, Some(4), vec![removed(0..5)]));
    assert!(holds(&mirror, 0..5));
    assert_eq!(mirror.status().ranks[0].rejected, 1);
}

#[tokio::test]
async fn copies_are_shared_few_and_come_in_parts() {
    let (mirror, mut intake, _agreement) = mirror(1 << 20);
    intake.take(batch(0, None, vec![stored(0..30_000)]));
    let first = mirror.cut().await;
    assert!(Arc::ptr_eq(&first, &mirror.cut().await), "nothing has changed");

    let (mut blocks, mut parts) = (0, 0);
    let mut reading = Parts::new(Arc::clone(&first));
    for part in reading.by_ref() {
        let here: usize = part.runs.iter().map(|run| run.names.len()).sum();
        assert!(here <= 1024 + wire::MESSAGE_BLOCKS_MAX && part.last == (blocks + here == 30_000));
        (blocks, parts) = (blocks + here, parts + 1);
    }
    assert_eq!(blocks, 30_000);
    assert!(parts > 5);

    // As long as the ring leads on from a copy, it is as good as a new one.
    for at in 1..=40 {
        intake.take(batch(
            at,
            None,
            vec![stored(at as u32 * 1_000_000..at as u32 * 1_000_000 + 1)],
        ));
    }
    intake.take(Update::Reset { reason: ResetReason::Gap });
    intake.take(batch(0, None, vec![stored(0..3)]));
    let second = mirror.cut().await;
    assert!(!Arc::ptr_eq(&first, &second));
    intake.take(Update::Reset { reason: ResetReason::Gap });
    intake.take(batch(0, None, vec![stored(0..3)]));
    let mut third = Box::pin(mirror.cut());
    assert!(futures_util::poll!(&mut third).is_pending());
    drop(first);
    drop(reading);
    assert_eq!(third.await.head, *mirror.head().borrow());
    assert_eq!(mirror.status().snapshots, 3);
}
