//! Hot prefixes: the blocks that recent prompts use most, within bounds.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use splitrail_kv::{
    BlockHash, HashSeed, HotBounds, HotPrefix, HotPrefixes, Namespace, chain_hashes,
};

const HALF_LIFE_MS: u64 = 1000;
const BLOCK: usize = 2;

const WIDE: HotBounds =
    HotBounds { bytes_max: 1 << 24, runs_max: 1 << 16, half_life_ms: HALF_LIFE_MS };

/// The tokens of a prompt whose blocks are given by a name each.
fn tokens(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|name| [*name, 7]).collect()
}

fn hashes(blocks: &[u32]) -> Vec<BlockHash> {
    let mut out = Vec::new();
    let block_size = BLOCK as u32;
    let namespace = Namespace { salt: None, model: "m", adapter: None, block_size };
    chain_hashes(&namespace, HashSeed(7), &tokens(blocks), &mut out);
    out
}

/// Counts a prompt, and gives its ids if they are wanted.
fn send(hot: &mut HotPrefixes, now_ms: u64, blocks: &[u32]) -> bool {
    let hashes = hashes(blocks);
    let wanted = hot.record(now_ms, "m", &hashes);
    if wanted {
        hot.learn(now_ms, &hashes, &tokens(blocks));
    }
    wanted
}

fn lengths(prefixes: &[HotPrefix]) -> Vec<usize> {
    prefixes.iter().map(|prefix| prefix.hashes.len()).collect()
}

#[test]
fn the_common_blocks_of_prompts_are_one_hot_prefix() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    assert!(!send(&mut hot, 0, &[1, 2, 3, 4, 5]), "used once");
    assert_eq!((hot.hottest(0, 100, 100), hot.len()), (vec![], 1));
    assert!(send(&mut hot, 0, &[1, 2, 3, 8, 9]));
    let prefixes = hot.hottest(0, 100, 100);
    assert_eq!(lengths(&prefixes), [3], "the tails were used once");
    assert_eq!(prefixes[0].hashes, hashes(&[1, 2, 3]));
    assert_eq!((prefixes[0].worth(0, 3), prefixes[0].worth(1, 2)), (6.0, 2.0));
    let known = hot.tokens(&prefixes[0].hashes).unwrap();
    assert_eq!((known.ids, &*known.model), (tokens(&[1, 2, 3]), "m"));
    assert_eq!(hot.tokens(&hashes(&[1, 2])).unwrap().ids, tokens(&[1, 2]));
    assert!(hot.tokens(&hashes(&[1, 2, 3, 4])).is_none(), "its ids are not kept");
    assert!(!send(&mut hot, 0, &[1, 2, 3]), "its ids are known");
    assert!(send(&mut hot, 0, &[1, 2, 3, 4]));
    assert_eq!(hot.tokens(&hashes(&[1, 2, 3, 4])).unwrap().ids, tokens(&[1, 2, 3, 4]));
}

#[test]
fn the_hottest_blocks_are_chosen_as_whole_prefixes() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    for _ in 0..5 {
        send(&mut hot, 0, &[1, 2]);
    }
    for tail in [[10, 11], [20, 21]] {
        for _ in 0..3 {
            send(&mut hot, 0, &[&[1, 2], &tail[..]].concat());
        }
    }
    for _ in 0..4 {
        send(&mut hot, 0, &[5, 6, 7]);
    }
    // Uses: [1, 2] has 11, [5, 6, 7] has 4, both tails have 3.
    let chosen = |blocks| {
        let mut lengths = lengths(&hot.hottest(0, blocks, 100));
        lengths.sort_unstable();
        lengths
    };
    assert_eq!(chosen(0), Vec::<usize>::new());
    assert_eq!(chosen(1), [1]);
    assert_eq!(chosen(2), [2]);
    assert_eq!(chosen(4), [2, 2], "a part of a run");
    assert_eq!(chosen(5), [2, 3]);
    assert_eq!(chosen(6), [3, 3]);
    assert_eq!(chosen(100), [3, 4, 4]);
}

