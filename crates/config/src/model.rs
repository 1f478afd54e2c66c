//! The configuration as typed values: one struct per mapping of the YAML file.
//!
//! These structs are the single source of names, types, defaults and their
//! documentation: the located validator and `splitrail schema` are both derived
//! from the JSON Schema that `schemars` makes of them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use super::scalar::HitThreshold;
use super::scalar::{self, BlockSize};

mod assumed;
mod canary;
mod connector;
mod costs;
mod discovery;
mod events;
mod fleet;
mod flow;
mod health;
mod limits;
mod tokenizer;

pub use splitrail_settings::Secret;

pub use assumed::AssumedConfig;
pub use canary::{CanaryConfig, DriftConfig};
pub use connector::{Connector, Network, NotANetwork};
pub use costs::CostsConfig;
pub use discovery::{AddressFamily, Discovery, DnsDiscovery, KubernetesDiscovery, PodPort};
pub use events::{Events, NatsEvents, Storage};
pub use fleet::{ClientWorkers, FleetConfig, FleetTls, FleetToken};
pub use flow::{BreakerConfig, Flow, Gate, GateKind, RequestFlow, Retries};
pub use health::{EjectionConfig, HealthConfig};
pub use limits::{FairBy, Limits};
pub use splitrail_policy::Policy;
pub use splitrail_policy::queue::QueueConfig;
pub use splitrail_policy::threshold::ThresholdConfig;
pub use tokenizer::{ContentFormatConfig, HuggingfaceTokenizer, TokenizerConfig};

/// A whole configuration file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where the router listens.
    #[serde(default)]
    pub listen: Listen,
    /// Seed of the block hashes; the same for all routers and shims of a cluster.
    #[serde(default)]
    pub hash_seed: u64,
    /// Seed of the draws that break ties and drive `random` and `temperature`; set, a run
    /// with the same requests in the same order draws the same. Left out, the system's entropy.
    #[serde(default)]
    pub draw_seed: Option<u64>,
    /// Bounds on what clients may ask for and on what the router holds.
    #[serde(default)]
    pub limits: Limits,
    /// How shims attach, and where workers may be that the file does not name.
    #[serde(default)]
    pub fleet: FleetConfig,
    /// How shims' words come to this router.
    #[serde(default)]
    pub events: Events,
    /// What is written down of requests that have ended.
    #[serde(default)]
    pub ledger: Ledger,
    /// What is written down of decisions, for replay.
    #[serde(default)]
    pub record: RecordConfig,
    /// The models that are served, one entry each.
    #[schemars(length(min = 1))]
    pub models: Vec<Model>,
}

/// Listening addresses, `IP:PORT`; port 0 takes any free port.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Listen {
    /// The OpenAI HTTP front door.
    #[schemars(with = "scalar::Address")]
    pub http: SocketAddr,
    /// Host names (without ports) by which clients may call the HTTP front door; others get a 403,
    /// on all paths but `/health` and `/ready`. Empty, any name is taken. A list protects against
    /// web pages whose own name is made to lead to this router (DNS rebinding).
    pub http_hosts: Vec<String>,
    /// The gRPC front door; left out, there is none.
    #[schemars(with = "Option<scalar::Address>")]
    pub grpc: Option<SocketAddr>,
    /// Whether the gRPC front door serves `Explain`, which shows other clients' load and which
    /// prompts are cached. Only where no client but operators reaches that listener.
    pub grpc_explain: bool,
    /// Where shims attach; left out, none can. Never a public address.
    #[schemars(with = "Option<scalar::Address>")]
    pub fleet: Option<SocketAddr>,
    /// Metrics, health, decisions, and an operator's changes. Keep it off public addresses.
    #[schemars(with = "scalar::Address")]
    pub admin: SocketAddr,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            http: SocketAddr::from(([0, 0, 0, 0], 8000)),
            http_hosts: Vec::new(),
            grpc: None,
            grpc_explain: false,
            fleet: None,
            admin: SocketAddr::from(([127, 0, 0, 1], 9090)),
        }
    }
}

/// What is written down of requests that have ended.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ledger {
    /// The file to which a line of JSON per request is appended, for billing: counts, sources
    /// and workers, no content. Each router needs its own. Left out, there is none.
    pub path: Option<PathBuf>,
    /// When the file makes room for a new one.
    pub rotate: Rotate,
    /// Between two log lines with each model's totals (requests, hits, tokens); only models
    /// that had requests are named. `0s` writes none.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub log_every: Duration,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { path: None, rotate: Rotate::default(), log_every: Duration::from_secs(60) }
    }
}

/// What is written down of decisions, for replay.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecordConfig {
    /// The file to which a line of JSON per prompt is appended when its request has ended:
    /// hashes of its blocks, figures and the decision, no content. `splitrail replay` reads it
    /// as a trace. Each router needs its own. Left out, there is none.
    pub path: Option<PathBuf>,
    /// When the file makes room for a new one.
    pub rotate: Rotate,
    /// The share of requests that are written down, drawn one by one. A replay of a part finds
    /// less to reuse than there was.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample: f64,
}

