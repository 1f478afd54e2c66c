//! Records why one request of a trace was placed where it was.

use serde_json::{Value, json};
use splitrail_policy::queue::Release;
use splitrail_policy::{Candidate, CandidateIndex, Choice, Policy, WorkerIndex};

/// Keeps the placement of one request.
#[derive(Clone, Debug, Default)]
pub struct PlacementRecord {
    /// The position of the request in the trace, from 0; `None` if no placement is asked for.
    request: Option<usize>,
    placement: Option<Value>,
}

impl PlacementRecord {
    /// Keeps the placement of this request of the trace.
    pub fn of(request: Option<usize>) -> Self {
        Self { request, placement: None }
    }

    /// The placement in the form of a decision record: `cost_unit`, and `candidates` with their costs,
    /// terms and vetoes. `None` if a policy of a configuration has not placed the request.
    pub fn into_placement(self) -> Option<Value> {
        self.placement
    }

    /// Notes a placement, if it is the one that is asked for.
    pub(crate) fn note(
        &mut self,
        request: usize,
        policy: &Policy,
        choice: &Choice,
        candidates: &[Candidate],
    ) {
        if self.request == Some(request) {
            // All prefill workers are candidates; decode workers have the places after them.
            let prefill_workers = candidates.len();
            let record =
                |(index, seen)| candidate(CandidateIndex(index), seen, choice, prefill_workers);
            let candidates: Vec<Value> = candidates.iter().enumerate().map(record).collect();
            self.placement =
                Some(json!({ "cost_unit": policy.cost_unit(), "candidates": candidates }));
        }
    }

    /// Notes a placement from the queue.
    pub(crate) fn note_release(&mut self, policy: &Policy, release: &Release<usize>) {
        self.note(release.item.key, policy, &release.choice, &release.candidates);
    }
}

/// A candidate, with the members of a decision record's.
fn candidate(
    index: CandidateIndex,
    seen: &Candidate,
    choice: &Choice,
    prefill_workers: usize,
) -> Value {
    let name = |worker: WorkerIndex| match worker.place().checked_sub(prefill_workers) {
        None => format!("p{}", worker.place()),
        Some(decode) => format!("d{decode}"),
    };
    let fetch = choice.fetches.get(index.0).copied().flatten();
    json!({
        "leg": "prefill",
        "worker": name(seen.worker),
        "chosen": index == choice.index,
        "up": seen.up,
        "veto": choice.vetoes.get(index.0).copied().flatten(),
        "cost": choice.costs[index],
        "terms": choice.terms.get(index.0),
        "overlap_blocks": seen.overlap_blocks,
        "speculative_blocks": seen.speculative_blocks,
        "requests": seen.requests,
        "prefill_tokens": seen.prefill_tokens,
        "fetch": fetch.map(|fetch| {
            json!({ "source": name(fetch.source), "blocks": fetch.blocks })
        }),
    })
}
