//! Block hashes: their layout is a contract, their separation a promise to tenants.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use splitrail_kv::{BlockHash, HashSeed, Namespace, chain_hashes, next_hash};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const SEED: HashSeed = HashSeed(7);
const PLAIN: Namespace<'_> =
    Namespace { salt: None, model: "qwen3-8b", adapter: None, block_size: 16 };

fn chain(namespace: &Namespace<'_>, seed: HashSeed, tokens: &[u32]) -> Vec<u64> {
    let mut out = Vec::new();
    chain_hashes(namespace, seed, tokens, &mut out);
    out.into_iter().map(|hash| hash.0).collect()
}

/// The values come from another implementation of XXH3 (the reference one, in
/// C). If this test fails, routers and side-cars of two versions disagree.
#[test]
fn the_layout_is_pinned() {
    let tokens = |count: u32| (1000..1000 + count).collect::<Vec<_>>();
    let salted = Namespace { salt: Some("tenant-a"), adapter: Some("my-lora"), ..PLAIN };
    let large = Namespace { block_size: 256, ..PLAIN };

    assert_eq!(PLAIN.root(SEED).0, 0xce52_444c_9580_cc80);
    assert_eq!(chain(&PLAIN, SEED, &tokens(35)), [0x901b_9348_ef3a_e056, 0x8d9f_b2a6_8f75_0a36]);
    assert_eq!(salted.root(SEED).0, 0x1aee_5544_29e6_1cba);
    assert_eq!(chain(&salted, SEED, &tokens(35)), [0x7f7f_9476_79d3_25e3, 0x6c0a_7104_bd0d_8a14]);
    assert_eq!(chain(&large, SEED, &tokens(515)), [0x05f8_f8c5_4a83_ad0a, 0xbcc1_2cbc_8656_bdc3]);
}

#[test]
fn only_full_blocks_have_a_hash() {
    for (tokens, blocks) in [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)] {
        assert_eq!(chain(&PLAIN, SEED, &vec![1; tokens]).len(), blocks, "{tokens} tokens");
    }
}

#[test]
fn a_block_size_of_zero_has_no_blocks_and_clears_the_result() {
    let mut out = vec![BlockHash(1)];
    chain_hashes(&Namespace { block_size: 0, ..PLAIN }, SEED, &[1, 2, 3], &mut out);
    assert_eq!(out, []);
}

/// Fields of arbitrary text, so short that equal concatenations are frequent.
fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof![Just('a'), Just('\0'), Just('\u{1}')], 0..4)
        .prop_map(String::from_iter)
}

type Fields = (Option<String>, String, Option<String>, u32);

fn fields() -> impl Strategy<Value = Fields> {
    (
        proptest::option::of(text()),
        text(),
        proptest::option::of(text()),
        prop_oneof![Just(1_u32), Just(2), Just(256)],
    )
}

fn root((salt, model, adapter, block_size): &Fields) -> u64 {
    let (salt, adapter) = (salt.as_deref(), adapter.as_deref());
    Namespace { salt, model, adapter, block_size: *block_size }.root(SEED).0
}

proptest! {
    #[test]
    fn namespaces_share_a_root_only_when_equal(one in fields(), other in fields()) {
        prop_assert_eq!(one == other, root(&one) == root(&other));
    }

    #[test]
    fn no_salt_is_not_the_empty_salt_and_fields_do_not_swap(name in text()) {
        let roots = [
            (None, "m".to_owned(), None, 16),
            (Some(String::new()), "m".to_owned(), None, 16),
            (None, "m".to_owned(), Some(String::new()), 16),
            (Some(format!("x{name}")), "m".to_owned(), None, 16),
            (None, "m".to_owned(), Some(format!("x{name}")), 16),
        ]
        .map(|fields| root(&fields));
        for (at, root) in roots.iter().enumerate() {
            prop_assert!(!roots[..at].contains(root));
        }
    }

    #[test]
    fn a_prefix_of_a_prompt_has_a_prefix_of_its_hashes(
        tokens in proptest::collection::vec(any::<u32>(), 0..200),
        cut in 0_usize..200,
        block_size in 1_u32..9,
    ) {
        let namespace = Namespace { block_size, ..PLAIN };
        let whole = chain(&namespace, SEED, &tokens);
        let part = chain(&namespace, SEED, &tokens[..cut.min(tokens.len())]);
        prop_assert_eq!(&whole[..part.len()], &part[..]);
    }

    #[test]
    fn a_changed_token_changes_its_block_and_all_after_it(
        mut tokens in proptest::collection::vec(any::<u32>(), 64),
        at in 0_usize..64,
        flip in 1_u32..,
    ) {
        let before = chain(&PLAIN, SEED, &tokens);
        tokens[at] ^= flip;
        let after = chain(&PLAIN, SEED, &tokens);
        for block in 0..before.len() {
            prop_assert_eq!(before[block] == after[block], block < at / 16);
        }
    }

    #[test]
    fn order_matters(tokens in proptest::collection::vec(any::<u32>(), 16), at in 0_usize..15) {
        let mut swapped = tokens.clone();
        swapped.swap(at, at + 1);
        prop_assume!(swapped != tokens);
        prop_assert_ne!(chain(&PLAIN, SEED, &tokens), chain(&PLAIN, SEED, &swapped));
    }

    #[test]
    fn seeds_and_namespaces_share_no_hash(
        tokens in proptest::collection::vec(any::<u32>(), 64),
        seed in any::<u64>().prop_filter("another seed", |seed| *seed != SEED.0),
    ) {
        let ours = chain(&PLAIN, SEED, &tokens);
        let others = [
            chain(&PLAIN, HashSeed(seed), &tokens),
            chain(&Namespace { salt: Some("s"), ..PLAIN }, SEED, &tokens),
            chain(&Namespace { adapter: Some("s"), ..PLAIN }, SEED, &tokens),
            chain(&Namespace { model: "s", ..PLAIN }, SEED, &tokens),
        ];
        for other in others.iter().flatten() {
            prop_assert!(!ours.contains(other));
        }
    }

    /// Small blocks are hashed at once, large ones streamed: the same bytes.
    #[test]
    fn every_block_size_has_the_same_layout(
        parent in any::<u64>(),
        tokens in proptest::collection::vec(any::<u32>(), 0..600),
    ) {
        let mut bytes = parent.to_le_bytes().to_vec();
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        let expected = BlockHash(xxh3_64_with_seed(&bytes, SEED.0));
        prop_assert_eq!(next_hash(SEED, BlockHash(parent), &tokens), expected);
    }
}
