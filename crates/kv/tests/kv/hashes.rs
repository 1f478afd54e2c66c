//! Block hashes: their layout is a contract, and tenants rely on their separation.

use proptest::prelude::*;
use splitrail_kv::{BlockHash, BlockHasher, Chain, HashSeed, Namespace, chain_hashes};

const SEED: HashSeed = HashSeed(7);
const PLAIN: Namespace<'_> =
    Namespace { salt: None, model: "qwen3-8b", adapter: None, block_size: 16 };

fn chain(namespace: &Namespace<'_>, seed: HashSeed, tokens: &[u32]) -> Vec<u64> {
    let mut out = Vec::new();
    chain_hashes(namespace, seed, tokens, &mut out);
    out.into_iter().map(|hash| hash.0).collect()
}

/// The values come from another implementation of the layout, in another language. If this test
/// fails, routers and shims of different versions disagree.
#[test]
fn the_layout_is_pinned() {
    let next = |parent, tokens: std::ops::Range<u32>| {
        BlockHasher::new(SEED).next(BlockHash(parent), &tokens.collect::<Vec<_>>()).0
    };
    assert_eq!(next(0x0123_4567_89ab_cdef, 1000..1016), 0xf380_9b2b_6198_b789);
    assert_eq!(next(0, 1000..1256), 0xc34c_b5ab_e184_78ff);
    assert_eq!(next(1, 5..8), 0xa1b6_2c47_d2be_7063);
    assert_eq!(next(next(1, 0..16), 16..32), 0x968a_2349_0861_b923);
    assert_eq!(next(9, 0..0), 0x370a_5ec9_04f0_c1b6);
    assert_eq!(next(9, 0..19), 0x3bf0_4660_0dc8_375a);

    let salted = Namespace { salt: Some("tenant-a"), adapter: Some("my-lora"), ..PLAIN };
    let tokens: Vec<u32> = (1000..1035).collect();
    for namespace in [PLAIN, salted] {
        let root = namespace.root(SEED).0;
        let [first, second] = [next(root, 1000..1016), next(next(root, 1000..1016), 1016..1032)];
        assert_eq!(chain(&namespace, SEED, &tokens), [first, second]);
    }
    assert_eq!(PLAIN.root(SEED).0, 14_377_743_951_369_027_924);
    assert_eq!(salted.root(SEED).0, 7_251_277_956_996_189_315);
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
    fn a_block_hash_depends_on_the_order_of_tokens(tokens in proptest::collection::vec(any::<u32>(), 16), at in 0_usize..15) {
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

    /// One block size has a code path of its own.
    #[test]
    fn a_further_or_missing_token_changes_the_block_hash(
        parent in any::<u64>(),
        tokens in proptest::collection::vec(any::<u32>(), 1..600),
    ) {
        let hash = |tokens: &[u32]| BlockHasher::new(SEED).next(BlockHash(parent), tokens);
        let longer = [&tokens[..], &[0]].concat();
        prop_assert_ne!(hash(&tokens), hash(&longer));
        prop_assert_ne!(hash(&tokens), hash(&tokens[1..]));
        prop_assert_ne!(hash(&tokens), BlockHasher::new(SEED).next(BlockHash(!parent), &tokens));
    }

    /// Hashes are used in tables and compared, so all bits must be equally random.
    #[test]
    fn one_flipped_bit_flips_half_of_the_hash(
        tokens in proptest::collection::vec(any::<u32>(), 16),
        parent in any::<u64>(),
    ) {
        let whole = BlockHasher::new(SEED).next(BlockHash(parent), &tokens).0;
        let mut flips = 0;
        for bit in 0..512 {
            let mut other = tokens.clone();
            other[bit / 32] ^= 1 << (bit % 32);
            flips += (BlockHasher::new(SEED).next(BlockHash(parent), &other).0 ^ whole).count_ones();
        }
        prop_assert!((14_000..19_000).contains(&flips), "{flips} of {} bits", 512 * 64);
    }
}

proptest! {
    #[test]
    fn a_chain_does_not_depend_on_the_portions_of_tokens(
        portions in proptest::collection::vec(proptest::collection::vec(0_u32..3, 0..40), 0..12),
        block_size in 0_u32..20,
        split in 0_usize..12,
    ) {
        let namespace = Namespace { block_size, ..PLAIN };
        let tokens = portions.concat();
        let wanted = chain(&namespace, SEED, &tokens);
        let (mut ours, mut behind) = (Chain::new(&namespace, SEED), Chain::new(&namespace, SEED));
        for (at, portion) in portions.iter().enumerate() {
            let (blocks, had) = (ours.hashes().len(), ours.tokens());
            ours.append(portion);
            // For a part of the tokens, the second chain gets the results of the first.
            if at < split {
                let made = &ours.hashes()[blocks..];
                behind.append_done(ours.tokens() - had, made, ours.rest());
            } else {
                behind.append(portion);
            }
        }
        for got in [ours, behind] {
            prop_assert_eq!(got.tokens(), tokens.len());
            prop_assert_eq!(got.root(), namespace.root(SEED));
            let full = wanted.len() * block_size as usize;
            prop_assert_eq!(got.rest(), if block_size == 0 { &[][..] } else { &tokens[full..] });
            let hashes: Vec<u64> = got.into_hashes().into_iter().map(|hash| hash.0).collect();
            prop_assert_eq!(&hashes, &wanted);
        }
    }
}
