//! The facts that an inspection collects, before findings are made from them.

use std::io;

use splitrail_config::model::{Connector, WorkerConfig};
use splitrail_engine::EngineKind;
use splitrail_engine::identity::{EngineModel, EventSource};
use splitrail_fleet::engine_facts::can_take;
use splitrail_policy::{KvFormat, group_tag};
use splitrail_prompt::compare::Difference;

use crate::subject::Origin;

/// The facts about all workers of one model.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// The workers, in the order of the configuration; discovered ones last.
    pub workers: Vec<WorkerFacts>,
    /// Sources of workers that were not asked, or found nothing, each with the reason.
    pub sources: Vec<SourceFact>,
}

/// What a source of workers returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFact {
    /// The source's name.
    pub name: String,
    /// Its state.
    pub state: SourceState,
}

/// The state of a source of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceState {
    /// The source lists this number of workers.
    Found(usize),
    /// The source cannot be reached; the cause.
    Failed(String),
    /// The source cannot be asked once: its workers are known only while a router runs.
    NotAsked,
}

/// The facts about one worker.
#[derive(Clone, Debug)]
pub struct WorkerFacts {
    /// The worker's configuration, or what its source says.
    pub config: WorkerConfig,
    /// Where the worker is from.
    pub origin: Origin,
    /// Whether the engine answers at all.
    pub reach: Reachability,
    /// What the engine reports about itself.
    pub engine: EngineReport,
    /// How far the clock of the engine's host is ahead of this one's, in whole seconds.
    pub clock_ahead_s: Option<i64>,
    /// The worker's KV events.
    pub events: EventsFact,
    /// The replay of the worker's KV events.
    pub replay: ReplayFact,
    /// The engine's tokens of a chat, compared with the router's.
    pub chat_tokens: TokensFact,
    /// The engine's tokens of a text, compared with the router's.
    pub text_tokens: TokensFact,
    /// The small prompt that the engine served.
    pub trial: TrialFact,
    /// Whether the engine supports `cache_hit_threshold`, if this matters.
    pub supports_cache_hit_threshold: Option<bool>,
    /// What the prefill leg of the trial returned.
    pub staged: StagedFact,
    /// The hand-offs in which the worker took part as the decode worker.
    pub fetched: Vec<FetchedFact>,
    /// The ids of the decode workers of which none can take what this worker hands over; empty if one
    /// can.
    pub without_taker: Vec<String>,
    /// The ids of the prefill workers of which this worker can take none's hand-off; empty if it can
    /// take one.
    pub without_source: Vec<String>,
    /// What the worker's shim reports.
    pub shim: ShimFact,
    /// The worker's bootstrap server.
    pub bootstrap: BootstrapFact,
}

impl WorkerFacts {
    /// The facts before any question.
    #[must_use]
    pub fn new(config: WorkerConfig, origin: Origin) -> Self {
        Self {
            config,
            origin,
            reach: Reachability::TimeOver,
            engine: EngineReport::default(),
            clock_ahead_s: None,
            events: EventsFact::Untested,
            replay: ReplayFact::Untested,
            chat_tokens: TokensFact::Untested,
            text_tokens: TokensFact::Untested,
            trial: TrialFact::Untested,
            supports_cache_hit_threshold: None,
            staged: StagedFact::Untested,
            fetched: Vec::new(),
            without_taker: Vec::new(),
            without_source: Vec::new(),
            shim: ShimFact::Untested,
            bootstrap: BootstrapFact::Untested,
        }
    }

