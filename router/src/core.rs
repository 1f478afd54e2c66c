//! What serves requests, whatever door they came through.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use dashmap::DashMap;
use serde::Serialize;
use splitrail_kv::HashSeed;
use tokio::sync::Semaphore;

use crate::admission::{Admission, Room, Share, ShareKey};
use crate::assemble::Books;
use crate::config::model::{
    Config, Events, FleetConfig, GateKind, Limits, Model, OnNoPrefill, RequestFlow,
};
use crate::error::{Error, Kind};
use crate::fleet::budget::RetryBudget;
use crate::fleet::parity::Parity;
use crate::fleet::{Networks, Pool, Worker};
use crate::flow::client::EngineClient;
use crate::flow::staged::Releases;
use crate::ledger::decisions::Decisions;
use crate::memory_budget::{self, MemoryBudget};
use crate::name::Name;
use crate::pick::Leg;
use crate::service::Cut;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::model::ModelSeries;
use rustc_hash::FxBuildHasher;
use splitrail_prompt::PromptModel;
use splitrail_prompt::stamp::FileStamp;

/// How long readiness waits for the first index synchronisation.
pub const SYNC_PATIENCE: Duration = Duration::from_secs(15);

/// One model with everything that serves it.
pub struct Served {
    /// Its configuration.
    pub config: Model,
    /// Its workers and their index.
    pub pool: Arc<Pool>,
    /// Tokenizer and chat template, if it has them.
    pub prompt: Option<Arc<PromptModel>>,
    /// The files that it was read from, as they were.
    pub prompt_files: Vec<FileStamp>,
    /// The way to its engines.
    pub client: EngineClient,
    /// What is left for retries.
    pub retry_budget: Arc<RetryBudget>,
    /// Hand-offs that nobody is going to use, on their way to be freed.
    pub releases: Arc<Releases>,
    /// When a mismatch of token counts was last logged.
    pub mismatch: Seldom,
    /// When a prefill that could not be had was last logged.
    pub no_prefill: Seldom,
    /// When a prompt of which too little is cached was last logged at `info`.
    pub below_threshold: Seldom,
    /// Series of its metrics that every request touches.
    pub series: ModelSeries,
}

/// Lets a log line through once in a while.
#[derive(Debug, Default)]
pub struct Seldom(AtomicU64);

impl Seldom {
    /// Whether the line may be written now; then not again for half a minute.
    pub fn may_say(&self) -> bool {
        const QUIET_MS: u64 = 30_000;
        let now = unix_ms();
        let last = self.0.load(Relaxed);
        let due = now.saturating_sub(last) >= QUIET_MS;
        due && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}

impl Served {
    /// Whether its engines must be asked if they honour `cache_hit_threshold`.
    pub fn asks_for_thresholds(&self) -> bool {
        let config = &self.config;
        let gated = |flow: &RequestFlow| {
            matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly | RequestFlow::Auto)
        };
        let own = RequestFlow::from(config.flow);
        // Decode legs after a prefill carry the guard in every flow. Halves of pairs cannot be
        // asked: alone they never answer.
        let guard = config.gate.preemption_guard > 0.0 && config.connector.serves_alone();
        let guarded = |flow: &RequestFlow| guard && flow.hands_over();
        config.gate.kind == GateKind::Auto
            && std::iter::once(&own)
                .chain(&config.request_flows)
                .any(|flow| gated(flow) || guarded(flow))
    }

    /// Its configured name, the metrics' label.
    pub fn name(&self) -> &str {
        &self.config.name
    }
}

/// What a name that clients use stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The model's place.
    pub model: usize,
    /// The adapter, if the name is one.
    pub adapter: Option<String>,
}

/// A request that a client waits for.
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

/// What becomes of prompts here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tokenizing {
    /// Nothing: no tokenizer is configured.
    None,
    /// They are tokenised in less than a millisecond, if they are of words.
    Fast,
    /// They are tokenised by the reference.
    Slow,
}

/// What a configuration says is served: replaced as a whole when it changes.
pub struct Serving {
    /// The models, in the configuration's order.
    pub models: Vec<Arc<Served>>,
    /// Names, aliases and adapters.
    pub names: BTreeMap<String, Named>,
    /// Bounds.
    pub limits: Limits,
    /// What the slowest of all models does with prompts.
    pub tokenizing: Tokenizing,
    /// The whole configuration.
    pub config: Arc<Config>,
}

