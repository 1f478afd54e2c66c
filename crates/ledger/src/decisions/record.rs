//! The decision record of one prompt.

use serde::Serialize;

use super::parts::{CandidateRecord, DrawRecord, FetchRecord, VetoRecord, WeighedRecord};
use crate::entry::Entry;
use crate::timeline::RequestTimes;
use splitrail_api::name::Name;

/// How one prompt was routed. The members before `outcome` are written before an engine has
/// answered. Only the events of a `DecisionHandle` change a record.
#[derive(Clone, Debug, Serialize)]
pub struct Decision {
    /// The request's id, as the client sees it.
    pub(super) request_id: Name,
    /// The place of the prompt in its batch.
    pub(super) prompt_index: usize,
    /// The tenant of the request; `None` if the router has no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tenant: Option<Name>,
    /// The model's configured name.
    pub(super) model: Name,
    /// The flow that was executed: `aggregated`, `prefill_first`, `decode_first`, `decode_only`.
    pub(super) flow: &'static str,
    /// Why a P/D model's request was prefilled on its decode worker.
    pub(super) local_reason: Option<&'static str>,
    /// The local reason that the metrics have counted for the prompt.
    #[serde(skip)]
    pub(super) counted_reason: Option<&'static str>,
    /// The share of the prompt, from 0 to 1, that a decode worker was to hold.
    pub(super) cache_hit_threshold: Option<f64>,
    /// The share of the prompt, from 0 to 1, that the decode worker tried first had cached: the
    /// engine's figure if it rejected the prompt, and otherwise the index's; `None` if neither is
    /// known.
    pub(super) cache_hit_ratio: Option<f64>,
    /// Which gate decided whether a decode worker holds enough: `engine`, `shim`, `router`, or
    /// `none`.
    pub(super) gate: Option<&'static str>,
    /// The result of trying decode first: `served`, `rejected`, `skipped`, `unsupported` or
    /// `failed`.
    pub(super) decode_try: Option<&'static str>,
    /// The comparison of both ways, where the router chose between them.
    pub(super) auto: Option<WeighedRecord>,
    /// When the first decision was made, in milliseconds since 1970.
    pub(super) decided_unix_ms: u64,
    /// The number of attempts so far, the present one included.
    pub(super) attempts: u32,
    /// The worker that computes the prompt, in P/D.
    pub(super) prefill_worker: Option<Name>,
    /// The worker that generates.
    pub(super) decode_worker: Option<Name>,
    /// The prompt's length by the router's tokenizer; `None` if the router does not know the
    /// tokens.
    pub(super) prompt_tokens: Option<u32>,
    /// Why the router does not know the prompt's tokens.
    pub(super) prompt_unknown: Option<&'static str>,
    /// The number of full blocks of the prompt.
    pub(super) prompt_blocks: u32,
    /// Leading blocks on the worker that computes the prompt.
    pub(super) overlap_blocks: u32,
    /// The largest overlap of all candidates for computing the prompt.
    pub(super) best_overlap_blocks: u32,
    /// Leading blocks on the worker that generates, in P/D.
    pub(super) decode_overlap_blocks: u32,
    /// Tokens that the prompt's worker is expected to find cached.
    pub(super) estimated_cached_tokens: Option<u32>,
    /// The candidates: the chosen ones, and the cheapest others.
    pub(super) candidates: Vec<CandidateRecord>,
    /// Workers that have the role for a leg and were no candidates, with the reason; at most 32
    /// for each leg.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) vetoed: Vec<VetoRecord>,
    /// The other inputs of the choices.
    pub(super) draws: Vec<DrawRecord>,
    /// The last peer fetch before the prefill leg; left out if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fetch: Option<FetchRecord>,
    /// How the prompt ended: `ok`, an error's name, or `cancelled`; `None` while it runs.
    pub(super) outcome: Option<&'static str>,
    /// The times of the request; left out while it runs.
    #[serde(flatten)]
    pub(super) times: Option<RequestTimes>,
    /// Cached tokens in the end.
    pub(super) cached_tokens: Option<u32>,
    /// Cached tokens in the client's usage; `None` if the usage has none.
    pub(super) told_cached_tokens: Option<u32>,
    /// The source of the cached tokens: `engine` or `estimate`.
    pub(super) cached_source: Option<&'static str>,
    /// Tokens that the decode worker received by a hand-off.
    pub(super) transferred_tokens: Option<u32>,
    /// The prompt's entry in the ledger: its legs with their figures.
    pub(super) ledger: Entry,
}

/// What is known of a prompt when its record is started.
#[derive(Clone, Debug, Default)]
pub struct DecisionStart {
    /// The request's id, as the client sees it.
    pub request_id: Name,
    /// The place of the prompt in its batch.
    pub prompt_index: usize,
    /// The tenant of the request; `None` if the router has no tenants.
    pub tenant: Option<Name>,
    /// The model's configured name.
    pub model: Name,
    /// The flow that the request is meant to take.
    pub flow: &'static str,
    /// The present time, in milliseconds since 1970.
    pub decided_unix_ms: u64,
    /// The prompt's length by the router's tokenizer; `None` if the router does not know the
    /// tokens.
    pub prompt_tokens: Option<u32>,
    /// Why the router does not know the prompt's tokens.
    pub prompt_unknown: Option<&'static str>,
    /// The number of full blocks of the prompt.
    pub prompt_blocks: u32,
    /// The prompt's entry in the ledger, in which no leg is entered yet.
    pub ledger: Entry,
}

