//! The configuration as typed values: one struct per mapping of the YAML file.
//!
//! These structs are the single source of names, types, defaults and their
//! documentation: the located validator and `splitrail schema` are both derived
//! from the JSON Schema that `schemars` makes of them.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use super::scalar::HitThreshold;
use super::scalar::{self, BlockSize};
use splitrail_settings::size;

mod access;
mod access_log;
mod canary;
mod connector;
mod costs;
mod discovery;
mod engine_tls;
mod events;
mod fleet;
pub(crate) mod flow;
mod health;
mod limits;
mod listen;
mod network;
mod or_none;
pub(crate) mod peer_fetch;
mod prewarm;
mod queue;
mod quotas;
mod speculative_index;
mod tokenizer;
mod tracing;
mod worker;

pub use splitrail_settings::Secret;

pub use access::{
    Auth, CacheGroup, CertificateName, Defaults, JwtAuth, TenantConfig, TenantLimits, TokenWeights,
};
pub use access_log::AccessLogConfig;
pub use canary::{CanaryConfig, DriftConfig};
pub use connector::{Connector, KvPath};
pub use costs::CostsConfig;
pub use discovery::{
    AddressFamily, Discovery, DnsDiscovery, KubernetesDiscovery, PodPort, UrlScheme,
};
pub use engine_tls::EngineTls;
pub use events::{Events, NatsEvents, Storage};
pub use fleet::{ClientWorkers, FleetConfig, FleetTls, FleetToken};
pub use flow::{BreakerConfig, Flow, GateConfig, GateKind, RequestFlow, Retries};
pub use health::{EjectionConfig, HealthConfig};
pub use limits::{FairBy, Limits};
pub use listen::{AdminAccess, ClientCertificates, Listen, Listener, ListenerTls};
pub use network::{Network, NotANetwork};
pub use peer_fetch::{KvLoadFailurePolicy, PeerFetch};
pub use prewarm::PrewarmConfig;
pub use queue::{QueueConfig, ThresholdConfig};
pub use quotas::{LocalQuotas, NatsQuotas, Quotas};
pub use speculative_index::SpeculativeIndexConfig;
pub use splitrail_policy::Policy;
pub use tokenizer::{ContentFormatConfig, EngineTokenizer, HuggingfaceTokenizer, TokenizerConfig};
pub use tracing::{OtlpConfig, OtlpHeader, OtlpProtocol, OtlpTarget, TracingConfig};
pub use worker::{NO_EVENTS, Role, WorkerConfig};

/// A whole configuration file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The listeners of the router.
    #[serde(default)]
    pub listen: Listen,
    /// Seed of the block hashes. All routers and shims of a cluster need the same value. `read_back`
    /// needs a random number that clients do not know, and a `record` should have one.
    #[serde(default)]
    pub hash_seed: u64,
    /// Seed of the random numbers that break ties and that `temperature` uses. With a seed, the same
    /// requests in the same order get the same numbers, for example in tests. Defaults to the
    /// system's entropy.
    #[serde(default)]
    pub rng_seed: Option<u64>,
    /// Limits of what clients may request and of what the router holds.
    #[serde(default)]
    pub limits: Limits,
    /// How shims attach, and the networks of workers that are not listed in the file.
    #[serde(default)]
    pub fleet: FleetConfig,
    /// How the reports of shims reach this router.
    #[serde(default)]
    pub events: Events,
    /// The ledger: the account of the tokens of each request.
    #[serde(default)]
    pub ledger: Ledger,
    /// The record of decisions, for `splitrail replay`.
    #[serde(default)]
    pub record: RecordConfig,
    /// The audit file: who changed what, and which credentials were refused.
    #[serde(default)]
    pub audit: AuditConfig,
    /// The access log: one line for each request of a client.
    #[serde(default)]
    pub access_log: AccessLogConfig,
    /// Traces of requests.
    #[serde(default)]
    pub tracing: TracingConfig,
    /// How clients prove who they are; a request needs one of these credentials. Without entries,
    /// everyone who reaches a listener may use the engines.
    #[serde(default)]
    pub auth: Vec<Auth>,
    /// The tenants that credentials may name.
    #[serde(default)]
    pub tenants: Vec<TenantConfig>,
    /// How the limits of tenants are shared by the routers of a cluster.
    #[serde(default)]
    pub quotas: Quotas,
    /// What applies to requests that no other setting is for.
    #[serde(default)]
    pub defaults: Defaults,
    /// A secret from which the cache salts of tenants are derived. All routers of a cluster need the
    /// same secret. Without it, whoever reaches an engine directly and knows the name of a tenant
    /// can compute the tenant's salt.
    #[serde(default)]
    pub cache_salt_key: Option<Secret>,
    /// The models that the router serves, one entry each.
    #[schemars(length(min = 1))]
    pub models: Vec<Model>,
}

