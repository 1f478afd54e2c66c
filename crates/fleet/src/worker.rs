//! One engine, from the router's point of view.

use std::fmt::{self, Display};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};
use http::uri::Authority;
use prometheus::{IntCounter, IntCounterVec};
use splitrail_engine::vllm::load::EngineLoad;
use tokio_util::sync::CancellationToken;

use super::audit::Audit;
use super::booking::{Booked, Booking};
use super::bootstrap::Bootstrap;
use super::breaker::Breaker;
use super::costs::Costs;
use super::drift::Drift;
use super::endpoint_support::EndpointSupport;
use super::event_stats::EventStats;
use super::hand_overs::HandOvers;
use super::life::Life;
use super::outcomes::OutcomeCounters;
use super::pace::Pace;
use super::parity::ParityState;
use super::ranks::Ranks;
use super::resync::Resync;
use super::shim_report::ShimReport;
use super::state::{Event, State};
use splitrail_api::error::{Error, Fault};
use splitrail_config::model::{BreakerConfig, HealthConfig, Role, Worker as WorkerConfig};
use splitrail_engine_client::Engine;
use splitrail_engine_client::echoes::Echoes;
use splitrail_policy::{Coefficients, Leg, WorkerIndex};
use splitrail_telemetry::Metrics;

/// A load report older than this says nothing about now.
const LOAD_STALE: Duration = Duration::from_secs(5);

/// A load report that is recent enough, without a copy of it.
pub struct Recent(Guard<Arc<Report>>);

#[derive(Debug, Default)]
struct Report {
    /// When it was asked for; `None` if none has come.
    asked: Option<Instant>,
    load: EngineLoad,
}

impl Deref for Recent {
    type Target = EngineLoad;

    fn deref(&self) -> &EngineLoad {
        &self.0.load
    }
}

/// One engine.
#[derive(Debug)]
pub struct Worker {
    /// Its number in its model's fleet, which no other worker ever has.
    pub index: WorkerIndex,
    /// Its configuration.
    pub config: WorkerConfig,
    /// Host and port of its HTTP address.
    pub authority: Authority,
    /// Where decode workers meet it, for connectors that send both legs at once.
    pub bootstrap: Option<Bootstrap>,
    /// What the router has given it to do, on all its ranks.
    pub booked: Arc<Booked>,
    /// Its data-parallel ranks.
    pub ranks: Ranks,
    /// What it reports, and how far the index was off.
    pub audit: Audit,
    /// Where it is in its life.
    pub life: Life,
    /// What its work costs.
    pub costs: Arc<Costs>,
    /// What it has done lately.
    pub outcomes: OutcomeCounters,
    /// What it was seen not to offer, and how it does what needs no model.
    pub endpoint_support: EndpointSupport,
    /// Where it was seen to hand nothing over.
    pub hand_overs: HandOvers,
    /// Which of its answers carry the id of their request.
    pub echoes: Echoes,
    /// How many processes it was before this one, as far as was seen.
    processes: AtomicU32,
    /// Counts requests that were sent to it again, since a kept connection had ended.
    resent: Option<IntCounter>,
    unsolicited: Option<IntCounter>,
    /// Counts its answers that were for another request.
    foreign_replies: Option<IntCounter>,
    /// For how long it gets a growing share once it is alive.
    slow_start_ms: AtomicU64,
    /// Whether it has been here from the start, when all are new and none is spared.
    founder: AtomicBool,
    /// What its shim tells of it.
    pub shim_report: ShimReport,
    /// What was made of that.
    pub drift: Drift,
    /// Whether it agrees with the router on tokens and blocks.
    pub parity: ParityState,
    /// What became of its KV events.
    pub event_stats: EventStats,
    /// Asks whoever follows its KV events to read all of them anew.
    pub resync: Resync,
    /// Fires when it leaves the fleet.
    pub gone: CancellationToken,
    /// Whether its name must be looked up within the allowed networks: it is not written down.
    pub guarded: bool,
    /// Whether the same holds of where it publishes KV events.
    pub guards_events: bool,
    /// Whether its last probe or request found it alive.
    up: AtomicBool,
    /// Whether it was probed at all.
    probed: AtomicBool,
    /// Whether its KV events are known from the beginning, or will not be.
    synced: AtomicBool,
    /// The longest sequence that it takes, in tokens; 0 until it has said so.
    context_tokens: AtomicU32,
    /// Whether it honours `cache_hit_threshold`: 1 for no, 2 for yes, 0 for not known.
    honours_threshold: AtomicU8,
    /// Of its prefill leg, and of its others.
    breakers: [Breaker; 2],
    /// How fast its queue moves.
    pub pace: Pace,
    /// When it last said that nobody waits in its queue.
    idle_at: ArcSwapOption<Instant>,
    /// What it last said of its load.
    load: ArcSwap<Report>,
}

