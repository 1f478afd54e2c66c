//! Policies that others have published, to compare with: each as a pure function of the
//! candidates, in the form that `docs/replay.md` states.
//!
//! They are given workers that may be chosen, and know nothing of health or draining. Of
//! equal ones the first is taken, or one is drawn, as each of them says.

mod dynamo;
mod hashing;
mod llmd;
mod mooncake;
mod overlap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Query};
use crate::index::CandidateIndex;

/// A published policy.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Published {
    /// Any, evenly.
    Random,
    /// Each in turn.
    RoundRobin,
    /// The fewest prompt tokens outstanding.
    LeastLoaded,
    /// Rendezvous hashing of a prompt's first two blocks.
    PrefixHash,
    /// The same, passing over workers with more than 1.25 times their share of requests.
    PrefixHashBl,
    /// Most overlap, then the fewest prompt tokens outstanding.
    ExactOverlap,
    /// The same with the overlap of what was routed to a worker of late.
    ApproxPrefix,
    /// The fewest blocks to compute, its own and those queued.
    Dynamo,
    /// The same with the overlap of what was routed to a worker of late.
    DynamoApprox,
    /// The same, counting the blocks of queued requests as present.
    DynamoPending,
    /// The share of the prompt that is present, twice, and the shortness of the queue.
    Llmd,
    /// The soonest predicted end of the prefill.
    Mooncake,
    /// The same, counting the blocks of queued requests as present.
    MooncakePending,
    /// The same as `Mooncake`, or with the prefix fetched from the worker that has most of it.
    MooncakeFetch,
    /// `MooncakePending` with the prefill's own time counted several times over, for those
    /// who come after it.
    WorkAware,
}

/// Which leading blocks a policy believes to be present on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// What is there now.
    Present,
    /// What was routed there of late.
    Recent,
    /// What is there now, and what queued requests are going to compute.
    Pending,
}

impl Sight {
    /// The leading blocks of a candidate.
    pub fn blocks(self, candidate: &Candidate) -> u32 {
        match self {
            Self::Present => candidate.overlap_blocks,
            Self::Recent => candidate.recent_blocks,
            Self::Pending => candidate.assumed_blocks.max(candidate.overlap_blocks),
        }
    }
}

/// What a published policy chose.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The chosen candidate.
    pub index: CandidateIndex,
    /// How many were equally good; from 2 on, the draw decided if the policy draws.
    pub tied: usize,
    /// Leading blocks that it should fetch from a peer before it begins; 0 for no fetch.
    pub fetch_blocks: u32,
    /// Every candidate's cost in the policy's own unit, lower is better.
    pub costs: Vec<f64>,
}

impl Published {
    /// All of them, in the order in which they are told.
    pub const ALL: [Self; 15] = [
        Self::Random,
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::PrefixHash,
        Self::PrefixHashBl,
        Self::ExactOverlap,
        Self::ApproxPrefix,
        Self::Dynamo,
        Self::DynamoApprox,
        Self::DynamoPending,
        Self::Llmd,
        Self::Mooncake,
        Self::MooncakePending,
        Self::MooncakeFetch,
        Self::WorkAware,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::PrefixHash => "prefix_hash",
            Self::PrefixHashBl => "prefix_hash_bl",
            Self::ExactOverlap => "exact_overlap",
            Self::ApproxPrefix => "approx_prefix",
            Self::Dynamo => "dynamo",
            Self::DynamoApprox => "dynamo_approx",
            Self::DynamoPending => "dynamo_pending",
            Self::Llmd => "llmd",
            Self::Mooncake => "mooncake",
            Self::MooncakePending => "mooncake_pending",
            Self::MooncakeFetch => "mooncake_fetch",
            Self::WorkAware => "work_aware",
        }
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// What it believes to be present; bookings of tokens and times follow it.
    pub fn sight(self) -> Sight {
        match self {
            Self::ApproxPrefix | Self::DynamoApprox => Sight::Recent,
            Self::DynamoPending | Self::MooncakePending | Self::WorkAware => Sight::Pending,
            _ => Sight::Present,
        }
    }

    /// Chooses among candidates, all of which may be chosen; `None` if there are none.
    pub fn choose(self, candidates: &[Candidate], query: Query) -> Option<Chosen> {
        if candidates.is_empty() {
            return None;
        }
        let sight = self.sight();
        let costs = |cost: &dyn Fn(&Candidate) -> f64| candidates.iter().map(cost).collect();
        let chosen = match self {
            Self::Random => drawn(vec![0.0; candidates.len()], query.draw),
            Self::RoundRobin => {
                let index = CandidateIndex((query.turn % candidates.len() as u64) as usize);
                Chosen { index, tied: 1, fetch_blocks: 0, costs: vec![0.0; candidates.len()] }
            }
            Self::LeastLoaded => first(costs(&|c| c.active_tokens as f64)),
            Self::PrefixHash => hashing::choose(candidates, query),
            Self::PrefixHashBl => hashing::choose_bounded(candidates, query),
            Self::ExactOverlap | Self::ApproxPrefix => first(overlap::costs(candidates, sight)),
            Self::Dynamo | Self::DynamoApprox | Self::DynamoPending => {
                drawn(costs(&|c| dynamo::cost(c, query, sight)), query.draw)
            }
            Self::Llmd => drawn(llmd::costs(candidates, query), query.draw),
            Self::Mooncake | Self::MooncakePending => {
                first(costs(&|c| mooncake::cost(c, query, sight, 1.0)))
            }
            Self::WorkAware => first(costs(&|c| mooncake::cost(c, query, sight, 1.0 + BETA))),
            Self::MooncakeFetch => mooncake::choose_with_fetch(candidates, query),
        };
        Some(chosen)
    }
}

/// How often [`Published::WorkAware`] counts a prefill's time on top of once.
const BETA: f64 = 4.0;

/// Tokens that `blocks` leading blocks save: the last token is always computed.
fn cached_tokens(query: Query, blocks: u32) -> u64 {
    (u64::from(blocks) * u64::from(query.block_size)).min(query.prompt_tokens.saturating_sub(1))
}

/// The first of the cheapest.
fn first(costs: Vec<f64>) -> Chosen {
    let mut index = CandidateIndex::default();
    for i in CandidateIndex::all(costs.len()) {
        if costs[i] < costs[index] {
            index = i;
        }
    }
    Chosen { index, tied: 1, fetch_blocks: 0, costs }
}

/// One of the cheapest, by the draw.
fn drawn(costs: Vec<f64>, draw: u64) -> Chosen {
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let tied = CandidateIndex::all(costs.len()).filter(|i| costs[*i] == least);
    let tied: Vec<CandidateIndex> = tied.collect();
    let index = match tied.len() {
        0 => CandidateIndex::default(),
        count => tied[(draw % count as u64) as usize],
    };
    Chosen { index, tied: tied.len(), fetch_blocks: 0, costs }
}

#[cfg(test)]
mod tests;
