//! One engine as the router sees it: configuration, health, load and what it supports.

use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use http::uri::Authority;
use prometheus::{IntCounter, IntCounterVec};
use splitrail_engine::EngineKind;
use splitrail_engine::load::EngineLoad;
use tokio_util::sync::CancellationToken;

use super::bootstrap::Bootstrap;
use super::drift::Drift;
use super::engine_facts::EngineFacts;
use super::event_stats::EventStats;
use super::lifecycle::Lifecycle;
use super::load_report::{LOAD_STALE, LoadReport, RecentLoad};
use super::missing_hand_offs::MissingHandOffs;
use super::outcomes::{Ejections, OutcomeCounters};
use super::parity::ParityMonitor;
use super::presence::Presence;
use super::prewarm::PrewarmState;
use super::push::PushState;
use super::quarantine::DrainCauses;
use super::ranks::Ranks;
use super::read_back::ReadBackSupport;
use super::resync::Resync;
use super::shim_report::{EventOrigin, ShimReport};
use super::state::{Event, WorkerState};
use super::usage_stats::UsageStats;
use splitrail_api::error::{Error, ErrorKind, Fault};
use splitrail_config::model::{BreakerConfig, GateKind, HealthConfig, Role, WorkerConfig};
use splitrail_engine_client::Engine;
use splitrail_engine_client::echoes::Echoes;
use splitrail_policy::{Coefficients, Leg, WorkerIndex};
use splitrail_settings::log_throttle::LogThrottle;
use splitrail_telemetry::metrics::Scope;
use splitrail_telemetry::{Metrics, WorkerSeries};
use splitrail_workload::booking::{BookedSums, Booking};
use splitrail_workload::breaker::Breaker;
use splitrail_workload::costs::Costs;
use splitrail_workload::endpoint_support::EndpointSupport;
use splitrail_workload::fetches::PeerFetches;
use splitrail_workload::pace::Pace;
use splitrail_workload::progress::Progress;

mod succession;

/// One engine as the router sees it.
#[derive(Debug)]
pub struct Worker {
    /// The worker's number in its model's pool. No other worker ever has the same number.
    pub index: WorkerIndex,
    /// The worker's configuration, merged from all sources.
    pub config: WorkerConfig,
    /// Which engine it is.
    pub engine: EngineKind,
    /// What the engine has told about itself.
    pub facts: EngineFacts,
    /// Host and port of the worker's HTTP address.
    pub authority: Authority,
    /// Whether the worker's URL is `https`.
    uses_tls: bool,
    /// The bootstrap server, for connectors that send both legs at once.
    pub bootstrap: Option<Bootstrap>,
    /// The work that the router has assigned to the worker, over all ranks.
    pub booked: Arc<BookedSums>,
    /// The data-parallel ranks.
    pub ranks: Ranks,
    /// Compares the cached tokens that the worker reports with the index's estimates.
    pub usage_stats: UsageStats,
    /// Limits log lines about usage that cannot be used as the engine reports it.
    pub usage_log: LogThrottle,
    /// The state of the worker, with its time and cause.
    pub lifecycle: Lifecycle,
    /// The learned cost model of the worker.
    pub costs: Arc<Costs>,
    /// Counts of recent results, for outlier ejection.
    pub outcomes: OutcomeCounters,
    /// The worker's ejections in a row.
    pub(super) ejections: Ejections,
    /// The endpoints that the worker lacks, and the circuit breaker of endpoints that need no
    /// model.
    pub endpoint_support: EndpointSupport,
    /// What was learned of the worker's hand-offs.
    pub missing_hand_offs: MissingHandOffs,
    /// Prefixes that the worker takes from other workers, or others from it.
    pub fetches: Arc<PeerFetches>,
    /// How far the worker is prewarmed.
    pub prewarm: PrewarmState,
    /// What is known of the engine if KV is pushed from or to it.
    pub push: PushState,
    /// What was learned of read-back with the worker.
    pub read_back: ReadBackSupport,
    pub(super) drain_causes: DrainCauses,
    /// Which of the worker's replies carry the id of their request.
    pub echoes: Echoes,
    /// Whether the engine's process is still there, and still the same.
    pub presence: Presence,
    /// The metrics of the worker's legs.
    pub series: WorkerSeries,
    /// Counts requests that were sent again because a reused connection had ended.
    resent: Option<IntCounter>,
    unsolicited: Option<IntCounter>,
    /// Counts replies that belonged to another request.
    foreign_replies: Option<IntCounter>,
    /// Duration of the slow start, in milliseconds.
    slow_start_ms: AtomicU64,
    /// Whether the worker was there when the router started and has not been down since. Such
    /// workers have no slow start, since all of them are new.
    initial_member: AtomicBool,
    /// What the worker's shim reports.
    pub shim_report: ShimReport,
    /// The reaction to drift of the index.
    pub drift: Drift,
    /// Whether worker and router agree on tokens and block hashes.
    pub parity: ParityMonitor,
    /// Counts of the worker's KV events.
    pub event_stats: EventStats,
    /// Asks the task that follows the worker's KV events to read all of them again.
    pub resync: Resync,
    /// Cancelled when the worker leaves the fleet.
    pub gone: CancellationToken,
    /// Whether the worker's host must resolve to an address within the allowed networks, because
    /// the worker is not listed in the configuration.
    pub guarded: bool,
    /// Whether the same holds for the host that publishes the KV events.
    pub guards_events: bool,
    /// Whether the last probe or request reached the worker.
    up: AtomicBool,
    /// Whether the worker has been probed.
    probed: AtomicBool,
    /// Whether the first synchronisation of the index is over, or the worker has no KV events.
    synced: AtomicBool,
    /// Whether the engine supports `cache_hit_threshold`: 0 is unknown, 1 is no, 2 is yes.
    supports_cache_hit_threshold: AtomicU8,
    /// The circuit breaker of prefill legs, and that of all other legs.
    breakers: [Breaker; 2],
    /// How fast the engine's queue moves.
    pub pace: Pace,
    /// Whether the engine makes progress with its legs.
    pub progress: Arc<Progress>,
    /// The time of the last report that no request waits in the engine's queue.
    idle_at: ArcSwapOption<Instant>,
    /// The last load report.
    load: ArcSwap<LoadReport>,
}

