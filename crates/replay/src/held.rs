//! A policy behind the router's own queue: requests are held, and assigned to a worker shortly
//! before it has nothing to do.

use std::collections::VecDeque;

use splitrail_policy::learn::{Learner, UsualScales};
use splitrail_policy::queue::{Item, Payer, Queue, QueueConfig, View, shortest_prefill_ms};
use splitrail_policy::{Candidate, Coefficients, FetchPlan, Policy, Source, mix};
use splitrail_sim::cluster::{Cluster, Decision, Peer, Router};

use crate::auto::PrefillView;
use crate::feed::Feed;
use crate::fetches::FetchBounds;
use crate::placement::PlacementRecord;
use crate::published::VisibleBlocks;

/// Holds requests, and places them by a policy.
#[derive(Debug)]
pub struct HeldRouter {
    policy: Policy,
    queue: Queue<usize>,
    state: Option<ClusterView>,
    assumed_coefficients: Vec<Coefficients>,
    learns: bool,
    /// The bounds of fetches between workers, if they fetch.
    fetches: Option<FetchBounds>,
    /// Requests that were released in the last round and are not placed yet.
    released: VecDeque<(usize, Candidate, Option<FetchPlan>)>,
    /// Whether something has happened since the last round.
    due: bool,
    /// When the next round is due, if workers fetch: a fetch begins before its worker is free.
    due_ns: Option<u64>,
    seed: u64,
    placement_record: PlacementRecord,
}

/// What is known of the prefill workers.
#[derive(Debug)]
struct ClusterView {
    feed: Feed,
    workers: Vec<KnownWorker>,
    /// By request: when its prefill started.
    began_ns: Vec<u64>,
}

/// What is known of one prefill worker.
#[derive(Debug)]
struct KnownWorker {
    learner: Option<Learner>,
    /// Prefills that it has started, and when they are predicted to end.
    running: Vec<(usize, u64)>,
}

impl HeldRouter {
    /// `assumed_coefficients` are the initial ones of each worker, the last one for all others. If
    /// the router `learns`, they are replaced by what it observes. `fetches` bounds the fetches
    /// between workers, if they fetch.
    pub fn new(
        policy: Policy,
        queue: QueueConfig,
        assumed_coefficients: Vec<Coefficients>,
        learns: bool,
        fetches: Option<FetchBounds>,
        seed: u64,
    ) -> Self {
        Self {
            policy,
            queue: Queue::new(queue),
            state: None,
            assumed_coefficients,
            learns,
            fetches,
            released: VecDeque::new(),
            due: false,
            due_ns: None,
            seed,
            placement_record: PlacementRecord::default(),
        }
    }

    fn state(&mut self, cluster: &Cluster<'_>) -> &mut ClusterView {
        let (assumed_coefficients, learns, fetches) =
            (&self.assumed_coefficients, self.learns, self.fetches);
        self.state
            .get_or_insert_with(|| ClusterView::new(cluster, assumed_coefficients, learns, fetches))
    }

    fn round(&mut self, cluster: &Cluster<'_>) {
        self.due = false;
        let Some(state) = &self.state else { return };
        let round =
            self.queue.round(cluster.now_ns(), &self.policy, &mut QueueView { cluster, state });
        self.due_ns = round.due_ns.filter(|_| self.fetches.is_some());
        for release in &round.releases {
            self.placement_record.note_release(&self.policy, release);
        }
        let placed = round.releases.into_iter();
        self.released.extend(
            placed.map(|one| (one.item.key, one.candidates[one.choice.index], one.choice.fetch())),
        );
    }
}

impl ClusterView {
    fn new(
        cluster: &Cluster<'_>,
        assumed_coefficients: &[Coefficients],
        learns: bool,
        fetches: Option<FetchBounds>,
    ) -> Self {
        let known = |worker: usize| {
            let prior = assumed_coefficients
                .get(worker)
                .or(assumed_coefficients.last())
                .copied()
                .unwrap_or_default();
            let learner = learns.then(|| Learner::new(prior));
            KnownWorker { learner, running: Vec::new() }
        };
        Self {
            feed: Feed::new(cluster, VisibleBlocks::Pending, assumed_coefficients, fetches),
            workers: (0..cluster.prefill_workers()).map(known).collect(),
            began_ns: vec![0; cluster.workload().requests().len()],
        }
    }

    fn candidates(&self, cluster: &Cluster<'_>, request: usize, out: &mut Vec<Candidate>) {
        self.feed.candidates(cluster, request, out);
        let now_ns = cluster.now_ns();
        for (candidate, known) in out.iter_mut().zip(&self.workers) {
            let Some(learner) = &known.learner else { continue };
            candidate.coefficients = learner.coefficients(now_ns);
            // A learning router only predicts the end of a prefill, but knows that it has not ended
            // yet.
            let ends_ns = known.running.iter().map(|(_, ends_ns)| *ends_ns).max();
            let left_ns = ends_ns.map_or(0, |ends_ns| ends_ns.saturating_sub(now_ns).max(1));
            candidate.wait_ns += left_ns;
            candidate.wait_ns -= cluster.running_left_ns(candidate.worker.place());
        }
    }
}

