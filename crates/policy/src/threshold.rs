//! `cache_hit_threshold: auto`: whether a decode worker computes the rest of a prompt itself.
//!
//! For each request, both ways are predicted in milliseconds and compared:
//!
//! ```text
//! remote  wait(p) + fetch(p) + read(p) + load(p) + prefill(p) + hand-off + step
//!         + price(prefill pool) x (fetch(p) + read(p) + prefill(p)) + copy(p)
//! local   wait(d) + fetch(d) + load(d) + local(d) + step
//!         + price(decode pool)  x (fetch(d) + local(d)) + copy(d)
//! local(d) = steps x (max(a, b) + interference x min(a, b))
//! ```
//!
//! where `p` is the best prefill worker and `d` the best decode worker, `a` a decode step on `d` with
//! its present load, and `b` the computation of one chunk. The other terms and the prices are those
//! of `predicted.rs` ([`CostTerms`](crate::CostTerms)): either way delays later requests of the same
//! pool, and the busier pool has the higher price. Either way may fetch a prefix from another worker
//! where that makes it cheaper ([`FetchPlan`](crate::FetchPlan)). What remains is computed.
//!
//! **Effect on other requests.** While a decode worker computes a prompt, each of its streams gets
//! tokens at intervals of `max(a, b) + interference x min(a, b)`. An interval below the goal for
//! the time between tokens (TBT) costs nothing. A longer interval uses up a budget of the worker
//! (`guard.rs`); without budget the prompt is not computed there.
//!
//! **What is learned.** The interference, and the errors of the predictions of both ways, from the
//! times of finished requests. For a way that was not used for minutes, the estimates return to the
//! configured ones. Besides, exploration sends one in 64 requests the dearer way if that way costs
//! at most 1.5 times as much and was not observed for ten seconds. If it was not observed for
//! minutes, it may cost more: twice as much for each two minutes. Exploration may take two percent
//! of the time that requests wait for their first tokens. There is no other exploration.
//!
//! **The ratio.** Engines and shims that gate need a ratio and not a comparison. The ratio is the
//! one above which local prefills saved most in the last minutes (`curve.rs`).

mod curve;
mod estimate;
mod guard;

use std::collections::HashMap;

use serde::Serialize;

use crate::candidate::{Candidate, Query};
use crate::fetch::{BestSources, FetchPlan, Source};
use crate::index::{CandidateIndex, WorkerIndex};
use crate::learn::{Evidence, Fit};
use curve::Curve;
use guard::Guard;
use splitrail_kv::mix;

/// The cache hit threshold of a request if neither the request nor its model names one.
pub const DEFAULT_THRESHOLD_RATIO: f64 = 0.8;

/// The age from which on a calibration is trusted less.
const TRUSTED_SECONDS: f64 = 60.0;
/// After each further period of this length, half of the difference from the configured value is
/// left.
const HALF_LIFE_SECONDS: f64 = 120.0;
/// If the last observation is older than this, the next one counts for more, the more the older it
/// is: for a way that is rarely used, a few observations must suffice.
const DOUBTED_SECONDS: f64 = 10.0;
/// After each further period of this length, half of what was learned is left.
const DOUBT_HALF_LIFE_SECONDS: f64 = 60.0;
/// One in this number of requests may explore.
const EXPLORED_OF: u64 = 64;
/// The share of the time that all requests wait for their first tokens that exploration may take.
const EXPLORED_SHARE: f64 = 0.02;
/// Maximum of the saved, unused time for exploration.
const EXPLORED_SAVED_MAX_MS: f64 = 3_000.0;
/// The explored way costs at most this many times the cost of the other way.
const EXPLORED_COST: f64 = 1.5;
/// The explored way was not observed for at least this time.
const EXPLORED_AFTER_NS: u64 = 10_000_000_000;

/// The settings of `cache_hit_threshold: auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThresholdConfig {
    /// The maximum time between tokens, in milliseconds, that a local prefill may cause in a
    /// stream, as the mean of the stream's slowest tenth.
    pub tbt_goal_ms: f64,
    /// Prompt tokens that a decode worker computes in one step; 0: the whole prompt.
    pub chunk_tokens: u32,
    /// The initial value of the interference, which is then learned: the part of the shorter of a
    /// step's two parts that is added to the longer one. 0 means that both overlap completely, 1
    /// that one waits for the other.
    pub interference: f64,
}

impl Default for ThresholdConfig {
    fn default() -> Self {
        Self { tbt_goal_ms: 200.0, chunk_tokens: 2048, interference: 1.0 }
    }
}

