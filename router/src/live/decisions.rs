//! What recent decisions say: the flows of requests between workers, and the last decisions.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde::Serialize;

use crate::core::Core;
use splitrail_ledger::decisions::Decision;
use splitrail_telemetry::figure::rounded;

/// Maximum number of decisions that are read for a snapshot.
const READ_MAX: usize = 4096;

/// Number of decisions in a snapshot.
const SHOWN: usize = 8;

/// Number of them that are the newest, whether or not their requests have ended. The others are of
/// requests that have ended.
const NEWEST: usize = 4;

/// The time over which flows are counted, in milliseconds.
const FLOW_WINDOW_MS: u64 = 15_000;

/// Maximum number of flows of one model in a snapshot.
const FLOWS_MAX: usize = 24;

/// Requests that took the same way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Flow {
    /// The worker that computed their prompts for another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prefill_worker: Option<String>,
    /// The worker that answered.
    pub(super) decode_worker: String,
    /// How many there were.
    pub(super) requests_per_s: Option<f64>,
}

/// A decision in a snapshot. Members that are not known are left out.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DecisionView {
    request_id: String,
    #[serde(skip_serializing_if = "is_first")]
    prompt_index: usize,
    model: String,
    decided_unix_ms: u64,
    flow: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    local_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u32>,
    prompt_blocks: u32,
    overlap_blocks: u32,
    best_overlap_blocks: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    runner_up: Option<String>,
    /// By how much the runner-up was worse, in the unit of the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    margin: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    margin_unit: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
}

/// Whether a prompt is the first, and mostly the only one, of its request.
fn is_first(prompt_index: &usize) -> bool {
    *prompt_index == 0
}

/// What the decisions of the last seconds say.
#[derive(Debug, Default)]
pub(super) struct RecentDecisions {
    /// Requests by model, prefill worker and decode worker.
    counts: HashMap<(String, Option<String>, String), u32>,
    /// The time over which they were counted.
    covered_ms: u64,
    /// The newest decisions, and the newest of requests that have ended.
    pub(super) shown: Vec<DecisionView>,
}

impl RecentDecisions {
    /// Reads the newest decisions.
    pub(super) fn read(core: &Core, now_unix_ms: u64) -> Self {
        let mut recent = Self::default();
        let (mut read, mut oldest_ms) = (0, 0);
        let kept = core.serving().limits.decisions_kept.min(READ_MAX);
        core.decisions.read_recent(kept, |decision| {
            read += 1;
            let age_ms = now_unix_ms.saturating_sub(decision.decided_unix_ms);
            oldest_ms = age_ms.max(oldest_ms);
            let room = if decision.outcome.is_some() { SHOWN } else { NEWEST };
            if recent.shown.len() < room {
                recent.shown.push(DecisionView::new(core, decision));
            }
            if age_ms <= FLOW_WINDOW_MS {
                recent.count(decision);
            }
        });
        // With very many requests, those that can be read do not fill the window.
        let is_full = read == kept && oldest_ms < FLOW_WINDOW_MS;
        recent.covered_ms = if is_full { oldest_ms.max(1) } else { FLOW_WINDOW_MS };
        recent
    }

    fn count(&mut self, decision: &Decision) {
        let Some(answered) = decision.decode_worker.as_deref() else { return };
        let prefill = decision.prefill_worker.as_deref().map(str::to_owned);
        let flow = (decision.model.to_string(), prefill, answered.to_owned());
        *self.counts.entry(flow).or_default() += 1;
    }

    /// The largest flows of a model, the largest first.
    pub(super) fn flows(&self, model: &str) -> Vec<Flow> {
        let mut counts: Vec<_> = self.counts.iter().filter(|((of, ..), _)| of == model).collect();
        counts.sort_unstable_by_key(|(flow, count)| (Reverse(**count), *flow));
        let rate = |count: u32| rounded(f64::from(count) * 1e3 / self.covered_ms as f64);
        let flows = counts.into_iter().take(FLOWS_MAX);
        flows
            .map(|((_, prefill_worker, decode_worker), count)| Flow {
                prefill_worker: prefill_worker.clone(),
                decode_worker: decode_worker.clone(),
                requests_per_s: rate(*count),
            })
            .collect()
    }
}

impl DecisionView {
    fn new(core: &Core, decision: &Decision) -> Self {
        // The leg that computes the prompt is the interesting one, and it is placed first.
        let chosen = decision.candidates.iter().find(|candidate| candidate.chosen);
        let next = chosen.and_then(|chosen| Some((chosen, decision.runner_up(chosen)?)));
        let unit = next.and_then(|_| {
            let serving = core.serving();
            serving.model(&decision.model).map(|served| served.config.policy.cost_unit())
        });
        let unit = unit.filter(|unit| *unit != "none");
        Self {
            request_id: decision.request_id.to_string(),
            prompt_index: decision.prompt_index,
            model: decision.model.to_string(),
            decided_unix_ms: decision.decided_unix_ms,
            flow: decision.flow,
            local_reason: decision.local_reason,
            prefill_worker: decision.prefill_worker.as_deref().map(str::to_owned),
            decode_worker: decision.decode_worker.as_deref().map(str::to_owned),
            prompt_tokens: decision.prompt_tokens,
            prompt_blocks: decision.prompt_blocks,
            overlap_blocks: decision.overlap_blocks,
            best_overlap_blocks: decision.best_overlap_blocks,
            runner_up: next.map(|(_, next)| (*next.worker).to_owned()),
            margin: unit.and(next).and_then(|(chosen, next)| rounded(next.cost - chosen.cost)),
            margin_unit: unit,
            cached_tokens: decision.cached_tokens,
            attempts: decision.attempts,
            outcome: decision.outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_flows_of_a_model_are_shown() {
        let mut recent = RecentDecisions { covered_ms: 2000, ..RecentDecisions::default() };
        for decode in 0..40u32 {
            let flow = ("m".to_owned(), Some("p".to_owned()), format!("d{decode:02}"));
            recent.counts.insert(flow, decode + 1);
        }
        recent.counts.insert(("n".to_owned(), None, "d".to_owned()), 99);
        let flows = recent.flows("m");
        assert_eq!(flows.len(), FLOWS_MAX);
        assert_eq!((&*flows[0].decode_worker, flows[0].requests_per_s), ("d39", Some(20.0)));
        assert_eq!(recent.flows("n")[0].prefill_worker, None);
    }
}
