//! Decides whether a decode worker holds enough of a prompt, and whether the router or the engine checks it. Pure.
//!
//! Only blocks that a worker's own events confirm may open the router's gate. Speculative blocks
//! (routed there recently, or estimated) are never part of `held`.

use splitrail_kv::BlockHash;

use splitrail_config::model::{GateConfig, GateKind};

/// The component that checks the cache hit threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// The engine, by the field `cache_hit_threshold`.
    Engine,
    /// The worker's shim, by the header `x-splitrail-gate`.
    Shim,
    /// The router's index.
    Router,
}

impl Gate {
    /// The label in metrics, in records and in the route header.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Shim => "shim",
            Self::Router => "router",
        }
    }

    /// The gate for a worker. `supports` says whether its engine supports `cache_hit_threshold`;
    /// `None` if this is not known.
    pub(crate) fn of(kind: GateKind, shim: bool, supports: Option<bool>) -> Self {
        match kind {
            GateKind::Engine if supports != Some(false) => Self::Engine,
            GateKind::Auto if supports == Some(true) => Self::Engine,
            GateKind::Shim | GateKind::Auto if shim => Self::Shim,
            _ => Self::Router,
        }
    }
}

/// What a cache hit threshold requires of a worker for one prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Need {
    /// The share of the prompt's tokens that must be cached, from 0 to 1.
    pub(crate) threshold: f64,
    /// The same in leading blocks; `None` if the router does not know the prompt's tokens.
    pub(crate) blocks: Option<u32>,
    /// Whether any worker could hold as many blocks. An engine always computes the last token.
    pub(crate) possible: bool,
}

impl Need {
    /// The requirement for a prompt in blocks of `block_size` tokens; 0 if the size is not known
    /// yet.
    pub(crate) fn new(threshold: f64, prompt_tokens: Option<u32>, block_size: u32) -> Self {
        let known = prompt_tokens.filter(|_| block_size > 0);
        let blocks = known.map(|tokens| needed_blocks(threshold, tokens, block_size));
        let most = known.map(|tokens| tokens.saturating_sub(1) / block_size);
        Self { threshold, blocks, possible: blocks.zip(most).is_none_or(|(n, most)| n <= most) }
    }

    /// Whether every worker holds enough, because nothing is required.
    fn is_nothing(&self) -> bool {
        self.threshold == 0.0 || self.blocks == Some(0)
    }
}

/// The smallest number of blocks that covers the share `threshold` of the prompt: `ceil(threshold *
/// tokens / block_size)`, corrected for rounding errors.
fn needed_blocks(threshold: f64, tokens: u32, block_size: u32) -> u32 {
    let enough = |blocks: f64| blocks * f64::from(block_size) >= threshold * f64::from(tokens);
    let mut blocks = (threshold * f64::from(tokens) / f64::from(block_size)).ceil();
    while blocks >= 1.0 && enough(blocks - 1.0) {
        blocks -= 1.0;
    }
    blocks as u32
}

/// What to do with a decode worker for one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateDecision {
    /// The worker certainly holds enough, or nothing is required and no gate decided (`None`).
    Enough(Option<Gate>),
    /// The request is sent, and this gate decides whether the worker holds enough.
    Ask(Gate),
    /// The worker certainly holds too little.
    TooLittle,
    /// It cannot be known whether the worker holds enough.
    Unknown,
}

/// Decides what to do with a worker that holds `held` leading blocks. `held` is `None` if the index is not trusted
/// for this worker or the prompt's tokens are not known.
pub(crate) fn decide(
    settings: &GateConfig,
    gate: Gate,
    need: &Need,
    held: Option<u32>,
) -> GateDecision {
    if need.is_nothing() {
        return GateDecision::Enough(None);
    }
    let sure = need.blocks.zip(held);
    match gate {
        Gate::Router | Gate::Shim if !need.possible => GateDecision::TooLittle,
        Gate::Router => match sure {
            Some((needed, held)) if held >= needed => GateDecision::Enough(Some(gate)),
            Some(_) => GateDecision::TooLittle,
            None => GateDecision::Unknown,
        },
        Gate::Shim if need.blocks.is_none() => GateDecision::Unknown,
        Gate::Engine | Gate::Shim => {
            let short = |(needed, held): (u32, u32)| {
                held.saturating_add(settings.index_margin_blocks) < needed || !need.possible
            };
            match settings.index_first && sure.is_some_and(short) {
                true => GateDecision::TooLittle,
                false => GateDecision::Ask(gate),
            }
        }
    }
}

