//! The interface of a routing policy to the simulated cluster.

use super::state::Cluster;

/// A worker of either pool: an end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// This prefill worker.
    Prefill(usize),
    /// This decode worker.
    Decode(usize),
}

/// The placement of a request's prefill, with the fetch before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The prefill worker, or the decode worker of a local prefill.
    pub worker: usize,
    /// Number of leading blocks that the worker first fetches from a peer's cache; 0 for no fetch.
    /// The request may not start before the fetch is complete, and then finds at least these
    /// blocks.
    pub fetch_blocks: u32,
    /// When the fetch is complete, if the router has timed it; it then takes nothing from any link,
    /// and finds what was requested.
    pub fetch_ready_ns: u64,
    /// The worker that sends the blocks. The transfer then waits for its turn on the links of both
    /// workers, and the cluster determines when it is complete and what arrives.
    pub fetch_from: Option<Peer>,
}

impl Placement {
    /// A placement on this worker without a fetch.
    pub fn on(worker: usize) -> Self {
        Self { worker, ..Self::default() }
    }

    /// A placement on this worker, which fetches leading blocks from another one.
    pub fn fetching(worker: usize, fetch_blocks: u32, from: Peer) -> Self {
        Self { worker, fetch_blocks, fetch_ready_ns: 0, fetch_from: Some(from) }
    }
}

/// The decision for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// A prefill worker computes the prompt, and a decode worker then receives the KV.
    Prefill(Placement),
    /// This decode worker computes the prompt itself.
    Local(usize),
    /// A decode worker computes the prompt itself, after it has fetched leading blocks from
    /// `fetch_from`.
    LocalFetching(Placement),
    /// The router keeps the request, and returns it by [`Router::release`].
    Hold,
    /// The request is refused.
    Reject,
}

/// Decides where requests go. All methods but the first have a default that does nothing, or what
/// the reference model does.
pub trait Router {
    /// A request has arrived. All events up to this time have been handled.
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision;

    /// Returns a request that was held, with its decision. Called after every arrival and whenever
    /// a prefill worker has completed something, until it returns `None`; must not hold the request
    /// again.
    fn release(&mut self, cluster: &Cluster<'_>) -> Option<(usize, Decision)> {
        let _ = cluster;
        None
    }

    /// When `release` must be called again if nothing happens before; read after the router has
    /// released what it can.
    fn due_ns(&self) -> Option<u64> {
        None
    }

    /// A request was placed and not refused.
    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A prefill worker has started a request, whose hits are known now.
    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A request's prompt has been computed, remotely or locally.
    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }

    /// A request has its first token.
    fn first_token(&mut self, cluster: &Cluster<'_>, request: usize) {
        let _ = (cluster, request);
    }
}
