//! The most recent decisions, for operators and tests. Counts and hashes only: no
//! prompt, no token ids, no completions.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use serde::{Serialize, Serializer};
use splitrail_kv::Tier;

use super::entry::Entry;
use crate::veto::VetoReason;
use splitrail_api::name::Name;
use splitrail_policy::{Candidate, Terms};

/// One candidate of a decision.
#[derive(Clone, Debug, Serialize)]
pub struct CandidateRecord {
    /// The part of the request that was placed.
    pub leg: &'static str,
    /// The worker's name.
    pub worker: Name,
    /// The data-parallel rank that the request was to be pinned to, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u16>,
    /// Whether it was thought alive.
    pub up: bool,
    /// Leading blocks that it held.
    pub overlap_blocks: u32,
    /// The same blocks by the fastest tier that had them; tiers without any are left out.
    #[serde(serialize_with = "by_tier")]
    pub overlap_by_tier: [u32; Tier::COUNT],
    /// The share of them that did not count, since it was seen to find less than the index
    /// promised.
    pub overlap_discount: f64,
    /// Leading blocks that it was assumed to hold, those among them: a guess from what was
    /// sent there lately, which its cost went by.
    pub assumed_blocks: u32,
    /// Those of them that were just being computed for another prompt.
    pub underway_blocks: u32,
    /// Requests that it worked on.
    pub requests: u32,
    /// Prompt tokens that it had still to compute.
    pub prefill_tokens: u64,
    /// Tokens of requests that it held.
    pub active_tokens: u64,
    /// Its cost under the policy; lower is better.
    pub cost: f64,
    /// What the cost is made of, in milliseconds, where the policy counts those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<Terms>,
    /// Why it could not be chosen, if so: its load or its health.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub veto: Option<VetoReason>,
    /// Milliseconds since its last KV event or index synchronisation; `None` if there was none.
    pub index_age_ms: Option<u64>,
    /// Whether it was chosen.
    pub chosen: bool,
}

impl CandidateRecord {
    /// A candidate as it was seen.
    pub fn new(
        leg: &'static str,
        worker: &str,
        seen: &Candidate,
        figures: Figures,
        chosen: bool,
    ) -> Self {
        let Figures { cost, terms, veto, index_age_ms } = figures;
        Self {
            leg,
            worker: worker.into(),
            rank: seen.rank,
            up: seen.up,
            overlap_blocks: seen.overlap_blocks,
            overlap_by_tier: seen.overlap_by_tier,
            overlap_discount: seen.overlap_discount,
            assumed_blocks: seen.assumed_blocks,
            underway_blocks: seen.underway_blocks,
            requests: seen.requests,
            prefill_tokens: seen.prefill_tokens,
            active_tokens: seen.active_tokens,
            cost,
            terms,
            veto,
            index_age_ms,
            chosen,
        }
    }
}

/// What a choice and the fleet say of one candidate.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Its cost under the policy.
    pub cost: f64,
    /// What the cost is made of, in milliseconds.
    pub terms: Option<Terms>,
    /// Why it could not be chosen.
    pub veto: Option<VetoReason>,
    /// Milliseconds since its last KV event or index synchronisation.
    pub index_age_ms: Option<u64>,
}

/// A worker that has the role for a leg and was no candidate for it.
#[derive(Clone, Debug, Serialize)]
pub struct VetoRecord {
    /// The part of the request that was placed.
    pub leg: &'static str,
    /// The worker's name.
    pub worker: Name,
    /// Why it was no candidate.
    pub reason: VetoReason,
    /// Milliseconds since its last KV event or index synchronisation; `None` if there was none.
    pub index_age_ms: Option<u64>,
}

fn by_tier<S: Serializer>(blocks: &[u32; Tier::COUNT], to: S) -> Result<S::Ok, S::Error> {
    let tiers = Tier::ALL.iter().map(|tier| (tier.name(), blocks[*tier as usize]));
    to.collect_map(tiers.filter(|(_, blocks)| *blocks > 0))
}

/// What a decision took from outside the snapshot.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DrawRecord {
    /// The part of the request that was placed.
    pub leg: &'static str,
    /// Picks for such a leg before this one.
    pub turn: u64,
    /// The random bits.
    pub draw: u64,
}

/// What the policy beside the first would have done.
#[derive(Clone, Debug, Serialize)]
pub struct ShadowRecord {
    /// The part of the request that was placed.
    pub leg: &'static str,
    /// The policy.
    pub policy: &'static str,
    /// Whom it would have chosen.
    pub worker: Name,
    /// Whether that is who was chosen.
    pub agrees: bool,
    /// By how much sooner the first token would have come, as predicted; below 0: later.
    pub predicted_gain_ms: f64,
}