impl Worker {
    /// A worker that is presumed alive until a probe fails.
    pub fn new(index: WorkerIndex, config: WorkerConfig, authority: Authority) -> Self {
        let facts = EngineFacts::new(&config);
        let synced = AtomicBool::new(facts.publishes() == Some(false));
        let lifecycle = Lifecycle::new(&config.id);
        let uses_tls = config.url.starts_with("https://");
        let bootstrap = Bootstrap::new(config.bootstrap.as_deref(), &authority);
        let ranks = Ranks::new(config.data_parallel_ranks, config.takes_rank_header);
        let supports_cache_hit_threshold =
            AtomicU8::new(config.supports_cache_hit_threshold.map_or(0, |yes| 1 + u8::from(yes)));
        Self {
            index,
            config,
            engine: EngineKind::default(),
            facts,
            authority,
            uses_tls,
            bootstrap,
            booked: Arc::default(),
            ranks,
            usage_stats: UsageStats::default(),
            usage_log: LogThrottle::default(),
            lifecycle,
            costs: Arc::new(Costs::new(Coefficients::default())),
            outcomes: OutcomeCounters::default(),
            ejections: Ejections::default(),
            endpoint_support: EndpointSupport::default(),
            missing_hand_offs: MissingHandOffs::default(),
            fetches: Arc::default(),
            prewarm: PrewarmState::default(),
            push: PushState::default(),
            read_back: ReadBackSupport::default(),
            drain_causes: DrainCauses::default(),
            echoes: Echoes::default(),
            presence: Presence::default(),
            series: WorkerSeries::default(),
            resent: None,
            unsolicited: None,
            foreign_replies: None,
            slow_start_ms: AtomicU64::new(0),
            initial_member: AtomicBool::new(false),
            shim_report: ShimReport::default(),
            drift: Drift::default(),
            parity: ParityMonitor::default(),
            event_stats: EventStats::default(),
            resync: Resync::default(),
            gone: CancellationToken::new(),
            guarded: false,
            guards_events: false,
            up: AtomicBool::new(true),
            probed: AtomicBool::new(false),
            synced,
            supports_cache_hit_threshold,
            breakers: [BreakerConfig::default(); 2].map(Breaker::new),
            pace: Pace::default(),
            progress: Arc::default(),
            idle_at: ArcSwapOption::empty(),
            load: ArcSwap::default(),
        }
    }

