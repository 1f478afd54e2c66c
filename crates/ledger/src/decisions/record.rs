//! The decision record of one prompt.

use serde::Serialize;

use super::parts::{CandidateRecord, DrawRecord, FetchRecord, VetoRecord, WeighedRecord};
use crate::entry::Entry;
use crate::timeline::RequestTimes;
use splitrail_api::name::Name;

/// How one prompt was routed. The members before `outcome` are written before an engine has
/// answered. Only the events of a `DecisionHandle` change a record.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Decision {
    /// The request's id, as the client sees it.
    pub request_id: Name,
    /// The place of the prompt in its batch.
    pub prompt_index: usize,
    /// The tenant of the request; `None` if the router has no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<Name>,
    /// The model's configured name.
    pub model: Name,
    /// The flow that was executed: `aggregated`, `prefill_first`, `decode_first`, `decode_only`.
    pub flow: &'static str,
    /// Why a P/D model's request was prefilled on its decode worker.
    pub local_reason: Option<&'static str>,
    /// The local reason that the metrics have counted for the prompt.
    #[serde(skip)]
    pub counted_reason: Option<&'static str>,
    /// The share of the prompt, from 0 to 1, that a decode worker was to hold.
    pub cache_hit_threshold: Option<f64>,
    /// The share of the prompt, from 0 to 1, that the decode worker tried first had cached: the
    /// engine's figure if it rejected the prompt, and otherwise the index's; `None` if neither is
    /// known.
    pub cache_hit_ratio: Option<f64>,
    /// Which gate decided whether a decode worker holds enough: `engine`, `shim`, `router`, or
    /// `none`.
    pub gate: Option<&'static str>,
    /// The result of trying decode first: `served`, `rejected`, `skipped`, `unsupported` or
    /// `failed`.
    pub decode_try: Option<&'static str>,
    /// The comparison of both ways, where the router chose between them.
    pub auto: Option<WeighedRecord>,
    /// When the first decision was made, in milliseconds since 1970.
    pub decided_unix_ms: u64,
    /// The number of attempts so far, the present one included.
    pub attempts: u32,
    /// The worker that computes the prompt, in P/D.
    pub prefill_worker: Option<Name>,
    /// The worker that generates.
    pub decode_worker: Option<Name>,
    /// The prompt's length by the router's tokenizer; `None` if the router does not know the
    /// tokens.
    pub prompt_tokens: Option<u32>,
    /// Why the router does not know the prompt's tokens.
    pub prompt_unknown: Option<&'static str>,
    /// The number of full blocks of the prompt.
    pub prompt_blocks: u32,
    /// Leading blocks on the worker that computes the prompt.
    pub overlap_blocks: u32,
    /// The largest overlap of all candidates for computing the prompt.
    pub best_overlap_blocks: u32,
    /// Leading blocks on the worker that generates, in P/D.
    pub decode_overlap_blocks: u32,
    /// Tokens that the prompt's worker is expected to find cached.
    pub estimated_cached_tokens: Option<u32>,
    /// The candidates: the chosen ones, and the cheapest others.
    pub candidates: Vec<CandidateRecord>,
    /// Workers that have the role for a leg and were no candidates, with the reason; at most 32
    /// for each leg.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vetoed: Vec<VetoRecord>,
    /// The other inputs of the choices.
    pub draws: Vec<DrawRecord>,
    /// The last peer fetch before the prefill leg; left out if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<FetchRecord>,
    /// How the prompt ended: `ok`, an error's name, or `cancelled`; `None` while it runs.
    pub outcome: Option<&'static str>,
    /// The times of the request; left out while it runs.
    #[serde(flatten)]
    pub times: Option<RequestTimes>,
    /// Cached tokens in the end.
    pub cached_tokens: Option<u32>,
    /// Cached tokens in the client's usage; `None` if the usage has none.
    pub told_cached_tokens: Option<u32>,
    /// The source of the cached tokens: `engine` or `estimate`.
    pub cached_source: Option<&'static str>,
    /// Tokens that the decode worker received by a hand-off.
    pub transferred_tokens: Option<u32>,
    /// The prompt's entry in the ledger: its legs with their figures.
    pub ledger: Entry,
}

impl Decision {
    /// Whether the prompt failed: it has ended, not well, and its client did not leave.
    pub(super) fn has_failed(&self) -> bool {
        self.outcome.is_some_and(|outcome| !matches!(outcome, "ok" | "cancelled"))
    }

    /// The time to the first token of a stream, or that of a whole reply; 0 while the request runs.
    pub(super) fn slow_ms(&self) -> f64 {
        self.times.map_or(0.0, |times| times.ttft_ms.unwrap_or(times.total_ms))
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
}
