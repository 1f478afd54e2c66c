//! The store of pins: which prompts find a pin, and when a pin leaves the store.

use std::time::Duration;

use proptest::prelude::*;
use splitrail_kv::{HashSeed, Namespace, chain_hashes};

use super::*;

const BLOCK: usize = 2;
const PLENTY: Bounds = Bounds { pins: 1000, bytes: 1 << 30 };

fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: BLOCK as u32 };
    let mut hashes = Vec::new();
    chain_hashes(&namespace, HashSeed(5), tokens, &mut hashes);
    hashes
}

/// A pin of these tokens, which are its payload.
fn pin(tokens: &[u32], holder: u32, ends: Instant) -> Pin<Vec<u32>> {
    Pin {
        hashes: hashes(tokens).into(),
        holder: WorkerIndex(holder),
        process: 0,
        blocks: tokens.len().div_ceil(BLOCK) as u32,
        ends,
        freed: ends,
        payload_bytes: 0,
        payload: tokens.to_vec(),
    }
}

fn later(start: Instant, s: u64) -> Instant {
    start + Duration::from_secs(s)
}

const NO_BOUND: u64 = u64::MAX;

#[test]
fn a_pin_is_found_by_any_prompt_that_shares_whole_blocks_and_taken_once() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    assert!(store.keep(pin(&[1, 2, 3, 4, 5], 7, later(now, 9)), NO_BOUND).is_empty());
    let find = |store: &Store<_>, tokens: &[u32]| store.find(now, &hashes(tokens), |_, _| true);
    for (prompt, blocks) in [
        (&[1, 2, 3, 4, 5, 6, 7, 8][..], Some(2)),
        (&[1, 2, 3, 9, 5, 6], Some(1)),
        (&[1, 2], Some(1)),
        (&[1, 9, 3, 4], None),
        (&[1], None),
    ] {
        assert_eq!(find(&store, prompt).map(|found| found.blocks), blocks, "{prompt:?}");
    }
    let found = find(&store, &[1, 2, 3, 4]).unwrap();
    assert_eq!(store.take(found).unwrap().payload, [1, 2, 3, 4, 5]);
    assert!(store.take(found).is_none() && find(&store, &[1, 2, 3, 4]).is_none());
    assert_eq!((store.len(), store.bytes, store.blocks(WorkerIndex(7))), (0, 0, 0));
}

#[test]
fn an_abandoned_pin_counts_until_it_expires_or_its_process_is_gone() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    let four = [1, 2, 3, 4, 5, 6, 7, 8];
    let leave = |store: &mut Store<_>, process, seconds| {
        assert!(store.keep(pin(&four, 0, later(now, seconds)), 10).is_empty());
        let found = store.find(now, &hashes(&four), |_, _| true).unwrap();
        let mut taken = store.take(found).unwrap();
        taken.process = process;
        store.leave(&taken);
    };
    leave(&mut store, 1, 9);
    leave(&mut store, 2, 5);
    let worker = WorkerIndex(0);
    assert_eq!((store.len(), store.bytes, store.blocks(worker)), (0, 0, 8));
    // The worker has room for two further blocks.
    assert_eq!(store.keep(pin(&four, 0, later(now, 9)), 10)[0].1, PinEnd::Bound);
    assert!(store.keep(pin(&[9, 9, 9, 9], 0, later(now, 9)), 10).is_empty());
    assert_eq!(store.blocks(worker), 10);
    store.expire(later(now, 5));
    assert_eq!(store.blocks(worker), 6);
    store.forget_left(|of, process, _| (of, process) == (worker, 1));
    assert_eq!((store.len(), store.blocks(worker)), (1, 2));
}

#[test]
fn the_blocks_of_an_ended_pin_count_until_the_engine_frees_them() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    let four = Pin { freed: later(now, 10), ..pin(&[1, 2, 3, 4, 5, 6, 7, 8], 0, later(now, 9)) };
    assert!(store.keep(four, 4).is_empty());
    assert_eq!((store.expire(later(now, 9)), store.len()), (1, 0));
    assert_eq!(store.blocks(WorkerIndex(0)), 4);
    assert_eq!(store.keep(pin(&[3, 4], 0, later(now, 19)), 4)[0].1, PinEnd::Bound);
    assert_eq!(store.expire(later(now, 10)), 0);
    assert_eq!(store.blocks(WorkerIndex(0)), 0);
}

