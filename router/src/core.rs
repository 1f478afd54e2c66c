//! The state that serves requests of all listeners.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use dashmap::DashMap;
use serde::Serialize;

use crate::abort::AbortToken;
use crate::admission::{Admission, FreePlaces, Share};
use rustc_hash::FxBuildHasher;
use splitrail_access::Access;
use splitrail_api::error::{Error, ErrorKind};
use splitrail_api::memory_budget::{self, MemoryBudget};
use splitrail_api::name::Name;
use splitrail_api::shares::ClientShare;
use splitrail_config::model::{Config, Discovery, Model, OnNoPrefill, RequestFlow};
use splitrail_fleet::parity::Parity;
use splitrail_fleet::state::WorkerState;
use splitrail_fleet::{Cluster, ServedModel, ServedModels, Worker};
use splitrail_flow::prepare::Preparer;
use splitrail_ledger::audit::Audit;
use splitrail_ledger::decisions::Decisions;
use splitrail_ledger::lines::Lines;
use splitrail_ledger::recorder::Recorder;
use splitrail_policy::Leg;
use splitrail_request_log::access_log::AccessLog;
use splitrail_request_log::traces::Traces;
use splitrail_settings::address_shares::AddressShares;
use splitrail_telemetry::Metrics;
use splitrail_telemetry::clock::unix_ms;
use tokio::sync::Semaphore;

/// Maximum number of dry runs at the same time.
const DRY_RUNS_MAX: usize = 2;

/// Maximum time for which readiness waits for the first index synchronisation.
pub const SYNC_TIMEOUT: Duration = Duration::from_secs(15);

/// A request that is being served.
#[derive(Clone, Debug, Serialize)]
pub struct LiveRequest {
    /// The id that the client sees.
    pub request_id: Name,
    /// The model's configured name.
    pub model: Name,
    /// The endpoint.
    pub endpoint: &'static str,
    /// When it arrived, in milliseconds since 1970.
    pub arrived_unix_ms: u64,
}

/// What is told of requests, operators and credentials: files, the access log and traces.
pub struct RequestLogs {
    /// The ledger file, for billing.
    pub ledger: Lines,
    /// The record file, for replay.
    pub recorder: Recorder,
    /// What is written down about operators and refused credentials.
    pub audit: Audit,
    /// What is written down about requests of clients.
    pub access_log: AccessLog,
    /// Traces of requests.
    pub traces: Traces,
}

/// The router's shared state.
pub struct Core {
    /// The state of the cluster: the served models and their workers.
    pub cluster: Arc<Cluster>,
    /// The router's metrics.
    pub metrics: Arc<Metrics>,
    /// The most recent decisions.
    pub decisions: Decisions,
    /// What is told of requests, operators and credentials.
    pub logs: RequestLogs,
    /// Requests in flight, by the router's internal number. Bounded by `in_flight`.
    pub live: DashMap<u64, LiveRequest, FxBuildHasher>,
    /// Places for requests; `limits.in_flight_max` of them.
    pub in_flight: FreePlaces,
    /// Who may use the router. A reload replaces it.
    pub access: ArcSwap<Access>,
    /// The connections of clients to all listeners.
    pub connections: Arc<AddressShares>,
    /// The places that each client holds.
    pub admission: Arc<Admission>,
    /// Memory held by requests; at most `limits.request_memory_max`.
    pub memory: Arc<MemoryBudget>,
    /// Prepares requests.
    pub preparer: Arc<Preparer>,
    /// The permits of requests that clients have explained, `DRY_RUNS_MAX` in all.
    pub dry_runs: Semaphore,
    /// The same for operators.
    pub operator_dry_runs: Semaphore,
    /// Ends streams that are still open when a drain's grace ends.
    pub abort: AbortToken,
    draining: AtomicBool,
    /// Whether the router was ready once: workers that join later are not waited for.
    settled: AtomicBool,
    started: Instant,
    /// When the router started, in seconds since 1970.
    pub started_unix_s: u64,
}