    /// Whether the engine answered as an engine does.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.reach == Reachability::Answers
    }

    /// Whether the engine is of the transfer group of `source` and stores KV as that does, as far as
    /// both tell. A router may let it take
    /// blocks of another size, but an engine that cannot do so may end, and a check must not try that.
    #[must_use]
    pub fn stores_alike(&self, source: &Self, connector: Connector) -> bool {
        let of = |worker: &Self| {
            let group = worker.config.transfer_group.as_deref().map_or(0, group_tag);
            worker.engine.kv_format().in_group(group)
        };
        let (own, other) = (of(self), of(source));
        let sizes = self.engine.block_size.zip(source.engine.block_size);
        can_take(own, other, connector) && sizes.is_none_or(|(own, other)| own == other)
    }

    /// The connector that the engine shows: the one that is expected if a hand-off works, or NIXL if
    /// there are metrics of it. Engines tell of no other connector.
    #[must_use]
    pub fn shown_connector(&self, expected: Connector) -> Option<Connector> {
        let works = |fetched: &FetchedFact| {
            matches!(fetched.outcome, FetchOutcome::Transferred | FetchOutcome::Served)
        };
        if self.staged == StagedFact::Usable || self.fetched.iter().any(works) {
            return Some(expected);
        }
        (self.engine.has_nixl == Some(true)).then_some(Connector::Nixl)
    }
}

/// Whether and how an address answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// An engine answers.
    Answers,
    /// There is no connection.
    Connect {
        /// The kind of the cause.
        kind: io::ErrorKind,
        /// The cause.
        cause: String,
    },
    /// The host has no address.
    Name(String),
    /// The address is not in `fleet.networks`.
    Outside,
    /// The TLS handshake fails.
    Tls(String),
    /// The peer does not speak HTTP, or closes the connection.
    NotHttp(String),
    /// A connection is accepted, and there is no reply in time.
    Late,
    /// The list of models is refused with status 403: without the right key, engines answer with 401.
    Forbidden,
    /// The credential is missing or wrong; the status.
    KeyRefused(u16),
    /// Something that is no engine answers; the status of `/v1/models`.
    NotAnEngine(u16),
    /// The time of the inspection was over before the worker's turn.
    TimeOver,
}

/// What an engine reports about itself. A member that it does not report is `None`.
#[derive(Clone, Debug, Default)]
pub struct EngineReport {
    /// Which engine was asked.
    pub kind: EngineKind,
    /// Status of the path at which the engine says that it is alive.
    pub health: Option<u16>,
    /// The version.
    pub version: Option<String>,
    /// All models and adapters.
    pub models: Vec<EngineModel>,
    /// Tokens per KV block.
    pub block_size: Option<u32>,
    /// Number of data-parallel ranks.
    pub ranks: Option<u32>,
    /// The data type of the KV.
    pub kv_dtype: Option<String>,
    /// The layout of the KV, if the engine was started with one.
    pub kv_layout: Option<String>,
    /// Whether metrics show the NIXL connector; `None` without metrics.
    pub has_nixl: Option<bool>,
    /// Where KV events are published.
    pub sources: SourcesFact,
}

impl EngineReport {
    /// The entry of a model by its name.
    #[must_use]
    pub fn model(&self, name: &str) -> Option<&EngineModel> {
        self.models.iter().find(|model| model.name == name)
    }

    /// How the engine stores KV.
    fn kv_format(&self) -> KvFormat {
        KvFormat::of(self.kv_dtype.as_deref(), self.kv_layout.as_deref())
            .with_block_size(self.block_size)
    }
}

/// What an engine says about where it publishes KV events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SourcesFact {
    /// The engine does not say, as older versions.
    #[default]
    Unknown,
    /// The engine publishes no KV events.
    None,
    /// The engine publishes at addresses that are not TCP.
    NotTcp,
    /// The engine publishes at these addresses, by rank.
    Listed(Vec<EventSource>),
}

/// The state of a worker's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventsFact {
    /// Not tested: no address is configured, or the engine does not answer.
    Untested,
    /// The publisher cannot be connected to; the cause.
    Unreachable(String),
    /// Connected, but no prompt was served that would cause an event.
    Connected,
    /// Connected, and nothing arrived after a prompt was served.
    Silent,
    /// Events arrived that cannot be decoded; the cause.
    Undecodable(String),
    /// Events arrived, but not those of the prompt.
    OfAnother,
    /// The events of the prompt arrived.
    Arrived,
}

/// The state of the replay of a worker's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayFact {
    /// Not tested: no address is configured, or the engine does not answer.
    Untested,
    /// The service cannot be reached, or does not answer; the cause.
    Fails(String),
    /// The service answers.
    Answers,
}

