//! Compares local prefill with remote prefill for a prompt whose threshold the router chooses.

use std::time::Instant;

use crate::decide::fetchable::{is_fetchable, may_take_prefix};
use crate::decide::place::{LegRules, fetch_choice, list_sources, query};
use crate::prepare::Unit;
use crate::run::read_back::readable_blocks;
use splitrail_api::Endpoint;
use splitrail_api::request::Options;
use splitrail_config::model::{HitThreshold, RequestFlow};
use splitrail_fleet::ServedModel;
use splitrail_ledger::decisions::{DecisionHandle, WeighedRecord};
use splitrail_policy::Leg;
use splitrail_policy::queue::shortest_prefill_ms;
use splitrail_policy::threshold::{Comparison, ComparisonInput, PredictedWay};

/// The comparison of local and remote prefill for one prompt.
#[derive(Clone, Copy, Debug)]
pub struct PrefillComparison {
    comparison: Comparison,
    at: Instant,
}

impl PrefillComparison {
    /// Whether a remote prefill is the better way; `None` if there is no prefill worker to compare
    /// with.
    pub fn remote_pays(&self) -> Option<bool> {
        let Comparison { local, at_decode, at_prefill, .. } = &self.comparison;
        // If no decode worker may compute the prompt (it has no budget for long steps), the remote
        // way is taken at any cost.
        at_prefill.as_ref().map(|_| !local || at_decode.is_none())
    }

    /// The comparison as decision records show it.
    pub(crate) fn record(&self, served: &ServedModel) -> WeighedRecord {
        let Comparison { local, explored, at_decode, at_prefill, hit_ratio } = self.comparison;
        let roster = served.pool.roster();
        let fetch = |way: Option<PredictedWay>| Some(fetch_choice(&roster, way?.fetch?));
        WeighedRecord {
            remote_ms: at_prefill.map(|way| way.cost_ms),
            local_ms: at_decode.map(|way| way.cost_ms),
            remote_ttft_ms: at_prefill.map(|way| way.ttft_ms),
            local_ttft_ms: at_decode.map(|way| way.ttft_ms),
            local,
            explored,
            hit_ratio,
            remote_fetch: fetch(at_prefill),
            local_fetch: fetch(at_decode),
        }
    }

    /// Trains the prediction of the way that was taken, when the first token of a stream has
    /// arrived.
    pub fn begun(&self, served: &ServedModel, decision: &DecisionHandle) {
        let (alone, was_rejected, attempts) = decision.with(|decision| {
            let was_rejected = decision.decode_try == Some("rejected");
            (decision.prefill_worker.is_none(), was_rejected, decision.attempts)
        });
        // The time of a request with retries says nothing about either way. A decode worker that has
        // rejected the prompt was the first attempt of the remote way.
        let expected = if !alone && was_rejected { 2 } else { 1 };
        let way = if alone { self.comparison.at_decode } else { self.comparison.at_prefill };
        let Some(way) = way.filter(|_| attempts <= expected) else { return };
        let now = Instant::now();
        let ttft_ms = now.duration_since(self.at).as_secs_f64() * 1e3;
        served.pool.calibration.observe(now, alone, &way, ttft_ms);
    }
}

/// Whether the router chooses the threshold of a request, because neither the request nor its model
/// names one.
pub fn is_open(served: &ServedModel, flow: RequestFlow, threshold: Option<f64>) -> bool {
    let auto = served.config.cache_hit_threshold == Some(HitThreshold::Auto);
    let left_out = served.config.cache_hit_threshold.is_none();
    threshold.is_none()
        && match flow {
            RequestFlow::Auto => auto || left_out,
            RequestFlow::DecodeFirst | RequestFlow::DecodeOnly => auto,
            RequestFlow::Aggregated | RequestFlow::PrefillFirst => false,
        }
}

/// Where a prefill leg of a prompt may be placed: its worker may fetch a prefix from another one, by the
/// leg itself or before it, and read back what decode workers keep.
pub(crate) fn prefill_rules(
    served: &ServedModel,
    endpoint: Endpoint,
    unit: &Unit,
    options: Options,
) -> LegRules<'static> {
    let may_fetch = is_fetchable(served, endpoint, unit, options);
    let readable_blocks = readable_blocks(served, endpoint, unit, options);
    let takes_prefix = may_take_prefix(served, endpoint, unit);
    LegRules { may_fetch, readable_blocks, takes_prefix, ..LegRules::any(Leg::Prefill, &[]) }
}

/// Compares local and remote prefill for a prompt. `remote` says where the prefill leg may be placed. `goes`
/// says whether the prompt is then served; otherwise nothing is learned from the comparison.
pub(crate) fn weigh(
    served: &ServedModel,
    unit: &Unit,
    remote: LegRules<'_>,
    goes: bool,
) -> PrefillComparison {
    let pool = &served.pool;
    let now = Instant::now();
    let roster = pool.roster();
    let prefill = pool.candidates(&roster, remote.query(unit, now));
    let mut decode = pool.candidates(&roster, LegRules::any(Leg::Aggregated, &[]).query(unit, now));
    // Speculative blocks open no gate, so they are no reason to try a gate.
    for candidate in &mut decode {
        candidate.speculative_blocks = candidate.believed_blocks();
    }
    let mut sources = Vec::new();
    list_sources(pool, &roster, unit, remote, now, &mut sources);
    let query = query(pool, unit, Leg::Prefill, pool.turn(Leg::Prefill), rand::random());
    let shortest_ms = shortest_prefill_ms(&prefill, &query);
    let (waiting, ahead_ms) = pool.waiting.ahead(Leg::Prefill, shortest_ms, prefill.len());
    let input = ComparisonInput {
        query,
        prefill: &prefill,
        decode: &decode,
        sources: &sources,
        waiting,
        ahead_ms,
    };
    PrefillComparison { comparison: pool.calibration.compare(now, &input, goes), at: now }
}

/// The learned cache hit threshold, from 0 to 1.
pub fn learned_ratio(served: &ServedModel) -> f64 {
    served.pool.calibration.learned(Instant::now()).threshold_ratio
}