impl Worker {
    /// A worker, presumed alive until a probe says otherwise.
    pub fn new(index: WorkerIndex, config: WorkerConfig, authority: Authority) -> Self {
        let synced = AtomicBool::new(config.kv_events.is_none());
        let life = Life::new(&config.id);
        let bootstrap = Bootstrap::new(config.bootstrap.as_deref(), &authority);
        let ranks = Ranks::new(config.data_parallel_ranks, config.takes_rank_header);
        let honours_threshold =
            AtomicU8::new(config.supports_cache_hit_threshold.map_or(0, |yes| 1 + u8::from(yes)));
        Self {
            index,
            config,
            authority,
            bootstrap,
            booked: Arc::default(),
            ranks,
            audit: Audit::default(),
            life,
            costs: Arc::new(Costs::new(Coefficients::default())),
            outcomes: OutcomeCounters::default(),
            endpoint_support: EndpointSupport::default(),
            hand_overs: HandOvers::default(),
            echoes: Echoes::default(),
            processes: AtomicU32::new(0),
            resent: None,
            unsolicited: None,
            foreign_replies: None,
            slow_start_ms: AtomicU64::new(0),
            founder: AtomicBool::new(false),
            shim_report: ShimReport::default(),
            drift: Drift::default(),
            parity: ParityState::default(),
            event_stats: EventStats::default(),
            resync: Resync::default(),
            gone: CancellationToken::new(),
            guarded: false,
            guards_events: false,
            up: AtomicBool::new(true),
            probed: AtomicBool::new(false),
            synced,
            context_tokens: AtomicU32::new(0),
            honours_threshold,
            breakers: [BreakerConfig::default(); 2].map(Breaker::new),
            pace: Pace::default(),
            idle_at: ArcSwapOption::empty(),
            load: ArcSwap::default(),
        }
    }

    /// The same worker with breakers as configured.
    pub fn with_breakers(self, config: BreakerConfig) -> Self {
        self.endpoint_support.breaker.set_config(config);
        Self { breakers: [config; 2].map(Breaker::new), ..self }
    }

    /// The same worker, whose name must be looked up within the allowed networks, or not, and
    /// likewise the name of its publisher.
    pub fn with_guard(self, guarded: bool, guards_events: bool) -> Self {
        Self { guarded, guards_events, ..self }
    }

    /// From now on its breakers go by this; what they have seen stays.
    pub fn set_breakers(&self, config: BreakerConfig) {
        let breakers = self.breakers.iter().chain([&self.endpoint_support.breaker]);
        breakers.for_each(|breaker| breaker.set_config(config));
    }

    /// It takes the place of one that is described otherwise: what is known of the engine, if
    /// it is the same, goes on.
    pub fn succeed_to(&self, before: &Self) {
        if self.authority != before.authority {
            return;
        }
        let why = "as before it was described otherwise";
        if before.is_draining() {
            self.set_draining(true, why);
        }
        if before.is_probed() {
            self.set_probed(before.is_up(), why);
        }
        self.founder.store(before.founder.load(Relaxed), Relaxed);
    }

    /// Whether it takes no new work by somebody's wish.
    pub fn is_draining(&self) -> bool {
        self.state() == State::Draining
    }

    /// The same worker, watched as configured; its changes of state are counted.
    pub fn watched(self, model: &str, config: &HealthConfig, transitions: IntCounterVec) -> Self {
        self.set_slow_start(config.slow_start);
        let life = self.life.counted(model, transitions);
        Self { life, ..self }
    }

    /// The same worker, whose connections' faults are counted.
    pub fn with_counts(self, model: &str, metrics: &Metrics) -> Self {
        let labels = [model, self.id()];
        let resent = metrics.resent_requests.with_label_values(&labels);
        let foreign_replies = metrics.foreign_replies.with_label_values(&labels);
        let unsolicited = metrics.unsolicited_data_connections.with_label_values(&labels);
        Self {
            resent: Some(resent),
            foreign_replies: Some(foreign_replies),
            unsolicited: Some(unsolicited),
            ..self
        }
    }

