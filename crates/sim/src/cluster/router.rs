//! Who decides.

use super::state::Cluster;

/// Where a request's prefill goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The prefill worker.
    pub worker: usize,
    /// Leading blocks that it fetches from a peer's cache first; 0 for no fetch. It may not
    /// start before the fetch is done, and finds at least these blocks.
    pub fetch_blocks: u32,
    /// When the fetch is done.
    pub fetch_ready_ns: u64,
}

impl Placement {
    /// On this worker, without a fetch.
    pub fn on(worker: usize) -> Self {
        Self { worker, ..Self::default() }
    }
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A prefill worker computes its prompt, a decode worker then receives the KV.
    Prefill(Placement),
    /// This decode worker computes the prompt itself.
    Local(usize),
    /// The router keeps it, and gives it back by [`Router::release`].
    Hold,
    /// It is refused.
    Reject,
}

/// Decides where requests go. All methods but the first have a default that does nothing, or
/// what the reference model does.
pub trait Router {
    /// A request has arrived. Whatever happened up to this instant is done.
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision;

    /// Gives back a request that was held, and where it goes. Asked after every arrival and
    /// whenever a prefill worker has finished something, until there is none; must not hold
    /// it again.
    fn release(&mut self, cluster: &Cluster<'_>) -> Option<(usize, Decision)> {
        let _ = cluster;
        None
    }

    /// When it wants to be asked for a release again, if nothing happens before; looked at
    /// when it has released what it can.
    fn due_ns(&self) -> Option<u64> {
        None
    }

    /// The decode worker that receives the KV of a prefill which has just ended.
    fn decode_worker(&mut self, cluster: &Cluster<'_>, request: usize) -> usize {
        let _ = request;
        cluster.least_loaded_decode_worker()
    }

    /// A request went to where it was sent; it was not refused.
    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A prefill worker has begun with a request, whose hits are known now.
    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A request's prompt is computed, remotely or locally.
    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A request has its first token.
    fn first_token(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A request has its last token.
    fn finished(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A decode worker's step has ended.
    fn step_ended(&mut self, cluster: &Cluster<'_>, decode_worker: usize, duration_ns: u64) {
        let _ = (cluster, decode_worker, duration_ns);
    }
}
