//! One engine as the router sees it: configuration, health, load and what it supports.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use http::uri::Authority;
use prometheus::IntCounter;
use splitrail_engine::EngineKind;
use splitrail_engine::load::EngineLoad;
use tokio_util::sync::CancellationToken;

use super::bootstrap::Bootstrap;
use super::drift::Drift;
use super::engine_facts::EngineFacts;
use super::event_stats::EventStats;
use super::failed_hand_offs::FailedHandOffs;
use super::last_block::LastBlock;
use super::load_report::{LOAD_STALE, LoadReport, RecentLoad};
use super::missing_hand_offs::MissingHandOffs;
use super::parity::ParityMonitor;
use super::prewarm::PrewarmState;
use super::push::PushState;
use super::ranks::Ranks;
use super::read_back::ReadBackSupport;
use super::resync::Resync;
use super::shim_report::{EventOrigin, ShimReport};
use super::usage_stats::UsageStats;
use splitrail_api::error::Error;
use splitrail_config::model::{GateKind, Role, WorkerConfig};
use splitrail_engine_client::Engine;
use splitrail_engine_client::echoes::Echoes;
use splitrail_policy::{Leg, Location, WorkerIndex};
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::metrics::Scope;
use splitrail_telemetry::{Metrics, WorkerSeries};
use splitrail_workload::booking::{BookedSums, Booking};
use splitrail_workload::costs::Costs;
use splitrail_workload::endpoint_support::EndpointSupport;
use splitrail_workload::fetches::PeerFetches;
use splitrail_workload::pace::Pace;

mod health;
mod succession;

pub use health::{UnreadyCause, WorkerHealth};

/// One engine as the router sees it.
#[derive(Debug)]
pub struct Worker {
    /// The worker's number in its model's pool. No other worker ever has the same number.
    pub index: WorkerIndex,
    /// The worker's configuration, merged from all sources.
    pub config: WorkerConfig,
    /// Where the worker is reached.
    pub address: WorkerAddress,
    /// Whether the worker can do its work, and does.
    pub health: WorkerHealth,
    /// What is known of the engine and of what it supports.
    pub engine: EngineState,
    /// How far the index of the worker's blocks is to be trusted.
    pub kv: IndexTrust,
    /// The work that the worker has, and how long work takes.
    pub load: WorkerLoad,
    /// The data-parallel ranks.
    pub ranks: Ranks,
    /// What was learned of moving KV from and to the worker.
    pub transfer: TransferState,
    /// What the worker's shim reports.
    pub shim_report: ShimReport,
    /// When the worker was first asked for this, or that of the worker whose place it has taken.
    joined: OnceLock<Instant>,
    /// The worker's metrics.
    pub counts: WorkerCounts,
    /// Cancelled when the worker leaves the fleet.
    pub gone: CancellationToken,
}

/// Where a worker is reached.
#[derive(Debug)]
pub struct WorkerAddress {
    /// Host and port of the HTTP address.
    pub authority: Authority,
    /// Whether the URL is `https`.
    uses_tls: bool,
    /// Whether the host must resolve to an address within the allowed networks, because the worker
    /// is not listed in the configuration.
    pub guarded: bool,
    /// Whether the same holds for the host that publishes the KV events.
    pub guards_events: bool,
}

/// What is known of a worker's engine.
#[derive(Debug)]
pub struct EngineState {
    /// Which engine it is.
    pub kind: EngineKind,
    /// What the engine reports about itself.
    pub facts: EngineFacts,
    /// The endpoints that the engine lacks, and the circuit breaker of endpoints that need no model.
    pub endpoint_support: EndpointSupport,
    /// Which of the engine's replies carry the id of their request.
    pub echoes: Echoes,
    /// Whether the engine supports `cache_hit_threshold`: 0 is unknown, 1 is no, 2 is yes.
    supports_cache_hit_threshold: AtomicU8,
}

/// How far the index of a worker's blocks is to be trusted.
#[derive(Debug)]
pub struct IndexTrust {
    /// Compares the cached tokens that the worker reports with the index's estimates.
    pub usage_stats: UsageStats,
    /// Limits log lines about usage that cannot be used as the engine reports it.
    pub usage_log: LogThrottle,
    /// Whether the engine drops the last block of each hit.
    pub last_block: LastBlock,
    /// The reaction to drift of the index.
    pub drift: Drift,
    /// Whether worker and router agree on tokens and block hashes.
    pub parity: ParityMonitor,
    /// The number of blocks that the index has of the worker, over all ranks.
    pub held_blocks: AtomicUsize,
    /// Counts of the worker's KV events.
    pub event_stats: EventStats,
    /// Asks the task that follows the worker's KV events to read all of them again.
    pub resync: Resync,
    /// Whether the first synchronisation of the index is over, or the worker has no KV events.
    synced: AtomicBool,
}

