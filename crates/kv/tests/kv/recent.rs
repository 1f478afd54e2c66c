//! The recently routed blocks: exactly those that were lately routed to a worker, within limits.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use splitrail_kv::{
    BlockHash, EXPIRED_BLOCKS_MAX, HashSeed, Namespace, RecentConfig, RecentOverlaps,
    RecentPrompts, WorkerKey, chain_hashes,
};

const LIFETIME_MS: u64 = 100;

fn recent(max_blocks_per_worker: usize) -> RecentPrompts {
    RecentPrompts::new(RecentConfig { lifetime_ms: LIFETIME_MS, max_blocks_per_worker })
}

fn worker(number: u32) -> WorkerKey {
    WorkerKey { worker: number, rank: 0 }
}

/// The hashes of a prompt of one token per block.
fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
    let mut out = Vec::new();
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size: 1 };
    chain_hashes(&namespace, HashSeed(7), tokens, &mut out);
    out
}

/// A prompt of `len` blocks that begins with `name`, and so shares nothing with others.
fn prompt(name: u32, len: u32) -> Vec<BlockHash> {
    hashes(&std::iter::once(name).chain(0..len - 1).collect::<Vec<_>>())
}

fn overlap(recent: &RecentPrompts, worker: WorkerKey, prompt: &[BlockHash]) -> u32 {
    let mut found = RecentOverlaps::default();
    recent.find(prompt, &mut found);
    found.get(worker)
}

#[test]
fn a_prompt_is_speculative_at_its_worker_until_it_expires() {
    let mut recent = recent(100);
    let (a, longer) = (prompt(1, 5), prompt(1, 8));
    recent.record(10, worker(0), &a, None);
    assert_eq!(overlap(&recent, worker(0), &longer), 5);
    assert_eq!(overlap(&recent, worker(1), &longer), 0);
    assert_eq!((recent.blocks(worker(0)), recent.next_expiry_ms()), (5, Some(110)));
    assert!(!recent.expire(109));
    assert_eq!(overlap(&recent, worker(0), &a), 5);
    assert!(!recent.expire(110));
    assert_eq!(overlap(&recent, worker(0), &a), 0);
    assert_eq!((recent.blocks(worker(0)), recent.next_expiry_ms()), (0, None));
}

#[test]
fn blocks_that_are_sent_again_stay_and_the_others_expire() {
    let mut recent = recent(100);
    let whole = prompt(1, 9);
    recent.record(0, worker(0), &whole, None);
    recent.record(60, worker(0), &whole[..4], None);
    assert_eq!((recent.blocks(worker(0)), recent.listed_blocks()), (9, 9));
    recent.expire(100);
    assert_eq!(overlap(&recent, worker(0), &whole), 4);
    recent.expire(160);
    assert_eq!(overlap(&recent, worker(0), &whole), 0);
}

#[test]
fn the_last_blocks_of_the_oldest_prompt_are_removed_for_new_ones() {
    let mut recent = recent(10);
    let (a, b, c) = (prompt(1, 5), prompt(2, 5), prompt(3, 3));
    recent.record(0, worker(0), &a, None);
    recent.record(1, worker(0), &b, None);
    recent.record(2, worker(0), &c, None);
    let held =
        |recent: &RecentPrompts| [&a, &b, &c].map(|prompt| overlap(recent, worker(0), prompt));
    assert_eq!(held(&recent), [2, 5, 3]);
    // The engine is found to have a smaller cache.
    recent.record(3, worker(0), &c, Some(4));
    assert_eq!(held(&recent), [0, 1, 3]);
    recent.record(4, worker(0), &prompt(4, 30), Some(4));
    assert_eq!(overlap(&recent, worker(0), &prompt(4, 30)), 4);
    assert_eq!(recent.blocks(worker(0)), 4);
    // Each worker has its own limit.
    recent.record(5, worker(1), &a, None);
    assert_eq!(overlap(&recent, worker(1), &a), 5);
    assert_eq!(recent.blocks(worker(0)), 4);
}

#[test]
fn a_restarted_worker_has_no_speculative_blocks() {
    let mut recent = recent(100);
    let a = prompt(1, 5);
    recent.record(0, worker(0), &a, None);
    recent.record(0, worker(1), &a, None);
    recent.forget(0);
    assert_eq!(overlap(&recent, worker(0), &a), 0);
    assert_eq!(overlap(&recent, worker(1), &a), 5);
    assert_eq!(recent.listed_blocks(), 5);
    recent.record(1, worker(0), &a, None);
    assert_eq!(overlap(&recent, worker(0), &a), 5);
}

#[test]
fn renewing_blocks_does_not_increase_memory() {
    let mut recent = recent(64);
    let common = prompt(1, 20);
    for turn in 0..5000_u32 {
        let branch = common.iter().copied().chain(prompt(turn % 7 + 2, 3));
        recent.record(0, worker(turn % 2), &branch.collect::<Vec<_>>(), None);
    }
    for number in [0, 1] {
        assert!(recent.blocks(worker(number)) <= 64);
    }
    assert_eq!(recent.listed_blocks(), recent.blocks(worker(0)) + recent.blocks(worker(1)));
}

