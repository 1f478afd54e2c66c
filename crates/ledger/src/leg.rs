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
    /// The engine's figure, reduced to what was cached before an earlier attempt of the same request
    /// ran on the worker.
    EarlierAttempt,
}

impl Origin {
    /// `engine` or `estimate`, as in metrics, decision records and the route header.
    pub fn kind(self) -> &'static str {
        match self {
            Self::EnginePrefill | Self::EngineDecode | Self::EarlierAttempt => "engine",
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
    /// The blocks of `overlap` if the engine did the opposite with the last block of a hit.
    pub blocks_otherwise: u32,
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
    /// Number of KV events that had arrived from the worker.
    pub events: u64,
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

    /// [`Self::cached_tokens`] if the engine did the opposite with the last block of a hit.
    pub fn cached_tokens_otherwise(&self, prompt_tokens: u32) -> u32 {
        estimate_cached_tokens(self.blocks_otherwise, prompt_tokens, self.block_size)
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

/// What was known of a worker's cache before an attempt.
#[derive(Clone, Copy, Debug)]
pub struct EarlierCache {
    /// What the router expected when it placed the attempt's leg.
    pub expected: Expectation,
    /// The cached tokens that the engine has reported of that leg.
    pub reported: Option<u32>,
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
    /// What was known of the worker's cache before an earlier attempt of the same request ran there.
    /// What that attempt has left in the cache is no hit of the request.
    pub before: Option<EarlierCache>,
    /// The KV that the leg was to read back; prefill legs only.
    pub read_back: Option<ReadBackOffer>,
    /// Leading tokens of the prompt, in whole blocks, that the leg was to take from a worker that
    /// holds them (one shot); only prefill legs that read nothing back.
    pub fetch_offer: Option<u32>,
    /// Whether the engine is known to have begun, because the head of its stream or its reply has
    /// arrived, or its KV events say so.
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
            before: None,
            read_back: None,
            fetch_offer: None,
            begun: false,
            worked: false,
        }
    }

    /// The cached tokens that count at most, of a prompt with `prompt_tokens` tokens. Without an
    /// earlier attempt on the worker, there is no such limit.
    fn cached_max(&self, prompt_tokens: u32) -> u32 {
        self.before.map_or(u32::MAX, |before| {
            before.expected.cached_tokens(prompt_tokens).max(before.reported.unwrap_or(0))
        })
    }

    /// What was known of the worker's cache before this leg and those before it on the same worker.
    pub(crate) fn cache_before(&self) -> EarlierCache {
        let reported = self.cached_tokens.filter(|_| !self.receives);
        self.before.unwrap_or(EarlierCache { expected: self.expected, reported })
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
        let most = self.cached_max(self.prompt_tokens.unwrap_or(u32::MAX));
        self.cached_tokens.map(|reported| self.split(reported, reported).cached().min(most))
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
        let most = self.cached_max(prompt_tokens);
        let (cached, source) = match reported {
            Some(tokens) if tokens > most => (most.min(prompt_tokens), Origin::EarlierAttempt),
            Some(tokens) => (tokens.min(prompt_tokens), self.kind.origin()),
            None if self.expected.overlap_is_upper_bound => (0, Origin::Estimate),
            None => (self.expected.cached_tokens(prompt_tokens).min(most), Origin::Estimate),
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
mod tests;