/// The work that a worker has, and how long work takes.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    /// The work that the router has assigned to the worker, over all ranks.
    pub booked: Arc<BookedSums>,
    /// The learned cost model of the worker.
    pub costs: Arc<Costs>,
    /// How fast the engine's queue moves.
    pub pace: Pace,
    /// The time of the last report that no request waits in the engine's queue.
    idle_at: ArcSwapOption<Instant>,
    /// The last load report.
    report: ArcSwap<LoadReport>,
    /// Why the last request for a load report failed; `None` after one that succeeded.
    failure: ArcSwapOption<String>,
}

/// What was learned of moving KV from and to a worker.
#[derive(Debug, Default)]
pub struct TransferState {
    /// The bootstrap server, for connectors that send both legs at once.
    pub bootstrap: Option<Bootstrap>,
    /// Prefixes that the worker takes from other workers, or others from it.
    pub fetches: Arc<PeerFetches>,
    /// How far the worker is prewarmed.
    pub prewarm: PrewarmState,
    /// What is known of the engine if KV is pushed from or to it.
    pub push: PushState,
    /// What was learned of read-back with the worker.
    pub read_back: ReadBackSupport,
    /// What was learned of the worker's hand-offs.
    pub missing_hand_offs: MissingHandOffs,
    /// Decode legs that have failed on them.
    pub failed_hand_offs: FailedHandOffs,
    /// Where the worker is.
    pub location: Location,
}

/// The metrics that a worker itself updates.
#[derive(Debug, Default)]
pub struct WorkerCounts {
    /// The metrics of the worker's legs.
    pub series: WorkerSeries,
    /// Counts requests that were sent again because a reused connection had ended.
    resent: Option<IntCounter>,
    unsolicited: Option<IntCounter>,
    /// Counts replies that belonged to another request.
    foreign_replies: Option<IntCounter>,
}

impl Worker {
    /// A worker that is presumed alive until a probe fails.
    pub fn new(index: WorkerIndex, config: WorkerConfig, authority: Authority) -> Self {
        let facts = EngineFacts::new(&config);
        let supports = config.supports_cache_hit_threshold;
        Self {
            index,
            health: WorkerHealth::new(&config.id),
            kv: IndexTrust {
                usage_stats: UsageStats::default(),
                last_block: LastBlock::default(),
                held_blocks: AtomicUsize::new(0),
                usage_log: LogThrottle::default(),
                drift: Drift::default(),
                parity: ParityMonitor::default(),
                event_stats: EventStats::default(),
                resync: Resync::default(),
                synced: AtomicBool::new(facts.publishes() == Some(false)),
            },
            engine: EngineState {
                kind: EngineKind::default(),
                facts,
                endpoint_support: EndpointSupport::default(),
                echoes: Echoes::default(),
                supports_cache_hit_threshold: AtomicU8::new(
                    supports.map_or(0, |yes| 1 + u8::from(yes)),
                ),
            },
            load: WorkerLoad::default(),
            ranks: Ranks::new(config.data_parallel_ranks, config.takes_rank_header),
            transfer: TransferState {
                bootstrap: Bootstrap::new(config.bootstrap.as_deref(), &authority),
                location: config.location.as_deref().map(Location::of).unwrap_or_default(),
                ..TransferState::default()
            },
            shim_report: ShimReport::default(),
            joined: OnceLock::new(),
            counts: WorkerCounts::default(),
            gone: CancellationToken::new(),
            address: WorkerAddress {
                authority,
                uses_tls: config.url.starts_with("https://"),
                guarded: false,
                guards_events: false,
            },
            config,
        }
    }

    /// Creates the worker's series, and sets the counters that the worker itself updates.
    pub fn with_counts(mut self, model: &str, metrics: &Metrics) -> Self {
        let legs = [Leg::Prefill, Leg::Decode].into_iter().filter(|leg| self.serves(*leg));
        let legs: Vec<_> = legs.map(Leg::name).collect();
        let (worker, role) = (self.id(), self.config.role.name());
        metrics.declare(&Scope::Worker { model, worker, role, legs: &legs });
        let labels = [model, worker];
        self.counts = WorkerCounts {
            series: WorkerSeries::new(metrics, model, worker),
            resent: Some(metrics.resent_requests.with_label_values(&labels)),
            foreign_replies: Some(metrics.foreign_replies.with_label_values(&labels)),
            unsolicited: Some(metrics.unsolicited_data_connections.with_label_values(&labels)),
        };
        self
    }

