//! The parts of a decision record: candidates, vetoes, draws and comparisons.

use serde::{Serialize, Serializer};
use splitrail_kv::Tier;

use crate::veto::VetoReason;
use splitrail_api::name::Name;
use splitrail_policy::CostTerms;

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
    /// Whether the worker was considered alive.
    pub up: bool,
    /// Leading blocks of the prompt that the worker held and could use.
    pub overlap_blocks: u32,
    /// Leading blocks of the prompt that a worker with several cache groups held in full attention, or
    /// was about to hold; left out if it could use them all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spine_blocks: Option<u32>,
    /// The same blocks by the fastest tier that had them; tiers without any are left out.
    #[serde(serialize_with = "by_tier")]
    pub overlap_by_tier: [u32; Tier::COUNT],
    /// The share of these blocks, from 0 to 1, that did not count, because the worker found less
    /// than the index promised.
    pub overlap_discount: f64,
    /// Leading blocks of the speculative index, including the confirmed blocks: the worker
    /// probably held them because of what was sent to it lately. The cost is computed from this
    /// figure.
    pub speculative_blocks: u32,
    /// The speculative blocks that were being computed for another prompt.
    pub underway_blocks: u32,
    /// Requests that the worker worked on.
    pub requests: u32,
    /// Prompt tokens that the worker had still to compute.
    pub prefill_tokens: u64,
    /// Tokens of the requests that the worker held.
    pub active_tokens: u64,
    /// The candidate's cost under the policy; lower is better.
    pub cost: f64,
    /// The terms of the cost in milliseconds, if the policy computes milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<CostTerms>,
    /// Why the candidate could not be chosen: its load or its health. `None` if it could be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub veto: Option<VetoReason>,
    /// Milliseconds since its last KV event or index synchronisation; `None` if there was none.
    pub index_age_ms: Option<u64>,
    /// The prefix that the worker would fetch from another one; `None` if it would fetch nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<FetchChoice>,
    /// The number of leading blocks of which the worker would read back those that it lacks; 0 if it
    /// would read nothing.
    #[serde(skip_serializing_if = "is_zero")]
    pub read_back_blocks: u32,
    /// Whether it was chosen.
    pub chosen: bool,
}

/// A prefix that a candidate would fetch from another worker because that is cheaper than computing
/// it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FetchChoice {
    /// The name of the worker that holds the prefix.
    pub source: Name,
    /// The rank of that worker, where it has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u16>,
    /// The number of leading blocks that the candidate would hold.
    pub blocks: u32,
    /// The number of tokens that would be sent.
    pub tokens: u64,
    /// The predicted time in milliseconds until the blocks are there.
    pub predicted_ms: f64,
    /// The way of the fetch: `one_shot` if the prefill leg takes the prefix itself, otherwise
    /// `two_step`.
    pub way: &'static str,
}

/// A peer fetch before a prefill leg.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FetchRecord {
    /// The worker that took the prefix.
    pub worker: Name,
    /// What was to be fetched.
    #[serde(flatten)]
    pub choice: FetchChoice,
    /// How the fetch ended, as in `splitrail_peer_fetches_total`.
    pub outcome: &'static str,
    /// How long the fetch took, in milliseconds; with `one_shot`, up to the end of the prefill leg.
    pub took_ms: f64,
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

fn is_zero(blocks: &u32) -> bool {
    *blocks == 0
}

fn by_tier<S: Serializer>(blocks: &[u32; Tier::COUNT], to: S) -> Result<S::Ok, S::Error> {
    let tiers = Tier::ALL.iter().map(|tier| (tier.name(), blocks[*tier as usize]));
    to.collect_map(tiers.filter(|(_, blocks)| *blocks > 0))
}

/// The inputs of a choice that are not in the snapshot of the workers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DrawRecord {
    /// The part of the request that was placed.
    pub leg: &'static str,
    /// The number of choices for such a leg before this one.
    pub turn: u64,
    /// The random bits.
    pub draw: u64,
}

/// The comparison of local and remote prefill. A way that does not exist has no figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeighedRecord {
    /// Cost of a remote prefill, in milliseconds: the time to the first token, and what other
    /// requests lose by it.
    pub remote_ms: Option<f64>,
    /// Cost of a local prefill, in milliseconds.
    pub local_ms: Option<f64>,
    /// The part of `remote_ms` that is this request's own time to the first token.
    pub remote_ttft_ms: Option<f64>,
    /// The part of `local_ms` that is this request's own time to the first token.
    pub local_ttft_ms: Option<f64>,
    /// Whether a local prefill was chosen.
    pub local: bool,
    /// Whether the way was chosen to learn its cost, and not because it is cheaper.
    pub explored: bool,
    /// The largest share of the prompt, from 0 to 1, that any decode worker holds.
    pub hit_ratio: f64,
    /// The prefix that the prefill worker would fetch from another worker; `None` if it would fetch
    /// nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_fetch: Option<FetchChoice>,
    /// The prefix that the decode worker would fetch from another worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_fetch: Option<FetchChoice>,
}
