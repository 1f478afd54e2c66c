//! Adapts a policy to the cluster's router interface.

use splitrail_policy::{
    Candidate, CandidateIndex, Coefficients, FetchPlan, Policy, Source, SplitMix64, pick,
};
use splitrail_sim::cluster::{Cluster, Decision, Placement, Router};

use crate::auto::PrefillView;
use crate::feed::Feed;
use crate::fetches::FetchBounds;
use crate::placement::PlacementRecord;
use crate::published::{PublishedPolicy, VisibleBlocks};

/// A policy that places requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Chooser {
    /// A policy that others have published.
    Published(PublishedPolicy),
    /// A policy of a configuration, decided by the router's own code.
    Configured(Policy),
}

impl Chooser {
    /// The blocks that count as present.
    fn sight(&self) -> VisibleBlocks {
        match self {
            Self::Published(policy) => policy.visible_blocks(),
            Self::Configured(_) => VisibleBlocks::Pending,
        }
    }
}

/// A decision of a policy.
#[derive(Clone, Copy, Debug, Default)]
struct ChosenWorker {
    index: CandidateIndex,
    /// Number of leading blocks that a published policy has the worker fetch without any link.
    fetch_blocks: u32,
    /// The fetch over the links.
    plan: Option<FetchPlan>,
}

/// Places requests by a policy.
#[derive(Debug)]
pub struct PolicyRouter {
    chooser: Chooser,
    assumed_coefficients: Vec<Coefficients>,
    /// Random numbers for choices and tie-breaks. A decision that uses none takes none.
    draws: SplitMix64,
    turn: u64,
    feed: Option<Feed>,
    /// The bounds of fetches between workers, if the policy is a configured one.
    fetches: Option<FetchBounds>,
    candidates: Vec<Candidate>,
    sources: Vec<Source>,
    /// The last decision.
    last: ChosenWorker,
    placement_record: PlacementRecord,
}

impl PolicyRouter {
    /// `assumed_coefficients` has one entry for each worker; the last one applies to all further
    /// workers. `fetches` bounds the fetches between workers, if they fetch under a configured policy.
    pub fn new(
        chooser: Chooser,
        assumed_coefficients: Vec<Coefficients>,
        fetches: Option<FetchBounds>,
        seed: u64,
    ) -> Self {
        Self {
            chooser,
            assumed_coefficients,
            draws: SplitMix64::new(seed),
            turn: 0,
            feed: None,
            fetches,
            candidates: Vec::new(),
            sources: Vec::new(),
            last: ChosenWorker::default(),
            placement_record: PlacementRecord::default(),
        }
    }

    fn choose(&mut self, cluster: &Cluster<'_>, request: usize) -> ChosenWorker {
        let mut draws = self.draws.clone();
        let (turn, draw) = (self.turn, draws.next_u64());
        let query = self.feed(cluster).query(cluster, request, turn, draw);
        match &self.chooser {
            Chooser::Published(policy) => {
                let candidates = self.feed.as_ref();
                let candidates =
                    candidates.map(|feed| feed.published(cluster, request, &self.candidates));
                let blocks = cluster.workload().blocks(request);
                let chosen = policy.choose(&candidates.unwrap_or_default(), query, blocks);
                let Some(chosen) = chosen else { return ChosenWorker::default() };
                if chosen.tied > 1 {
                    self.draws = draws;
                }
                ChosenWorker { index: chosen.index, fetch_blocks: chosen.fetch_blocks, plan: None }
            }
            Chooser::Configured(policy) => {
                self.draws = draws;
                let choice = pick(policy, &self.candidates, &self.sources, query);
                let Some(choice) = choice else { return ChosenWorker::default() };
                self.placement_record.note(request, policy, &choice, &self.candidates);
                ChosenWorker { index: choice.index, fetch_blocks: 0, plan: choice.fetch() }
            }
        }
    }

    fn feed(&mut self, cluster: &Cluster<'_>) -> &mut Feed {
        let sight = self.chooser.sight();
        let is_configured = matches!(self.chooser, Chooser::Configured(_));
        let fetches = self.fetches.filter(|_| is_configured);
        let assumed_coefficients = &self.assumed_coefficients;
        self.feed.get_or_insert_with(|| Feed::new(cluster, sight, assumed_coefficients, fetches))
    }
}

impl PrefillView for PolicyRouter {
    fn see(
        &mut self,
        cluster: &Cluster<'_>,
        request: usize,
        out: &mut Vec<Candidate>,
    ) -> (usize, f64) {
        self.feed(cluster).candidates(cluster, request, out);
        (0, 0.0)
    }

    fn feed(&mut self, cluster: &Cluster<'_>) -> &mut Feed {
        Self::feed(self, cluster)
    }

    fn placement_record(&mut self) -> &mut PlacementRecord {
        &mut self.placement_record
    }
}

impl Router for PolicyRouter {
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision {
        let mut candidates = std::mem::take(&mut self.candidates);
        let mut sources = std::mem::take(&mut self.sources);
        let feed = self.feed(cluster);
        feed.arrived(cluster, request);
        feed.candidates(cluster, request, &mut candidates);
        feed.sources(cluster, request, &mut sources);
        (self.candidates, self.sources) = (candidates, sources);
        self.last = self.choose(cluster, request);
        let ChosenWorker { index, fetch_blocks, plan } = self.last;
        let candidate = &self.candidates[index];
        if fetch_blocks == 0 {
            let worker = candidate.worker.place();
            return Decision::Prefill(Feed::placement(cluster, worker, plan));
        }
        let Candidate { worker, overlap_blocks, coefficients, .. } = *candidate;
        let worker = worker.place();
        let cached = |blocks| u64::from(cluster.workload().cached_tokens(request, blocks));
        let fetch_ns = coefficients.hand_off_ns(cached(fetch_blocks) - cached(overlap_blocks));
        let fetch_ready_ns = cluster.now_ns() + fetch_ns;
        Decision::Prefill(Placement { worker, fetch_blocks, fetch_ready_ns, fetch_from: None })
    }

    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        if cluster.row(request).prefill_worker.is_none() {
            return;
        }
        self.turn += 1;
        let ChosenWorker { index, fetch_blocks, plan } = self.last;
        let candidate = self.candidates[index];
        let fetch_blocks = plan.map_or(fetch_blocks, |plan| plan.blocks);
        self.feed(cluster).placed(cluster, request, &candidate, fetch_blocks);
    }

    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        self.feed(cluster).started(cluster, request);
    }

    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        self.feed(cluster).ended(cluster, request);
    }
}
