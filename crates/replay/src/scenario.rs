//! One run: a trace, a cluster and a policy.

use splitrail_policy::Coefficients;
use splitrail_policy::queue::QueueConfig;
use splitrail_policy::threshold::ThresholdConfig;
use splitrail_sim::cluster::{
    self, Cluster, ClusterConfig, CostModel, Decision, Pool, Router, SimulationResult, Workload,
};

use crate::auto::{AutoRouter, PrefillView};
use crate::driver::{Chooser, PolicyRouter};
use crate::fetches::FetchBounds;
use crate::held::HeldRouter;
use crate::named::{NamedPolicy, ReplayPolicy};
use crate::oracle::OracleRouter;
use crate::placement::PlacementRecord;
use crate::published::PublishedPolicy;

/// How a trace is served, except for the policy.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The cluster.
    pub cluster: ClusterConfig,
    /// The speed of the trace relative to the recording.
    pub rate: f64,
    /// The share of time for which all prefill workers would be busy if nothing were cached;
    /// determines the rate.
    pub utilisation: Option<f64>,
    /// Whether requests of the same timestamp are spaced evenly up to the next one.
    pub spread: bool,
    /// The time between tokens in milliseconds that local prefills may cause, if the threshold is
    /// learned. The oracle policies cannot learn it, and use the cluster's `local_threshold`.
    pub auto_tbt_goal_ms: Option<f64>,
    /// The router's queue, for policies behind it.
    pub queue: QueueConfig,
    /// Whether such a policy fits its coefficients to observations.
    pub learns: bool,
    /// The bounds of fetches of prefixes between workers, under the policies of a configuration;
    /// `None` if they fetch nothing.
    pub fetches: Option<FetchBounds>,
    /// The seed of random choices and tie-breaks.
    pub seed: u64,
    /// The coefficients that a router assumes for each worker; if empty, the true ones without
    /// slowness.
    pub assumed_coefficients: Vec<Coefficients>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            cluster: ClusterConfig::default(),
            rate: 1.0,
            utilisation: None,
            spread: false,
            auto_tbt_goal_ms: None,
            // The cluster reports the end of a prefill without delay, so no lead is needed. And a
            // replay in which requests are refused says nothing about the rest.
            queue: QueueConfig { lead_ms: 0.0, max_waiting: usize::MAX, ..QueueConfig::default() },
            learns: false,
            fetches: None,
            seed: 1,
            assumed_coefficients: Vec::new(),
        }
    }
}

/// Converts a cost model to the coefficients of decisions.
pub fn coefficients(cost: &CostModel) -> Coefficients {
    Coefficients {
        prefill_base_seconds: cost.prefill_base_s,
        prefill_seconds_per_token: cost.prefill_token_s,
        prefill_seconds_per_token_pair: cost.prefill_pair_s,
        hand_off_base_seconds: cost.transfer_base_s,
        kv_bytes_per_token: cost.kv_bytes_per_token,
        bandwidth_bytes_per_second: cost.transfer_bytes_per_s,
        fetch_base_seconds: cost.fetch_base_s,
        fetch_bytes_per_second: cost.transfer_bytes_per_s,
        step_base_seconds: cost.step_base_s,
        step_seconds_per_request: cost.step_request_s,
        step_seconds_per_context_token: cost.step_context_s,
        // A replay has no slower tiers.
        ..Coefficients::default()
    }
}

/// The cost model of a cluster whose workers have these coefficients.
pub fn cost_model(costs: &Coefficients) -> CostModel {
    CostModel {
        prefill_base_s: costs.prefill_base_seconds,
        prefill_token_s: costs.prefill_seconds_per_token,
        prefill_pair_s: costs.prefill_seconds_per_token_pair,
        transfer_base_s: costs.hand_off_base_seconds,
        fetch_base_s: costs.fetch_base_seconds,
        kv_bytes_per_token: costs.kv_bytes_per_token,
        transfer_bytes_per_s: costs.bandwidth_bytes_per_second,
        step_base_s: costs.step_base_seconds,
        step_request_s: costs.step_seconds_per_request,
        step_context_s: costs.step_seconds_per_context_token,
    }
}

/// For a pool, whose workers take from their common queue without a router.
struct NoRouter;