    /// The name of the worker's model, for logs: ids of workers are unique in their model only.
    pub fn model(&self) -> &str {
        self.health.lifecycle.model()
    }

    /// When the worker joined.
    pub fn joined(&self) -> Instant {
        *self.joined.get_or_init(Instant::now)
    }

    /// The worker's id.
    pub fn id(&self) -> &str {
        &self.config.id
    }

    /// Whether the first synchronisation of the index is over.
    pub fn is_synced(&self) -> bool {
        self.kv.synced.load(Relaxed)
    }

    /// Records that the first synchronisation of the index is still to come.
    pub fn set_unsynced(&self) {
        self.kv.synced.store(false, Relaxed);
    }

    /// Whether the worker or its shim reports KV blocks.
    pub fn tells_blocks(&self) -> bool {
        self.engine.facts.publishes() == Some(true) || self.shim_report.publishes()
    }

    /// How the worker's KV events reach the router; `None` if the worker has no source of KV events.
    pub fn event_origin(&self) -> Option<EventOrigin> {
        self.tells_blocks().then(|| match self.shim_report.capabilities() {
            Some(_) => EventOrigin::Shim,
            None => EventOrigin::Engine,
        })
    }

    /// Records that the first synchronisation of the index is over.
    pub fn set_synced(&self) {
        self.kv.synced.store(true, Relaxed);
    }

    /// Whether the KV events of all ranks are being received, so that the index matches what the
    /// worker holds.
    pub fn events_are_current(&self) -> bool {
        self.ranks.are_current()
    }

    /// Records for all ranks whether their KV events are being received.
    pub fn set_events_current(&self, current: bool) {
        self.ranks.set_all_current(current);
    }

    /// Whether the overlap in the index may be used: events are being received, the worker agrees
    /// with the router on tokens and blocks, and drift has not been given up on. Of one rank if
    /// requests are pinned to it, otherwise of all.
    pub fn overlap_is_believed(&self, rank: Option<u16>) -> bool {
        let current = match rank {
            Some(rank) => self.ranks.is_current(rank),
            None => self.ranks.are_current(),
        };
        current && self.takes_part_in_kv_routing()
    }

    /// Whether the index of the worker would be used if its events are being received.
    pub fn takes_part_in_kv_routing(&self) -> bool {
        self.kv.parity.is_believed() && !self.kv.drift.has_given_up() && !self.is_quarantined()
    }

    /// Restarts the measurements of drift after the worker's part of the index was dropped.
    pub fn index_begins_anew(&self) {
        self.kv.usage_stats.restart();
        self.kv.drift.index_begins_anew();
    }

    /// Whether the index left out blocks of the worker because of its size limit. The overlap is
    /// then a lower bound.
    pub fn index_is_truncated(&self) -> bool {
        self.ranks.is_any_truncated()
    }

    /// Whether the engine has cache groups that are not followed, so that it may find less of a prompt
    /// than the index says. The overlap then influences the choice of a worker and nothing else.
    pub fn overlap_is_upper_bound(&self) -> bool {
        !self.kv.event_stats.unfollowed_groups().is_empty()
    }