/// The cluster from the queue's point of view.
struct QueueView<'a, 'b> {
    cluster: &'a Cluster<'b>,
    state: &'a ClusterView,
}

impl View<usize> for QueueView<'_, '_> {
    fn candidates(&mut self, key: &usize, out: &mut Vec<Candidate>) {
        self.state.candidates(self.cluster, *key, out);
    }

    fn sources(&mut self, key: &usize, out: &mut Vec<Source>) {
        self.state.feed.sources(self.cluster, *key, out);
    }

    fn shared_blocks(&self, one: &usize, other: &usize) -> u32 {
        let workload = self.cluster.workload();
        let pairs = workload.blocks(*one).iter().zip(workload.blocks(*other));
        pairs.take_while(|(a, b)| a == b).count() as u32
    }
}

impl PrefillView for HeldRouter {
    fn see(
        &mut self,
        cluster: &Cluster<'_>,
        request: usize,
        out: &mut Vec<Candidate>,
    ) -> (usize, f64) {
        let state = self.state(cluster);
        state.candidates(cluster, request, out);
        let query = state.feed.query(cluster, request, 0, 0);
        let shortest_ms = shortest_prefill_ms(out, &query);
        (self.queue.len(), self.queue.ahead_ms(0, shortest_ms, out.len()))
    }

    fn feed(&mut self, cluster: &Cluster<'_>) -> &mut Feed {
        &mut self.state(cluster).feed
    }

    fn placement_record(&mut self) -> &mut PlacementRecord {
        &mut self.placement_record
    }
}

impl Router for HeldRouter {
    fn arrive(&mut self, cluster: &Cluster<'_>, request: usize) -> Decision {
        let now_ns = cluster.now_ns();
        let draw = mix(self.seed ^ mix(request as u64));
        let state = self.state(cluster);
        state.feed.arrived(cluster, request);
        let query = state.feed.query(cluster, request, request as u64, draw);
        let item = Item {
            key: request,
            arrival_ns: now_ns,
            class: 0,
            payer: Payer::EVERYONE,
            deadline_ns: None,
            query,
        };
        self.due = true;
        let Some(state) = &self.state else { return Decision::Reject };
        match self.queue.push(item, now_ns, &mut QueueView { cluster, state }) {
            Ok(_) => Decision::Hold,
            Err(_) => Decision::Reject,
        }
    }

    fn release(&mut self, cluster: &Cluster<'_>) -> Option<(usize, Decision)> {
        let is_time = self.due_ns.is_some_and(|due_ns| due_ns <= cluster.now_ns());
        if self.released.is_empty() && (self.due || is_time) {
            self.round(cluster);
        }
        let (request, candidate, fetch) = self.released.front_mut()?;
        let worker = candidate.worker.place();
        let feed = &self.state.as_ref()?.feed;
        *fetch = feed.admitted(cluster, Peer::Prefill(worker), *fetch);
        Some((*request, Decision::Prefill(Feed::placement(cluster, worker, *fetch))))
    }

    fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    fn placed(&mut self, cluster: &Cluster<'_>, request: usize) {
        if cluster.row(request).prefill_worker.is_none() {
            return;
        }
        let Some((_, candidate, fetch)) = self.released.pop_front() else { return };
        let fetch_blocks = fetch.map_or(0, |fetch| fetch.blocks);
        self.state(cluster).feed.placed(cluster, request, &candidate, fetch_blocks);
    }

    fn prefill_started(&mut self, cluster: &Cluster<'_>, request: usize) {
        let row = cluster.row(request);
        let Some(worker) = row.prefill_worker.map(|worker| worker as usize) else { return };
        let (now_ns, hits) = (cluster.now_ns(), row.hit_blocks);
        let input = u64::from(cluster.workload().requests()[request].input_tokens);
        let cached = u64::from(cluster.workload().cached_tokens(request, hits));
        let state = self.state(cluster);
        state.feed.started(cluster, request);
        state.began_ns[request] = now_ns;
        let known = &mut state.workers[worker];
        if let Some(learner) = &known.learner {
            let takes_ns = learner.coefficients(now_ns).prefill_ns(input, cached);
            known.running.push((request, now_ns + takes_ns));
        }
    }

    fn prefill_ended(&mut self, cluster: &Cluster<'_>, request: usize) {
        self.due = true;
        let row = cluster.row(request);
        let Some(worker) = row.prefill_worker.map(|worker| worker as usize) else { return };
        let (now_ns, hits) = (cluster.now_ns(), row.hit_blocks);
        let input = u64::from(cluster.workload().requests()[request].input_tokens);
        let cached = u64::from(cluster.workload().cached_tokens(request, hits));
        let state = self.state(cluster);
        state.feed.ended(cluster, request);
        let seconds = (now_ns - state.began_ns[request]) as f64 / 1e9;
        let known = &mut state.workers[worker];
        known.running.retain(|(running, _)| *running != request);
        if let Some(learner) = &mut known.learner {
            learner.prefill(now_ns, input - cached, cached, seconds);
            let learners = state.workers.iter().filter_map(|known| known.learner.as_ref());
            let usual = UsualScales::of(learners);
            let learners = state.workers.iter_mut().filter_map(|known| known.learner.as_mut());
            learners.for_each(|learner| learner.set_usual(&usual));
        }
    }
}