/// The ledger: the account of the tokens of each request.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ledger {
    /// The ledger file, for billing. It gets one line of JSON per request with counts, sources and
    /// workers, and no content. Each router needs its own file. Without a path, no file is written.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
    /// Interval between log lines with the totals of each model that had requests (requests, hits,
    /// tokens). `0s` disables them.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub log_interval: Duration,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { path: None, rotate: Rotation::default(), log_interval: Duration::from_secs(60) }
    }
}

/// The record of decisions, for replay.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecordConfig {
    /// The record file. It gets one line of JSON per prompt when the request has ended, with block
    /// hashes, figures and the decision, and no content. `splitrail replay` reads it as a trace.
    /// Each router needs its own file. Without a path, no file is written.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
    /// The share of requests that are recorded, chosen at random. A replay of a sample finds fewer
    /// cache hits than the whole traffic.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub sample: f64,
}

impl Default for RecordConfig {
    fn default() -> Self {
        Self { path: None, rotate: Rotation::default(), sample: 1.0 }
    }
}

/// The audit file.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// The audit file. It gets one line of JSON for each change on the admin listener, each reload,
    /// and for refused credentials, with the client's address and without any credential. Each router needs its own
    /// file. Without a path, no file is written.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
}

/// Rotation of a file.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rotation {
    /// Size from which the file is rotated: it is renamed to `PATH.1`, the former `PATH.1`
    /// to `PATH.2`, and so on.
    #[serde(rename = "size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 4096))]
    pub max_bytes: u64,
    /// Maximum number of rotated files. The oldest one is deleted with a warning in the log.
    #[schemars(range(min = 1, max = 10_000))]
    pub files_max: u32,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { max_bytes: 256 << 20, files_max: 64 }
    }
}

