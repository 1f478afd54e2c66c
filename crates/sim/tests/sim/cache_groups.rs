//! The cache of a hybrid model hits what vLLM 0.32 was observed to hit: the figures are those of tiny
//! gpt-oss and Qwen3-Next models on a CPU.

use splitrail_sim::cache::{GroupKind, KvCache, Namespace, Sequence};

const BLOCK: usize = 32;
const GROUPS: [&[GroupKind]; 3] = [
    &[GroupKind::SlidingWindow { tokens: 64 }],
    &[GroupKind::Mamba; 3],
    &[GroupKind::SlidingWindow { tokens: 100 }, GroupKind::Mamba],
];

fn cache(groups: &[GroupKind], blocks: u32) -> KvCache {
    KvCache::new(blocks, BLOCK).with_groups(groups.to_vec())
}

/// `shared` tokens that all prompts begin with, then as many others as `own` says.
fn prompt(shared: usize, own: usize, salt: u32) -> Vec<u32> {
    let common = (0..shared as u32).map(|i| i % 90);
    common.chain((0..own as u32).map(|i| 100 + (i * 7 + salt) % 97)).collect()
}

/// Computes a prompt and so many tokens of a reply; returns the hit in tokens and all tokens.
fn run(cache: &mut KvCache, tokens: Vec<u32>, generated: u32) -> (usize, Vec<u32>) {
    let mut sequence = Sequence::new(tokens, Namespace::default(), BLOCK, 7);
    let hits = cache.admit(&mut sequence, 0).expect("it fits");
    let computed = sequence.tokens().len();
    cache.register(&mut sequence, computed);
    for token in 0..generated {
        sequence.push(200 + token);
        let tokens = sequence.tokens().len();
        assert!(cache.grow(&mut sequence, tokens));
        cache.register(&mut sequence, tokens - 1);
    }
    let all = sequence.tokens().to_vec();
    cache.release(&mut sequence);
    (hits * BLOCK, all)
}

#[test]
fn a_prefix_is_hit_from_the_third_prompt_on_and_a_chat_after_its_prompt() {
    for groups in GROUPS {
        let mut cache = cache(groups, 200);
        let mut hit = |tokens| run(&mut cache, tokens, 0).0;
        assert_eq!(hit(prompt(128, 72, 1)), 0, "the first prompt with the prefix");
        assert_eq!(hit(prompt(128, 72, 1)), 192, "the same again");
        assert_eq!(hit(prompt(128, 72, 2)), 0, "another suffix: it stores the junction");
        assert_eq!(hit(prompt(128, 72, 3)), 128);
        assert_eq!(hit(prompt(128, 72, 4)), 128);
        let (_, mut turns) = run(&mut cache, prompt(0, 105, 9), 70);
        turns.extend(prompt(0, 32, 11));
        assert_eq!(run(&mut cache, turns, 0).0, 96, "the end of the first turn's prompt");
    }
}

#[test]
fn a_prompt_of_whole_blocks_is_resumed_before_its_last_block() {
    let mut cache = cache(GROUPS[0], 100);
    run(&mut cache, prompt(0, 128, 1), 0);
    assert_eq!(run(&mut cache, prompt(0, 128, 1), 0).0, 96);
    let mut longer = prompt(0, 128, 1);
    longer.extend(prompt(0, 40, 5));
    assert_eq!(run(&mut cache, longer, 0).0, 96);
}

#[test]
fn groups_take_blocks_from_one_pool_and_lose_them_apart() {
    // The first prompt needs 6 full blocks, one of a part and 3 states; the others take the rest.
    let mut cache = cache(GROUPS[1], 22);
    run(&mut cache, prompt(0, 200, 1), 0);
    assert_eq!(cache.resident_blocks(), 9);
    run(&mut cache, prompt(0, 200, 2), 0);
    let again = Sequence::new(prompt(0, 200, 1), Namespace::default(), BLOCK, 7);
    assert!(cache.resident_blocks() <= cache.usable_blocks());
    run(&mut cache, prompt(0, 70, 3), 0);
    let held = cache.resident().count();
    assert!(held > 0 && cache.hit_blocks(&again) * BLOCK <= 192);
}
