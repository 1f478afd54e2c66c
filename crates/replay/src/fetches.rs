//! Fetches of prefixes between workers: their bounds, and those under way.

use splitrail_policy::{FetchPlan, WorkerIndex};
use splitrail_sim::cluster::{Cluster, Peer};

/// The bounds of fetches, as a model configures them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchBounds {
    /// Minimum number of prompt tokens that a fetch must bring.
    pub min_tokens: u32,
    /// Maximum number of concurrent fetches from a worker, and to a worker.
    pub max_per_worker: u32,
}

impl FetchBounds {
    /// Fetches of any length, and any number of them.
    pub const NONE: Self = Self { min_tokens: 1, max_per_worker: u32::MAX };
}

/// The fetches under way.
#[derive(Debug, Default)]
pub(crate) struct Fetches {
    bounds: Option<FetchBounds>,
    running: Vec<Running>,
}

#[derive(Debug)]
struct Running {
    from: Peer,
    to: Peer,
    ready_ns: u64,
}

impl Fetches {
    /// Fetches within these bounds; without bounds, workers fetch nothing.
    pub(crate) fn new(bounds: Option<FetchBounds>) -> Self {
        Self { bounds, running: Vec::new() }
    }

    /// The bounds, if workers fetch at all.
    pub(crate) fn bounds(&self) -> Option<FetchBounds> {
        self.bounds
    }

    /// Whether a worker may send a further prefix.
    pub(crate) fn may_send(&self, from: Peer, now_ns: u64) -> bool {
        self.has_room(now_ns, |one| one.from == from)
    }

    /// Whether a worker may take a further prefix.
    pub(crate) fn may_take(&self, to: Peer, now_ns: u64) -> bool {
        self.has_room(now_ns, |one| one.to == to)
    }

    fn has_room(&self, now_ns: u64, is_at: impl Fn(&Running) -> bool) -> bool {
        let Some(bounds) = self.bounds else { return false };
        let running = self.running.iter().filter(|one| one.ready_ns > now_ns && is_at(one));
        running.count() < bounds.max_per_worker as usize
    }

    /// Notes the fetch of a request that was placed, if it has one.
    pub(crate) fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        let now_ns = cluster.now_ns();
        self.running.retain(|one| one.ready_ns > now_ns);
        let row = cluster.row(request);
        let prefill = row.prefill_worker.map(|worker| Peer::Prefill(worker as usize));
        let decode = row.decode_worker.map(|worker| Peer::Decode(worker as usize));
        if let (Some(from), Some(to)) = (row.fetch_from, prefill.or(decode)) {
            self.running.push(Running { from, to, ready_ns: row.fetch_ready_ns });
        }
    }
}

/// All workers. Decode workers have the numbers after those of the prefill workers.
pub(crate) fn peers(cluster: &Cluster<'_>) -> impl Iterator<Item = Peer> {
    let prefill = (0..cluster.prefill_workers()).map(Peer::Prefill);
    prefill.chain((0..cluster.decode_workers()).map(Peer::Decode))
}

/// The number of a worker among all.
pub(crate) fn number(cluster: &Cluster<'_>, peer: Peer) -> WorkerIndex {
    WorkerIndex::at(match peer {
        Peer::Prefill(worker) => worker,
        Peer::Decode(worker) => cluster.prefill_workers() + worker,
    })
}

/// The worker that sends the blocks of a fetch.
pub(crate) fn sender(cluster: &Cluster<'_>, fetch: &FetchPlan) -> Peer {
    let place = fetch.source.place();
    match place.checked_sub(cluster.prefill_workers()) {
        None => Peer::Prefill(place),
        Some(decode) => Peer::Decode(decode),
    }
}