/// One model and the workers that serve it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The name under which the engines serve the model. It is also the label `model` of metrics.
    #[schemars(length(min = 1, max = 256))]
    pub name: String,
    /// Other names that clients may use for the model.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Adapters (LoRA) that clients may name as `model`. Each has its own namespace.
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Tokens per KV block of the engines. `auto` asks an engine at the start.
    #[serde(default)]
    pub block_size: BlockSize,
    /// How prompts become tokens. KV routing needs a tokenizer. A text is the model's folder, or the
    /// id of a model that is in the Hugging Face cache of this host (`Qwen/Qwen3-8B`; nothing is
    /// downloaded), or `engine`, or `none`. Without a value, the name of the model is looked up in
    /// that cache; if it is not there, KV routing is off, with a warning.
    #[serde(default = "tokenizer::none")]
    #[schemars(with = "tokenizer::TokenizerEntry", transform = scalar::derived)]
    pub tokenizer: TokenizerConfig,
    /// The order of the legs of a request. Without a value, it follows from the roles of the workers:
    /// `decode_first` with prefill workers (`prefill_first` without a tokenizer, or with
    /// `connector: sglang`), otherwise `aggregated`.
    #[serde(default = "flow::none")]
    #[schemars(transform = scalar::derived)]
    pub flow: Flow,
    /// Further flows that a request may select with the header `x-splitrail-flow`.
    #[serde(default)]
    pub request_flows: Vec<RequestFlow>,
    /// The share of a prompt's tokens that a decode worker must hold to serve the request without a
    /// remote prefill, for requests that set none. `auto` learns the share above which a local
    /// prefill of the rest is cheaper. Without a value, `decode_first` uses 0.8, and the flow
    /// `auto` compares both ways for each request.
    #[serde(default)]
    pub cache_hit_threshold: Option<HitThreshold>,
    /// The check of the cache hit threshold.
    #[serde(default)]
    pub gate: GateConfig,
    /// Settings of the flow `auto` in addition to `costs`.
    #[serde(default)]
    pub auto: ThresholdConfig,
    /// How KV is transferred from a prefill worker to a decode worker. Without a value, `nixl` if the
    /// flow hands over from prefill workers to others, otherwise `none`.
    #[serde(default)]
    #[schemars(transform = scalar::derived)]
    pub connector: Connector,
    /// Networks that may contain the host of a hand-off, in addition to the addresses of the workers
    /// (`10.0.0.0/8`, or a single address), for example a transfer network of the engines. Hand-offs
    /// with other hosts are refused. Only engines of `nixl` and `nixl_push` name a host.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub hand_off_networks: Vec<Network>,
    /// Whether a worker that computes a prompt takes a prefix that another worker holds from there,
    /// where that is predicted to be faster than computing it; see [Peer fetch](hand-offs.md#peer-fetch).
    #[serde(default)]
    pub peer_fetch: PeerFetch,
    /// Minimum number of prompt tokens that a peer fetch must bring.
    #[serde(default = "peer_fetch::min_tokens")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub peer_fetch_min_tokens: u32,
    /// Maximum number of concurrent peer fetches from a worker, and to a worker.
    #[serde(default = "peer_fetch::max_per_worker")]
    #[schemars(range(min = 1, max = 1024))]
    pub peer_fetch_max_per_worker: u32,
    /// With which `kv_load_failure_policy` the prefill engines of the model were started. Engines do
    /// not tell, so it is written down here. `peer_fetch: one_shot` needs `fail`, vLLM's default.
    #[serde(default)]
    pub kv_load_failure_policy: Option<KvLoadFailurePolicy>,
    /// Whether a prefill worker that has joined or restarted takes over the prefixes that recent
    /// prompts use most; see [Prewarming](hand-offs.md#prewarming).
    #[serde(default)]
    pub prewarm: PrewarmConfig,
    /// Prompts of up to this number of tokens are never prefilled remotely.
    #[serde(default)]
    pub local_prefill_max_tokens: u32,
    /// What happens if no prefill worker can serve the prefill leg.
    #[serde(default)]
    pub on_no_prefill: OnNoPrefill,
    /// How long a prefill engine keeps the blocks of a hand-off. A decode worker must fetch the
    /// hand-off within nine tenths of this time; otherwise the prompt is prefilled again.
    #[serde(default = "flow::lease")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub lease: Duration,
    /// Whether prefill workers read back what decode workers have generated, where that is predicted
    /// to be faster than computing it in the next turn. The engines on both sides need NIXL with `bidirectional_kv_xfer` and
    /// `kv_load_failure_policy: fail`. Needs a secret `hash_seed`; see [hand-offs](hand-offs.md).
    #[serde(default)]
    pub read_back: bool,
    /// How long a decode engine keeps KV pinned for `read_back` (vLLM's `decoder_kv_blocks_ttl`). A
    /// tenth of the time, and at least six seconds, is kept as a margin. The pin lasts at least
    /// 10 s.
    #[serde(default = "flow::read_back_pin")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub read_back_pin: Duration,
    /// Maximum share of a decode worker's KV blocks that may stay pinned for `read_back`, in percent.
    /// Beyond it, the oldest pins are released.
    #[serde(default = "flow::read_back_pinned_percent_max")]
    #[schemars(range(min = 1, max = 90))]
    pub read_back_pinned_percent_max: u32,
    /// Whether a streamed completion or chat that loses its decode worker continues on another one,
    /// if the result is exactly the same.
    #[serde(default)]
    pub migrate: bool,
    /// What clients get if an engine reports no `cached_tokens`.
    #[serde(default)]
    pub cached_tokens_fallback: CachedTokensFallback,
    /// The policy that chooses workers.
    #[serde(default)]
    pub policy: Policy,
    /// Lets requests wait in the router, in an order that minimises the time to first token. With
    /// `none`, each request is sent to its worker at once and waits in the engine's queue. Without a
    /// value, there is a queue if the policy is `predicted_ttft` and the model has a tokenizer.
    #[serde(default, with = "or_none")]
    #[schemars(with = "or_none::OrNone<QueueConfig>", transform = scalar::derived)]
    pub queue: Option<QueueConfig>,
    /// Saturation thresholds. A worker beyond one of them gets further requests only if all workers
    /// are. Without thresholds, workers are never saturated.
    #[serde(default)]
    pub saturation: SaturationConfig,
    /// Tracks where cache hits are lost, compared with the maximum that the prompts allow. Tracking
    /// takes about 10 bytes per remembered block of long prompts, and at most 20 for each of
    /// `blocks_max`; the first 4096 blocks of a request count. With `none`, losses are not tracked.
    /// Without a value, they are if the model has a tokenizer.
    #[serde(default, with = "or_none")]
    #[schemars(with = "or_none::OrNone<CacheLossTrackingConfig>", transform = scalar::derived)]
    pub cache_loss_tracking: Option<CacheLossTrackingConfig>,
    /// The cost model of the workers before costs have been learned.
    #[serde(default)]
    pub costs: CostsConfig,
    /// The speculative index: what workers probably hold beyond confirmed blocks.
    #[serde(default)]
    pub speculative_index: SpeculativeIndexConfig,
    /// The canary, which tests whether workers and router agree on tokens and KV blocks.
    #[serde(default)]
    pub canary: CanaryConfig,
    /// What happens if the index and the `cached_tokens` of a worker drift apart.
    #[serde(default)]
    pub drift: DriftConfig,
    /// Request fields that are forwarded to the engines of this model although they control an
    /// engine or are unknown to the router; see [fields](fields.md). Fields that only the router
    /// may set (hand-offs, ranks, ids) cannot be listed.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub pass_unknown: Vec<String>,
    /// Retries before the first byte has reached the client.
    #[serde(default)]
    pub retries: Retries,
    /// Circuit breakers, which stop requests to a worker after consecutive failures.
    #[serde(default)]
    pub breaker: BreakerConfig,
    /// How the health of workers is observed.
    #[serde(default)]
    pub health: HealthConfig,
    /// Timeouts of the steps of a request.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// What the tokens of this model count towards the limits of tenants.
    #[serde(default)]
    pub token_weights: TokenWeights,
    /// The credential for the engines of this model, sent as a bearer token.
    #[serde(default)]
    pub engine_api_key: Option<Secret>,
    /// How the router checks the certificates of engines with an `https` URL, and its own
    /// certificate. Without this section, certificates must be from an authority that the system
    /// trusts, and the router presents none.
    #[serde(default)]
    pub engine_tls: Option<EngineTls>,
    /// The URLs of prefill workers. Each becomes an item of `workers` with the role `prefill` and an
    /// id such as `prefill-10.0.0.1:8000`.
    #[serde(default, skip_serializing)]
    #[schemars(transform = scalar::without_default)]
    pub prefill: Vec<String>,
    /// The URLs of decode workers, which become items of `workers` likewise.
    #[serde(default, skip_serializing)]
    #[schemars(transform = scalar::without_default)]
    pub decode: Vec<String>,
    /// The listed workers. A text is the URL of an engine that does both parts, with an id such as
    /// `worker-10.0.0.1:8000`. Can be left out with `prefill` and `decode`, or with `discovery`.
    #[serde(default)]
    #[schemars(with = "Vec<worker::WorkerEntry>")]
    pub workers: Vec<WorkerConfig>,
    /// Further sources of workers.
    #[serde(default)]
    pub discovery: Vec<Discovery>,
}