/// What a comparison of local and remote prefill is made from.
#[derive(Clone, Copy, Debug)]
pub struct ComparisonInput<'a> {
    /// The query of the request.
    pub query: Query,
    /// The candidates for a remote prefill.
    pub prefill: &'a [Candidate],
    /// The candidates for decode. Their `prefill_tokens` are those of unfinished local prefills;
    /// their coefficients include the costs of prefill on them.
    pub decode: &'a [Candidate],
    /// The workers that a candidate of either way could fetch a prefix from.
    pub sources: &'a [Source],
    /// The number of requests that wait for any prefill worker.
    pub waiting: usize,
    /// The time in milliseconds for which those of them that come before this one keep the pool
    /// busy: [`Queue::ahead_ms`](crate::queue::Queue::ahead_ms).
    pub ahead_ms: f64,
}

/// The prediction for one of the two ways.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictedWay {
    /// The candidate that computes the prompt.
    pub index: CandidateIndex,
    /// The predicted time to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// The predicted time plus the delay of other requests, in milliseconds.
    pub cost_ms: f64,
    /// The parts of the prediction before the correction by what is learned. The caller passes them
    /// back to [`Threshold::observe`].
    pub parts: PredictedParts,
    /// The predicted time of the cheaper way, if this way is explored; 0 otherwise.
    pub instead_ms: f64,
    /// The part of the budget for long steps that this way uses up; 0 for remote prefill.
    pub excess_ms: f64,
    /// The prefix that the candidate would fetch from another worker; `None` if computing is cheaper.
    pub fetch: Option<FetchPlan>,
}

/// The two parts of a prediction that are corrected by a factor each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PredictedParts {
    /// The longer parts of the steps and all other times, in milliseconds.
    pub longer_ms: f64,
    /// The shorter parts of the steps that mix prefill and decode, which count in proportion to the
    /// interference, in milliseconds; 0 for remote prefill.
    pub shorter_ms: f64,
}

impl PredictedParts {
    /// Both parts in the order of the factors that [`Fit`] learns.
    fn to_array(self) -> [f64; 2] {
        [self.longer_ms, self.shorter_ms]
    }
}

impl PredictedWay {
    /// The loss by exploring this way, if the first token takes `ttft_ms`.
    fn explored_ms(&self, ttft_ms: f64) -> f64 {
        if self.instead_ms > 0.0 { (ttft_ms - self.instead_ms).max(0.0) } else { 0.0 }
    }
}

/// The comparison of both ways.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Whether the decode worker should compute the prompt.
    pub local: bool,
    /// Whether this is not the cheaper way but an exploration.
    pub explored: bool,
    /// The best decode worker for a local prefill; `None` if there is none, or none has enough
    /// budget for long steps.
    pub at_decode: Option<PredictedWay>,
    /// The best prefill worker for a remote prefill; `None` if there is none.
    pub at_prefill: Option<PredictedWay>,
    /// The largest share of the prompt, from 0 to 1, that any decode worker holds.
    pub hit_ratio: f64,
}

impl Comparison {
    /// The chosen way.
    pub fn way(&self) -> Option<&PredictedWay> {
        if self.local { self.at_decode.as_ref() } else { self.at_prefill.as_ref() }
    }
}

/// What has been learned so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LearnedThreshold {
    /// The share of a prompt, from 0 to 1, that a decode worker must hold to compute the rest
    /// itself. Also 1 if a local prefill is never better.
    pub threshold_ratio: f64,
    /// The number of recent comparisons from which the ratio was learned; older ones count less.
    pub comparisons: f64,
    /// The share of the possible gain in these comparisons that this ratio achieves, from 0 to 1;
    /// smaller if there were few comparisons.
    pub confidence: f64,
    /// The learned interference: the part of a step's shorter part that is added to the longer one.
    pub interference: f64,
    /// The quality of predictions for local prefill.
    pub local: Evidence,
    /// The quality of predictions for remote prefill.
    pub remote: Evidence,
}

/// Compares and learns for one pair of pools.
#[derive(Clone, Debug)]
pub struct Threshold {
    config: ThresholdConfig,
    local: Fit<2>,
    remote: Fit<2>,
    /// When each way was last observed.
    local_ns: u64,
    remote_ns: u64,
    guards: HashMap<WorkerIndex, Guard>,
    curve: Curve,
    /// The time that exploration may take now, in milliseconds.
    exploring_ms: f64,
}

impl Threshold {
    /// A state in which nothing is learned. Until requests are compared, its ratio is
    /// `threshold_ratio`.
    pub fn new(config: ThresholdConfig, threshold_ratio: f64) -> Self {
        Self {
            config,
            local: Fit::default(),
            remote: Fit::default(),
            local_ns: 0,
            remote_ns: 0,
            guards: HashMap::new(),
            curve: Curve::new(threshold_ratio),
            exploring_ms: 0.0,
        }
    }

