//! The prompt tokens of one leg: how many were cached, transferred and computed, and who gave each
//! figure.

use serde::Serialize;
use splitrail_kv::{Overlap, Tier, estimate_cached_tokens};

use splitrail_api::name::Name;

/// The source of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The engine of a prefill leg.
    EnginePrefill,
    /// The engine of the answering leg.
    EngineDecode,
    /// The router: computed from its tokenizer and from blocks that the worker's events confirmed.
    Estimate,
}

impl Origin {
    /// `engine` or `estimate`, as in metrics, decision records and the route header.
    pub fn kind(self) -> &'static str {
        match self {
            Self::EnginePrefill | Self::EngineDecode => "engine",
            Self::Estimate => "estimate",
        }
    }
}

/// The part of a request that a worker executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LegKind {
    /// The prompt was computed for another worker.
    Prefill,
    /// The reply was generated; the prompt was computed too, unless it was handed over.
    Decode,
}

impl LegKind {
    /// The value of the metrics' label `leg`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The source of figures that the engine of this leg reports.
    pub fn origin(self) -> Origin {
        match self {
            Self::Prefill => Origin::EnginePrefill,
            Self::Decode => Origin::EngineDecode,
        }
    }
}

/// What the router expected of a leg when it placed the leg.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expectation {
    /// The prompt's length by the router's tokenizer.
    pub prompt_tokens: Option<u32>,
    /// Leading blocks that the worker held, as confirmed by its events.
    pub overlap: Overlap,
    /// Whether the engine may find less than `overlap`, so that no estimate is made from it.
    pub overlap_is_upper_bound: bool,
    /// The last blocks of `overlap`, which a peer fetch has brought for this leg.
    pub fetched_blocks: u32,
    /// The last tokens of `fetched_blocks`, or of what the leg takes itself, which their source had
    /// lost and computed for this request.
    pub recomputed_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Whether the engine does not read its prefix cache for this request.
    pub bypasses_cache: bool,
    /// Whether the engine generates several samples of the prompt. It then reports the cached tokens
    /// of the last sample, which finds the blocks that the first sample has computed.
    pub several_samples: bool,
    /// Whether the engine's count of cached tokens, if it reports one, can be compared with the
    /// expectation: the worker's events arrive, the router knows the tokens, and one sample is
    /// requested.
    pub comparable: bool,
    /// The epoch of the worker's index from which the overlap was taken; see `fleet::audit`.
    pub epoch: u64,
}

impl Expectation {
    /// The number of tokens that the worker finds cached of a prompt with `prompt_tokens` tokens.
    /// The last token is always computed.
    pub fn cached_tokens(&self, prompt_tokens: u32) -> u32 {
        match self.bypasses_cache {
            true => 0,
            false => estimate_cached_tokens(self.overlap.blocks, prompt_tokens, self.block_size),
        }
    }

    /// The part of `cached_tokens` that a peer fetch has brought: what lies behind the blocks that
    /// the worker held before.
    fn fetched_tokens(&self, cached_tokens: u32) -> u32 {
        let fetched = self.fetched_blocks.min(self.overlap.blocks);
        let own = (self.overlap.blocks - fetched).saturating_mul(self.block_size);
        cached_tokens.saturating_sub(own).min(fetched.saturating_mul(self.block_size))
    }

    /// The part of `fetched_tokens` that the source has computed for this request: what lies behind
    /// the tokens that it still held.
    fn recomputed_tokens(&self, fetched_tokens: u32) -> u32 {
        let fetched = self.fetched_blocks.min(self.overlap.blocks).saturating_mul(self.block_size);
        fetched_tokens.saturating_sub(fetched.saturating_sub(self.recomputed_tokens))
    }

    /// Splits `cached_tokens` by tier. Engines report hits without their tier, so the tiers of the
    /// index are used, the fastest first. Tokens that are not in the index count as found in the
    /// engine's own cache (`device`).
    fn by_tier(&self, cached_tokens: u32) -> [u32; Tier::COUNT] {
        let mut left = cached_tokens;
        let mut tiers = self.overlap.by_tier.map(|blocks| {
            let tokens = blocks.saturating_mul(self.block_size).min(left);
            left -= tokens;
            tokens
        });
        tiers[Tier::Device as usize] += left;
        tiers
    }
}