    /// From now on it starts slowly for so long.
    pub fn set_slow_start(&self, lasts: Duration) {
        let ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX);
        self.slow_start_ms.store(ms, Relaxed);
    }

    /// The same worker, which is here from the start.
    pub fn founding(self) -> Self {
        Self { founder: AtomicBool::new(true), ..self }
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.life.state()
    }

    /// How much of its share of new work it gets, above 0 and up to 1.
    pub fn share(&self, now: Instant) -> f64 {
        const LEAST: f64 = 0.1;
        let warming = self.state() == State::Warming && !self.founder.load(Relaxed);
        let whole_ms = self.slow_start_ms.load(Relaxed);
        if !warming || whole_ms == 0 {
            return 1.0;
        }
        (self.life.age(now).as_secs_f64() * 1e3 / whole_ms as f64).clamp(LEAST, 1.0)
    }

    /// Takes no new work from now on, or takes it again. Says whether that is news.
    pub fn set_draining(&self, draining: bool, why: impl Display) -> bool {
        self.life.change(if draining { Event::Drain } else { Event::Undrain }, why)
    }

    /// The breaker of a leg.
    pub fn breaker(&self, leg: Leg) -> &Breaker {
        let [prefill, others] = &self.breakers;
        if leg == Leg::Prefill { prefill } else { others }
    }

    /// Whether it may be asked for a leg: it takes work, and has not failed that leg too often.
    pub fn is_available(&self, leg: Leg, now: Instant) -> bool {
        self.state().takes_work() && self.breaker(leg).allows(now)
    }

    /// Records how a leg ended: it has done its part, or failed with this.
    pub fn record(&self, leg: Leg, failed: Option<&Error>) {
        if failed.is_some_and(|error| error.fault() == Fault::Router) {
            return;
        }
        let breaker = self.breaker(leg);
        let failed = failed.is_some_and(Error::speaks_against_its_worker);
        self.outcomes.ended(failed);
        let (worker, leg) = (self.id(), leg.name());
        if failed && breaker.fail(Instant::now()) {
            tracing::warn!(worker, leg, "breaker opened: too many failures in a row");
        } else if !failed && breaker.succeed() {
            tracing::info!(worker, leg, "breaker closed");
        }
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.config.id
    }

    /// Whether its last probe or request found it alive.
    pub fn is_up(&self) -> bool {
        self.up.load(Relaxed)
    }

    /// Records that it is alive, or not, and why; says whether that is news.
    pub fn set_up(&self, up: bool, why: impl Display) -> bool {
        if !up {
            // Whatever comes back may be another version of it.
            self.set_honours_threshold(None);
            self.ranks.set_pins(None);
            self.founder.store(false, Relaxed);
        }
        self.life.change(if up { Event::Alive } else { Event::Dead }, why);
        let is_news = self.up.swap(up, Relaxed) != up;
        if is_news && !up {
            self.becomes_another();
        }
        is_news
    }

    /// Whether it was probed at all.
    pub fn is_probed(&self) -> bool {
        self.probed.load(Relaxed)
    }

    /// Records a probe's result; says whether that is news.
    pub fn set_probed(&self, up: bool, why: impl Display) -> bool {
        let first = !self.probed.swap(true, Relaxed);
        self.set_up(up, why) || (first && up)
    }

    /// Whether the first index synchronisation is over.
    pub fn is_synced(&self) -> bool {
        self.synced.load(Relaxed)
    }

    /// Records that the first index synchronisation is still to come.
    pub fn set_unsynced(&self) {
        self.synced.store(false, Relaxed);
    }

    /// Whether somebody tells what it holds.
    pub fn tells_blocks(&self) -> bool {
        self.config.kv_events.is_some() || self.shim_report.publishes()
    }

    /// Records that the first index synchronisation is over.
    pub fn set_synced(&self) {
        self.synced.store(true, Relaxed);
    }

    /// Whether its KV events come in, those of all its ranks, so that the index is what it
    /// holds.
    pub fn events_are_current(&self) -> bool {
        self.ranks.are_current()
    }

    /// Records that its KV events come in, or are cut off: those of all its ranks.
    pub fn set_events_current(&self, current: bool) {
        self.ranks.set_all_current(current);
    }

    /// Whether what the index has of it counts: its events come in, it agrees with the router
    /// on tokens and blocks, and it keeps what the index promises. Of a rank, where requests
    /// are pinned to one; else of all.
    pub fn overlap_is_believed(&self, rank: Option<u16>) -> bool {
        let current = match rank {
            Some(rank) => self.ranks.is_current(rank),
            None => self.ranks.are_current(),
        };
        current && self.takes_part_in_kv_routing()
    }

    /// Whether its events would be believed, if they come in.
    pub fn takes_part_in_kv_routing(&self) -> bool {
        self.parity.is_believed() && !self.drift.has_given_up()
    }

    /// It is another process than before, or may be: nothing that it was seen to do counts.
    pub fn becomes_another(&self) {
        self.costs.forget();
        self.endpoint_support.forget();
        self.hand_overs.forget();
        self.begins_anew();
        self.parity.forget();
        self.drift.forget();
        self.audit.restart();
    }

    /// Its process has begun anew: no connection leads to it yet.
    pub fn begins_anew(&self) {
        self.processes.fetch_add(1, Relaxed);
        self.echoes.forget();
    }

    /// What the index had of it is dropped: what comes now is measured afresh.
    pub fn index_begins_anew(&self) {
        self.audit.restart();
        self.drift.index_begins_anew();
    }

    /// Whether the index lacks blocks of it that were beyond the bound: its overlap
    /// is a lower bound then.
    pub fn index_is_truncated(&self) -> bool {
        self.ranks.is_any_truncated()
    }

    /// The longest sequence that it takes, in tokens, if it has said so.
    pub fn context_tokens(&self) -> Option<u32> {
        Some(self.context_tokens.load(Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Records the longest sequence that it takes.
    pub fn set_context_tokens(&self, tokens: u32) {
        self.context_tokens.store(tokens, Relaxed);
    }

    /// Whether it honours `cache_hit_threshold`; `None` until it was asked.
    pub fn honours_threshold(&self) -> Option<bool> {
        match self.honours_threshold.load(Relaxed) {
            0 => None,
            known => Some(known == 2),
        }
    }

    /// Records whether it honours `cache_hit_threshold`; `None` forgets it, for a process
    /// that may be another one. What is configured stands.
    pub fn set_honours_threshold(&self, honours: Option<bool>) {
        let known = self.config.supports_cache_hit_threshold.or(honours);
        self.honours_threshold.store(known.map_or(0, |yes| 1 + u8::from(yes)), Relaxed);
    }

    /// Its load as last reported, unless that is too old to mean anything.
    pub fn load(&self, now: Instant) -> Option<Recent> {
        let report = self.load.load();
        (now.saturating_duration_since(report.asked?) < LOAD_STALE).then(|| Recent(report))
    }

    /// Records a load report that was asked for at this instant.
    pub fn set_load(&self, asked: Instant, load: EngineLoad) {
        if load.waiting == Some(0) {
            self.idle_at.store(Some(Arc::new(asked)));
        }
        self.load.store(Arc::new(Report { asked: Some(asked), load }));
    }

    /// Requests that wait in its queue, by its own report; 0 where it has not said so.
    pub fn waiting(&self, now: Instant) -> u64 {
        self.load(now).and_then(|load| load.waiting).unwrap_or(0)
    }

    /// Whether all that it has reported since an instant says that requests wait: one that
    /// was sent then may be among them. Without a report nothing says so.
    pub fn has_queued_since(&self, since: Instant) -> bool {
        let report = self.load.load();
        let queues = report.asked.is_some_and(|asked| asked >= since)
            && report.load.waiting.is_some_and(|waiting| waiting > 0);
        queues && self.idle_at.load().as_deref().is_none_or(|idle| *idle < since)
    }

    /// Books a leg on the worker, and on a rank if the leg is pinned to it: `prefill_tokens` to
    /// compute, `active_tokens` to hold.
    pub fn book(&self, rank: Option<u16>, prefill_tokens: u64, active_tokens: u64) -> Booking {
        let of_rank = rank.and_then(|rank| self.ranks.get(rank));
        let of_rank = of_rank.map(|rank| Arc::clone(&rank.booked));
        Booking::both(Arc::clone(&self.booked), of_rank, prefill_tokens, active_tokens)
    }

    /// Whether it can take a leg.
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

    fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Differs over all workers of a model, and between processes of one worker as far as the
    /// router can tell them apart.
    fn process(&self) -> u64 {
        u64::from(self.index.0) << 32 | u64::from(self.processes.load(Relaxed))
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

    fn count_foreign_answer(&self) {
        self.foreign_replies.iter().for_each(IntCounter::inc);
    }

    fn count_unsolicited(&self) {
        self.unsolicited.iter().for_each(IntCounter::inc);
    }
}
