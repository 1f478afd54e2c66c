//! Tests of the mirror without sockets: what it makes of an engine's events.
#![allow(clippy::unwrap_used)]

use splitrail_engine::kv_events::{DecodeLimits, Decoder, EventBatch, SkippedEvents};
use splitrail_engine::kv_events::{ResetReason, SyncOutcome, Update};
use splitrail_kv::{EngineHash, HashSeed, KvEvent, Namespace, StoredBlock, Tier, chain_hashes};
use splitrail_proto::v1;
use tokio::time::Instant;

use super::rank_follower::{RankIntake, TRUNCATED_MIN};
use super::*;

fn terms() -> HashTerms {
    HashTerms { seed: HashSeed(7), model: "m".to_owned(), block_size: 1, blocks_max: 0 }
}

/// A mirror that has caught up with an engine that holds nothing.
fn mirror(blocks_max: usize) -> (Mirror, RankIntake, Agreement) {
    let mirror = Mirror::new(MirrorConfig { blocks_max, ..MirrorConfig::default() });
    let agreement = mirror.agree(terms()).unwrap();
    mirror.update(|state| state.expect([0].into_iter()));
    let events = "tcp://127.0.0.1:1".parse().unwrap();
    let mut intake = RankIntake::new(mirror.clone(), EventSource { rank: 0, events, replay: None });
    intake.handle(Update::Synced { outcome: SyncOutcome::Replayed });
    (mirror, intake, agreement)
}

fn batch(sequence: u64, rank: Option<u16>, events: Vec<KvEvent>) -> Update {
    let skipped = SkippedEvents::default();
    Update::Batch { sequence, batch: EventBatch { timestamp_s: 1.0, rank, events, skipped } }
}