impl Serving {
    /// These models, as a configuration says.
    pub fn new(models: Vec<Arc<Served>>, config: Arc<Config>) -> Self {
        let mut names = BTreeMap::new();
        for (model, served) in models.iter().enumerate() {
            let config = &served.config;
            for name in std::iter::once(&config.name).chain(&config.aliases) {
                names.insert(name.clone(), Named { model, adapter: None });
            }
            for adapter in &config.adapters {
                names.insert(adapter.clone(), Named { model, adapter: Some(adapter.clone()) });
            }
        }
        let of = |served: &Arc<Served>| match &served.prompt {
            None => Tokenizing::None,
            Some(prompt) if prompt.tokenizer().is_fast() => Tokenizing::Fast,
            Some(_) => Tokenizing::Slow,
        };
        let tokenizing = models.iter().map(of).max().unwrap_or(Tokenizing::None);
        Self { models, names, limits: config.limits.clone(), tokenizing, config }
    }

    /// The model of a configured name.
    pub fn model(&self, name: &str) -> Option<&Arc<Served>> {
        self.models.iter().find(|served| served.name() == name)
    }
}

/// The router's shared state.
pub struct Core {
    serving: ArcSwap<Serving>,
    /// Seed of the block hashes.
    pub hash_seed: HashSeed,
    /// How shims attach.
    pub fleet: FleetConfig,
    /// How their words come here.
    pub events: Events,
    /// The port of the HTTP door, as configured.
    pub http_port: u16,
    /// Where workers may be that the configuration does not name.
    pub networks: Networks,
    /// Counters.
    pub metrics: Metrics,
    /// The last decisions.
    pub decisions: Decisions,
    /// Where ended requests are written down.
    pub books: Books,
    /// Requests in flight, by a number of the router's own. Bounded by `in_flight`.
    pub live: DashMap<u64, LiveRequest, FxBuildHasher>,
    /// Room for requests; `limits.in_flight_max` of it.
    pub in_flight: Room,
    /// Who has how much of that room.
    pub admission: Arc<Admission>,
    /// Memory that requests hold; at most `limits.request_memory_max_bytes`.
    pub memory: Arc<MemoryBudget>,
    /// Room for parsing and tokenising off the reactor: one per core.
    pub preparing: Arc<Semaphore>,
    /// How much of that long bodies may take: half, so that others pass them by.
    pub preparing_long: Arc<Semaphore>,
    /// Ends streams that outlive a drain's grace.
    pub cut: Cut,
    draining: AtomicBool,
    /// Whether it was ready once: who joins later is not waited for.
    settled: AtomicBool,
    started: Instant,
}

impl Core {
    /// A core that serves `models`.
    pub fn new(
        models: Vec<Arc<Served>>,
        config: Arc<Config>,
        metrics: Metrics,
        memory: Arc<MemoryBudget>,
        books: Books,
    ) -> Self {
        metrics.set_config(config.digest());
        let limits = &config.limits;
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let fleet = config.fleet.clone();
        Self {
            hash_seed: HashSeed(config.hash_seed),
            networks: Networks::new(&fleet.networks),
            fleet,
            events: config.events.clone(),
            http_port: config.listen.http.port(),
            metrics,
            decisions: Decisions::new(limits.decisions_kept),
            books,
            live: DashMap::default(),
            in_flight: Room::new(limits.in_flight_max),
            admission: Arc::default(),
            memory,
            preparing: Arc::new(Semaphore::new(cores)),
            preparing_long: Arc::new(Semaphore::new((cores / 2).max(1))),
            cut: Cut::default(),
            draining: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            started: Instant::now(),
            serving: ArcSwap::from_pointee(Serving::new(models, config)),
        }
    }

    /// What is served now. A request takes it once, and keeps to it.
    pub fn serving(&self) -> Arc<Serving> {
        self.serving.load_full()
    }

    /// From now on, this is served. The fleet does this once it has the workers.
    pub fn serve(&self, serving: Arc<Serving>) {
        self.decisions.keep(serving.limits.decisions_kept);
        self.serving.store(serving);
    }

    /// Refuses a request that would find no room, before anything is done for it.
    ///
    /// # Errors
    /// If there is no room, for anybody or for this client.
    pub fn look_for_room(&self, client: Option<ShareKey>) -> Result<(), Error> {
        match self.in_flight.free() {
            0 => Err(self.shed_full()),
            free if self.admission.would_share(client, free) => Ok(()),
            _ => Err(self.shed_share()),
        }
    }