    /// Sets the configuration of the circuit breakers and resets those of the legs.
    pub fn with_breakers(self, config: BreakerConfig) -> Self {
        self.endpoint_support.breaker.set_config(config);
        Self { breakers: [config; 2].map(Breaker::new), ..self }
    }

    /// Sets which engine the worker runs.
    pub fn with_engine(self, engine: EngineKind) -> Self {
        Self { engine, ..self }
    }

    /// Sets whether the host of the worker, and that of its event publisher, must resolve to an
    /// address within the allowed networks.
    pub fn with_guard(self, guarded: bool, guards_events: bool) -> Self {
        Self { guarded, guards_events, ..self }
    }

    /// Changes the configuration of the circuit breakers and keeps their counts.
    pub fn set_breakers(&self, config: BreakerConfig) {
        let breakers = self.breakers.iter().chain([&self.endpoint_support.breaker]);
        breakers.for_each(|breaker| breaker.set_config(config));
    }

    /// Sets the slow start, and the counter of state changes.
    pub fn watched(self, model: &str, config: &HealthConfig, transitions: IntCounterVec) -> Self {
        self.set_slow_start(config.slow_start);
        let lifecycle = self.lifecycle.counted(model, transitions);
        Self { lifecycle, ..self }
    }

    /// Creates the worker's series, and sets the counters that the worker itself updates.
    pub fn with_counts(self, model: &str, metrics: &Metrics) -> Self {
        let legs = [Leg::Prefill, Leg::Decode].into_iter().filter(|leg| self.serves(*leg));
        let legs: Vec<_> = legs.map(Leg::name).collect();
        let (worker, role) = (self.id(), self.config.role.name());
        metrics.declare(&Scope::Worker { model, worker, role, legs: &legs });
        let series = WorkerSeries::new(metrics, model, worker);
        let labels = [model, worker];
        let resent = metrics.resent_requests.with_label_values(&labels);
        let foreign_replies = metrics.foreign_replies.with_label_values(&labels);
        let unsolicited = metrics.unsolicited_data_connections.with_label_values(&labels);
        Self {
            series,
            resent: Some(resent),
            foreign_replies: Some(foreign_replies),
            unsolicited: Some(unsolicited),
            ..self
        }
    }