impl Core {
    /// A core that serves `models`.
    pub fn new(
        models: Vec<Arc<ServedModel>>,
        config: Arc<Config>,
        metrics: Metrics,
        memory: Arc<MemoryBudget>,
        access: Access,
        logs: RequestLogs,
    ) -> Self {
        metrics.set_config(config.digest());
        let limits = &config.limits;
        access.declare(&metrics);
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let metrics = Arc::new(metrics);
        let in_flight = FreePlaces::new(limits.in_flight_max);
        let decisions = Decisions::new(limits.decisions_kept);
        let cluster = Arc::new(Cluster::new(models, config, Arc::clone(&metrics)));
        Self {
            metrics,
            decisions,
            logs,
            live: DashMap::default(),
            in_flight,
            access: ArcSwap::from_pointee(access),
            connections: Arc::default(),
            admission: Arc::default(),
            preparer: Arc::new(Preparer::new(Arc::clone(&cluster), Arc::clone(&memory))),
            memory,
            dry_runs: Semaphore::new(DRY_RUNS_MAX),
            operator_dry_runs: Semaphore::new(DRY_RUNS_MAX),
            abort: AbortToken::default(),
            draining: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            started: Instant::now(),
            started_unix_s: unix_ms() / 1000,
            cluster,
        }
    }

    /// The current state. A request takes it once and uses it to its end.
    pub fn serving(&self) -> Arc<ServedModels> {
        self.cluster.serving()
    }

    /// Refuses a request for which no place is free, before any work is done for it.
    ///
    /// # Errors
    /// No place is free for any client, or for this client.
    pub fn check_free_places(&self, client: Option<ClientShare>) -> Result<(), Error> {
        match self.in_flight.free() {
            0 => Err(self.shed_full()),
            free if self.admission.may_take_place(client, free) => Ok(()),
            _ => Err(self.shed_share()),
        }
    }

    /// Takes places for a request whose body is complete, or for further legs of it;
    /// [`leave`](Self::leave) returns them.
    ///
    /// # Errors
    /// As [`check_free_places`](Self::check_free_places).
    pub fn admit(&self, client: Option<ClientShare>, places: usize) -> Result<Share, Error> {
        let free = self.in_flight.enter(places).ok_or_else(|| self.shed_full())?;
        self.admission.share(client, free, places).ok_or_else(|| {
            self.in_flight.leave(places);
            self.shed_share()
        })
    }

    /// Returns the places of a request that has ended.
    pub fn leave(&self, share: Share) {
        self.in_flight.leave(share.places());
    }

    fn shed(&self, reason: &str, kind: ErrorKind, message: &'static str) -> Error {
        self.metrics.shed.with_label_values(&["none", reason]).inc();
        Error::new(kind, message)
    }

    fn shed_full(&self) -> Error {
        let message = "the router already serves limits.in_flight_max requests";
        self.shed("in_flight_max", ErrorKind::Overloaded, message)
    }

    fn shed_share(&self) -> Error {
        let message = "the router is busy, and this client has its share (limits.fair_by)";
        self.shed("fair_share", ErrorKind::OverShare, message)
    }

    /// Counts a request that is refused because all requests together would hold more than
    /// `limits.request_memory_max`; returns the error.
    pub fn shed_memory(&self) -> Error {
        memory_budget::shed(&self.metrics.shed)
    }