/// The blocks of a prompt. Each block has one token, which is also its name.
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
fn no_blocks_count_as_held_while_events_may_be_missing() {
    let (mirror, mut intake, _agreement) = mirror(100);
    intake.handle(batch(0, None, vec![stored(0..5)]));
    assert!(holds(&mirror, 0..5) && !holds(&mirror, 0..6));
    intake.handle(Update::Gap { expected: 1, sequence: 3 });
    assert!(!holds(&mirror, 0..5));
    for (sequence, opens) in [(1, false), (2, false), (3, true)] {
        intake.handle(batch(sequence, None, vec![removed(4..5)]));
        assert_eq!(holds(&mirror, 0..4), opens, "{sequence}");
    }
    intake.handle(Update::Disconnected { error: splitrail_engine::zmtp::WireError::TimedOut });
    assert!(!holds(&mirror, 0..4));
    intake.handle(Update::Synced { outcome: SyncOutcome::Replayed });
    assert!(holds(&mirror, 0..4));
    drop(intake);
    assert!(!holds(&mirror, 0..4), "the events are no longer followed");
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_the_index_is_measured_once_a_second_at_most() {
    let (mirror, mut intake, _agreement) = mirror(1 << 20);
    let empty = mirror.status();
    intake.handle(batch(0, None, vec![stored(0..100_000)]));
    let blocks = |status: &MirrorStatus| status.ranks[0].blocks[Tier::Device as usize];
    for _ in 0..3 {
        let status = mirror.status();
        assert_eq!((status.index_bytes, blocks(&status)), (empty.index_bytes, 100_000));
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(mirror.status().index_bytes > empty.index_bytes + 100_000);
}

#[test]
fn a_reset_gives_the_mirror_a_new_id_if_it_held_blocks() {
    let (mirror, mut intake, _agreement) = mirror(100);
    let (_, id) = mirror.id();
    intake.handle(Update::Reset { reason: ResetReason::Gap });
    assert_eq!(mirror.id().1, id, "nothing was known");
    intake.handle(batch(0, None, vec![stored(0..5)]));
    assert_eq!(mirror.status().sequence, 1);
    intake.handle(Update::Reset { reason: ResetReason::ReplayTooShort });
    let status = mirror.status();
    assert_ne!(status.mirror_id, id);
    assert_eq!((status.sequence, status.ranks[0].blocks[0]), (0, 0));
    assert_eq!((status.ranks[0].resets, status.ranks[0].last_reset), (2, Some("replay_too_short")));
}

#[test]
fn blocks_beyond_the_limit_are_reported_and_read_again_when_they_fit() {
    let (mirror, mut intake, _agreement) = mirror(8);
    intake.handle(batch(0, None, vec![stored(0..12)]));
    let status = mirror.status();
    assert!(status.ranks[0].truncated);
    assert_eq!((status.ranks[0].blocks[0], status.ranks[0].rejected), (8, 4));
    let later = Instant::now() + TRUNCATED_MIN;
    assert!(!intake.may_fit_now(later), "there is none");
    intake.handle(batch(1, None, vec![removed(7..8)]));
    assert!(!intake.may_fit_now(Instant::now()), "it has not been long");
    assert!(intake.may_fit_now(later));
}

#[test]
fn events_of_another_rank_are_ignored() {
    let (mirror, mut intake, _agreement) = mirror(100);
    // An engine that is one rank of several names its own number, which need not be ours.
    intake.handle(batch(0, Some(3), vec![stored(0..5)]));
    intake.handle(batch(1, Some(4), vec![removed(0..5)]));
    assert!(holds(&mirror, 0..5));
    assert_eq!(mirror.status().ranks[0].rejected, 1);
}

/// A batch as an engine sends it: a prompt of three blocks, and an event with this type and no more.
fn decoded(sequence: u64, odd: &str) -> Update {
    let text = |text: &str| [&[0xa0 | u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let batch = [
        &[0x92, 0, 0x92, 0x81][..],
        &text("type"),
        &text(odd),
        &[0x95],
        &text("BlockStored"),
        &[0x93, 0, 1, 2, 0xc0, 0x93, 0, 1, 2, 1],
    ];
    let mut decoder = Decoder::new(DecodeLimits::default());
    Update::Batch { sequence, batch: decoder.decode(&batch.concat()).unwrap() }
}

#[test]
fn an_odd_event_costs_no_others_unless_it_may_have_removed_them() {
    let (mirror, mut intake, _agreement) = mirror(100);
    intake.handle(batch(0, None, vec![stored(5..8)]));
    intake.handle(decoded(1, "BlockStored"));
    intake.handle(decoded(2, "BlocksAdded"));
    assert!(holds(&mirror, 0..3) && holds(&mirror, 5..8));
    let status = mirror.status();
    assert_eq!((status.ranks[0].rejected, status.ranks[0].resets), (2, 0));
    intake.handle(decoded(3, "Rearranged"));
    assert!(holds(&mirror, 0..3) && !holds(&mirror, 5..8));
    let status = mirror.status();
    assert_eq!((status.ranks[0].resets, status.ranks[0].last_reset), (1, Some("unclear_removal")));
}

#[test]
fn a_tier_that_was_cleared_is_empty_in_the_changes_of_the_mirror() {
    let (mirror, mut intake, _agreement) = mirror(100);
    let KvEvent::Stored { parent, blocks, adapter, salt, .. } = stored(0..2) else { panic!() };
    let tier = Tier::Host;
    let offloaded = KvEvent::Stored { parent, blocks, adapter, salt, tier };
    intake.handle(batch(0, None, vec![stored(0..3), stored(0..1), offloaded]));
    let before = mirror.position().borrow().sequence;
    intake.handle(batch(1, None, vec![KvEvent::TierCleared { tier: Tier::Device }]));
    let changes = mirror.after(mirror.id().0, before).unwrap();
    let changes = changes.iter().flat_map(|events| &events.changes);
    let removed = changes.map(|change| match &change.change {
        Some(v1::change::Change::Removed(removed)) => removed.names.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(removed.sum::<usize>(), 4, "one for each copy");
    assert_eq!(mirror.status().ranks[0].blocks, [0, 2, 0, 0]);
}

#[tokio::test]
async fn snapshots_are_shared_limited_and_sent_in_parts() {
    let (mirror, mut intake, _agreement) = mirror(1 << 20);
    intake.handle(batch(0, None, vec![stored(0..30_000)]));
    let first = mirror.snapshot().await;
    assert!(Arc::ptr_eq(&first, &mirror.snapshot().await), "nothing has changed");

    let (mut blocks, mut parts) = (0, 0);
    let mut reading = SnapshotParts::new(Arc::clone(&first));
    for part in reading.by_ref() {
        let here: usize = part.runs.iter().map(|run| run.names.len()).sum();
        assert!(
            here <= 1024 + messages::MESSAGE_BLOCKS_MAX && part.last == (blocks + here == 30_000)
        );
        (blocks, parts) = (blocks + here, parts + 1);
    }
    assert_eq!(blocks, 30_000);
    assert!(parts > 5);

    // A snapshot is shared as long as the ring leads from it to the last change.
    for at in 1..=40 {
        intake.handle(batch(
            at,
            None,
            vec![stored(at as u32 * 1_000_000..at as u32 * 1_000_000 + 1)],
        ));
    }
    intake.handle(Update::Reset { reason: ResetReason::Gap });
    intake.handle(batch(0, None, vec![stored(0..3)]));
    let second = mirror.snapshot().await;
    assert!(!Arc::ptr_eq(&first, &second));
    intake.handle(Update::Reset { reason: ResetReason::Gap });
    intake.handle(batch(0, None, vec![stored(0..3)]));
    let mut third = Box::pin(mirror.snapshot());
    assert!(futures_util::poll!(&mut third).is_pending());
    drop(first);
    drop(reading);
    assert_eq!(third.await.position, *mirror.position().borrow());
    assert_eq!(mirror.status().snapshots, 3);
}

#[test]
fn changes_that_are_read_again_do_not_say_when_the_engine_made_them() {
    let (mirror, mut intake, _agreement) = mirror(100);
    let mut made_s = |update| {
        let before = mirror.position().borrow().sequence;
        intake.handle(update);
        let changes = mirror.after(mirror.id().0, before).unwrap();
        changes.iter().map(|events| events.engine_time_s).collect::<Vec<_>>()
    };
    assert_eq!(made_s(batch(0, None, vec![stored(0..5)])), [1.0]);
    made_s(Update::Disconnected { error: splitrail_engine::zmtp::WireError::TimedOut });
    assert_eq!(made_s(batch(1, None, vec![removed(4..5)])), [0.0]);
    made_s(Update::Synced { outcome: SyncOutcome::Replayed });
    assert_eq!(made_s(batch(2, None, vec![removed(3..4)])), [1.0]);
}