impl Default for RecordConfig {
    fn default() -> Self {
        Self { path: None, rotate: Rotate::default(), sample: 1.0 }
    }
}

/// When a file of lines makes room for a new one.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rotate {
    /// Bytes after which the file is moved aside to `PATH.1`, and what was there to `PATH.2`.
    #[schemars(range(min = 4096))]
    pub max_bytes: u64,
    /// Files that are kept aside; the oldest one is deleted, with a warning in the log.
    #[schemars(range(min = 1, max = 10_000))]
    pub keep: u32,
}

impl Default for Rotate {
    fn default() -> Self {
        Self { max_bytes: 256 << 20, keep: 64 }
    }
}

/// One model and the workers that serve it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The name that the engines serve it under, and the metrics' `model` label.
    #[schemars(length(min = 1, max = 256))]
    pub name: String,
    /// Other names that clients may use for it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Adapters (LoRA) that clients may name as `model`; each its own namespace.
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Tokens per KV block, as the engines'; `auto` asks an engine at the start.
    #[serde(default)]
    pub block_size: BlockSize,
    /// How prompts become tokens.
    pub tokenizer: TokenizerConfig,
    /// How requests are served.
    pub flow: Flow,
    /// Flows that a request may ask for with the header `x-splitrail-flow`, beside `flow`.
    #[serde(default)]
    pub request_flows: Vec<RequestFlow>,
    /// The share of a prompt's tokens that a decode worker must hold to serve it without a
    /// remote prefill, for requests that name none. `auto` finds it: the share above which a
    /// local prefill of the rest pays. Left out, `decode_first` takes 0.8, and the flow `auto`
    /// compares both ways for each request.
    #[serde(default)]
    pub cache_hit_threshold: Option<HitThreshold>,
    /// Who applies the threshold.
    #[serde(default)]
    pub gate: Gate,
    /// What `auto` goes by beside `costs`.
    #[serde(default)]
    pub auto: ThresholdConfig,
    /// How KV gets from a prefill to a decode worker.
    #[serde(default)]
    pub connector: Connector,
    /// Networks, beside the workers' own addresses, in which a hand-off's host may lie
    /// (`10.0.0.0/8`, or one address): the engines' transfer network, say. A hand-off from
    /// elsewhere is refused. Only `nixl` has hosts in its hand-offs.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub hand_off_networks: Vec<Network>,
    /// Prompts of up to this many tokens never go to a remote prefill.
    #[serde(default)]
    pub local_prefill_max_tokens: u32,
    /// What happens where no prefill worker could do its part.
    #[serde(default)]
    pub on_no_prefill: OnNoPrefill,
    /// How long a prefill engine keeps a hand-off's blocks; less a tenth, the time in which a
    /// decode worker must have taken it. Past it the prompt is prefilled again.
    #[serde(default = "flow::lease")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub lease: Duration,
    /// Whether a streamed completion or chat whose decode worker is lost goes on upon another
    /// one, where that is exact.
    #[serde(default)]
    pub migrate: bool,
    /// What clients are told where an engine reports no `cached_tokens`.
    #[serde(default)]
    pub cached_tokens_fallback: CachedTokensFallback,
    /// How a worker is chosen.
    #[serde(default)]
    pub policy: Policy,
    /// Has requests wait here for a worker, in an order that gets most of them their first token
    /// soonest. Left out, each goes to its worker at once, and waits in the engine's queue.
    #[serde(default)]
    pub queue: Option<QueueConfig>,
    /// From when on a worker has enough, and gets more only if all have. Left out, none has.
    #[serde(default)]
    pub busy: BusyConfig,
    /// Watches where cache hits are lost, against the best that the stream of prompts allows.
    /// It remembers the name of each block, at some 20 bytes, and takes a few microseconds for
    /// each hundred blocks of a prompt. Left out, nobody watches.
    #[serde(default)]
    pub loss: Option<LossConfig>,
    /// A second policy that decides beside the first and moves nothing: metrics tell how often
    /// it would have chosen otherwise, and what that is predicted to be worth.
    #[serde(default)]
    pub shadow: Option<Shadow>,
    /// What the workers' work is taken to cost before anything was learned of it.
    #[serde(default)]
    pub costs: CostsConfig,
    /// What workers are assumed to hold beyond what their KV events confirm.
    #[serde(default)]
    pub assumed: AssumedConfig,
    /// How workers are asked whether they agree with the router on prompts and KV blocks.
    #[serde(default)]
    pub canary: CanaryConfig,
    /// What happens where the index and a worker's `cached_tokens` drift apart.
    #[serde(default)]
    pub drift: DriftConfig,
    /// Fields of requests that this model's engines are sent although they steer an engine, or
    /// are not known to the router; see [fields](fields.md). Fields that only the router may set
    /// (hand-offs, ranks, ids) cannot be opened.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub pass_unknown: Vec<String>,
    /// Retries before the first byte has reached the client.
    #[serde(default)]
    pub retries: Retries,
    /// When a failing worker is left alone.
    #[serde(default)]
    pub breaker: BreakerConfig,
    /// How workers are watched.
    #[serde(default)]
    pub health: HealthConfig,
    /// How long each step may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// The router's credential towards this model's engines, sent as a bearer token.
    #[serde(default)]
    pub engine_api_key: Option<Secret>,
    /// The workers that are written down; may be left out where there is `discovery`.
    #[serde(default)]
    pub workers: Vec<Worker>,
    /// Where more workers come from.
    #[serde(default)]
    pub discovery: Vec<Discovery>,
}