    /// The time since the core was made.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Starts to drain; from now on the router is not ready.
    pub fn drain(&self) {
        self.draining.store(true, Relaxed);
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    /// Why the router is not ready, if it is not: it drains, the keys of no issuer were read and
    /// clients have no other credentials, a model has no worker that is up for
    /// some leg of its flow, or an index is still being built (only within [`SYNC_TIMEOUT`] after
    /// the start, and until the router was ready once).
    pub fn unready(&self) -> Option<String> {
        if self.is_draining() {
            return Some("draining".into());
        }
        if let Some(issuer) = self.access.load().unread_issuer() {
            return Some(format!("no keys of the issuer {issuer} were read yet"));
        }
        for served in &self.serving().models {
            let (config, pool) = (&served.config, &served.pool);
            let roster = pool.roster();
            // A model that may prefill locally works without prefill workers.
            let hands_over = RequestFlow::from(config.flow).hands_over();
            let legs: &[Leg] = match (hands_over, config.on_no_prefill) {
                (true, OnNoPrefill::Fail) => &[Leg::Decode, Leg::Prefill],
                _ => &[Leg::Aggregated],
            };
            let name = served.name();
            let is_in_service = |worker: &Worker| {
                worker.is_up() && worker.is_probed() && worker.state() != WorkerState::Unready
            };
            let takes = |taker: &Worker, source: &Worker| {
                let is_other = taker.serves(Leg::Decode) && taker.index != source.index;
                is_other && is_in_service(taker) && taker.can_take_from(source, config.connector)
            };
            for leg in legs {
                let of_role = || roster.iter().filter(|worker| worker.serves(*leg));
                let is_stranded = |worker: &Worker| {
                    *leg == Leg::Prefill && !roster.iter().any(|taker| takes(taker, worker))
                };
                let serves = |worker: &Arc<Worker>| is_in_service(worker) && !is_stranded(worker);
                if !of_role().any(serves) {
                    // Decode workers are the ones that may prefill locally.
                    let role = match hands_over && *leg == Leg::Aggregated {
                        true => Leg::Decode.name(),
                        false => leg.name(),
                    };
                    let causes = match of_role().next() {
                        Some(_) => causes_out_of_service(of_role(), is_in_service),
                        None => no_workers_found(config),
                    };
                    return Some(format!("model {name} has no {role} worker that serves{causes}"));
                }
            }
            if pool.block_size() == 0 {
                return Some(format!("no worker of model {name} has reported its block size"));
            }
            if self.settled.load(Relaxed) || self.started.elapsed() >= SYNC_TIMEOUT {
                continue;
            }
            let waiting = |worker: &&Arc<Worker>| {
                worker.is_up() && worker.supports_cache_hit_threshold().is_none()
            };
            let unasked = roster.iter().find(waiting);
            if let Some(worker) = unasked.filter(|_| served.asks_for_thresholds()) {
                return Some(format!(
                    "it is not known yet whether worker {} supports cache_hit_threshold",
                    worker.id()
                ));
            }
            let unasked =
                roster.iter().find(|w| w.is_up() && w.kv.parity.parity() == Parity::Pending);
            if let Some(worker) = unasked {
                return Some(format!("parity of worker {} is being tested", worker.id()));
            }
            let unsynced = roster.iter().find(|w| w.is_up() && !w.is_synced());
            if let Some(worker) = unsynced {
                return Some(format!("the index of worker {} is being built", worker.id()));
            }
        }
        self.settled.store(true, Relaxed);
        None
    }
}

/// Where a model without workers of a role looks for them, after a colon.
fn no_workers_found(config: &Model) -> String {
    let sources: Vec<_> = config.discovery.iter().map(Discovery::name).collect();
    match sources.is_empty() {
        true => String::new(),
        false => format!(": none was found by {}", sources.join(", ")),
    }
}

/// Why workers do not serve: of the first three, after a colon. Those that are in service lack a worker that
/// takes their KV.
fn causes_out_of_service<'a>(
    workers: impl Iterator<Item = &'a Arc<Worker>>,
    is_in_service: impl Fn(&Worker) -> bool,
) -> String {
    let cause = |worker: &Arc<Worker>| {
        let id = worker.id();
        if is_in_service(worker) {
            format!("no decode worker in service can take the KV of {id}")
        } else if worker.is_probed() {
            let state = worker.state().name();
            format!("{id} is {state} ({})", worker.health.lifecycle.since().why)
        } else {
            format!("{id} has not been probed yet")
        }
    };
    let causes: Vec<String> = workers.take(3).map(cause).collect();
    if causes.is_empty() { String::new() } else { format!(": {}", causes.join(", ")) }
}