/// How one prompt was routed. Everything above `outcome` is written before an
/// engine has answered.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Decision {
    /// The request's id, as the client sees it.
    pub request_id: Name,
    /// Which prompt of a batch this is.
    pub prompt_index: usize,
    /// The model's configured name.
    pub model: Name,
    /// The flow that was executed: `aggregated`, `prefill_first`, `decode_first`, `decode_only`.
    pub flow: &'static str,
    /// Why a P/D model's request was prefilled where it is decoded.
    pub local_reason: Option<&'static str>,
    /// The reason that the metrics have counted for it.
    #[serde(skip)]
    pub counted_reason: Option<&'static str>,
    /// The share of the prompt that a decode worker was to hold.
    pub cache_hit_threshold: Option<f64>,
    /// The share of the prompt that the decode worker tried first had cached, from 0 to 1: the
    /// engine's figure where it turned the prompt away, else the index's; `None` if neither knows.
    pub cache_hit_ratio: Option<f64>,
    /// Who decided whether one does: `engine`, `shim`, `router`, or `none`.
    pub gate: Option<&'static str>,
    /// What came of trying decode first: `served`, `rejected`, `skipped`, `unsupported` or
    /// `failed`.
    pub decode_try: Option<&'static str>,
    /// What `auto` reckoned with.
    pub auto: Option<WeighedRecord>,
    /// When the first decision was made, in milliseconds since 1970.
    pub decided_unix_ms: u64,
    /// Attempts so far, the present one included.
    pub attempts: u32,
    /// The worker that computes the prompt, in P/D.
    pub prefill_worker: Option<Name>,
    /// The worker that generates.
    pub decode_worker: Option<Name>,
    /// The prompt's length by the router's tokenizer; `None` if it knows no tokens.
    pub prompt_tokens: Option<u32>,
    /// Why the router knows no tokens of it.
    pub prompt_unknown: Option<&'static str>,
    /// Its full blocks.
    pub prompt_blocks: u32,
    /// Leading blocks on the worker that computes the prompt.
    pub overlap_blocks: u32,
    /// The most that any candidate for computing it held.
    pub best_overlap_blocks: u32,
    /// Leading blocks on the worker that generates, in P/D.
    pub decode_overlap_blocks: u32,
    /// Tokens that the prompt's worker is expected to find cached.
    pub estimated_cached_tokens: Option<u32>,
    /// Who was considered: the chosen ones, and the cheapest others.
    pub candidates: Vec<CandidateRecord>,
    /// Who was not considered, and why: workers with the role for a leg, at most 32 for each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vetoed: Vec<VetoRecord>,
    /// What else went into the choices.
    pub draws: Vec<DrawRecord>,
    /// What the policy beside the first would have done, where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shadow: Vec<ShadowRecord>,
    /// How it ended: `ok`, an error's name, or `cancelled`; `None` while it runs.
    pub outcome: Option<&'static str>,
    /// Cached tokens in the end.
    pub cached_tokens: Option<u32>,
    /// Cached tokens as the client is told; `None` if it is told none.
    pub told_cached_tokens: Option<u32>,
    /// Who said so.
    pub cached_source: Option<&'static str>,
    /// Tokens handed over to the decode worker.
    pub transferred_tokens: Option<u32>,
    /// The prompt's entry in the ledger: its legs with their figures.
    pub ledger: Entry,
}

/// A decision that is still being written.
#[derive(Clone, Debug, Default)]
pub struct DecisionHandle(Arc<Mutex<Decision>>);

impl DecisionHandle {
    /// Changes the record.
    pub fn update(&self, change: impl FnOnce(&mut Decision)) {
        change(&mut self.lock());
    }

    /// Reads a part of the record.
    pub fn with<T>(&self, read: impl FnOnce(&Decision) -> T) -> T {
        read(&self.lock())
    }

    /// An attempt begins: what the last one left of its way is void.
    pub fn begin_attempt(&self, flow: &'static str) {
        self.update(|decision| {
            decision.flow = flow;
            decision.local_reason = None;
            decision.prefill_worker = None;
            decision.decode_worker = None;
            decision.candidates.clear();
            decision.vetoed.clear();
            decision.draws.clear();
            decision.shadow.clear();
            decision.outcome = None;
        });
    }