impl Model {
    /// Whether placing its requests takes what work costs into account: for its policy or its
    /// queue, or to compare a local with a remote prefill.
    pub fn uses_costs(&self) -> bool {
        let own = RequestFlow::from(self.flow);
        let compares = |flow: &RequestFlow| {
            !matches!(flow, RequestFlow::Aggregated | RequestFlow::PrefillFirst)
        };
        self.policy.reckons()
            || self.queue.is_some()
            || self.shadow.is_some()
            || std::iter::once(&own).chain(&self.request_flows).any(compares)
    }
}

/// What happens where no prefill worker could do its part.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OnNoPrefill {
    /// The decode worker computes the prompt itself (counted and logged).
    #[default]
    Local,
    /// The request fails with 503.
    Fail,
}

/// What clients are told where an engine reports no `cached_tokens`.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum CachedTokensFallback {
    /// The router's estimate from confirmed blocks.
    #[default]
    Estimate,
    /// 0.
    Zero,
    /// Nothing: the key is left out.
    Omit,
}

/// From when on a worker has enough.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct BusyConfig {
    /// With so many requests.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests: Option<u32>,
    /// With so many prompt tokens that it still has to compute.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub prefill_tokens: Option<u64>,
    /// With so much of its KV blocks in use, in percent, by its own report.
    #[schemars(range(min = 1.0, max = 100.0))]
    pub kv_used_percent: Option<f64>,
}

impl BusyConfig {
    /// Whether a worker has enough.
    pub fn is_enough(
        &self,
        requests: u32,
        prefill_tokens: u64,
        kv_used_ratio: Option<f64>,
    ) -> bool {
        let used_percent = kv_used_ratio.map(|ratio| ratio * 100.0);
        self.requests.is_some_and(|most| requests >= most)
            || self.prefill_tokens.is_some_and(|most| prefill_tokens >= most)
            || self.kv_used_percent.zip(used_percent).is_some_and(|(most, used)| used >= most)
    }
}

/// How losses of cache hits are watched.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// The time over which they are summed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub window: Duration,
    /// Blocks of the stream that are remembered, the latest ones; at least half as many.
    #[schemars(range(min = 1024, max = 1_073_741_824))]
    pub blocks_max: usize,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self { window: Duration::from_secs(600), blocks_max: 4 << 20 }
    }
}

/// A policy that is tried without being followed.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Shadow {
    /// It.
    pub policy: Policy,
}

/// How long each step may take.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Opening a connection to an engine.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub connect: Duration,
    /// The whole prefill leg.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub prefill: Duration,
    /// From sending the decode (or only) leg of a stream to its first event.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub first_token: Duration,
    /// A whole answer that is not streamed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub answer: Duration,
    /// Between two pieces of a stream. Comments alone keep a stream open for ten times as long.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub stream_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            prefill: Duration::from_secs(60),
            first_token: Duration::from_secs(60),
            answer: Duration::from_secs(600),
            stream_idle: Duration::from_secs(30),
        }
    }
}

/// One engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Its name in logs, metrics and the route header; unique in its model.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._:-]+$"))]
    pub id: String,
    /// What it does.
    pub role: Role,
    /// Its HTTP address, `http://HOST:PORT`.
    pub url: String,
    /// Where it publishes KV events, `tcp://HOST:PORT`.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// Where it answers replay requests, `tcp://HOST:PORT`.
    #[serde(default)]
    pub kv_replay: Option<String>,
    /// The bootstrap server of a prefill worker, `http://HOST:PORT`, for `connector: mooncake`
    /// and `sglang`; left out, port 8998 of the host in `url`.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// Whether the address is a shim's, which gates by `x-splitrail-gate`.
    #[serde(default)]
    pub shim: bool,
    /// Whether the engine honours `cache_hit_threshold`; left out, it is asked once.
    #[serde(default)]
    pub honours_threshold: Option<bool>,
    /// What its work is taken to cost before anything was learned of it; left out, what the
    /// model's is.
    #[serde(default)]
    pub costs: Option<CostsConfig>,
    /// Data-parallel ranks behind the address; left out, the engine's `/metrics` (or its
    /// shim) say it. Rank r publishes KV events, and replays them, r ports behind
    /// `kv_events` and `kv_replay`.
    #[serde(default)]
    #[schemars(range(min = 1, max = 256))]
    pub data_parallel_ranks: Option<u16>,
    /// Whether the engine runs a request on the rank that `X-data-parallel-rank` names; left
    /// out, one with several ranks is asked once. Where it does not, only what all ranks hold
    /// counts.
    #[serde(default)]
    pub takes_rank_header: Option<bool>,
}

/// What a worker does.
#[derive(
    Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
    /// Either.
    Both,
}

impl Role {
    /// The role as the configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}
