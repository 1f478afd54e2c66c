//! A prefill worker: its queue and its running iteration.

use std::collections::VecDeque;

use super::outcome::RequestResult;
use super::workload::Workload;

/// A request that is being computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) request: usize,
    /// Tokens that need no more computing before this iteration.
    pub(super) done_tokens: u32,
    /// Tokens of this iteration.
    pub(super) tokens: u32,
}

/// One prefill worker.
#[derive(Debug, Default)]
pub(super) struct PrefillWorker {
    /// Requests that have not started, in order of arrival.
    pub(super) waiting: VecDeque<usize>,
    /// Requests that have started and not ended, in order; those with tokens are in the running
    /// iteration.
    pub(super) parts: Vec<Part>,
    /// When the running iteration ends.
    pub(super) busy_until_ns: Option<u64>,
    pub(super) outstanding_requests: u32,
    pub(super) outstanding_tokens: u64,
    pub(super) busy_ns: u64,
}

impl PrefillWorker {
    /// Takes the next waiting request that may start now. It overtakes requests that are not sent to
    /// the worker before their fetch over the links is complete.
    pub(super) fn next(&mut self, rows: &[RequestResult], now_ns: u64) -> Option<usize> {
        let waits = |request: &usize| rows[*request].fetch_ready_ns > now_ns;
        let place = self
            .waiting
            .iter()
            .position(|request| rows[*request].fetch_from.is_none() || !waits(request))?;
        if waits(&self.waiting[place]) {
            return None;
        }
        self.waiting.remove(place)
    }

    /// Ends the running iteration; `done` receives the requests that it completed.
    pub(super) fn end_iteration(&mut self, workload: &Workload, done: &mut Vec<usize>) {
        self.busy_until_ns = None;
        self.parts.retain_mut(|part| {
            part.done_tokens += part.tokens;
            part.tokens = 0;
            let unfinished = part.done_tokens < workload.requests()[part.request].input_tokens;
            if !unfinished {
                done.push(part.request);
            }
            unfinished
        });
    }
}
