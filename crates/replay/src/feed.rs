//! The candidates of a decision, as a router would see them in the simulated cluster.

use splitrail_kv::{BlockHash, ConversationBounds, Conversations};
use splitrail_policy::learn::BusyShare;
use splitrail_policy::{
    Candidate, Coefficients, FetchPlan, KvFormat, Leg, Query, Source, WorkerIndex,
};
use splitrail_sim::cluster::{Cluster, Peer, Placement, Workload};

use crate::fetches::{FetchBounds, Fetches, number, peers, sender};
use crate::published::VisibleBlocks;

/// How long a placement is remembered.
const RECENT_NS: u64 = 120_000_000_000;

/// The names of a prompt's full blocks.
fn hashes(workload: &Workload, request: usize) -> Vec<BlockHash> {
    let full = workload.requests()[request].input_tokens / workload.block_tokens();
    let blocks = workload.blocks(request).iter().take(full as usize);
    blocks.map(|block| BlockHash(u64::from(*block))).collect()
}

/// A router's own bookings, from its placements and the ends that it observes.
#[derive(Debug)]
pub struct Feed {
    /// The blocks that count as present for the policy, from which bookings are made.
    sight: VisibleBlocks,
    /// The fetches of prefixes between workers.
    fetches: Fetches,
    coefficients: Vec<Coefficients>,
    /// By worker and block: number of outstanding requests with the block. Empty if no policy uses
    /// it.
    pending: Vec<Vec<u32>>,
    /// By worker and block: the time of the last placement there, plus 1; 0 for never.
    recent: Vec<Vec<u64>>,
    /// By worker: tokens to compute of outstanding requests, and predicted time of waiting ones.
    booked_tokens: Vec<u64>,
    waiting_ns: Vec<u64>,
    busy: Vec<BusyShare>,
    /// Tokens and predicted times by request.
    request_tokens: Vec<u64>,
    request_ns: Vec<u64>,
    conversations: Conversations,
}

impl Feed {
    /// `sight` says which blocks count as present for the policy and for bookings; `fetches` bounds
    /// the fetches between workers, if they fetch.
    pub fn new(
        cluster: &Cluster<'_>,
        sight: VisibleBlocks,
        assumed_coefficients: &[Coefficients],
        fetches: Option<FetchBounds>,
    ) -> Self {
        let workers = cluster.prefill_workers();
        let blocks = cluster.workload().distinct_blocks() as usize;
        let requests = cluster.workload().requests().len();
        let of = |which| if sight == which { workers } else { 0 };
        let known = |worker| {
            assumed_coefficients
                .get(worker)
                .or(assumed_coefficients.last())
                .copied()
                .unwrap_or_default()
        };
        Self {
            sight,
            fetches: Fetches::new(fetches),
            coefficients: (0..workers).map(known).collect(),
            pending: vec![vec![0; blocks]; of(VisibleBlocks::Pending)],
            recent: vec![vec![0; blocks]; of(VisibleBlocks::Recent)],
            booked_tokens: vec![0; workers],
            waiting_ns: vec![0; workers],
            busy: vec![BusyShare::default(); workers],
            request_tokens: vec![0; requests],
            request_ns: vec![0; requests],
            conversations: Conversations::new(ConversationBounds::default()),
        }
    }

    /// The workers of both pools that hold leading blocks of a request; none if workers do not fetch.
    /// Decode workers have the numbers after those of the prefill workers.
    pub fn sources(&self, cluster: &Cluster<'_>, request: usize, into: &mut Vec<Source>) {
        into.clear();
        let Some(bounds) = self.fetches.bounds() else { return };
        let now_ns = cluster.now_ns();
        let able = peers(cluster).filter(|peer| self.fetches.may_send(*peer, now_ns));
        into.extend(able.map(|peer| Source {
            worker: number(cluster, peer),
            rank: None,
            blocks: cluster.peer_overlap_blocks(peer, request),
            wait_ns: cluster.outgoing_wait_ns(peer),
            kv_format: KvFormat::default(),
        }));
        let block_tokens = u64::from(cluster.workload().block_tokens());
        let tokens = |source: &Source| u64::from(source.blocks) * block_tokens;
        into.retain(|source| tokens(source) >= u64::from(bounds.min_tokens.max(1)));
    }

