//! The choice of the next hot prefix for a worker that is prewarmed.
#![allow(clippy::unwrap_used)]

use splitrail_kv::{HotBounds, HotPrefixes};

use super::*;

const WORKER: u32 = 9;

/// The blocks of a prefix: those of some names, ten of each.
fn hashes(names: &[u64]) -> Vec<BlockHash> {
    let mut chained = 0;
    let blocks = names.iter().flat_map(|name| (0..10).map(move |at| name << 8 | at));
    let chained = blocks.map(|block| {
        chained = (chained ^ block).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7);
        BlockHash(chained)
    });
    chained.collect()
}

/// A worker, its rank, and how many blocks it holds.
type Holder = (u32, u16, usize);

/// A prefix by the names of its blocks, how often it was used, and who holds it.
type Used<'a> = (&'a [u64], u32, &'a [Holder]);

fn hot(prefixes: &[Used<'_>]) -> Vec<HotHolders> {
    let bounds = HotBounds { bytes_max: 1 << 24, runs_max: 1000, half_life_ms: 1000 };
    let mut known = HotPrefixes::new(bounds, 1);
    for (names, uses, _) in prefixes {
        let hashes = hashes(names);
        for _ in 0..*uses {
            if known.record(0, "m", &hashes) {
                known.learn(0, &hashes, &vec![7; hashes.len()]);
            }
        }
    }
    let hottest = known.hottest(0, 1000, 1000);
    let hot = prefixes.iter().map(|(names, _, held)| {
        let last = hashes(names).pop();
        let prefix = hottest.iter().find(|prefix| prefix.hashes.last().copied() == last).unwrap();
        let held = held
            .iter()
            .map(|&(worker, rank, blocks)| HeldPrefix { by: WorkerKey { worker, rank }, blocks });
        let mut held: Vec<HeldPrefix> = held.collect();
        held.sort_by_key(|held| std::cmp::Reverse(held.blocks));
        HotHolders { prefix: prefix.clone(), held }
    });
    hot.collect()
}

/// Workers that can send, and whether they have time.
fn senders(workers: &[(u32, bool)]) -> Senders {
    let sender = |&(worker, is_free): &(u32, bool)| {
        let key = WorkerKey { worker, rank: 0 };
        let worker = WorkerIndex(worker);
        (
            key,
            Sender {
                worker,
                rank: None,
                kv_format: KvFormat::default(),
                is_free,
                load: SenderLoad { wait_ns: 0, booked_tokens: u64::from(worker.0) },
            },
        )
    };
    workers.iter().map(sender).collect()
}

/// What a worker needs.
struct Fixture {
    rank: u16,
    blocks_max: usize,
    room_blocks: usize,
    tried: HashMap<BlockHash, u32>,
    brought: Vec<FetchedPrefix>,
    running: Vec<Vec<BlockHash>>,
    from: HashMap<WorkerIndex, u32>,
}

/// A worker that has nothing yet, and room for everything.
fn fixture() -> Fixture {
    let (tried, brought, running, from) = Default::default();
    Fixture { rank: 0, blocks_max: 1000, room_blocks: usize::MAX, tried, brought, running, from }
}

impl Fixture {
    fn choose(&self, hot: &[HotHolders], senders: &Senders) -> NextFetch {
        let brought: Vec<&FetchedPrefix> = self.brought.iter().collect();
        let running: Vec<&[BlockHash]> = self.running.iter().map(|hashes| &hashes[..]).collect();
        let need = PrewarmTarget {
            worker: WorkerIndex(WORKER),
            rank: self.rank,
            kv_format: KvFormat::default(),
            blocks_min: 4,
            blocks_max: self.blocks_max,
            room_blocks: self.room_blocks,
            tried: &self.tried,
            running: &running,
            brought: &brought,
            from: &self.from,
            from_max: 2,
        };
        choose(&need, hot, senders)
    }

    /// Which prefix is fetched, how much of it, how much of that is new, and from whom.
    fn fetched(&self, hot: &[HotHolders], senders: &Senders) -> (usize, usize, usize, u32) {
        match self.choose(hot, senders) {
            NextFetch::Fetch(PrefixOffer { at, blocks, brought_blocks, source, .. }) => {
                (at, blocks, brought_blocks, source.0)
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_prefix_whose_missing_blocks_are_used_most_comes_first() {
    let prefixes = hot(&[
        (&[1, 2], 3, &[(1, 0, 20)]),
        (&[5], 9, &[(1, 0, 10), (2, 0, 10)]),
        (&[6], 20, &[(1, 0, 10), (WORKER, 0, 10)]),
    ]);
    let all = senders(&[(1, true), (2, true)]);
    assert_eq!(fixture().fetched(&prefixes, &all), (1, 10, 10, 1), "the source with less to do");
    let second = senders(&[(1, false), (2, true)]);
    assert_eq!(fixture().fetched(&prefixes, &second), (1, 10, 10, 2));
    let first = senders(&[(1, true)]);
    let part = hot(&[(&[1, 2], 3, &[(1, 0, 20), (WORKER, 0, 10)])]);
    assert_eq!(fixture().fetched(&part, &first), (0, 20, 10, 1));
}

#[test]
fn a_failed_prefix_is_tried_once_more() {
    let prefixes = hot(&[(&[1], 2, &[(1, 0, 10)])]);
    let mut fixture = fixture();
    for (tries, is_open) in [(0, true), (1, true), (2, false), (u32::MAX, false)] {
        fixture.tried.insert(*hashes(&[1]).last().unwrap(), tries);
        let choice = fixture.choose(&prefixes, &senders(&[(1, true)]));
        assert_eq!(matches!(choice, NextFetch::Fetch(_)), is_open, "after {tries}");
        let paused = fixture.choose(&prefixes, &senders(&[(1, false)]));
        assert_eq!(
            paused,
            if is_open { NextFetch::Wait } else { NextFetch::Done },
            "after {tries}"
        );
    }
}

#[test]
fn a_prewarmed_worker_waits_only_for_workers_that_hold_more() {
    let prefixes = hot(&[(&[1], 2, &[(1, 0, 10), (2, 0, 3)])]);
    let choose = |senders: &Senders| fixture().choose(&prefixes, senders);
    assert_eq!(choose(&senders(&[(1, false)])), NextFetch::Wait, "busy, or paused after a failure");
    assert_eq!(choose(&senders(&[(2, true)])), NextFetch::Done, "less than a fetch must bring");
    assert_eq!(choose(&senders(&[])), NextFetch::Done, "it can never send");
    let mut used = fixture();
    used.from.insert(WorkerIndex(1), 2);
    assert_eq!(used.choose(&prefixes, &senders(&[(1, true)])), NextFetch::Wait);
    let mut coming = fixture();
    coming.running.push(hashes(&[1, 2]));
    assert_eq!(coming.choose(&prefixes, &senders(&[(1, true)])), NextFetch::Wait);
}

#[test]
fn fetched_blocks_are_not_fetched_again_before_their_events_arrive() {
    let prefixes = hot(&[(&[1, 2], 4, &[(1, 0, 20)]), (&[1, 3], 2, &[(1, 0, 20)])]);
    let mut fixture = fixture();
    let all = senders(&[(1, true)]);
    assert_eq!(fixture.fetched(&prefixes, &all), (0, 20, 20, 1));
    fixture.brought.push(FetchedPrefix { rank: 0, hashes: hashes(&[1, 2]).into() });
    assert_eq!(fixture.fetched(&prefixes, &all), (1, 20, 10, 1), "the rest of the other one");
    fixture.brought.push(FetchedPrefix { rank: 0, hashes: hashes(&[1, 3]).into() });
    assert_eq!(fixture.choose(&prefixes, &all), NextFetch::Done);
}

#[test]
fn a_prefix_is_brought_to_one_rank_and_counts_as_what_that_rank_lacks() {
    let prefixes = hot(&[(&[1, 2], 2, &[(1, 0, 20), (WORKER, 0, 10)])]);
    let all = senders(&[(1, true)]);
    let mut fixture = fixture();
    assert_eq!(fixture.fetched(&prefixes, &all), (0, 20, 10, 1));
    fixture.rank = 1;
    assert_eq!(fixture.fetched(&prefixes, &all), (0, 20, 20, 1), "it lacks the beginning too");
    fixture.brought.push(FetchedPrefix { rank: 0, hashes: hashes(&[1, 2]).into() });
    assert_eq!(fixture.choose(&prefixes, &all), NextFetch::Done, "another rank has it");
}

#[test]
fn a_prefix_is_cut_to_what_may_come_and_to_the_room() {
    let prefixes = hot(&[(&[1, 2], 2, &[(1, 0, 20), (WORKER, 0, 5)])]);
    let all = senders(&[(1, true)]);
    let mut fixture = fixture();
    fixture.blocks_max = 7;
    assert_eq!(fixture.fetched(&prefixes, &all), (0, 12, 7, 1));
    fixture.room_blocks = 4;
    assert_eq!(fixture.fetched(&prefixes, &all), (0, 9, 4, 1));
    fixture.room_blocks = 3;
    assert_eq!(fixture.choose(&prefixes, &all), NextFetch::Full, "less than a fetch must bring");
    let held = hot(&[(&[1], 2, &[(1, 0, 10), (WORKER, 0, 10)])]);
    assert_eq!(fixture.choose(&held, &all), NextFetch::Done, "it needs no room");
    fixture.blocks_max = 3;
    assert_eq!(fixture.choose(&prefixes, &all), NextFetch::Done, "nothing would arrive in time");
}

#[test]
fn clients_come_first() {
    for (waiting, fetches, own, needed) in
        [(0, 0, 0, false), (1, 0, 0, true), (0, 1, 0, true), (0, 2, 2, false), (0, 3, 2, true)]
    {
        assert_eq!(is_needed_by_clients(waiting, fetches, own), needed);
    }
}

#[test]
fn prefixes_are_compared_by_their_chained_blocks() {
    for (a, b, common) in [
        (&[1, 2][..], &[1, 2][..], 20),
        (&[1, 2], &[1, 3], 10),
        (&[1], &[1, 3], 10),
        (&[2], &[1], 0),
        (&[], &[1], 0),
    ] {
        let (a, b) = (hashes(a), hashes(b));
        assert_eq!(common_blocks(&a, &b), common);
    }
}
