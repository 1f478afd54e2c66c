//! What is kept of a request that is traced, in addition to its times.

use std::time::Duration;

use splitrail_api::name::Name;
use splitrail_telemetry::trace_context::TraceContext;

use super::stage::Stage;
use crate::leg::LegKind;

/// Maximum number of stages, and of legs, that are kept of one request. A batch of many prompts has
/// more; the rest is counted.
const KEPT_MAX: usize = 256;

/// The place of a request in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTrace {
    /// The span of the request.
    pub context: TraceContext,
    /// The id of the client's span; `None` if the trace begins here.
    pub parent_id: Option<u64>,
    /// The `tracestate` that the client sent.
    pub state: Option<Box<str>>,
}

/// The stages and legs of a traced request.
#[derive(Debug)]
pub struct Spans {
    /// The stages. Those of one prompt follow each other without a gap.
    pub stages: Vec<StageSpan>,
    /// The choices of workers.
    pub picks: Vec<Pick>,
    /// The legs.
    pub legs: Vec<TracedLeg>,
    /// The hand-offs that were used.
    pub hand_offs: Vec<HandOffSpan>,
    /// The number of stages and legs that were not kept.
    pub left_out: usize,
}

/// One stage of a prompt. Times are since the arrival of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSpan {
    /// The position of the prompt among the prompts of the request; `None` if all share the stage.
    pub prompt: Option<u32>,
    /// The stage.
    pub stage: Stage,
    /// When the stage began.
    pub begin: Duration,
    /// When the stage ended.
    pub end: Duration,
}

/// One choice of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Pick {
    /// The position of the prompt among the prompts of the request.
    pub prompt: u32,
    /// When the candidates were known.
    pub begin: Duration,
    /// The leg that the worker was chosen for.
    pub leg: &'static str,
    /// The chosen worker.
    pub chosen: ScoredCandidate,
    /// The candidate with the lowest cost besides the chosen one.
    pub runner_up: Option<ScoredCandidate>,
    /// The number of candidates.
    pub candidates: usize,
}

/// A candidate of a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredCandidate {
    /// The worker's name.
    pub worker: Name,
    /// The candidate's cost under the policy; lower is better.
    pub cost: f64,
    /// Leading blocks of the prompt that the worker held.
    pub overlap_blocks: u32,
}

/// One leg.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedLeg {
    /// The position of the prompt among the prompts of the request.
    pub prompt: u32,
    /// The kind of the leg.
    pub kind: LegKind,
    /// The worker's name.
    pub worker: Name,
    /// The id of the leg's span, which the engine knows as its parent.
    pub span_id: u64,
    /// When the leg began.
    pub begin: Duration,
    /// When the leg ended; `None` while it runs.
    pub end: Option<Duration>,
    /// How the leg ended: `ok`, an error's name, or `cancelled`.
    pub outcome: &'static str,
}

/// The time from the end of a prefill leg to the first token of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOffSpan {
    /// The position of the prompt among the prompts of the request.
    pub prompt: u32,
    /// The end of the prefill leg.
    pub begin: Duration,
    /// The first token.
    pub end: Duration,
}

/// With room for the stages, choices and legs of most requests.
impl Default for Spans {
    fn default() -> Self {
        Self {
            stages: Vec::with_capacity(8),
            picks: Vec::with_capacity(2),
            legs: Vec::with_capacity(2),
            hand_offs: Vec::new(),
            left_out: 0,
        }
    }
}

impl Spans {
    pub(super) fn push_stage(&mut self, span: StageSpan) {
        if self.stages.len() < KEPT_MAX {
            self.stages.push(span);
        } else {
            self.left_out += 1;
        }
    }

    pub(super) fn pick(&mut self, pick: Pick) {
        if self.picks.len() < KEPT_MAX {
            self.picks.push(pick);
        }
    }

    /// Keeps a leg; returns its place.
    pub(super) fn leg(&mut self, leg: TracedLeg) -> Option<usize> {
        if self.legs.len() >= KEPT_MAX {
            self.left_out += 1;
            return None;
        }
        self.legs.push(leg);
        Some(self.legs.len() - 1)
    }

    /// Ends everything that is still open.
    pub(super) fn close(&mut self, end: Duration) {
        for leg in &mut self.legs {
            leg.end = Some(leg.end.map_or(end, |ended| ended.min(end)));
        }
    }
}