    /// Adds to a candidate what is known of a worker as one that fetches.
    pub fn fetcher(&self, cluster: &Cluster<'_>, worker: Peer, candidate: &mut Candidate) {
        candidate.can_fetch = self.fetches.may_take(worker, cluster.now_ns());
        candidate.fetch_min_tokens = self.fetches.bounds().map_or(0, |bounds| bounds.min_tokens);
        candidate.link_wait_ns = cluster.incoming_wait_ns(worker);
    }

    /// The fetch that was planned for a worker, unless other fetches were first.
    pub fn admitted(
        &self,
        cluster: &Cluster<'_>,
        to: Peer,
        fetch: Option<FetchPlan>,
    ) -> Option<FetchPlan> {
        let now_ns = cluster.now_ns();
        fetch.filter(|fetch| {
            let from = sender(cluster, fetch);
            self.fetches.may_send(from, now_ns) && self.fetches.may_take(to, now_ns)
        })
    }

    /// A placement on a prefill or decode worker, with the fetch that was planned for it.
    pub fn placement(cluster: &Cluster<'_>, worker: usize, fetch: Option<FetchPlan>) -> Placement {
        match fetch {
            None => Placement::on(worker),
            Some(fetch) => Placement::fetching(worker, fetch.blocks, sender(cluster, &fetch)),
        }
    }

    /// Notes the fetch of a request that was placed on any worker.
    pub fn fetch_begun(&mut self, cluster: &Cluster<'_>, request: usize) {
        self.fetches.placed(cluster, request);
    }

    /// The candidates among the prefill workers for a request.
    pub fn candidates(&self, cluster: &Cluster<'_>, request: usize, into: &mut Vec<Candidate>) {
        into.clear();
        into.extend((0..cluster.prefill_workers()).map(|worker| {
            let overlap_blocks = cluster.overlap_blocks(worker, request);
            let speculative_blocks = self.pending_blocks(cluster, worker, request, overlap_blocks);
            let mut candidate = Candidate {
                worker: WorkerIndex::at(worker),
                up: true,
                requests: cluster.outstanding_requests(worker),
                prefill_tokens: self.booked_tokens[worker],
                active_tokens: cluster.outstanding_tokens(worker),
                overlap_blocks,
                speculative_blocks,
                underway_blocks: speculative_blocks - overlap_blocks,
                waiting: cluster.waiting_requests(worker) as u32,
                busy_share: self.busy[worker].at(cluster.now_ns()),
                wait_ns: cluster.running_left_ns(worker) + self.waiting_ns[worker],
                cache_fill: cluster.cache_fill(worker),
                coefficients: self.coefficients[worker],
                ..Candidate::default()
            };
            self.fetcher(cluster, Peer::Prefill(worker), &mut candidate);
            candidate
        }));
    }

    /// The candidates for a request as published policies see them, by the blocks that they count.
    pub fn published(
        &self,
        cluster: &Cluster<'_>,
        request: usize,
        candidates: &[Candidate],
    ) -> Vec<Candidate> {
        let published = |candidate: &Candidate| Candidate {
            overlap_blocks: self.visible_blocks(cluster, request, candidate),
            ..*candidate
        };
        candidates.iter().map(published).collect()
    }

    /// The number of leading blocks of a request that count as present on a candidate.
    fn visible_blocks(&self, cluster: &Cluster<'_>, request: usize, candidate: &Candidate) -> u32 {
        match self.sight {
            VisibleBlocks::Present => candidate.overlap_blocks,
            VisibleBlocks::Recent => self.recent_blocks(cluster, candidate.worker.place(), request),
            VisibleBlocks::Pending => candidate.speculative_blocks.max(candidate.overlap_blocks),
        }
    }

