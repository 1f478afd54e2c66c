//! Policies that others have published, for comparison. Each is a pure function of the candidates,
//! in the form that `docs/replay.md` describes.
//!
//! They get only workers that may be chosen, and do not evaluate health or draining. Of equally
//! good candidates the first is chosen, or one is drawn, as the policy defines.
//!
//! Blocks count alike in whatever tier a worker holds them, because the published rules know no tiers.

mod dynamo;
mod hashing;
mod llmd;
mod mooncake;

use splitrail_policy::{Candidate, CandidateIndex, Query};

/// A published policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PublishedPolicy {
    /// A candidate drawn at random, all with the same probability.
    Random,
    /// The candidates in turn.
    RoundRobin,
    /// The fewest outstanding prompt tokens.
    LeastLoaded,
    /// Rendezvous hashing of a prompt's first two blocks.
    PrefixHash,
    /// The same, but without workers that have more than 1.25 times their share of requests.
    PrefixHashBl,
    /// The largest overlap; among equals the fewest outstanding prompt tokens.
    ExactOverlap,
    /// The same with the overlap computed from what was routed to a worker lately.
    ApproxPrefix,
    /// The fewest blocks to compute, of this prompt and of queued prompts.
    Dynamo,
    /// The same with the overlap computed from what was routed to a worker lately.
    DynamoApprox,
    /// The same, counting the blocks of queued requests as present.
    DynamoPending,
    /// Twice the share of the prompt that the worker holds, plus the shortness of its queue.
    Llmd,
    /// The earliest predicted end of the prefill.
    Mooncake,
    /// The same, counting the blocks of queued requests as present.
    MooncakePending,
    /// The same as `Mooncake`, with the option to fetch the prefix from the worker that holds most
    /// of it.
    MooncakeFetch,
    /// `MooncakePending` with the time of the prefill counted several times, because it delays
    /// later requests.
    WorkAware,
}

/// Which leading blocks a policy counts as present on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisibleBlocks {
    /// Blocks that the worker holds now.
    Present,
    /// Blocks of prompts that were routed to the worker lately.
    Recent,
    /// Blocks that the worker holds now and blocks that queued requests are going to compute.
    Pending,
}

/// The choice of a published policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedChoice {
    /// The chosen candidate.
    pub index: CandidateIndex,
    /// The number of equally good candidates. If there are several, the draw decides in policies
    /// that draw.
    pub tied: usize,
    /// Leading blocks that the worker should fetch from another worker before it begins; 0 for no
    /// fetch.
    pub fetch_blocks: u32,
}

impl PublishedChoice {
    /// The choice of a candidate that no other equals, without a fetch.
    fn only(index: CandidateIndex) -> Self {
        Self { index, tied: 1, fetch_blocks: 0 }
    }
}

impl PublishedPolicy {
    /// All published policies with their names on the command line, in the order in which they are
    /// listed.
    pub const ALL: [(&'static str, Self); 15] = [
        ("random", Self::Random),
        ("round_robin", Self::RoundRobin),
        ("least_loaded", Self::LeastLoaded),
        ("prefix_hash", Self::PrefixHash),
        ("prefix_hash_bl", Self::PrefixHashBl),
        ("exact_overlap", Self::ExactOverlap),
        ("approx_prefix", Self::ApproxPrefix),
        ("dynamo", Self::Dynamo),
        ("dynamo_approx", Self::DynamoApprox),
        ("dynamo_pending", Self::DynamoPending),
        ("llmd", Self::Llmd),
        ("mooncake", Self::Mooncake),
        ("mooncake_pending", Self::MooncakePending),
        ("mooncake_fetch", Self::MooncakeFetch),
        ("work_aware", Self::WorkAware),
    ];

    /// The policy with this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, policy)| policy)
    }

    /// The blocks that the policy counts as present. Bookings of tokens and times are computed from
    /// them.
    pub fn visible_blocks(self) -> VisibleBlocks {
        match self {
            Self::ApproxPrefix | Self::DynamoApprox => VisibleBlocks::Recent,
            Self::DynamoPending | Self::MooncakePending | Self::WorkAware => VisibleBlocks::Pending,
            _ => VisibleBlocks::Present,
        }
    }

    /// Chooses among candidates, all of which may be chosen; `None` if there are none. Their
    /// `overlap_blocks` are the [`visible_blocks`](Self::visible_blocks). `blocks` are the names of
    /// the prompt's blocks.
    pub fn choose(
        self,
        candidates: &[Candidate],
        query: Query,
        blocks: &[u32],
    ) -> Option<PublishedChoice> {
        if candidates.is_empty() {
            return None;
        }
        let costs = |cost: &dyn Fn(&Candidate) -> f64| -> Vec<f64> {
            candidates.iter().map(cost).collect()
        };
        let chosen = match self {
            Self::Random => drawn(&vec![0.0; candidates.len()], query.draw),
            Self::RoundRobin => {
                let index = CandidateIndex((query.turn % candidates.len() as u64) as usize);
                PublishedChoice::only(index)
            }
            Self::LeastLoaded => first(&costs(&|c| c.active_tokens as f64)),
            Self::PrefixHash => hashing::choose(candidates, blocks),
            Self::PrefixHashBl => hashing::choose_bounded(candidates, blocks),
            Self::ExactOverlap | Self::ApproxPrefix => first(&overlap_costs(candidates)),
            Self::Dynamo | Self::DynamoApprox | Self::DynamoPending => {
                drawn(&costs(&|c| dynamo::cost(c, query)), query.draw)
            }
            Self::Llmd => drawn(&llmd::costs(candidates, query), query.draw),
            Self::Mooncake | Self::MooncakePending => {
                first(&costs(&|c| mooncake::cost(c, query, 1.0)))
            }
            Self::WorkAware => first(&costs(&|c| mooncake::cost(c, query, 1.0 + BETA))),
            Self::MooncakeFetch => mooncake::choose_with_fetch(candidates, query),
        };
        Some(chosen)
    }
}

/// How many additional times [`PublishedPolicy::WorkAware`] counts the time of a prefill.
const BETA: f64 = 4.0;

/// The outstanding prompt tokens of the candidates with the largest overlap; infinite for all others.
fn overlap_costs(candidates: &[Candidate]) -> Vec<f64> {
    let most = candidates.iter().map(|worker| worker.overlap_blocks).max();
    let cost = |worker: &Candidate| match Some(worker.overlap_blocks) == most {
        true => worker.active_tokens as f64,
        false => f64::INFINITY,
    };
    candidates.iter().map(cost).collect()
}

/// Chooses the first of the cheapest candidates.
fn first(costs: &[f64]) -> PublishedChoice {
    let mut index = CandidateIndex::default();
    for i in CandidateIndex::all(costs.len()) {
        if costs[i] < costs[index] {
            index = i;
        }
    }
    PublishedChoice::only(index)
}

/// Chooses one of the cheapest candidates by the draw.
fn drawn(costs: &[f64], draw: u64) -> PublishedChoice {
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let tied = CandidateIndex::all(costs.len()).filter(|i| costs[*i] == least);
    let tied: Vec<CandidateIndex> = tied.collect();
    let index = match tied.len() {
        0 => CandidateIndex::default(),
        count => tied[(draw % count as u64) as usize],
    };
    PublishedChoice { index, tied: tied.len(), fetch_blocks: 0 }
}

#[cfg(test)]
mod tests;
