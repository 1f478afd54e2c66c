//! A decode worker: its queue, its batch, and prompts that it computes itself.
//!
//! A step gives one token to each request of the batch. So the inputs of a step are kept as sums,
//! and the last step of a request is known when it joins: the work for a step does not depend on
//! the batch size.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::cost::CostModel;
use super::lru::Lru;
use super::workload::TraceRequest;

/// A prompt that the decode worker computes itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalPrefill {
    pub(super) request: usize,
    /// Tokens that need no more computing; `None` before the first chunk.
    pub(super) done_tokens: Option<u32>,
    /// Tokens in the running step.
    pub(super) tokens: u32,
}

/// One decode worker.
#[derive(Debug)]
pub(super) struct DecodeWorker {
    pub(super) cache: Lru,
    /// Requests that wait to be admitted, in order of arrival.
    pub(super) waiting: VecDeque<usize>,
    /// Admitted requests whose prompts are computed here; the first one is being computed.
    pub(super) local: VecDeque<LocalPrefill>,
    /// Input tokens of assigned requests that are not in the batch.
    pub(super) assigned_tokens: u64,
    /// Input and generated tokens of the batch.
    pub(super) context_tokens: u64,
    pub(super) batch: u32,
    /// Input and output tokens of all admitted requests.
    pub(super) reserved_tokens: u64,
    /// Number of admitted requests: the batch and the local prefills.
    pub(super) members: u32,
    pub(super) stepping: bool,
    /// Durations of all steps that have started, in nanoseconds.
    pub(super) steps_ns: Vec<u64>,
    /// (last step, request) for the batch.
    pub(super) ends: BinaryHeap<Reverse<(u32, usize)>>,
    /// Requests whose first step is the running one.
    pub(super) joined: Vec<usize>,
}

impl DecodeWorker {
    pub(super) fn new(cache: Lru) -> Self {
        Self {
            cache,
            waiting: VecDeque::new(),
            local: VecDeque::new(),
            assigned_tokens: 0,
            context_tokens: 0,
            batch: 0,
            reserved_tokens: 0,
            members: 0,
            stepping: false,
            steps_ns: Vec::new(),
            ends: BinaryHeap::new(),
            joined: Vec::new(),
        }
    }

    /// Tokens of KV that it holds or will hold.
    pub(super) fn load_tokens(&self) -> u64 {
        self.assigned_tokens + self.context_tokens
    }

    /// Whether a request may be admitted; an empty worker admits any request.
    pub(super) fn fits(
        &self,
        request: &TraceRequest,
        kv_capacity_tokens: u64,
        max_batch: u32,
    ) -> bool {
        let reserve = self.reserved_tokens + tokens(request);
        self.members == 0 || (reserve <= kv_capacity_tokens && self.members < max_batch)
    }

    pub(super) fn admit(&mut self, request: &TraceRequest) {
        self.members += 1;
        self.reserved_tokens += tokens(request);
    }

    /// A request joins the batch with the next step.
    pub(super) fn join(&mut self, id: usize, request: &TraceRequest) {
        self.assigned_tokens -= u64::from(request.input_tokens);
        self.context_tokens += u64::from(request.input_tokens);
        self.batch += 1;
        let last_step = self.steps_ns.len() as u32 + request.output_tokens - 1;
        self.ends.push(Reverse((last_step, id)));
        self.joined.push(id);
    }

    /// A request whose last token came with the step that has just ended.
    pub(super) fn pop_ended(&mut self, requests: &[TraceRequest]) -> Option<usize> {
        let Reverse((last_step, id)) = *self.ends.peek()?;
        if last_step as usize + 1 > self.steps_ns.len() {
            return None;
        }
        self.ends.pop();
        self.batch -= 1;
        self.members -= 1;
        self.context_tokens -= tokens(&requests[id]);
        self.reserved_tokens -= tokens(&requests[id]);
        Some(id)
    }

    /// Seconds of the next step from its decode part and its prefill part, of which the shorter one
    /// counts only partly.
    pub(super) fn step_s(&self, cost: &CostModel, prefill_s: f64, interference: f64) -> f64 {
        let decode_s = cost.step_s(self.batch, self.context_tokens);
        decode_s.max(prefill_s) + interference * decode_s.min(prefill_s)
    }
}

fn tokens(request: &TraceRequest) -> u64 {
    u64::from(request.input_tokens) + u64::from(request.output_tokens)
}