/// The value of `x-splitrail-gate`: `<namespace>:<rank>:<blocks>:<chained hash>`, the namespace and
/// the hash in hexadecimal. The hash is that of the last block needed, and so identifies the whole
/// prefix. The shim decides whether its blocks are resident. `None` if the router does not know the
/// needed blocks or none is needed.
pub(crate) fn header(
    namespace: BlockHash,
    rank: u16,
    need: &Need,
    hashes: &[BlockHash],
) -> Option<String> {
    let blocks = need.blocks?;
    let last = hashes.get((blocks as usize).checked_sub(1)?)?;
    Some(format!("{:016x}:{rank}:{blocks}:{:016x}", namespace.0, last.0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_gate_follows_what_is_known_of_the_worker() {
        use GateKind::{Auto, Engine, Router, Shim};
        for (kind, shim, supports, gate) in [
            (Auto, false, None, Gate::Router),
            (Auto, false, Some(false), Gate::Router),
            (Auto, true, None, Gate::Shim),
            (Auto, true, Some(true), Gate::Engine),
            (Engine, true, None, Gate::Engine),
            (Engine, false, Some(false), Gate::Router),
            (Shim, true, Some(true), Gate::Shim),
            (Shim, false, None, Gate::Router),
            (Router, true, Some(true), Gate::Router),
        ] {
            assert_eq!(Gate::of(kind, shim, supports), gate, "{kind:?} {shim} {supports:?}");
        }
    }

    #[test]
    fn the_four_requests_of_the_threshold_proposal() {
        // The cached shares of the prompt, in blocks of 16: 0.28, 0.337 and 0.41.
        let settings = GateConfig::default();
        for (threshold, tokens, held, expected) in [
            (0.0, 160, 0, GateDecision::Enough(None)),
            (0.33, 171, 3, GateDecision::TooLittle),
            (0.33, 190, 4, GateDecision::Enough(Some(Gate::Router))),
            (0.8, 195, 5, GateDecision::TooLittle),
        ] {
            let need = Need::new(threshold, Some(tokens), 16);
            assert_eq!(decide(&settings, Gate::Router, &need, Some(held)), expected);
        }
    }

    #[test]
    fn the_index_answers_only_what_it_is_sure_of() {
        let settings = GateConfig::default();
        let need = Need::new(0.5, Some(320), 16);
        assert_eq!(need.blocks, Some(10));
        for gate in [Gate::Engine, Gate::Shim] {
            let held = |held| decide(&settings, gate, &need, held);
            assert_eq!(held(Some(7)), GateDecision::TooLittle);
            assert_eq!(held(Some(8)), GateDecision::Ask(gate), "events may be under way");
            assert_eq!(held(Some(20)), GateDecision::Ask(gate), "it may be evicted by now");
            assert_eq!(held(None), GateDecision::Ask(gate));
            let asking = GateConfig { index_first: false, ..settings };
            assert_eq!(decide(&asking, gate, &need, Some(0)), GateDecision::Ask(gate));
        }
        assert_eq!(decide(&settings, Gate::Router, &need, None), GateDecision::Unknown);
        let blind = Need::new(0.5, None, 16);
        assert_eq!(decide(&settings, Gate::Shim, &blind, None), GateDecision::Unknown);
        assert_eq!(decide(&settings, Gate::Engine, &blind, None), GateDecision::Ask(Gate::Engine));
    }

    #[test]
    fn the_last_token_is_always_computed() {
        let settings = GateConfig::default();
        let all = Need::new(1.0, Some(32), 16);
        assert_eq!((all.blocks, all.possible), (Some(2), false));
        assert_eq!(decide(&settings, Gate::Router, &all, Some(2)), GateDecision::TooLittle);
        assert_eq!(decide(&settings, Gate::Shim, &all, None), GateDecision::TooLittle);
        let empty = Need::new(1.0, Some(0), 16);
        assert_eq!(decide(&settings, Gate::Router, &empty, None), GateDecision::Enough(None));
    }

    #[test]
    fn the_header_names_the_last_block_that_is_needed() {
        let hashes: Vec<_> = (1..=4).map(BlockHash).collect();
        let need = Need::new(0.5, Some(66), 16);
        let header = header(BlockHash(0xab), 0, &need, &hashes).unwrap();
        assert_eq!(header, "00000000000000ab:0:3:0000000000000003");
    }

    proptest! {
        #[test]
        fn needed_blocks_are_the_fewest_that_are_enough(
            threshold in 0.0..=1.0f64, tokens in 0u32..200_000, block_size in 1u32..300
        ) {
            let need = Need::new(threshold, Some(tokens), block_size).blocks.unwrap();
            let share = threshold * f64::from(tokens);
            prop_assert!(f64::from(need) * f64::from(block_size) >= share);
            prop_assert!(need == 0 || f64::from(need - 1) * f64::from(block_size) < share);
        }
    }
}