    /// Compares both ways. This changes nothing: the caller reports with
    /// [`Threshold::record_way_taken`] that a request takes the chosen way.
    pub fn compare(&self, now_ns: u64, input: &ComparisonInput<'_>) -> Comparison {
        let mut sources = BestSources::default();
        sources.select(input.sources);
        let at_prefill = self.at_prefill(now_ns, input, &sources);
        let at_decode = self.at_decode(now_ns, input, &sources);
        let (mut at_decode, mut at_prefill) = (at_decode, at_prefill);
        let (local, explored) = match (&mut at_decode, &mut at_prefill) {
            (Some(local), Some(remote)) => {
                let cheaper = local.cost_ms < remote.cost_ms;
                let explored = self.explores(now_ns, cheaper, local, remote, input.query.draw);
                if explored {
                    let (other, best) = if cheaper { (remote, local) } else { (local, remote) };
                    other.instead_ms = best.ttft_ms;
                }
                (cheaper != explored, explored)
            }
            (local, _) => (local.is_some(), false),
        };
        let held = input.decode.iter().filter(|c| c.up).map(Candidate::believed_blocks).max();
        let hit = input.query.cached_tokens(held.unwrap_or(0)) as f64;
        let hit_ratio = hit / input.query.prompt_tokens.saturating_sub(1).max(1) as f64;
        Comparison { local, explored, at_decode, at_prefill, hit_ratio }
    }

    /// Records that a request takes the way that a comparison has chosen.
    pub fn record_way_taken(
        &mut self,
        now_ns: u64,
        comparison: &Comparison,
        input: &ComparisonInput<'_>,
    ) {
        if let (Some(local), Some(remote)) = (comparison.at_decode, comparison.at_prefill) {
            let saved_ms = remote.cost_ms - local.cost_ms;
            self.curve.compared(now_ns, comparison.hit_ratio, saved_ms);
        }
        if let Some(way) = comparison.way() {
            let earned_ms = self.exploring_ms + EXPLORED_SHARE * way.ttft_ms;
            self.exploring_ms = earned_ms.min(EXPLORED_SAVED_MAX_MS) - way.explored_ms(way.ttft_ms);
        }
        let Some(local) = comparison.at_decode.filter(|_| comparison.local) else { return };
        let Some(chosen) = input.decode.get(local.index.0) else { return };
        // Workers that have left the fleet must be forgotten.
        let here = |worker: &WorkerIndex| input.decode.iter().any(|c| c.worker == *worker);
        self.guards.retain(|worker, _| here(worker));
        let (goal_ms, step_ms) = (self.config.tbt_goal_ms, estimate::step_ms(chosen));
        let guard = self.guards.entry(chosen.worker).or_default();
        guard.spend(now_ns, goal_ms, step_ms, local.excess_ms);
    }

    /// Learns from a request that took a way and had its first token after `ttft_ms`.
    pub fn observe(&mut self, now_ns: u64, local: bool, way: &PredictedWay, ttft_ms: f64) {
        let (fit, observed_ns) = if local {
            (&mut self.local, &mut self.local_ns)
        } else {
            (&mut self.remote, &mut self.remote_ns)
        };
        // Replace the predicted loss of the exploration by the measured one.
        self.exploring_ms += way.explored_ms(way.ttft_ms) - way.explored_ms(ttft_ms);
        let gap_seconds = now_ns.saturating_sub(*observed_ns) as f64 / 1e9;
        let doubted = (gap_seconds - DOUBTED_SECONDS).max(0.0) / DOUBT_HALF_LIFE_SECONDS;
        if doubted > 0.0 {
            fit.doubt(1.0 - 0.5f64.powf(doubted));
        }
        if fit.observe(way.parts.to_array(), ttft_ms) {
            *observed_ns = now_ns;
        }
    }

    /// What has been learned so far.
    pub fn learned(&self, now_ns: u64) -> LearnedThreshold {
        let [_, interference] = self.local.scales(trust(now_ns, self.local_ns), &[1.0; 2]);
        LearnedThreshold {
            threshold_ratio: self.curve.threshold_ratio(now_ns),
            comparisons: self.curve.comparisons(now_ns),
            confidence: self.curve.confidence(now_ns),
            interference: interference * self.config.interference,
            local: self.local.evidence(),
            remote: self.remote.evidence(),
        }
    }

    fn explores(
        &self,
        now_ns: u64,
        cheaper: bool,
        local: &PredictedWay,
        remote: &PredictedWay,
        draw: u64,
    ) -> bool {
        let (other, best, seen_ns) =
            if cheaper { (remote, local, self.remote_ns) } else { (local, remote, self.local_ns) };
        mix(draw ^ 0x6578_706c_6f72_6521).is_multiple_of(EXPLORED_OF)
            && other.ttft_ms - best.ttft_ms <= self.exploring_ms
            && other.cost_ms * trust(now_ns, seen_ns) <= EXPLORED_COST * best.cost_ms
            && now_ns.saturating_sub(seen_ns) > EXPLORED_AFTER_NS
    }
}

/// How much a calibration is trusted, from 0 to 1.
fn trust(now_ns: u64, observed_ns: u64) -> f64 {
    let seconds = now_ns.saturating_sub(observed_ns) as f64 / 1e9;
    0.5f64.powf((seconds - TRUSTED_SECONDS).max(0.0) / HALF_LIFE_SECONDS)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