impl Router for NoRouter {
    fn arrive(&mut self, _cluster: &Cluster<'_>, _request: usize) -> Decision {
        Decision::Reject
    }
}

impl Scenario {
    /// The arrival time of each request, in nanoseconds.
    pub fn arrivals_ns(&self, workload: &Workload) -> Vec<u64> {
        let ClusterConfig { prefill_workers, cost, .. } = &self.cluster;
        let rate = match self.utilisation {
            Some(utilisation) => workload.rate_for(utilisation, *prefill_workers, cost),
            None => self.rate,
        };
        // A trace with a single timestamp has no rate.
        let rate = if rate > 0.0 { rate } else { 1.0 };
        workload.arrivals_ns(rate, self.spread)
    }

    /// Serves the trace, and records a placement. `watch` is called from time to time with the
    /// number of requests that have arrived.
    pub fn run(
        &self,
        workload: &Workload,
        policy: &NamedPolicy,
        record: &mut PlacementRecord,
        watch: &mut dyn FnMut(usize),
    ) -> SimulationResult {
        let arrivals_ns = self.arrivals_ns(workload);
        let mut serve = |chooser| {
            let assumed_coefficients = self.assumed_coefficients();
            let router = PolicyRouter::new(chooser, assumed_coefficients, self.fetches, self.seed);
            self.run_router(workload, &arrivals_ns, router, record, watch)
        };
        match &policy.kind {
            ReplayPolicy::Published(published) => serve(Chooser::Published(*published)),
            ReplayPolicy::Configured(policy) => serve(Chooser::Configured(policy.clone())),
            ReplayPolicy::Held(policy) => {
                let router = HeldRouter::new(
                    policy.clone(),
                    self.queue,
                    self.assumed_coefficients(),
                    self.learns,
                    self.fetches,
                    self.seed,
                );
                self.run_router(workload, &arrivals_ns, router, record, watch)
            }
            // If iterations mix requests, no projection is exact: uses the most similar policy that
            // needs none.
            ReplayPolicy::Oracle { fetch, .. } if self.cluster.budget_tokens.is_some() => {
                let near =
                    if *fetch { PublishedPolicy::MooncakeFetch } else { PublishedPolicy::Mooncake };
                serve(Chooser::Published(near))
            }
            ReplayPolicy::Oracle { look_ahead, fetch } => {
                let mut router = OracleRouter::new(*look_ahead, *fetch);
                cluster::run(workload, &arrivals_ns, &self.cluster, &mut router, watch)
            }
            ReplayPolicy::Pooled(pool) => {
                let config = ClusterConfig { pool: *pool, ..self.cluster.clone() };
                debug_assert_ne!(*pool, Pool::Separate);
                cluster::run(workload, &arrivals_ns, &config, &mut NoRouter, watch)
            }
        }
    }

    /// Runs a router, behind the learned threshold if that is configured.
    fn run_router<R: PrefillView>(
        &self,
        workload: &Workload,
        arrivals_ns: &[u64],
        mut router: R,
        record: &mut PlacementRecord,
        watch: &mut dyn FnMut(usize),
    ) -> SimulationResult {
        let config = &self.cluster;
        *router.placement_record() = std::mem::take(record);
        let Some(tbt_goal_ms) = self.auto_tbt_goal_ms else {
            let result = cluster::run(workload, arrivals_ns, config, &mut router, watch);
            *record = std::mem::take(router.placement_record());
            return result;
        };
        // An operator knows the engine's chunk size; the interference must be learned.
        let chunk_tokens = config.chunk_tokens;
        let auto = ThresholdConfig { tbt_goal_ms, chunk_tokens, ..ThresholdConfig::default() };
        let assumed_coefficients = coefficients(&config.cost);
        let mut router = AutoRouter::new(router, auto, assumed_coefficients, self.seed);
        let result = cluster::run(workload, arrivals_ns, config, &mut router, watch);
        *record = std::mem::take(router.policy().placement_record());
        result
    }

    fn assumed_coefficients(&self) -> Vec<Coefficients> {
        match self.assumed_coefficients.is_empty() {
            true => vec![coefficients(&self.cluster.cost)],
            false => self.assumed_coefficients.clone(),
        }
    }
}
