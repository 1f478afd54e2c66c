//! One run: a trace, a cluster and a policy.

use splitrail_policy::queue::QueueConfig;
use splitrail_policy::threshold::ThresholdConfig;
use splitrail_policy::{Coefficients, Published};
use splitrail_sim::cluster::{
    self, Cluster, ClusterConfig, CostModel, Decision, Outcome, Pool, Router, Workload,
};

use crate::auto::{AutoRouter, Sees};
use crate::driver::{Chooser, PolicyRouter};
use crate::held::HeldRouter;
use crate::named::{Kind, Named};
use crate::oracle::OracleRouter;

/// How a trace is served, but for the policy.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The cluster.
    pub cluster: ClusterConfig,
    /// How often the trace runs as fast as recorded.
    pub rate: f64,
    /// The share of the time for which all prefill workers would be busy if nothing were
    /// cached; sets the rate.
    pub utilisation: Option<f64>,
    /// Whether requests of the same timestamp are spaced up to the next one.
    pub spread: bool,
    /// Share of a prompt's blocks from which a decode worker that holds them computes the
    /// rest itself.
    pub local_threshold: Option<f64>,
    /// Milliseconds between tokens that local prefills may cause, where the threshold finds
    /// itself; oracles know no such thing, and follow `local_threshold`.
    pub auto_tbt_goal_ms: Option<f64>,
    /// How requests wait where a policy has the router's queue before it.
    pub queue: QueueConfig,
    /// Whether such a policy fits its coefficients to what it observes.
    pub learns: bool,
    /// For draws and ties.
    pub seed: u64,
    /// What a router is told of each worker; empty for the truth, but for slowness.
    pub told: Vec<Coefficients>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            cluster: ClusterConfig::default(),
            rate: 1.0,
            utilisation: None,
            spread: false,
            local_threshold: None,
            auto_tbt_goal_ms: None,
            // The cluster tells at once when a prefill ends: nothing is on its way.
            // And a what-if that refuses says nothing of the rest.
            queue: QueueConfig { lead_ms: 0.0, max_waiting: usize::MAX, ..QueueConfig::default() },
            learns: false,
            seed: 1,
            told: Vec::new(),
        }
    }
}

/// A cost model in the words of decisions.
pub fn coefficients(cost: &CostModel) -> Coefficients {
    Coefficients {
        prefill_base_seconds: cost.prefill_base_s,
        prefill_seconds_per_token: cost.prefill_token_s,
        prefill_seconds_per_token_pair: cost.prefill_pair_s,
        hand_off_base_seconds: cost.transfer_base_s,
        kv_bytes_per_token: cost.kv_bytes_per_token,
        bandwidth_bytes_per_second: cost.transfer_bytes_per_s,
        step_base_seconds: cost.step_base_s,
        step_seconds_per_request: cost.step_request_s,
        step_seconds_per_context_token: cost.step_context_s,
    }
}

/// A pool takes from its own queue; nobody is asked.
struct Unasked;

impl Router for Unasked {
    fn arrive(&mut self, _cluster: &Cluster<'_>, _request: usize) -> Decision {
        Decision::Reject
    }
}

impl Scenario {
    /// When requests come.
    pub fn arrivals_ns(&self, workload: &Workload) -> Vec<u64> {
        let ClusterConfig { prefill_workers, cost, .. } = &self.cluster;
        let rate = match self.utilisation {
            Some(utilisation) => workload.rate_for(utilisation, *prefill_workers, cost),
            None => self.rate,
        };
        // A trace of one instant has no rate.
        let rate = if rate > 0.0 { rate } else { 1.0 };
        workload.arrivals_ns(rate, self.spread)
    }

    /// Serves the trace. `watch` is told now and then how many requests have come.
    pub fn run(
        &self,
        workload: &Workload,
        policy: &Named,
        watch: &mut dyn FnMut(usize),
    ) -> Outcome {
        let arrivals_ns = self.arrivals_ns(workload);
        let mut serve = |config: &ClusterConfig, chooser| {
            let router = PolicyRouter::new(chooser, self.told(), self.seed)
                .with_local_threshold(self.local_threshold);
            self.run_router(workload, &arrivals_ns, config, router, watch)
        };
        match &policy.kind {
            Kind::Published(published) => serve(&self.cluster, Chooser::Published(*published)),
            Kind::Configured(policy) => serve(&self.cluster, Chooser::Configured(policy.clone())),
            Kind::Held(policy) => {
                let (told, queue) = (self.told(), self.queue);
                let router = HeldRouter::new(policy.clone(), queue, told, self.seed)
                    .learning(self.learns)
                    .with_local_threshold(self.local_threshold);
                self.run_router(workload, &arrivals_ns, &self.cluster, router, watch)
            }
            // Nothing is exact where iterations mix requests: the nearest thing that is not.
            Kind::Oracle { fetch, .. } if self.cluster.budget_tokens.is_some() => {
                let near = if *fetch { Published::MooncakeFetch } else { Published::Mooncake };
                serve(&self.cluster, Chooser::Published(near))
            }
            Kind::Oracle { look_ahead, fetch } => {
                let mut router = OracleRouter::new(*look_ahead, *fetch, self.local_threshold);
                cluster::run(workload, &arrivals_ns, &self.cluster, &mut router, watch)
            }
            Kind::Pooled(pool) => {
                let config = ClusterConfig { pool: *pool, ..self.cluster.clone() };
                debug_assert_ne!(*pool, Pool::Separate);
                cluster::run(workload, &arrivals_ns, &config, &mut Unasked, watch)
            }
        }
    }

    /// Runs a router, behind the threshold that finds itself if that is wanted.
    fn run_router<R: Sees>(
        &self,
        workload: &Workload,
        arrivals_ns: &[u64],
        config: &ClusterConfig,
        mut router: R,
        watch: &mut dyn FnMut(usize),
    ) -> Outcome {
        let Some(tbt_goal_ms) = self.auto_tbt_goal_ms else {
            return cluster::run(workload, arrivals_ns, config, &mut router, watch);
        };
        // An operator knows the engine's chunks; interference is left to be learned.
        let chunk_tokens = config.chunk_tokens;
        let auto = ThresholdConfig { tbt_goal_ms, chunk_tokens, ..ThresholdConfig::default() };
        let told = coefficients(&config.cost);
        let mut router = AutoRouter::new(router, auto, told, self.seed);
        cluster::run(workload, arrivals_ns, config, &mut router, watch)
    }

    fn told(&self) -> Vec<Coefficients> {
        match self.told.is_empty() {
            true => vec![coefficients(&self.cluster.cost)],
            false => self.told.clone(),
        }
    }
}