/// Prompt tokens of a leg by the origin of their KV. The parts add up to the length of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LegTokens {
    /// Tokens found in the worker's own cache, by tier (`Tier as usize`).
    pub local_cache_hit: [u32; Tier::COUNT],
    /// The tokens that a peer fetch has brought for this leg: a part of `local_cache_hit`, or all of
    /// `fetched`.
    pub peer_fetched: u32,
    /// The part of `peer_fetched` that its source has computed for this request. Clients are not told
    /// of it as cached.
    pub recomputed: u32,
    /// Tokens whose KV a prefill leg read back from a decode worker.
    pub read_back: u32,
    /// Tokens whose KV a prefill leg itself took from a worker that held them (one shot).
    pub fetched: u32,
    /// Tokens whose KV another worker handed over. They never count as cache hits.
    pub external_kv_transfer: u32,
    /// Tokens that the worker computed.
    pub local_compute: u32,
}

impl LegTokens {
    /// Tokens found in the worker's own cache, in any tier.
    pub fn hit(&self) -> u32 {
        self.local_cache_hit.iter().sum()
    }

    /// Tokens that the leg's engine did not compute: hits, and what it read from another worker.
    fn not_computed(&self) -> u32 {
        self.hit() + self.read_back + self.fetched
    }

    /// Tokens that nobody has computed for the request.
    pub fn cached(&self) -> u32 {
        self.not_computed() - self.recomputed
    }

    /// The length of the prompt in tokens.
    pub fn total(&self) -> u32 {
        self.not_computed() + self.external_kv_transfer + self.local_compute
    }
}

/// The KV that a prefill leg was to read back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReadBackOffer {
    /// The id of the decode worker that kept it.
    pub worker: Name,
    /// Leading tokens of the prompt whose KV it is: whole blocks.
    pub tokens: u32,
}

/// One leg of an attempt: the reported facts, from which its figures are derived.
#[derive(Clone, Debug)]
pub struct LegFacts {
    /// The part of the request that this leg executes.
    pub kind: LegKind,
    /// The worker's id.
    pub worker: Name,
    /// What the router knew when it placed the leg.
    pub expected: Expectation,
    /// Prompt tokens according to this leg's engine; `None` if it did not report them.
    pub prompt_tokens: Option<u32>,
    /// Cached prompt tokens according to this leg's engine. 0 is a figure; `None` means not
    /// reported.
    pub cached_tokens: Option<u32>,
    /// Whether another worker hands the prompt's KV over to this leg. The engine's count of cached
    /// tokens is then not about its own cache: vLLM 0.32 repeats the prefill's count, and 0.22
    /// reports the whole prompt.
    pub receives: bool,
    /// The KV that the leg was to read back; prefill legs only.
    pub read_back: Option<ReadBackOffer>,
    /// Leading tokens of the prompt, in whole blocks, that the leg was to take from a worker that
    /// holds them (one shot); only prefill legs that read nothing back.
    pub fetch_offer: Option<u32>,
    /// Whether the engine is known to have begun, because the head of its stream or its reply has
    /// arrived.
    pub begun: bool,
    /// Whether the engine is known to have the KV of the whole prompt, because its reply or first
    /// output has arrived.
    pub worked: bool,
}

/// The figures of a leg, with their sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The source of `prompt_tokens`.
    pub prompt_source: Origin,
    /// The prompt's tokens by the origin of their KV.
    pub tokens: LegTokens,
    /// The source of the count of cached tokens, from which the other parts are derived.
    pub source: Origin,
}

impl LegFacts {
    /// A leg that is about to be sent.
    pub fn new(kind: LegKind, worker: &str, expected: Expectation) -> Self {
        Self {
            kind,
            worker: worker.into(),
            expected,
            prompt_tokens: None,
            cached_tokens: None,
            receives: false,
            read_back: None,
            fetch_offer: None,
            begun: false,
            worked: false,
        }
    }