#[test]
fn one_call_removes_a_bounded_number_of_expired_blocks() {
    let len = EXPIRED_BLOCKS_MAX as u32 + 10;
    let mut recent = recent(len as usize);
    recent.record(0, worker(0), &prompt(1, len), None);
    assert!(recent.expire(LIFETIME_MS), "some is left");
    assert_eq!(recent.blocks(worker(0)), 10);
    assert_eq!(overlap(&recent, worker(0), &prompt(1, len)), 10, "the end went first");
    assert!(!recent.expire(LIFETIME_MS));
    assert_eq!(recent.blocks(worker(0)), 0);
}

#[test]
fn a_clock_that_goes_back_changes_nothing() {
    let mut recent = recent(100);
    recent.record(50, worker(0), &prompt(1, 3), None);
    recent.record(20, worker(0), &prompt(2, 3), None);
    recent.expire(149);
    assert_eq!(recent.blocks(worker(0)), 6);
    recent.expire(150);
    assert_eq!(recent.blocks(worker(0)), 0);
}

/// The same promises, the slow way: every block with the last prompt that had it.
#[derive(Default)]
struct Model {
    /// Per worker: block to the prompt's number and the block's place.
    blocks: BTreeMap<u32, BTreeMap<BlockHash, (usize, usize)>>,
    /// By number.
    expires_ms: Vec<u64>,
}

impl Model {
    fn record(&mut self, now_ms: u64, worker: u32, hashes: &[BlockHash], bound: usize) {
        self.expire(now_ms);
        self.expires_ms.push(now_ms + LIFETIME_MS);
        let number = self.expires_ms.len() - 1;
        let blocks = self.blocks.entry(worker).or_default();
        let hashes = &hashes[..hashes.len().min(bound)];
        if hashes.is_empty() {
            return;
        }
        blocks.extend(hashes.iter().enumerate().map(|(at, hash)| (*hash, (number, at))));
        while blocks.len() > bound {
            let last = |(number, at): (usize, usize)| (number, usize::MAX - at);
            let oldest = blocks.iter().min_by_key(|(_, owner)| last(**owner)).unwrap();
            let oldest = *oldest.0;
            blocks.remove(&oldest);
        }
    }

    fn expire(&mut self, now_ms: u64) {
        for blocks in self.blocks.values_mut() {
            blocks.retain(|_, (number, _)| self.expires_ms[*number] > now_ms);
        }
    }

    fn held(&self, worker: u32) -> BTreeSet<BlockHash> {
        self.blocks.get(&worker).map(|blocks| blocks.keys().copied().collect()).unwrap_or_default()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Record { worker: u32, tokens: Vec<u32>, capacity: Option<usize> },
    Wait { ms: u64 },
    Forget { worker: u32 },
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = proptest::collection::vec(0..2_u32, 0..7);
    let record = (0..3_u32, tokens, proptest::option::weighted(0.3, 0..16_usize));
    prop_oneof![
        8 => record.prop_map(|(worker, tokens, capacity)| Op::Record { worker, tokens, capacity }),
        3 => (0..90_u64).prop_map(|ms| Op::Wait { ms }),
        1 => (0..3_u32).prop_map(|worker| Op::Forget { worker }),
    ]
}

proptest! {
    #[test]
    fn recent_prompts_agree_with_a_naive_model(ops in proptest::collection::vec(op(), 1..60)) {
        const BOUND: usize = 12;
        let mut recent = recent(BOUND);
            let mut model = Model::default();
        let mut now_ms = 0;
        let bits = |bits: u32| (0..6).map(|at| bits >> at & 1).collect::<Vec<_>>();
        let all: Vec<_> = (0..64).map(|number| hashes(&bits(number))).collect();
        for op in ops {
            match op {
                Op::Record { worker: number, tokens, capacity } => {
                    let hashes = hashes(&tokens);
                    recent.record(now_ms, worker(number), &hashes, capacity);
                    model.record(now_ms, number, &hashes, capacity.unwrap_or(BOUND).min(BOUND));
                }
                Op::Wait { ms } => {
                    now_ms += ms;
                    prop_assert!(!recent.expire(now_ms));
                    model.expire(now_ms);
                }
                Op::Forget { worker } => {
                    recent.forget(worker);
                    model.blocks.remove(&worker);
                }
            }
            let mut listed = 0;
            for number in 0..3 {
                let held = model.held(number);
                listed += held.len();
                prop_assert_eq!(recent.blocks(worker(number)), held.len());
                // All prompts of six blocks over two tokens, which include all prefixes.
                for prompt in &all {
                    let expected = prompt.iter().take_while(|hash| held.contains(hash)).count();
                    // Without gaps: no block is held if a block before it is not.
                    prop_assert!(prompt[expected..].iter().all(|hash| !held.contains(hash)));
                    prop_assert_eq!(overlap(&recent, worker(number), prompt), expected as u32);
                }
            }
            prop_assert_eq!(recent.listed_blocks(), listed);
        }
    }
}