    /// Takes room for a request that is whole, or for so many more legs of it;
    /// [`leave`](Self::leave) gives it back.
    ///
    /// # Errors
    /// As [`look_for_room`](Self::look_for_room).
    pub fn admit(&self, client: Option<ShareKey>, places: usize) -> Result<Share, Error> {
        let free = self.in_flight.enter(places).ok_or_else(|| self.shed_full())?;
        self.admission.share(client, free, places).ok_or_else(|| {
            self.in_flight.leave(places);
            self.shed_share()
        })
    }

    /// Takes back the room of a request that has ended.
    pub fn leave(&self, share: Share) {
        self.in_flight.leave(share.places());
    }

    fn shed(&self, reason: &str, kind: Kind, message: &'static str) -> Error {
        self.metrics.shed.with_label_values(&["none", reason]).inc();
        Error::new(kind, message)
    }

    fn shed_full(&self) -> Error {
        let message = "the router serves limits.in_flight_max requests already";
        self.shed("in_flight_max", Kind::Overloaded, message)
    }

    fn shed_share(&self) -> Error {
        let message = "the router is busy, and this client has its share (limits.fair_by)";
        self.shed("fair_share", Kind::OverShare, message)
    }

    /// Counts a request that is refused for want of memory, and says why: all requests together
    /// would hold more than `limits.request_memory_max_bytes`.
    pub fn shed_memory(&self) -> Error {
        memory_budget::shed(&self.metrics.shed)
    }

    /// Counts a request that is refused because its client does not take other answers.
    pub fn shed_unread(&self) -> Error {
        let message = "limits.unread_answers_max_bytes of answers wait on this connection, and \
                       are not read";
        self.shed("unread_answers", Kind::OverShare, message)
    }

    /// Starts to drain: not ready from now on.
    pub fn drain(&self) {
        self.draining.store(true, Relaxed);
    }

    /// Whether a drain has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    /// Why the router is not ready, if it is not: draining, a model without a
    /// worker that is up for each leg of its flow, or an index that is still being
    /// read (for as long as [`SYNC_PATIENCE`] after the start, until it was ready once).
    pub fn unready(&self) -> Option<String> {
        if self.is_draining() {
            return Some("draining".into());
        }
        for served in &self.serving().models {
            let (config, pool) = (&served.config, &served.pool);
            let roster = pool.roster();
            // Without prefill workers a model that may prefill locally still works.
            let hands_over = RequestFlow::from(config.flow).hands_over();
            let legs: &[Leg] = match (hands_over, config.on_no_prefill) {
                (true, OnNoPrefill::Fail) => &[Leg::Prefill, Leg::Decode],
                _ => &[Leg::Aggregated],
            };
            let name = served.name();
            for leg in legs {
                let up = |worker: &Arc<Worker>| worker.is_up() && worker.is_probed();
                if !roster.iter().any(|worker| worker.serves(*leg) && up(worker)) {
                    return Some(format!("model {name} has no {} worker that is up", leg.name()));
                }
            }
            if pool.block_size() == 0 {
                return Some(format!("no worker of model {name} has said its block size"));
            }
            if self.settled.load(Relaxed) || self.started.elapsed() >= SYNC_PATIENCE {
                continue;
            }
            let waiting =
                |worker: &&Arc<Worker>| worker.is_up() && worker.honours_threshold().is_none();
            let unasked = roster.iter().find(waiting);
            if let Some(worker) = unasked.filter(|_| served.asks_for_thresholds()) {
                return Some(format!("worker {} is asked for its threshold", worker.id()));
            }
            let unasked = roster.iter().find(|w| w.is_up() && w.parity.parity() == Parity::Pending);
            if let Some(worker) = unasked {
                return Some(format!("worker {} is asked whether it agrees", worker.id()));
            }
            let unsynced = roster.iter().find(|w| w.is_up() && !w.is_synced());
            if let Some(worker) = unsynced {
                return Some(format!("the index of worker {} is being read", worker.id()));
            }
        }
        self.settled.store(true, Relaxed);
        None
    }
}

/// Milliseconds since 1970, for records.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// A random id of 128 bits, as hex.
pub fn random_id() -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bits = rand::random::<u128>().to_be_bytes();
    let mut id = String::with_capacity(32);
    for byte in bits {
        id.push(char::from(DIGITS[usize::from(byte >> 4)]));
        id.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    id
}