    /// Whether the engine supports `cache_hit_threshold`; `None` if unknown.
    pub fn supports_cache_hit_threshold(&self) -> Option<bool> {
        match self.engine.supports_cache_hit_threshold.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Whether a leg to the engine may have a `cache_hit_threshold`. Until it is known whether the
    /// engine supports it, it does if engines are meant to apply the threshold.
    pub fn takes_cache_hit_threshold(&self, gate: GateKind) -> bool {
        self.supports_cache_hit_threshold().unwrap_or(gate == GateKind::Engine)
    }

    /// Records whether the engine supports `cache_hit_threshold`; `None` forgets it because the
    /// process may be another one. A configured value takes precedence.
    pub fn set_supports_cache_hit_threshold(&self, supports: Option<bool>) {
        let known = self.config.supports_cache_hit_threshold.or(supports);
        self.engine
            .supports_cache_hit_threshold
            .store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// The last load report, unless it is older than [`LOAD_STALE`].
    pub fn load(&self, now: Instant) -> Option<RecentLoad> {
        self.load_within(now, LOAD_STALE)
    }

    /// The last load report, unless its age has reached `max_age`.
    pub fn load_within(&self, now: Instant, max_age: Duration) -> Option<RecentLoad> {
        RecentLoad::within(self.load.report.load(), now, max_age)
    }

    /// Why the engine reports no load; `None` if it does, or was not asked yet.
    pub fn load_failure(&self) -> Option<Arc<String>> {
        self.load.failure.load_full()
    }

    /// Records that a request for a load report failed. Without reports, the worker's load is what the
    /// router has booked.
    pub fn record_load_failure(&self, error: &Error) {
        if self.load.failure.load().is_none() {
            let (model, worker) = (self.model(), self.id());
            tracing::warn!(model, worker, %error, "the engine reports no load: only its bookings count");
        }
        self.load.failure.store(Some(Arc::new(error.to_string())));
    }

    /// Records a load report that was requested at `asked`.
    pub fn set_load(&self, asked: Instant, load: EngineLoad) {
        self.load.failure.store(None);
        if load.waiting == Some(0) {
            self.load.idle_at.store(Some(Arc::new(asked)));
        }
        if load.tokens_total > self.load.report.load().load.tokens_total {
            self.health.progress.record_sign();
        }
        self.load.report.store(Arc::new(LoadReport { asked: Some(asked), load }));
    }

    /// Number of requests in the engine's queue by its last report; 0 if unknown.
    pub fn waiting(&self, now: Instant) -> u64 {
        self.load(now).and_then(|load| load.waiting).unwrap_or(0)
    }

    /// Whether the engine has answered a question for its load since an instant.
    pub fn has_reported_since(&self, since: Instant) -> bool {
        self.load.report.load().asked.is_some_and(|asked| asked >= since)
    }

    /// Whether every load report since an instant says that requests wait, so that a request that
    /// was sent then may be among them. `false` without a report.
    pub fn has_queued_since(&self, since: Instant) -> bool {
        let report = self.load.report.load();
        let queues = report.asked.is_some_and(|asked| asked >= since)
            && report.load.waiting.is_some_and(|waiting| waiting > 0);
        queues && !self.has_been_idle_since(since)
    }

    /// Whether a load report since an instant says that no request waits.
    pub fn has_been_idle_since(&self, since: Instant) -> bool {
        self.load.idle_at.load().as_deref().is_some_and(|idle| *idle >= since)
    }

    /// Books a leg on the worker, and on a rank if the leg is pinned to it: `prefill_tokens` to
    /// compute, `active_tokens` to hold.
    pub fn book(&self, rank: Option<u16>, prefill_tokens: u64, active_tokens: u64) -> Booking {
        let of_rank = rank.and_then(|rank| self.ranks.get(rank));
        let of_rank = of_rank.map(|rank| Arc::clone(&rank.booked));
        let (now, requests) = (Instant::now(), u64::from(self.load.booked.requests()) + 1);
        let times = self.load.costs.leg_times(now, prefill_tokens, active_tokens, requests);
        Booking::both(Arc::clone(&self.load.booked), of_rank, prefill_tokens, active_tokens)
            .with_progress(self.health.progress.begin(times, now))
    }

    /// Whether the worker's role allows a leg.
    pub fn serves(&self, leg: Leg) -> bool {
        match (leg, self.config.role) {
            (_, Role::Both) => true,
            (Leg::Prefill, role) => role == Role::Prefill,
            // A decode worker without a hand-off computes the prompt by itself.
            (Leg::Decode | Leg::Aggregated, role) => role == Role::Decode,
        }
    }
}

impl Engine for Worker {
    fn id(&self) -> &str {
        &self.config.id
    }

    fn model(&self) -> &str {
        self.health.lifecycle.model()
    }

    fn authority(&self) -> &Authority {
        &self.address.authority
    }

    /// Unique among all workers of a model and, as far as the router noticed, among processes of
    /// one worker.
    fn process(&self) -> u64 {
        u64::from(self.index.0) << 32 | u64::from(self.health.presence.processes())
    }

    fn uses_tls(&self) -> bool {
        self.address.uses_tls
    }

    fn is_guarded(&self) -> bool {
        self.address.guarded
    }

    fn has_shim(&self) -> bool {
        self.config.shim
    }

    fn echoes(&self) -> &Echoes {
        &self.engine.echoes
    }

    fn set_unreachable(&self, why: fmt::Arguments<'_>) {
        self.set_up(false, why);
    }

    fn count_resent(&self) {
        self.counts.resent.iter().for_each(IntCounter::inc);
    }

    fn count_foreign_reply(&self) {
        self.counts.foreign_replies.iter().for_each(IntCounter::inc);
    }

    fn count_unsolicited(&self) {
        self.counts.unsolicited.iter().for_each(IntCounter::inc);
    }
}

#[cfg(test)]
pub mod tests;