impl Model {
    /// Whether the model needs the cost model: for its policy or its queue, or to compare a local
    /// with a remote prefill.
    pub fn uses_costs(&self) -> bool {
        let compares = |flow| !matches!(flow, RequestFlow::Aggregated | RequestFlow::PrefillFirst);
        self.policy.uses_costs() || self.queue.is_some() || self.flows().any(compares)
    }

    /// The model's flow, and the further ones that requests may select.
    pub fn flows(&self) -> impl Iterator<Item = RequestFlow> {
        std::iter::once(self.flow.into()).chain(self.request_flows.iter().copied())
    }
}

/// What happens if no prefill worker can serve the prefill leg.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OnNoPrefill {
    /// The decode worker computes the prompt (counted and logged).
    #[default]
    Local,
    /// The request fails with status 503.
    Fail,
}

/// What clients get if an engine reports no `cached_tokens`.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum CachedTokensFallback {
    /// The router's estimate from confirmed blocks.
    #[default]
    Estimate,
    /// The value 0.
    Zero,
    /// The key is omitted.
    Omit,
}

/// Saturation thresholds of a worker.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct SaturationConfig {
    /// Number of requests from which the worker is saturated. Without a value, the number does not
    /// count.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests: Option<u32>,
    /// Number of prompt tokens to compute from which the worker is saturated. Without a value, the
    /// number does not count.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub prefill_tokens: Option<u64>,
    /// Share of used KV blocks, in percent as reported by the worker, from which the worker is
    /// saturated. Without a value, the share does not count.
    #[schemars(range(min = 1.0, max = 100.0))]
    pub kv_used_percent: Option<f64>,
}

impl SaturationConfig {
    /// Whether a worker is saturated.
    pub fn is_saturated(
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

/// How losses of cache hits are tracked.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct CacheLossTrackingConfig {
    /// The time over which losses are summed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub window: Duration,
    /// Maximum number of blocks that are remembered. At least the latest half of this number is
    /// kept, or fewer if prompts add fewer than 8 blocks each on average.
    #[schemars(range(min = 1024, max = 1_073_741_824))]
    pub blocks_max: usize,
}

impl Default for CacheLossTrackingConfig {
    fn default() -> Self {
        Self { window: Duration::from_secs(600), blocks_max: 4 << 20 }
    }
}

/// Timeouts of the steps of a request.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// Timeout for opening a connection to an engine, including the TLS handshake.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub connect: Duration,
    /// Timeout of the whole prefill leg.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub prefill: Duration,
    /// Timeout of a whole peer fetch. When it is over, the worker computes the prompt.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub peer_fetch: Duration,
    /// Timeout from sending the decode leg (or the only leg) of a stream to its first event.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub first_token: Duration,
    /// Timeout of a whole reply that is not streamed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub reply: Duration,
    /// Maximum time between two events of a stream. Comments alone keep a stream open for ten times
    /// as long.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub stream_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            prefill: Duration::from_secs(60),
            peer_fetch: Duration::from_secs(5),
            first_token: Duration::from_secs(60),
            reply: Duration::from_secs(600),
            stream_idle: Duration::from_secs(30),
        }
    }
}