    /// Whether the engine is known to have done anything for the leg.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun || self.worked
    }

    /// The part of the reported cached tokens that was read back.
    pub fn read_back_tokens(&self, cached_tokens: u32) -> u32 {
        self.read_tokens(self.read_back.as_ref().map(|offer| offer.tokens), cached_tokens)
    }

    /// The part of the reported cached tokens that was read from another worker. vLLM reports local
    /// hits and read tokens as one figure. It is exactly the offer if the engine has read: with a
    /// shorter hit of its own it has read the rest, and otherwise it has computed the rest and reports
    /// its own hit.
    fn read_tokens(&self, offered_tokens: Option<u32>, cached_tokens: u32) -> u32 {
        match offered_tokens {
            Some(offered) if cached_tokens == offered => {
                cached_tokens - self.expected.cached_tokens(cached_tokens + 1).min(cached_tokens)
            }
            _ => 0,
        }
    }

    /// The cached tokens that the engine has reported of a prompt with `prompt_tokens` tokens, if they
    /// are about what it had cached before this leg. They are not if KV was handed over, or if
    /// several samples of the leg find more than the worker's events have confirmed.
    pub fn credible_cached_tokens(&self, prompt_tokens: u32) -> Option<u32> {
        let shares_own_blocks = self.kind == LegKind::Decode && self.expected.several_samples;
        let max_tokens = match shares_own_blocks {
            true => self.expected.cached_tokens(prompt_tokens),
            false => u32::MAX,
        };
        self.cached_tokens.filter(|tokens| !self.receives && *tokens <= max_tokens)
    }

    /// The cached tokens that the engine has reported, without those that the source of a peer fetch
    /// has computed for this request.
    pub fn reported_cached_tokens(&self) -> Option<u32> {
        self.cached_tokens.map(|reported| self.split(reported, reported).cached())
    }

    /// The parts of a number of tokens that the engine did not compute. `reported` is the number that
    /// it has reported itself, or 0.
    fn split(&self, cached: u32, reported: u32) -> LegTokens {
        let read_back = self.read_back_tokens(reported);
        let fetched = self.read_tokens(self.fetch_offer, reported);
        let hit = cached - (read_back + fetched).min(cached);
        let before = self.expected.fetched_tokens(hit);
        let recomputed = match fetched {
            0 => self.expected.recomputed_tokens(before),
            tokens => self.expected.recomputed_tokens.min(tokens),
        };
        LegTokens {
            local_cache_hit: self.expected.by_tier(hit),
            peer_fetched: before + fetched,
            recomputed,
            read_back,
            fetched,
            ..LegTokens::default()
        }
    }

    /// The length of the prompt in tokens, and its source; `None` if it is not known. `elsewhere` is
    /// the length that the engine of the other leg reported.
    pub fn prompt_length(&self, elsewhere: Option<(u32, Origin)>) -> Option<(u32, Origin)> {
        let own = self.prompt_tokens.map(|tokens| (tokens, self.kind.origin()));
        let routers = self.expected.prompt_tokens.map(|tokens| (tokens, Origin::Estimate));
        own.or(elsewhere).or(routers)
    }

    /// The figures of the leg; `None` if the [length](Self::prompt_length) of the prompt is not known.
    pub fn figures(&self, elsewhere: Option<(u32, Origin)>) -> Option<Figures> {
        let (prompt_tokens, prompt_source) = self.prompt_length(elsewhere)?;
        let reported = self.credible_cached_tokens(prompt_tokens);
        let (cached, source) = match reported {
            Some(tokens) => (tokens.min(prompt_tokens), self.kind.origin()),
            None if self.expected.overlap_is_upper_bound => (0, Origin::Estimate),
            None => (self.expected.cached_tokens(prompt_tokens), Origin::Estimate),
        };
        let rest = prompt_tokens - cached;
        let (external_kv_transfer, local_compute) =
            if self.receives { (rest, 0) } else { (0, rest) };
        let split = self.split(cached, reported.map_or(0, |_| cached));
        let tokens = LegTokens { external_kv_transfer, local_compute, ..split };
        Some(Figures { prompt_tokens, prompt_source, tokens, source })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn overlap(by_tier: [u32; Tier::COUNT]) -> Overlap {
        Overlap { blocks: by_tier.iter().sum(), by_tier }
    }

    #[test]
    fn hits_are_spread_over_the_tiers_that_the_index_knows_fastest_first() {
        let expected = Expectation {
            overlap: overlap([2, 3, 0, 1]),
            block_size: 16,
            prompt_tokens: Some(200),
            ..Expectation::default()
        };
        assert_eq!(expected.by_tier(expected.cached_tokens(200)), [32, 48, 0, 16]);
        assert_eq!(expected.by_tier(40), [32, 8, 0, 0]);
        // Hits that are not in the index count as found in the engine's own memory.
        assert_eq!(expected.by_tier(128), [64, 48, 0, 16]);
    }

    #[test]
    fn hits_behind_what_the_worker_held_itself_were_fetched() {
        let expected = Expectation {
            overlap: overlap([7, 0, 0, 0]),
            fetched_blocks: 5,
            block_size: 16,
            ..Expectation::default()
        };
        for (cached_tokens, fetched) in [(0, 0), (32, 0), (48, 16), (112, 80), (128, 80)] {
            assert_eq!(expected.fetched_tokens(cached_tokens), fetched, "{cached_tokens}");
        }
        let nothing = Expectation { fetched_blocks: 0, ..expected };
        assert_eq!(nothing.fetched_tokens(112), 0);
    }

    #[test]
    fn tokens_that_a_source_computed_for_the_request_are_not_cached_tokens() {
        let expected = Expectation {
            overlap: overlap([7, 0, 0, 0]),
            fetched_blocks: 5,
            recomputed_tokens: 48,
            block_size: 16,
            prompt_tokens: Some(200),
            ..Expectation::default()
        };
        let told = |recomputed_tokens, cached_tokens| {
            let expected = Expectation { recomputed_tokens, ..expected };
            let leg = LegFacts {
                cached_tokens: Some(cached_tokens),
                ..LegFacts::new(LegKind::Prefill, "p0", expected)
            };
            let tokens = leg.figures(None).unwrap().tokens;
            assert_eq!((tokens.hit(), tokens.total()), (cached_tokens, 200), "as the engine said");
            assert_eq!(leg.reported_cached_tokens(), Some(tokens.cached()));
            (tokens.cached(), tokens.recomputed)
        };
        // Two blocks are the worker's own, two came from the source's cache, and three were computed.
        for (cached, expected) in [
            (0, (0, 0)),
            (32, (32, 0)),
            (64, (64, 0)),
            (80, (64, 16)),
            (112, (64, 48)),
            (128, (80, 48)),
        ] {
            assert_eq!(told(48, cached), expected, "{cached}");
        }
        assert_eq!(told(0, 112), (112, 0));
        // The source had lost more than the worker lacked.
        assert_eq!(told(112, 112), (32, 80));
    }

    #[test]
    fn several_samples_do_not_count_the_blocks_that_the_first_one_computed() {
        let told = |kind, overlap_blocks, reported| {
            let expected = Expectation {
                overlap: overlap([overlap_blocks, 0, 0, 0]),
                block_size: 16,
                several_samples: true,
                ..Expectation::default()
            };
            let leg = LegFacts {
                prompt_tokens: Some(100),
                cached_tokens: reported,
                ..LegFacts::new(kind, "w", expected)
            };
            let figures = leg.figures(None).unwrap();
            (figures.tokens.cached(), figures.source)
        };
        let decode = |overlap_blocks, reported| told(LegKind::Decode, overlap_blocks, reported);
        assert_eq!(decode(0, Some(96)), (0, Origin::Estimate));
        assert_eq!(decode(2, Some(96)), (32, Origin::Estimate));
        assert_eq!(decode(2, None), (32, Origin::Estimate));
        // What the engine can have had before is its own figure, and so is 0.
        assert_eq!(decode(6, Some(96)), (96, Origin::EngineDecode));
        assert_eq!(decode(6, Some(0)), (0, Origin::EngineDecode));
        // A prefill leg computes one sample only.
        assert_eq!(told(LegKind::Prefill, 0, Some(96)), (96, Origin::EnginePrefill));
    }

    #[test]
    fn a_leg_that_receives_kv_has_no_say_on_what_it_had_cached() {
        let leg = LegFacts {
            receives: true,
            prompt_tokens: Some(1142),
            cached_tokens: Some(1142),
            ..LegFacts::new(LegKind::Decode, "d0", Expectation::default())
        };
        let figures = leg.figures(None).unwrap();
        assert_eq!(figures.tokens.external_kv_transfer, 1142);
        assert_eq!(
            (figures.source, figures.prompt_source),
            (Origin::Estimate, Origin::EngineDecode)
        );
    }

    #[test]
    fn an_upper_bound_is_no_estimate() {
        let expected = Expectation {
            overlap: overlap([3, 0, 0, 0]),
            overlap_is_upper_bound: true,
            block_size: 16,
            prompt_tokens: Some(100),
            ..Expectation::default()
        };
        let cached = |reported| {
            let cached_tokens = reported;
            let leg = LegFacts::new(LegKind::Prefill, "p0", expected);
            let figures = LegFacts { cached_tokens, ..leg }.figures(None).unwrap();
            (figures.tokens.hit(), figures.tokens.local_compute, figures.source)
        };
        assert_eq!(cached(None), (0, 100, Origin::Estimate));
        assert_eq!(cached(Some(32)), (32, 68, Origin::EnginePrefill));
    }

    #[test]
    fn the_engine_s_figure_tells_whether_the_offer_was_read() {
        let expected = Expectation {
            overlap: overlap([3, 0, 0, 0]),
            block_size: 16,
            prompt_tokens: Some(300),
            ..Expectation::default()
        };
        let offer = ReadBackOffer { worker: "d0".into(), tokens: 240 };
        let leg = |cached_tokens| LegFacts {
            prompt_tokens: Some(300),
            cached_tokens: Some(cached_tokens),
            read_back: Some(offer.clone()),
            ..LegFacts::new(LegKind::Prefill, "p0", expected)
        };
        let parts = |cached| {
            let tokens = leg(cached).figures(None).unwrap().tokens;
            (tokens.hit(), tokens.read_back, tokens.local_compute)
        };
        assert_eq!(parts(240), (48, 192, 60));
        assert_eq!(parts(48), (48, 0, 252), "the engine has computed the rest");
        assert_eq!(parts(256), (256, 0, 44), "the engine held more than the offer");
        let silent = LegFacts { cached_tokens: None, ..leg(0) };
        assert_eq!(silent.figures(None).unwrap().tokens.read_back, 0, "nothing is known of it");
    }

    #[test]
    fn a_prefix_that_the_leg_took_itself_is_apart_from_its_own_hits() {
        let parts = |cached_tokens, recomputed_tokens| {
            let expected = Expectation {
                overlap: overlap([3, 0, 0, 0]),
                recomputed_tokens,
                block_size: 16,
                prompt_tokens: Some(300),
                ..Expectation::default()
            };
            let leg = LegFacts {
                prompt_tokens: Some(300),
                cached_tokens,
                fetch_offer: Some(240),
                ..LegFacts::new(LegKind::Prefill, "p0", expected)
            };
            let tokens = leg.figures(None).unwrap().tokens;
            assert_eq!((tokens.total(), tokens.peer_fetched), (300, tokens.fetched));
            let told = leg.reported_cached_tokens();
            assert!(told.is_none() || told == Some(tokens.cached()));
            [tokens.hit(), tokens.fetched, tokens.local_compute, tokens.cached()]
        };
        assert_eq!(parts(Some(240), 0), [48, 192, 60, 240]);
        assert_eq!(parts(Some(240), 32), [48, 192, 60, 208], "the source has computed some");
        assert_eq!(parts(Some(240), 240), [48, 192, 60, 48], "and more than the worker lacked");
        assert_eq!(parts(Some(48), 32), [48, 0, 252, 48], "the engine has computed the rest");
        assert_eq!(parts(Some(256), 32), [256, 0, 44, 256], "the engine held more than that");
        assert_eq!(parts(None, 32), [48, 0, 252, 48], "nothing is known of it");
    }

    proptest! {
        #[test]
        fn the_parts_of_each_leg_sum_to_the_prompt(
            prompt_tokens in proptest::option::of(0u32..5000),
            elsewhere in proptest::option::of(0u32..5000),
            known in proptest::option::of(0u32..5000),
            cached_tokens in proptest::option::of(0u32..6000),
            by_tier in proptest::array::uniform4(0u32..100),
            fetched_blocks in 0u32..120,
            recomputed_tokens in 0u32..5000,
            block_size in 0u32..40,
            receives: bool, bypasses_cache: bool,
            offered in proptest::option::of(0u32..100), one_shot: bool,
        ) {
            let expected = Expectation {
                prompt_tokens: known, overlap: overlap(by_tier), overlap_is_upper_bound: false, fetched_blocks,
                recomputed_tokens, block_size,
                bypasses_cache, several_samples: false,
                comparable: true,
                epoch: 0,
            };
            let offered = offered.filter(|_| !receives).map(|blocks| blocks * block_size);
            let offer = |tokens| ReadBackOffer { worker: "d".into(), tokens };
            let leg = LegFacts {
                prompt_tokens, cached_tokens, receives,
                read_back: offered.filter(|_| !one_shot).map(offer),
                fetch_offer: offered.filter(|_| one_shot),
                ..LegFacts::new(LegKind::Decode, "w", expected)
            };
            let figures = leg.figures(elsewhere.map(|tokens| (tokens, Origin::EnginePrefill)));
            prop_assert_eq!(figures.is_some(), prompt_tokens.or(elsewhere).or(known).is_some());
            let Some(figures) = figures else { return Ok(()) };
            prop_assert_eq!(figures.tokens.total(), figures.prompt_tokens);
            let before = figures.tokens.peer_fetched - figures.tokens.fetched;
            prop_assert!(before <= figures.tokens.hit().min(fetched_blocks * block_size));
            prop_assert!(figures.tokens.recomputed <= figures.tokens.peer_fetched);
            prop_assert!(figures.tokens.recomputed <= recomputed_tokens);
            if let (Some(reported), false) = (cached_tokens, receives) {
                let told = figures.tokens.not_computed();
                prop_assert_eq!(told, reported.min(figures.prompt_tokens));
                prop_assert_eq!(figures.source, Origin::EngineDecode);
            }
            let other = if receives { figures.tokens.local_compute } else { figures.tokens.external_kv_transfer };
            prop_assert_eq!(other, 0);
        }
    }
}