    /// Sets the duration of the slow start.
    pub fn set_slow_start(&self, lasts: Duration) {
        let ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX);
        self.slow_start_ms.store(ms, Relaxed);
    }

    /// Marks the worker as there since the start of the router.
    pub fn as_initial_member(self) -> Self {
        Self { initial_member: AtomicBool::new(true), ..self }
    }

    /// Whether the worker was there when the router started and has not been down since.
    pub fn is_initial_member(&self) -> bool {
        self.initial_member.load(Relaxed)
    }

    /// The current state.
    pub fn state(&self) -> WorkerState {
        self.lifecycle.state()
    }

    /// The fraction of its normal share of new work that the worker gets: below 1 during the slow
    /// start, at least 0.1.
    pub fn share(&self, now: Instant) -> f64 {
        /// The share at the beginning of the slow start.
        const SHARE_MIN: f64 = 0.1;
        let warming = self.state() == WorkerState::Warming && !self.initial_member.load(Relaxed);
        let whole_ms = self.slow_start_ms.load(Relaxed);
        if !warming || whole_ms == 0 {
            return 1.0;
        }
        (self.lifecycle.age(now).as_secs_f64() * 1e3 / whole_ms as f64).clamp(SHARE_MIN, 1.0)
    }

    /// The circuit breaker of a leg.
    pub fn breaker(&self, leg: Leg) -> &Breaker {
        let [prefill, others] = &self.breakers;
        if leg == Leg::Prefill { prefill } else { others }
    }

    /// Whether the worker may get this leg: its state takes work and its circuit breaker allows it.
    pub fn is_available(&self, leg: Leg, now: Instant) -> bool {
        self.state().takes_work() && self.breaker(leg).allows(now)
    }

    /// Records how a leg ended: with success, or with an error. Errors of the router itself are not
    /// counted.
    pub fn record(&self, leg: Leg, failed: Option<&Error>) {
        if failed.is_some_and(|error| error.fault() == Fault::Router) {
            return;
        }
        let breaker = self.breaker(leg);
        let of_engine = failed.filter(|error| error.fault() == Fault::Engine);
        if let Some(error) = of_engine.filter(|error| error.kind() != ErrorKind::BelowThreshold) {
            let leg = if leg == Leg::Prefill { Leg::Prefill } else { Leg::Decode };
            self.series.leg_failed(leg.name(), error.outcome());
        }
        let failed = failed.is_some_and(Error::speaks_against_its_worker);
        self.outcomes.ended(failed);
        let (model, worker, leg) = (self.model(), self.id(), leg.name());
        if failed && breaker.fail(Instant::now()) {
            tracing::warn!(model, worker, leg, "breaker opened: too many failures in a row");
        } else if !failed && breaker.succeed() {
            tracing::info!(model, worker, leg, "breaker closed");
        }
    }

    /// The name of the worker's model, for logs: ids of workers are unique in their model only.
    pub fn model(&self) -> &str {
        self.lifecycle.model()
    }

    /// The worker's id.
    pub fn id(&self) -> &str {
        &self.config.id
    }

    /// Whether the last probe or request reached the worker.
    pub fn is_up(&self) -> bool {
        self.up.load(Relaxed)
    }

    /// Records whether the worker is alive, and why. Returns whether this changed.
    pub fn set_up(&self, up: bool, why: impl Display) -> bool {
        if !up {
            // A worker that comes back may run another version of the engine.
            self.forget_version();
            self.initial_member.store(false, Relaxed);
            self.rejoin("its engine is down");
        }
        self.lifecycle.change(if up { Event::Alive } else { Event::Dead }, why);
        let is_news = self.up.swap(up, Relaxed) != up;
        if is_news && !up {
            self.becomes_another();
        }
        is_news
    }

    /// Whether the worker has been probed.
    pub fn is_probed(&self) -> bool {
        self.probed.load(Relaxed)
    }

    /// Records the result of a probe. Returns whether it changed, or is the first success.
    pub fn set_probed(&self, up: bool, why: impl Display) -> bool {
        self.presence.probed(up);
        let first = !self.probed.swap(true, Relaxed);
        self.set_up(up, why) || (first && up)
    }

    /// Whether the first synchronisation of the index is over.
    pub fn is_synced(&self) -> bool {
        self.synced.load(Relaxed)
    }

    /// Records that the first synchronisation of the index is still to come.
    pub fn set_unsynced(&self) {
        self.synced.store(false, Relaxed);
    }

    /// Whether the worker or its shim reports KV blocks.
    pub fn tells_blocks(&self) -> bool {
        self.facts.publishes() == Some(true) || self.shim_report.publishes()
    }

    /// How the worker's KV events reach the router; `None` if the worker has no source of KV events.
    pub fn event_origin(&self) -> Option<EventOrigin> {
        self.tells_blocks().then(|| self.shim_report.event_origin().unwrap_or(EventOrigin::Engine))
    }

    /// Records that the first synchronisation of the index is over.
    pub fn set_synced(&self) {
        self.synced.store(true, Relaxed);
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
        self.parity.is_believed() && !self.drift.has_given_up() && !self.is_quarantined()
    }

    /// Restarts the measurements of drift after the worker's part of the index was dropped.
    pub fn index_begins_anew(&self) {
        self.usage_stats.restart();
        self.drift.index_begins_anew();
    }

    /// Whether the index left out blocks of the worker because of its size limit. The overlap is
    /// then a lower bound.
    pub fn index_is_truncated(&self) -> bool {
        self.ranks.is_any_truncated()
    }

    /// Whether the engine has cache groups that are not followed, so that it may find less of a prompt
    /// than the index says. The overlap then influences the choice of a worker and nothing else.
    pub fn overlap_is_upper_bound(&self) -> bool {
        !self.event_stats.other_groups().is_empty()
    }

    /// Whether the engine supports `cache_hit_threshold`; `None` if unknown.
    pub fn supports_cache_hit_threshold(&self) -> Option<bool> {
        match self.supports_cache_hit_threshold.load(Relaxed) {
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
        self.supports_cache_hit_threshold.store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// The last load report, unless it is older than [`LOAD_STALE`].
    pub fn load(&self, now: Instant) -> Option<RecentLoad> {
        self.load_within(now, LOAD_STALE)
    }

    /// The last load report, unless its age has reached `max_age`.
    pub fn load_within(&self, now: Instant, max_age: Duration) -> Option<RecentLoad> {
        RecentLoad::within(self.load.load(), now, max_age)
    }

    /// Records a load report that was requested at `asked`.
    pub fn set_load(&self, asked: Instant, load: EngineLoad) {
        if load.waiting == Some(0) {
            self.idle_at.store(Some(Arc::new(asked)));
        }
        if load.tokens_total > self.load.load().load.tokens_total {
            self.progress.record_sign();
        }
        self.load.store(Arc::new(LoadReport { asked: Some(asked), load }));
    }

    /// Number of requests in the engine's queue by its last report; 0 if unknown.
    pub fn waiting(&self, now: Instant) -> u64 {
        self.load(now).and_then(|load| load.waiting).unwrap_or(0)
    }

    /// Whether the engine has answered a question for its load since an instant.
    pub fn has_reported_since(&self, since: Instant) -> bool {
        self.load.load().asked.is_some_and(|asked| asked >= since)
    }

    /// Whether every load report since an instant says that requests wait, so that a request that
    /// was sent then may be among them. `false` without a report.
    pub fn has_queued_since(&self, since: Instant) -> bool {
        let report = self.load.load();
        let queues = report.asked.is_some_and(|asked| asked >= since)
            && report.load.waiting.is_some_and(|waiting| waiting > 0);
        queues && !self.has_been_idle_since(since)
    }

    /// Whether a load report since an instant says that no request waits.
    pub fn has_been_idle_since(&self, since: Instant) -> bool {
        self.idle_at.load().as_deref().is_some_and(|idle| *idle >= since)
    }

    /// Books a leg on the worker, and on a rank if the leg is pinned to it: `prefill_tokens` to
    /// compute, `active_tokens` to hold.
    pub fn book(&self, rank: Option<u16>, prefill_tokens: u64, active_tokens: u64) -> Booking {
        let of_rank = rank.and_then(|rank| self.ranks.get(rank));
        let of_rank = of_rank.map(|rank| Arc::clone(&rank.booked));
        let (now, requests) = (Instant::now(), u64::from(self.booked.requests()) + 1);
        let times = self.costs.leg_times(now, prefill_tokens, active_tokens, requests);
        Booking::both(Arc::clone(&self.booked), of_rank, prefill_tokens, active_tokens)
            .with_progress(self.progress.begin(times, now))
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
        self.lifecycle.model()
    }

    fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Unique among all workers of a model and, as far as the router noticed, among processes of
    /// one worker.
    fn process(&self) -> u64 {
        u64::from(self.index.0) << 32 | u64::from(self.presence.processes())
    }

    fn uses_tls(&self) -> bool {
        self.uses_tls
    }

    fn is_guarded(&self) -> bool {
        self.guarded
    }

    fn has_shim(&self) -> bool {
        self.config.shim
    }

    fn echoes(&self) -> &Echoes {
        &self.echoes
    }

    fn set_unreachable(&self, why: fmt::Arguments<'_>) {
        self.set_up(false, why);
    }

    fn count_resent(&self) {
        self.resent.iter().for_each(IntCounter::inc);
    }

    fn count_foreign_reply(&self) {
        self.foreign_replies.iter().for_each(IntCounter::inc);
    }

    fn count_unsolicited(&self) {
        self.unsolicited.iter().for_each(IntCounter::inc);
    }
}

#[cfg(test)]
pub mod tests;