impl From<DecisionStart> for Decision {
    fn from(start: DecisionStart) -> Self {
        Self {
            request_id: start.request_id,
            prompt_index: start.prompt_index,
            tenant: start.tenant,
            model: start.model,
            flow: start.flow,
            local_reason: None,
            counted_reason: None,
            cache_hit_threshold: None,
            cache_hit_ratio: None,
            gate: None,
            decode_try: None,
            auto: None,
            decided_unix_ms: start.decided_unix_ms,
            attempts: 0,
            prefill_worker: None,
            decode_worker: None,
            prompt_tokens: start.prompt_tokens,
            prompt_unknown: start.prompt_unknown,
            prompt_blocks: start.prompt_blocks,
            overlap_blocks: 0,
            best_overlap_blocks: 0,
            decode_overlap_blocks: 0,
            estimated_cached_tokens: None,
            candidates: Vec::new(),
            vetoed: Vec::new(),
            draws: Vec::new(),
            fetch: None,
            outcome: None,
            times: None,
            cached_tokens: None,
            told_cached_tokens: None,
            cached_source: None,
            transferred_tokens: None,
            ledger: start.ledger,
        }
    }
}

/// What other crates read of a record. The comments of the fields say more.
impl Decision {
    /// The request's id, as the client sees it.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// When the first decision was made, in milliseconds since 1970.
    pub fn decided_unix_ms(&self) -> u64 {
        self.decided_unix_ms
    }

    /// How the prompt ended; `None` while it runs.
    pub fn outcome(&self) -> Option<&'static str> {
        self.outcome
    }

    /// Whether the prompt failed: it has ended, not well, and its client did not leave.
    pub(super) fn has_failed(&self) -> bool {
        self.outcome.is_some_and(|outcome| !matches!(outcome, "ok" | "cancelled"))
    }

    /// The time to the first token of a stream, or that of a whole reply; 0 while the request runs.
    pub(super) fn slow_ms(&self) -> f64 {
        self.times.map_or(0.0, |times| times.ttft_ms.unwrap_or(times.total_ms))
    }

    /// The number of full blocks of the prompt.
    pub fn prompt_blocks(&self) -> u32 {
        self.prompt_blocks
    }

    /// The place of the prompt in its batch.
    pub fn prompt_index(&self) -> usize {
        self.prompt_index
    }

    /// The tenant of the request; `None` if the router has no tenants.
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    /// The model's configured name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The flow that was executed, or is meant to be as long as none was begun.
    pub fn flow(&self) -> &'static str {
        self.flow
    }

    /// Why a P/D model's request was prefilled on its decode worker.
    pub fn local_reason(&self) -> Option<&'static str> {
        self.local_reason
    }

    /// Which gate decided whether a decode worker holds enough of the prompt.
    pub fn gate(&self) -> Option<&'static str> {
        self.gate
    }

    /// The result of trying decode first.
    pub fn decode_try(&self) -> Option<&'static str> {
        self.decode_try
    }

    /// The number of attempts so far, the present one included.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The worker that computes the prompt for another worker.
    pub fn prefill_worker(&self) -> Option<&str> {
        self.prefill_worker.as_deref()
    }

    /// The worker that generates.
    pub fn decode_worker(&self) -> Option<&str> {
        self.decode_worker.as_deref()
    }

    /// The prompt's length by the router's tokenizer.
    pub fn prompt_tokens(&self) -> Option<u32> {
        self.prompt_tokens
    }

    /// Leading blocks on the worker that computes the prompt.
    pub fn overlap_blocks(&self) -> u32 {
        self.overlap_blocks
    }

    /// The largest overlap of all candidates for computing the prompt.
    pub fn best_overlap_blocks(&self) -> u32 {
        self.best_overlap_blocks
    }

    /// The predicted time from the sending of the first leg to the first token, in milliseconds;
    /// `None` if the policy does not predict times.
    pub fn predicted_ttft_ms(&self) -> Option<f64> {
        let mut chosen = self.candidates.iter().filter(|one| one.chosen).peekable();
        chosen.peek()?;
        let mut sum_ms = 0.0;
        for one in chosen {
            let terms = one.terms?;
            // The terms of the decode leg have what remains of the hand-off.
            let twice_ms = if one.leg == "prefill" { terms.hand_off_ms } else { 0.0 };
            sum_ms += terms.ttft_ms() - twice_ms;
        }
        Some(sum_ms)
    }

    /// The candidates of all legs: the chosen ones, and the cheapest others.
    pub fn candidates(&self) -> &[CandidateRecord] {
        &self.candidates
    }

    /// The candidate that would have been chosen in the place of `chosen` for the same leg.
    pub fn runner_up(&self, chosen: &CandidateRecord) -> Option<&CandidateRecord> {
        let others = self
            .candidates
            .iter()
            .filter(|other| other.leg == chosen.leg && !other.chosen && (other.up || !chosen.up));
        others.min_by(|a, b| a.cost.total_cmp(&b.cost))
    }

    /// Prompt tokens that were cached because a peer fetch had brought them.
    pub fn peer_fetched_tokens(&self) -> u32 {
        let figures = self.ledger.legs().filter_map(|(_, figures)| figures);
        figures.map(|figures| figures.tokens.peer_fetched).sum()
    }

    /// The last peer fetch before the prefill leg.
    pub fn fetch(&self) -> Option<&FetchRecord> {
        self.fetch.as_ref()
    }

    /// Cached tokens of the prompt, as far as they are known.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    /// Cached tokens in the client's usage; `None` if the usage has none.
    pub fn client_cached_tokens(&self) -> Option<u32> {
        self.told_cached_tokens
    }

    /// The source of the cached tokens: `engine` or `estimate`.
    pub fn cached_source(&self) -> Option<&'static str> {
        self.cached_source
    }

    /// The prompt's entry in the ledger.
    pub fn ledger(&self) -> &Entry {
        &self.ledger
    }
}