#[test]
fn a_pin_that_may_not_be_read_hides_no_shorter_one() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    let end = later(now, 9);
    store.keep(pin(&[1, 2, 3, 4, 7, 7], 0, end), NO_BOUND);
    store.keep(pin(&[1, 2, 8, 8], 1, end), NO_BOUND);
    store.keep(pin(&[1, 2, 3, 4, 5, 6, 7, 8], 2, later(now, 5)), NO_BOUND);
    let prompt = hashes(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let find = |at, not: &[u32]| {
        let found = store.find(at, &prompt, |holder, _| !not.contains(&holder.0))?;
        Some((found.holder.0, found.blocks))
    };
    assert_eq!(find(now, &[]), Some((2, 4)));
    assert_eq!(find(now, &[2]), Some((0, 2)));
    assert_eq!(find(later(now, 5), &[]), Some((0, 2)));
    assert_eq!(find(now, &[2, 0]), Some((1, 1)));
    assert_eq!(find(now, &[2, 0, 1]), None);
    for blocks in 4..(TRIED_MAX as u32 + 4) {
        let tokens: Vec<u32> = (1..=2 * blocks).collect();
        store.put(pin(&tokens, 2, end));
    }
    let prompt = hashes(&(1..=40).collect::<Vec<u32>>());
    assert!(store.find(now, &prompt, |holder, _| holder.0 != 2).is_none(), "it gives up");
}

#[test]
fn a_closed_store_gives_everything_back() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    store.keep(pin(&[1, 2], 0, later(now, 9)), NO_BOUND);
    store.keep(pin(&[3, 4], 0, later(now, 9)), NO_BOUND);
    let found = store.find(now, &hashes(&[1, 2]), |_, _| true).unwrap();
    let taken = store.take(found).unwrap();
    assert_eq!(store.close().len(), 1);
    assert_eq!(store.put(taken).unwrap().1, PinEnd::Stopped);
    assert_eq!(store.keep(pin(&[5, 6], 0, later(now, 9)), NO_BOUND)[0].1, PinEnd::Stopped);
    assert!(store.is_empty() && store.close().is_empty());
}

#[test]
fn a_pin_is_not_found_from_its_end_on() {
    let (mut store, now) = (Store::new(PLENTY), Instant::now());
    store.keep(pin(&[1, 2], 0, later(now, 9)), NO_BOUND);
    let find = |store: &Store<_>, at| store.find(at, &hashes(&[1, 2]), |_, _| true).is_some();
    assert!(find(&store, later(now, 8)) && !find(&store, later(now, 9)));
    assert_eq!(store.expire(later(now, 8)), 0);
    assert_eq!((store.expire(later(now, 9)), store.len()), (1, 0));
}

#[test]
fn a_longer_pin_supersedes_those_whose_tokens_it_has() {
    let (mut store, end) = (Store::new(PLENTY), later(Instant::now(), 9));
    store.keep(pin(&[1, 2, 3, 4], 0, end), NO_BOUND);
    store.keep(pin(&[1, 2, 8, 8], 0, end), NO_BOUND);
    let out = store.keep(pin(&[1, 2, 3, 4, 5, 6], 1, end), NO_BOUND);
    let out: Vec<_> = out.into_iter().map(|(pin, why)| (pin.payload, why)).collect();
    assert_eq!(out, [(vec![1, 2, 3, 4], PinEnd::Superseded)]);
    assert_eq!(store.len(), 2, "another continuation stays");
}

#[test]
fn beyond_a_bound_the_oldest_pins_go() {
    let end = later(Instant::now(), 9);
    let mut store = Store::new(Bounds { pins: 3, ..PLENTY });
    let mut keep = |tokens: &[u32], holder, blocks_max| {
        let out = store.keep(pin(tokens, holder, end), blocks_max);
        out.into_iter().map(|(pin, why)| (pin.payload[0], why)).collect::<Vec<_>>()
    };
    assert_eq!(keep(&[1, 1, 1, 1], 0, 4), []);
    assert_eq!(keep(&[2, 2, 2, 2], 0, 4), []);
    assert_eq!(keep(&[3, 3], 0, 4), [(1, PinEnd::Bound)], "five blocks of the worker");
    assert_eq!(keep(&[4; 10], 0, 4), [(4, PinEnd::Bound)], "it alone is too large");
    assert_eq!(keep(&[5, 5], 1, 4), [], "of another worker");
    assert_eq!(keep(&[6, 6], 1, 4), [(2, PinEnd::Bound)], "four pins");
    let mut small = Store::new(Bounds { bytes: PIN_BYTES * 3, ..PLENTY });
    small.keep(pin(&[1, 1], 0, end), NO_BOUND);
    small.keep(pin(&[2, 2], 0, end), NO_BOUND);
    assert_eq!(small.keep(pin(&[3, 3], 0, end), NO_BOUND).len(), 1, "bytes");
}

#[test]
fn pins_that_are_lost_are_given_out() {
    let (mut store, end) = (Store::new(PLENTY), later(Instant::now(), 9));
    store.keep(pin(&[1, 1], 0, end), NO_BOUND);
    store.keep(pin(&[2, 2], 1, end), NO_BOUND);
    let lost = store.retain(|pin| (pin.holder == WorkerIndex(0)).then_some(PinEnd::Holder));
    assert_eq!((lost.len(), lost[0].1, store.len()), (1, PinEnd::Holder, 1));
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    // Few different tokens, so that prompts share blocks.
    proptest::collection::vec(0u32..2, 1..12)
}

