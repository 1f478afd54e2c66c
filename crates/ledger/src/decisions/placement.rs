//! The events of planning a prompt's flow and of choosing workers for its legs.

use super::handle::DecisionHandle;
use super::parts::{CandidateRecord, DrawRecord, FetchRecord, VetoRecord, WeighedRecord};
use super::record::Decision;
use splitrail_api::name::Name;
use splitrail_config::model::RequestFlow;
use splitrail_policy::Leg;

/// A worker that was chosen for a leg.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The leg.
    pub leg: Leg,
    /// The worker's name.
    pub worker: Name,
    /// Leading blocks of the prompt that the worker holds.
    pub overlap_blocks: u32,
    /// The largest overlap of all candidates.
    pub best_overlap_blocks: u32,
    /// Tokens of the prompt that the worker is expected to find cached; `None` if the prompt's
    /// length is not known.
    pub estimated_cached_tokens: Option<u32>,
    /// The number of choices for such a leg before this one.
    pub turn: u64,
    /// The random bits of the choice.
    pub draw: u64,
}

impl DecisionHandle {
    /// The router compared local prefill with remote prefill.
    pub fn weighed(&self, comparison: WeighedRecord) {
        self.lock().auto = Some(comparison);
    }

    /// A flow begins. Discards the workers, candidates and outcome of the flow before it.
    pub fn flow_begun(&self, flow: &'static str) {
        self.lock().begin_flow(flow);
    }

    /// A flow begins with a decode worker that must hold the share `threshold` of the prompt, from
    /// 0 to 1. Discards the workers, candidates and outcome of the flow before it.
    pub fn decode_try_begun(&self, flow: &'static str, threshold: Option<f64>) {
        let mut decision = self.lock();
        decision.begin_flow(flow);
        decision.cache_hit_threshold = threshold;
    }

    /// The index holds the share `ratio` of the prompt for the decode worker that is tried first.
    pub fn hit_ratio_estimated(&self, ratio: Option<f64>) {
        self.lock().cache_hit_ratio = ratio;
    }

    /// The engine of the decode worker that was tried first reports the share `ratio` of the
    /// prompt as cached, if it reports any. Returns the share that the record has now.
    pub fn hit_ratio_reported(&self, ratio: Option<f64>) -> Option<f64> {
        let mut decision = self.lock();
        decision.cache_hit_ratio = ratio.or(decision.cache_hit_ratio);
        decision.cache_hit_ratio
    }

    /// Trying decode first had this result, which this gate decided.
    pub fn decode_tried(&self, gate: &'static str, result: &'static str) {
        let mut decision = self.lock();
        decision.gate = Some(gate);
        decision.decode_try = Some(result);
    }

    /// A worker was chosen for a leg from these candidates, of which the chosen one is the first.
    /// Replaces an earlier choice for the same leg.
    pub fn placed(&self, placement: Placement, candidates: impl Iterator<Item = CandidateRecord>) {
        let mut decision = self.lock();
        let name = placement.leg.name();
        decision.candidates.retain(|earlier| earlier.leg != name);
        decision.candidates.extend(candidates);
        decision.draws.retain(|earlier| earlier.leg != name);
        let Placement { turn, draw, .. } = placement;
        decision.draws.push(DrawRecord { leg: name, turn, draw });
        match placement.leg {
            Leg::Prefill => decision.prefill_worker = Some(placement.worker),
            Leg::Decode | Leg::Aggregated => decision.decode_worker = Some(placement.worker),
        }
        match placement.leg {
            Leg::Decode => decision.decode_overlap_blocks = placement.overlap_blocks,
            Leg::Prefill | Leg::Aggregated => {
                decision.overlap_blocks = placement.overlap_blocks;
                decision.best_overlap_blocks = placement.best_overlap_blocks;
                decision.estimated_cached_tokens = placement.estimated_cached_tokens;
            }
        }
    }

    /// These workers have the role for a leg and were no candidates for it. Replaces what was
    /// recorded for the same leg.
    pub fn vetoed(&self, leg: Leg, workers: impl Iterator<Item = VetoRecord>) {
        let mut decision = self.lock();
        decision.vetoed.retain(|earlier| earlier.leg != leg.name());
        decision.vetoed.extend(workers);
    }

    /// A peer fetch before the prefill leg has ended.
    pub fn fetch_ended(&self, fetch: FetchRecord) {
        self.lock().fetch = Some(fetch);
    }

    /// The prompt is going to be prefilled by the worker that answers, for this reason. Returns
    /// whether the reason differs from the last one that was recorded.
    pub fn prefill_made_local(&self, reason: &'static str) -> bool {
        self.lock().make_local(reason)
    }
}

impl Decision {
    fn begin_flow(&mut self, flow: &'static str) {
        self.flow = flow;
        self.local_reason = None;
        self.prefill_worker = None;
        self.decode_worker = None;
        self.candidates.clear();
        self.vetoed.clear();
        self.draws.clear();
        self.fetch = None;
        self.outcome = None;
    }

    /// The worker that answers computes the prompt. Returns whether the reason differs from the
    /// last one that was recorded.
    pub(super) fn make_local(&mut self, reason: &'static str) -> bool {
        self.flow = RequestFlow::Aggregated.name();
        self.local_reason = Some(reason);
        self.prefill_worker = None;
        self.counted_reason.replace(reason) != Some(reason)
    }
}