#[test]
fn a_use_loses_half_of_its_worth_in_the_half_life() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    for _ in 0..4 {
        send(&mut hot, 0, &[1]);
    }
    let worth = |at_ms| hot.hottest(at_ms, 10, 10).first().map(|prefix| prefix.worth(0, 1));
    assert_eq!((worth(0), worth(HALF_LIFE_MS)), (Some(4.0), Some(2.0)));
    assert_eq!(worth(2 * HALF_LIFE_MS), None, "one use is not hot");
    send(&mut hot, 2 * HALF_LIFE_MS, &[1]);
    assert_eq!(hot.hottest(2 * HALF_LIFE_MS, 10, 10)[0].worth(0, 1), 2.0);
}

#[test]
fn a_second_use_within_the_half_life_makes_a_prefix_hot() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    send(&mut hot, 0, &[1]);
    assert!(send(&mut hot, HALF_LIFE_MS, &[1]), "as late as it may be");
    send(&mut hot, HALF_LIFE_MS, &[2]);
    assert!(!send(&mut hot, 2 * HALF_LIFE_MS + 1, &[2]), "too late");
}

#[test]
fn the_prefixes_of_most_worth_come_first_and_no_more_than_are_asked_for() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    let common: Vec<u32> = (1000..1040).collect();
    for tail in 0..50 {
        for _ in 0..2 + tail {
            send(&mut hot, 0, &[&common[..], &[tail, tail]].concat());
        }
    }
    let all = hot.hottest(0, 1000, 1000);
    assert_eq!(all.len(), 50);
    let worth = |prefix: &HotPrefix| prefix.worth(0, prefix.hashes.len());
    assert!(all.is_sorted_by(|a, b| worth(a) >= worth(b)));
    assert_eq!(hot.hottest(0, 1000, 3), all[..3]);
    assert_eq!(hot.hottest(0, 1000, 0), []);
}

#[test]
fn copies_of_the_common_blocks_of_hot_prefixes_are_bounded() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    let common: Vec<u32> = (1_000_000..1_060_000).collect();
    for tail in (0..6).flat_map(|tail| [tail, tail]) {
        send(&mut hot, 0, &[&common[..], &[tail, tail]].concat());
    }
    let copied = |blocks_max| {
        let prefixes = hot.hottest(0, blocks_max, 256);
        prefixes.iter().map(|prefix| prefix.hashes.len()).sum::<usize>()
    };
    assert_eq!(hot.hottest(0, 100_000, 1).len(), 1);
    assert!(copied(100_000) <= 1 << 18 && copied(100_000) > 4 * 60_000);
}

#[test]
fn the_least_used_ends_make_room() {
    let bounds = HotBounds { runs_max: 16, ..WIDE };
    let mut hot = HotPrefixes::new(bounds, BLOCK);
    for _ in 0..3 {
        send(&mut hot, 0, &[1, 2, 3]);
    }
    for name in 100..400 {
        send(&mut hot, 1, &[name, name]);
        send(&mut hot, 1, &[1, 2, name]);
        assert!(hot.len() <= 16);
    }
    assert_eq!(hot.hottest(1, 100, 100)[0].hashes, hashes(&[1, 2, 3]));
    hot.shrink(1, 0);
    assert!(hot.is_empty() && hot.bytes() == 0);
}

#[test]
fn a_single_prompt_does_not_replace_all_others() {
    let bounds = HotBounds { bytes_max: 4000, ..WIDE };
    let mut hot = HotPrefixes::new(bounds, BLOCK);
    send(&mut hot, 0, &[1, 2]);
    send(&mut hot, 0, &[1, 2]);
    let long: Vec<u32> = (1000..9000).collect();
    send(&mut hot, 0, &long);
    send(&mut hot, 0, &long);
    assert!(hot.bytes() <= 4000);
    assert!(hot.tokens(&hashes(&[1, 2])).is_some());
}

#[test]
fn a_namespace_keeps_its_name() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    let of = |adapter: &str, blocks: &[u32]| {
        let mut out = Vec::new();
        let block_size = BLOCK as u32;
        let namespace = Namespace { salt: None, model: "m", adapter: Some(adapter), block_size };
        chain_hashes(&namespace, HashSeed(7), &tokens(blocks), &mut out);
        out
    };
    for adapter in ["a", "b", "a", "b"] {
        for blocks in [&[1, 2, 3], &[1, 2, 4]] {
            let hashes = of(adapter, blocks);
            if hot.record(0, adapter, &hashes) {
                hot.learn(0, &hashes, &tokens(blocks));
            }
        }
    }
    for adapter in ["a", "b"] {
        let known = hot.tokens(&of(adapter, &[1, 2, 3])).unwrap();
        assert_eq!((&*known.model, known.ids), (adapter, tokens(&[1, 2, 3])));
    }
}