#[derive(Clone, Debug)]
enum Step {
    Keep(Vec<u32>, u32, u64),
    Read(Vec<u32>),
    PutBack(Vec<u32>),
    Expire(u64),
    Lose(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (tokens(), 0u32..3, 1u64..20).prop_map(|(t, w, s)| Step::Keep(t, w, s)),
        2 => tokens().prop_map(Step::Read),
        1 => tokens().prop_map(Step::PutBack),
        1 => (0u64..20).prop_map(Step::Expire),
        1 => (0u32..3).prop_map(Step::Lose),
    ]
}

/// The number of leading blocks with equal tokens.
fn shared(prompt: &[u32], pinned: &[u32]) -> usize {
    let pairs = prompt.chunks_exact(BLOCK).zip(pinned.chunks_exact(BLOCK));
    pairs.take_while(|(ours, theirs)| ours == theirs).count()
}

proptest! {
    /// Against a list that compares tokens: what is found shares exactly the tokens that it says,
    /// nothing shares more, nothing is found after its end, bounds hold, and each pin leaves once.
    #[test]
    fn a_found_pin_shares_its_tokens_and_each_pin_leaves_once(
        steps in proptest::collection::vec(step(), 1..40),
        blocks_max in 2u64..20,
        pins in 1usize..8,
    ) {
        let start = Instant::now();
        let mut now = start;
        let mut store = Store::new(Bounds { pins, ..PLENTY });
        // The tokens, holder and end of each pin that is in the store.
        let mut model: Vec<(Vec<u32>, u32, Instant)> = Vec::new();
        let out = |model: &mut Vec<(Vec<u32>, u32, Instant)>, gone: &Pin<Vec<u32>>| {
            let at = model.iter().position(|(tokens, holder, ends)| {
                (tokens, *holder, *ends) == (&gone.payload, gone.holder.0, gone.ends)
            });
            model.swap_remove(at.expect("a pin left twice"));
        };
        for step in steps {
            match step {
                Step::Keep(tokens, holder, s) => {
                    let ends = later(now, s);
                    model.push((tokens.clone(), holder, ends));
                    for (gone, why) in store.keep(pin(&tokens, holder, ends), blocks_max) {
                        if why == PinEnd::Superseded {
                            let full = gone.payload.len() / BLOCK;
                            prop_assert_eq!(shared(&tokens, &gone.payload), full);
                        }
                        out(&mut model, &gone);
                    }
                }
                Step::Read(tokens) | Step::PutBack(tokens) if tokens.len() < BLOCK => {}
                Step::Read(ref tokens) | Step::PutBack(ref tokens) => {
                    let found = store.find(now, &hashes(tokens), |_, _| true);
                    let live = model.iter().filter(|(_, _, ends)| *ends > now);
                    let best = live.map(|(pinned, ..)| shared(tokens, pinned)).max().unwrap_or(0);
                    prop_assert_eq!(found.map_or(0, |found| found.blocks), best);
                    if let Some(found) = found {
                        let taken = store.take(found).unwrap();
                        prop_assert_eq!(shared(tokens, &taken.payload), found.blocks);
                        prop_assert!(taken.ends > now);
                        match step {
                            Step::Read(_) => out(&mut model, &taken),
                            _ => assert!(store.put(taken).is_none()),
                        }
                    }
                }
                Step::Expire(s) => {
                    now += Duration::from_secs(s);
                    let over = store.expire(now);
                    let before = model.len();
                    model.retain(|(_, _, ends)| *ends > now);
                    prop_assert_eq!(over, before - model.len());
                }
                Step::Lose(holder) => {
                    let is_lost = |pin: &Pin<_>| (pin.holder.0 == holder).then_some(PinEnd::Holder);
                    for (gone, _) in store.retain(is_lost) {
                        out(&mut model, &gone);
                    }
                }
            }
            prop_assert_eq!(store.len(), model.len());
            prop_assert!(store.len() <= pins);
            for holder in 0..3 {
                let blocks = model.iter().filter(|(_, of, _)| *of == holder);
                let blocks: usize = blocks.map(|(t, ..)| t.len().div_ceil(BLOCK)).sum();
                prop_assert_eq!(store.blocks(WorkerIndex(holder)), blocks as u64);
                prop_assert!(blocks as u64 <= blocks_max);
            }
            if store.is_empty() {
                prop_assert_eq!(store.bytes, 0);
                prop_assert!(store.index.is_empty() && store.tails.is_empty());
            }
        }
    }
}