    /// The record as it is now.
    pub fn read(&self) -> Decision {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Decision> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A bounded ring of decisions.
#[derive(Debug)]
pub struct Decisions {
    ring: ArcSwap<Ring>,
}

/// Its places. Who starts a record takes the next number, and with it a place that nobody else
/// is at, unless all others were taken meanwhile: requests do not wait for each other here.
#[derive(Debug)]
struct Ring {
    next: AtomicU64,
    places: Box<[Mutex<Option<Kept>>]>,
}

/// A record with its number: higher is newer.
type Kept = (u64, DecisionHandle);

impl Ring {
    fn new(kept: usize) -> Self {
        let places = std::iter::repeat_with(Mutex::default).take(kept.max(1));
        Self { next: AtomicU64::new(0), places: places.collect() }
    }

    fn put(&self, handle: DecisionHandle) {
        let number = self.next.fetch_add(1, Relaxed);
        let place = &self.places[(number % self.places.len() as u64) as usize];
        // What makes room is freed once nobody can wait for it.
        let _oldest = lock(place).replace((number, handle));
    }

    /// The newest first.
    fn newest(&self) -> Vec<DecisionHandle> {
        let kept = self.places.iter().filter_map(|place| lock(place).clone());
        let mut kept: Vec<Kept> = kept.collect();
        kept.sort_unstable_by_key(|(number, _)| Reverse(*number));
        kept.into_iter().map(|(_, handle)| handle).collect()
    }
}

fn lock(place: &Mutex<Option<Kept>>) -> MutexGuard<'_, Option<Kept>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Decisions {
    /// A ring of `kept` records.
    pub fn new(kept: usize) -> Self {
        Self { ring: ArcSwap::from_pointee(Ring::new(kept)) }
    }

    /// From now on so many are kept.
    pub fn keep(&self, kept: usize) {
        let before = self.ring.load();
        if before.places.len() == kept.max(1) {
            return;
        }
        let ring = Ring::new(kept);
        let newest = before.newest();
        newest.into_iter().take(kept).rev().for_each(|handle| ring.put(handle));
        self.ring.store(Arc::new(ring));
    }

    /// Starts a record; the oldest makes room.
    pub fn start(&self, decision: Decision) -> DecisionHandle {
        let handle = DecisionHandle(Arc::new(Mutex::new(decision)));
        self.ring.load().put(handle.clone());
        handle
    }

    /// The newest records first, of one request if an id is given.
    pub fn newest(&self, request_id: Option<&str>, limit: usize) -> Vec<Decision> {
        let wanted = |handle: &DecisionHandle| {
            request_id.is_none_or(|id| handle.with(|decision| decision.request_id == id))
        };
        let found = self.ring.load().newest().into_iter().filter(wanted).take(limit);
        found.map(|handle| handle.read()).collect()
    }
}

/// As it is written down. A way that there is not has no figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WeighedRecord {
    /// What a remote prefill would cost, in milliseconds: its time to the first token, and what
    /// others lose by it.
    pub remote_ms: Option<f64>,
    /// What a local prefill would.
    pub local_ms: Option<f64>,
    /// The part of `remote_ms` that is this request's own time to the first token.
    pub remote_ttft_ms: Option<f64>,
    /// The part of `local_ms` that is.
    pub local_ttft_ms: Option<f64>,
    /// Whether the decode worker had better compute the prompt.
    pub local: bool,
    /// Whether that was chosen to learn about it, and not because it is cheaper.
    pub explored: bool,
    /// The share of the prompt that the decode worker with most of it holds.
    pub hit_ratio: f64,
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod ring_tests {
    use super::*;

    #[test]
    fn the_ring_forgets_the_oldest() {
        let decisions = Decisions::new(2);
        for id in ["a", "b", "c"] {
            decisions.start(Decision { request_id: id.into(), ..Decision::default() });
        }
        let ids: Vec<_> = decisions.newest(None, 9).into_iter().map(|d| d.request_id).collect();
        assert_eq!(ids, ["c", "b"]);
        assert!(decisions.newest(Some("a"), 9).is_empty());
        assert_eq!(decisions.newest(Some("b"), 9).len(), 1);
    }

    #[test]
    fn a_ring_of_another_size_keeps_the_newest() {
        let decisions = Decisions::new(3);
        let start = |id: &str| {
            decisions.start(Decision { request_id: id.into(), ..Decision::default() });
        };
        let ids = || decisions.newest(None, 9).into_iter().map(|d| String::from(d.request_id));
        ["a", "b", "c", "d"].into_iter().for_each(start);
        decisions.keep(2);
        assert!(ids().eq(["d", "c"]));
        decisions.keep(4);
        ["e", "f", "g"].into_iter().for_each(start);
        assert!(ids().eq(["g", "f", "e", "d"]));
    }
}