    /// The query for a request.
    pub fn query(&self, cluster: &Cluster<'_>, request: usize, turn: u64, draw: u64) -> Query {
        let workload = cluster.workload();
        Query {
            leg: Leg::Prefill,
            prompt_tokens: workload.requests()[request].input_tokens.into(),
            prompt_blocks: workload.blocks(request).len() as u32,
            block_size: workload.block_tokens(),
            turn,
            draw,
            sharing: self.conversations.find(&hashes(workload, request)),
        }
    }

    /// Notes that a request has arrived.
    pub fn arrived(&mut self, cluster: &Cluster<'_>, request: usize) {
        let hashes = hashes(cluster.workload(), request);
        self.conversations.record(cluster.now_ns() / 1_000_000, &hashes);
    }

    /// Books a request for this candidate, with the number of leading blocks that it fetches.
    pub fn placed(
        &mut self,
        cluster: &Cluster<'_>,
        request: usize,
        candidate: &Candidate,
        fetch_blocks: u32,
    ) {
        self.fetch_begun(cluster, request);
        let workload = cluster.workload();
        let worker = candidate.worker.place();
        let input = u64::from(workload.requests()[request].input_tokens);
        let seen = self.visible_blocks(cluster, request, candidate);
        let tokens = input.saturating_sub(u64::from(workload.block_tokens()) * u64::from(seen));
        let cached = workload.cached_tokens(request, seen.max(fetch_blocks));
        let prefill_ns = candidate.coefficients.prefill_ns(input, cached.into());
        self.request_tokens[request] = tokens;
        self.booked_tokens[worker] += tokens;
        self.request_ns[request] = prefill_ns;
        self.waiting_ns[worker] += prefill_ns;
        for block in workload.blocks(request) {
            if let Some(pending) = self.pending.get_mut(worker) {
                pending[*block as usize] += 1;
            }
            if let Some(recent) = self.recent.get_mut(worker) {
                recent[*block as usize] = cluster.now_ns() + 1;
            }
        }
    }

    /// Notes that a prefill worker has started a request.
    pub fn started(&mut self, cluster: &Cluster<'_>, request: usize) {
        let Some(worker) = cluster.row(request).prefill_worker else { return };
        self.waiting_ns[worker as usize] -= self.request_ns[request];
        self.busy[worker as usize].set(cluster.now_ns(), true);
    }

    /// Notes that a request's prefill has ended.
    pub fn ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        let Some(worker) = cluster.row(request).prefill_worker else { return };
        self.booked_tokens[worker as usize] -= self.request_tokens[request];
        let busy = cluster.outstanding_requests(worker as usize) > 0;
        self.busy[worker as usize].set(cluster.now_ns(), busy);
        if let Some(pending) = self.pending.get_mut(worker as usize) {
            for block in cluster.workload().blocks(request) {
                pending[*block as usize] -= 1;
            }
        }
    }

    /// Number of leading blocks that are present or that outstanding requests have; at least
    /// `present`.
    fn pending_blocks(
        &self,
        cluster: &Cluster<'_>,
        worker: usize,
        request: usize,
        present: u32,
    ) -> u32 {
        let Some(pending) = self.pending.get(worker) else { return present };
        let cache = cluster.cache(worker);
        let rest = &cluster.workload().blocks(request)[present as usize..];
        let there = |block: &&u32| pending[**block as usize] > 0 || cache.holds(**block);
        present + rest.iter().take_while(there).count() as u32
    }

    fn recent_blocks(&self, cluster: &Cluster<'_>, worker: usize, request: usize) -> u32 {
        let Some(recent) = self.recent.get(worker) else { return 0 };
        let there = |block: &&u32| {
            let routed = recent[**block as usize];
            routed > 0 && cluster.now_ns() - (routed - 1) <= RECENT_NS
        };
        cluster.workload().blocks(request).iter().take_while(there).count() as u32
    }
}
