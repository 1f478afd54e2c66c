//! The learned threshold of decode-first, in front of a policy.

use std::collections::HashMap;

use splitrail_policy::learn::BusyShare;
use splitrail_policy::threshold::{
    ComparisonInput, DEFAULT_THRESHOLD_RATIO, LearnedThreshold, PredictedWay, Threshold,
    ThresholdConfig,
};
use splitrail_policy::{Candidate, Coefficients, mix};
use splitrail_sim::cluster::{Cluster, Decision, Peer, Router};

use crate::feed::Feed;
use crate::fetches::number;
use crate::placement::PlacementRecord;

/// A router that reports what it knows of the prefill workers.
pub trait PrefillView: Router {
    /// Fills in the candidates for a request. Returns the number of requests that wait in the
    /// router, and the milliseconds that those before this one take.
    fn see(
        &mut self,
        cluster: &Cluster<'_>,
        request: usize,
        out: &mut Vec<Candidate>,
    ) -> (usize, f64);

    /// What the router knows of the cluster.
    fn feed(&mut self, cluster: &Cluster<'_>) -> &mut Feed;

    /// Where the placement that is asked for is kept.
    fn placement_record(&mut self) -> &mut PlacementRecord;
}

/// Applies the learned threshold first, and a policy to requests that are prefilled remotely.
#[derive(Debug)]
pub struct AutoRouter<R> {
    policy: R,
    threshold: Threshold,
    assumed_coefficients: Coefficients,
    seed: u64,
    decode: Vec<Decode>,
    /// The chosen way of requests that have no token yet.
    gone: HashMap<usize, (bool, PredictedWay)>,
}

/// The local prefills of a decode worker.
#[derive(Clone, Debug, Default)]
struct Decode {
    /// Requests with the number of tokens that they lacked.
    local: Vec<(usize, u64)>,
    busy: BusyShare,
}

impl<R: PrefillView> AutoRouter<R> {
    /// `assumed_coefficients` are those of decode workers.
    pub fn new(
        policy: R,
        config: ThresholdConfig,
        assumed_coefficients: Coefficients,
        seed: u64,
    ) -> Self {
        // Starts with the default threshold until something is learned.
        let threshold = Threshold::new(config, DEFAULT_THRESHOLD_RATIO);
        Self {
            policy,
            threshold,
            assumed_coefficients,
            seed,
            decode: Vec::new(),
            gone: HashMap::new(),
        }
    }

    /// The policy.
    pub fn policy(&mut self) -> &mut R {
        &mut self.policy
    }

    /// What has been learned.
    pub fn learned(&self, now_ns: u64) -> LearnedThreshold {
        self.threshold.learned(now_ns)
    }

    fn candidates(&mut self, cluster: &Cluster<'_>, request: usize) -> Vec<Candidate> {
        self.decode.resize(cluster.decode_workers(), Decode::default());
        // Without a cache, a decode worker has no place for what it would fetch.
        let has_caches = cluster.config().decode_cache_blocks > 0;
        let feed = self.policy.feed(cluster);
        let of = |(worker, known): (usize, &Decode)| {
            let (requests, active_tokens) = cluster.decode_batch(worker);
            let overlap_blocks = cluster.decode_overlap_blocks(worker, request);
            let mut candidate = Candidate {
                worker: number(cluster, Peer::Decode(worker)),
                up: true,
                requests,
                active_tokens,
                prefill_tokens: known.local.iter().map(|(_, tokens)| tokens).sum(),
                overlap_blocks,
                speculative_blocks: overlap_blocks,
                busy_share: known.busy.at(cluster.now_ns()),
                coefficients: self.assumed_coefficients,
                ..Candidate::default()
            };
            feed.fetcher(cluster, Peer::Decode(worker), &mut candidate);
            candidate.can_fetch &= has_caches;
            candidate
        };
        self.decode.iter().enumerate().map(of).collect()
    }
}

impl<R: PrefillView> Router for AutoRouter<R> {
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision {
        let now_ns = cluster.now_ns();
        let mut prefill = Vec::new();
        let (waiting, ahead_ms) = self.policy.see(cluster, request, &mut prefill);
        let decode = self.candidates(cluster, request);
        let mut sources = Vec::new();
        self.policy.feed(cluster).sources(cluster, request, &mut sources);
        let draw = mix(self.seed ^ mix(request as u64));
        let query = self.policy.feed(cluster).query(cluster, request, request as u64, draw);
        let input = ComparisonInput {
            query,
            prefill: &prefill,
            decode: &decode,
            sources: &sources,
            waiting,
            ahead_ms,
        };
        let comparison = self.threshold.compare(now_ns, &input);
        self.threshold.record_way_taken(now_ns, &comparison, &input);
        let Some(way) = comparison.way().copied() else {
            return self.policy.arrive(cluster, request);
        };
        self.gone.insert(request, (comparison.local, way));
        if !comparison.local {
            return self.policy.arrive(cluster, request);
        }
        let worker = way.index.0;
        let fetched = way.fetch.map_or(0, |fetch| fetch.blocks);
        let held = decode[way.index].held_blocks().max(fetched);
        let lacking = query.prompt_tokens - query.cached_tokens(held);
        let known = &mut self.decode[worker];
        known.local.push((request, lacking));
        known.busy.set(now_ns, true);
        match way.fetch {
            None => Decision::Local(worker),
            fetch => Decision::LocalFetching(Feed::placement(cluster, worker, fetch)),
        }
    }

    fn release(&mut self, cluster: &Cluster<'_>) -> Option<(usize, Decision)> {
        self.policy.release(cluster)
    }

    fn due_ns(&self) -> Option<u64> {
        self.policy.due_ns()
    }

    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        if cluster.row(request).prefill_worker.is_none() {
            self.policy.feed(cluster).fetch_begun(cluster, request);
        }
        self.policy.placed(cluster, request);
    }

    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        self.policy.prefill_started(cluster, request);
    }

    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        let row = cluster.row(request);
        if row.prefill_worker.is_some() {
            return self.policy.prefill_ended(cluster, request);
        }
        let Some(worker) = row.decode_worker else { return };
        let known = &mut self.decode[worker as usize];
        known.local.retain(|(local, _)| *local != request);
        known.busy.set(cluster.now_ns(), !known.local.is_empty());
    }

    fn first_token(&mut self, cluster: &Cluster<'_>, request: usize) {
        if let Some((local, way)) = self.gone.remove(&request) {
            let now_ns = cluster.now_ns();
            let ttft_ms = (now_ns - cluster.row(request).arrival_ns) as f64 / 1e6;
            self.threshold.observe(now_ns, local, &way, ttft_ms);
        }
    }
}