#[test]
fn nothing_shows_token_ids() {
    let mut hot = HotPrefixes::new(WIDE, BLOCK);
    send(&mut hot, 0, &[424_242]);
    send(&mut hot, 0, &[424_242]);
    assert!(!format!("{hot:?}").contains("424242"));
}

/// What was sent, as a list.
#[derive(Default)]
struct Naive {
    /// The times at which each block was used, by the names of the blocks up to it.
    uses: BTreeMap<Vec<u32>, Vec<u64>>,
}

impl Naive {
    fn send(&mut self, now_ms: u64, blocks: &[u32]) {
        for end in 1..=blocks.len() {
            self.uses.entry(blocks[..end].to_vec()).or_default().push(now_ms);
        }
    }

    fn of(&self, now_ms: u64, prefix: &[u32]) -> f64 {
        let age = |at: &u64| (now_ms - at) as f64 / HALF_LIFE_MS as f64;
        self.uses.get(prefix).map_or(0.0, |uses| uses.iter().map(|at| (-age(at)).exp2()).sum())
    }
}

fn steps() -> impl Strategy<Value = Vec<(u64, Vec<u32>)>> {
    let prompt = prop::collection::vec(0_u32..3, 0..7);
    prop::collection::vec((0_u64..400, prompt), 0..60)
}

proptest! {
    #[test]
    fn the_chosen_blocks_are_the_most_used_ones(steps in steps(), blocks_max in 0_usize..40) {
        let (mut hot, mut naive, mut now_ms) = (HotPrefixes::new(WIDE, BLOCK), Naive::default(), 0);
        for (pause_ms, blocks) in &steps {
            now_ms += pause_ms;
            send(&mut hot, now_ms, blocks);
            naive.send(now_ms, blocks);
        }
        let names: BTreeMap<BlockHash, Vec<u32>> = naive.uses.keys()
            .map(|blocks| (*hashes(blocks).last().unwrap(), blocks.clone()))
            .collect();
        let mut chosen = BTreeSet::new();
        let mut worth = 0.0;
        for prefix in hot.hottest(now_ms, blocks_max, 1000) {
            let blocks = &names[prefix.hashes.last().unwrap()];
            prop_assert_eq!(&hashes(blocks), &prefix.hashes);
            prop_assert_eq!(hot.tokens(&prefix.hashes).unwrap().ids, tokens(blocks));
            for end in 1..=blocks.len() {
                let uses = prefix.worth(end - 1, end);
                prop_assert!((uses - naive.of(now_ms, &blocks[..end])).abs() < 1e-6);
                if chosen.insert(blocks[..end].to_vec()) {
                    worth += uses;
                }
            }
        }
        prop_assert!(chosen.len() <= blocks_max);
        // No other choice of as many hot blocks is worth more.
        let mut all: Vec<f64> = naive.uses.keys().map(|blocks| naive.of(now_ms, blocks)).collect();
        all.retain(|uses| *uses >= 1.5 + 1e-6);
        all.sort_by(|a, b| b.total_cmp(a));
        let best: f64 = all.iter().take(blocks_max).sum();
        prop_assert!(worth >= best - 1e-6, "{worth} of {best}");
    }

    #[test]
    fn bounds_hold_and_all_memory_is_returned(
        steps in steps(), runs_max in 1_usize..20, bytes_max in 0_usize..6000,
    ) {
        let bounds = HotBounds { runs_max, bytes_max, half_life_ms: HALF_LIFE_MS };
        let (mut hot, mut now_ms) = (HotPrefixes::new(bounds, BLOCK), 0);
        for (pause_ms, blocks) in &steps {
            now_ms += pause_ms;
            send(&mut hot, now_ms, blocks);
            prop_assert!(hot.len() <= runs_max && hot.bytes() <= bytes_max);
            for prefix in hot.hottest(now_ms, 100, 100) {
                prop_assert!(hot.tokens(&prefix.hashes).is_some());
            }
        }
        hot.shrink(now_ms, 0);
        prop_assert_eq!((hot.len(), hot.bytes()), (0, 0));
    }
}