/// The comparison of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokensFact {
    /// Not tested: there is no tokenizer, or the engine does not answer.
    Untested,
    /// The router cannot compute these tokens exactly; the reason.
    Inexact(String),
    /// The engine does not say its tokens; the status of `/tokenize`, if it answered.
    Unavailable(Option<u16>),
    /// The router relies on the engine's tokens (`tokenizer: engine`), and gets none; the status of
    /// `/tokenize`, if it answered.
    Missing(Option<u16>),
    /// Both have the same tokens; their number.
    Agree(usize),
    /// The tokens differ.
    Differ(TokenDifference),
}

/// How the tokens of a known prompt differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenDifference {
    /// The shape of the difference.
    pub shape: Difference,
    /// Number of tokens according to the router.
    pub router_count: usize,
    /// Number of tokens according to the engine.
    pub engine_count: usize,
    /// The index of the first token that differs, from 0.
    pub at: usize,
    /// The router's token there; `None` at its end.
    pub router_token: Option<u32>,
    /// The engine's token there; `None` at its end.
    pub engine_token: Option<u32>,
    /// The router's tokens around the difference as text, in the engine's words.
    pub router_text: Option<String>,
    /// The engine's tokens around the difference as text.
    pub engine_text: Option<String>,
}

/// How the engine served a small prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrialFact {
    /// No prompt was sent.
    Untested,
    /// The request was served.
    Served {
        /// Whether usage has `prompt_tokens_details.cached_tokens`.
        reports_cached_tokens: bool,
    },
    /// The engine generates nothing, and has computed an embedding instead.
    Embedded,
    /// The request was refused or failed; the status and the engine's message.
    Refused {
        /// The status code.
        status: u16,
        /// The beginning of the engine's message.
        message: String,
    },
    /// There was no complete reply; the reason.
    NoReply(String),
}

/// What the prefill leg of a hand-off returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StagedFact {
    /// The worker does no prefill with a connector that names hand-offs in replies.
    Untested,
    /// The reply has no hand-off.
    Absent,
    /// The hand-off is not one of NIXL; the cause.
    Foreign(String),
    /// The hand-off names a host that the router does not allow.
    ForbiddenHost(String),
    /// The hand-off can be used.
    Usable,
}

/// The decode leg of a hand-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedFact {
    /// The id of the prefill worker.
    pub from: String,
    /// What came of it.
    pub outcome: FetchOutcome,
}

/// What came of a hand-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchOutcome {
    /// The decode worker's metrics show that it received KV.
    Transferred,
    /// The reply was right; metrics do not say whether KV was transferred.
    Served,
    /// The reply was right, and the decode worker computed the prompt by itself.
    Computed,
    /// The decode worker refused, or failed; the status and the engine's message.
    Refused {
        /// The status code.
        status: u16,
        /// The beginning of the engine's message.
        message: String,
    },
    /// There was no complete reply; the reason.
    NoReply(String),
    /// The hand-off was not tested; the reason.
    Untested(&'static str),
}

/// What the worker's shim reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShimFact {
    /// The worker is not configured as a shim.
    Untested,
    /// No shim answers at the address.
    Absent,
    /// The status of a shim.
    Reports(ShimStatus),
}

/// The status of a shim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShimStatus {
    /// The worker's id according to the shim.
    pub id: String,
    /// The role according to the shim.
    pub role: String,
    /// Why no work should be sent; `None` if it should.
    pub unready: Option<String>,
    /// Number of ranks whose events arrive without a gap.
    pub current_ranks: usize,
    /// Number of all ranks.
    pub ranks: usize,
    /// Number of routers that receive changes.
    pub live_routers: usize,
    /// Number of all routers.
    pub routers: usize,
    /// The last error of a router that receives none.
    pub router_error: Option<String>,
}

/// The state of a prefill worker's bootstrap server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootstrapFact {
    /// The connector needs none.
    Untested,
    /// The server cannot be used; its URL and the cause.
    Fails {
        /// The URL.
        url: String,
        /// The cause.
        cause: String,
    },
    /// The server answers.
    Answers,
}
