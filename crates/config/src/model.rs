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
use splitrail_engine::EngineKind;
use splitrail_settings::size;

mod access;
mod access_log;
mod canary;
mod connector;
mod costs;
mod discovery;
mod engine_tls;
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
mod streams;
mod tokenizer;
mod tracing;
mod worker;

pub use splitrail_settings::Secret;

pub use access::{
    Auth, CacheGroup, CertificateName, Defaults, JwtAuth, TenantConfig, TenantLimits, TokenWeights,
};
pub use access_log::AccessLogConfig;
pub use canary::{CanaryConfig, DriftConfig};
pub use connector::{Connector, Engine, KvPath};
pub use costs::CostsConfig;
pub use discovery::{
    AddressFamily, Discovery, DnsDiscovery, KubernetesDiscovery, PodPort, UrlScheme,
};
pub use engine_tls::EngineTls;
pub use fleet::{ClientWorkers, FleetConfig, FleetTls, FleetToken};
pub use flow::{BreakerConfig, Flow, GateConfig, GateKind, RequestFlow, Retries};
pub use health::{EjectionConfig, HealthConfig};
pub use limits::{FairBy, Limits};
pub use listen::{AdminAccess, ClientCertificates, Listen, Listener, ListenerTls};
pub use network::{Network, NotANetwork};
pub use peer_fetch::{KvLoadFailurePolicy, PeerFetch};
pub use prewarm::PrewarmConfig;
pub use queue::{QueueConfig, ThresholdConfig};
pub use quotas::{BrokerLogin, LocalQuotas, NatsQuotas, Quotas};
pub use speculative_index::SpeculativeIndexConfig;
pub use splitrail_policy::Policy;
pub use streams::StreamsConfig;
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
    /// Seed of the block hashes: one value for all routers and shims of a cluster. `read_back`
    /// needs a random number that clients do not know; a `record` should have one.
    #[serde(default)]
    pub hash_seed: u64,
    /// Seed of random numbers (ties, `temperature`), for repeatable tests. Default: the system's
    /// entropy.
    #[serde(default)]
    pub rng_seed: Option<u64>,
    /// Limits of clients' requests and of what the router holds.
    #[serde(default)]
    pub limits: Limits,
    /// How streams reach clients.
    #[serde(default)]
    pub streams: StreamsConfig,
    /// How shims attach, and the networks of unlisted workers.
    #[serde(default)]
    pub fleet: FleetConfig,
    /// The [ledger](ledger.md).
    #[serde(default)]
    pub ledger: Ledger,
    /// The record of decisions, for `splitrail replay`.
    #[serde(default)]
    pub record: RecordConfig,
    /// Who changed what, and which credentials were refused.
    #[serde(default)]
    pub audit: AuditConfig,
    /// One [line](access-log.md) for each request of a client.
    #[serde(default)]
    pub access_log: AccessLogConfig,
    /// Traces of requests.
    #[serde(default)]
    pub tracing: TracingConfig,
    /// How clients prove who they are; one of these is enough. Empty: no proof is needed.
    #[serde(default)]
    pub auth: Vec<Auth>,
    /// The tenants that credentials may name.
    #[serde(default)]
    pub tenants: Vec<TenantConfig>,
    /// How routers share the limits of tenants.
    #[serde(default)]
    pub quotas: Quotas,
    /// For requests that no other setting is for.
    #[serde(default)]
    pub defaults: Defaults,
    /// The secret behind the cache salts of tenants, the same for all routers of a cluster. Without
    /// it, anyone who can reach an engine and knows the name of a tenant can compute its salt.
    #[serde(default)]
    pub cache_salt_key: Option<Secret>,
    /// The models, one entry each.
    #[schemars(length(min = 1))]
    pub models: Vec<Model>,
}

/// The [ledger](ledger.md).
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ledger {
    /// The ledger file, one per router. Default: no file.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
    /// Interval between log lines with the totals of each model. `0s` disables them.
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
    /// The [record](record.md) file, one per router. Default: no file.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
    /// The share of requests that are recorded, at random. A replay of a sample finds fewer cache
    /// hits.
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
    /// The audit file, one per router: JSON lines for changes on the admin listener, reloads and
    /// refused credentials. Default: no file.
    pub path: Option<PathBuf>,
    /// When the file is rotated.
    pub rotate: Rotation,
}

/// Rotation of a file.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rotation {
    /// Size from which the file is rotated to `PATH.1`, `PATH.2`, and so on.
    #[serde(rename = "size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 4096))]
    pub max_bytes: u64,
    /// Maximum number of rotated files.
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
    /// The name that the engines serve; the label `model` of metrics.
    #[schemars(length(min = 1, max = 256))]
    pub name: String,
    /// Other names of the model for clients.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Adapters (LoRA) that clients may name as `model`, each with its own namespace. The router asks each
    /// engine at every probe which of them it has loaded: requests go only to [workers that
    /// have](fleet.md#adapters).
    #[serde(default)]
    pub adapters: Vec<String>,
    /// Tokens per KV block of the engines.
    #[serde(default)]
    pub block_size: BlockSize,
    /// [How prompts become tokens](configuration.md#tokenizers): a folder, an id in the Hugging
    /// Face cache, `engine` or `none`. Default: the cache under the model's name; if it is not
    /// there, KV routing is off.
    #[serde(default = "tokenizer::none")]
    #[schemars(with = "tokenizer::TokenizerEntry", transform = scalar::derived)]
    pub tokenizer: TokenizerConfig,
    /// The order of the legs. Default: with prefill workers `decode_first` (`prefill_first` without
    /// a tokenizer or with SGLang), otherwise `aggregated`.
    #[serde(default = "flow::none")]
    #[schemars(transform = scalar::derived)]
    pub flow: Flow,
    /// Further flows for the header `x-splitrail-flow`.
    #[serde(default)]
    pub request_flows: Vec<RequestFlow>,
    /// The cache hit threshold of requests that set none. Default: 0.8 with `decode_first`; the
    /// flow `auto` compares both ways.
    #[serde(default)]
    pub cache_hit_threshold: Option<HitThreshold>,
    /// The check of the cache hit threshold.
    #[serde(default)]
    pub gate: GateConfig,
    /// Settings of the flow `auto` beside `costs`.
    #[serde(default)]
    pub auto: ThresholdConfig,
    /// How KV gets from a prefill to a decode worker. Default: `nixl`, or `sglang` with
    /// `engine: sglang`, if the flow hands over from prefill workers to others, otherwise `none`.
    #[serde(default)]
    #[schemars(transform = scalar::derived)]
    pub connector: Connector,
    /// The engine of the workers. Default: `sglang` with `connector: sglang`, otherwise `vllm`.
    #[serde(default)]
    #[schemars(transform = scalar::derived)]
    pub engine: Option<Engine>,
    /// Networks of hosts in hand-offs beside the workers' addresses (`10.0.0.0/8`, or an address).
    /// Hand-offs with other hosts are refused. For `nixl` and `nixl_push`.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub hand_off_networks: Vec<Network>,
    /// Whether a worker [fetches a prefix](hand-offs.md#peer-fetch) from another where that is
    /// predicted to be faster.
    #[serde(default)]
    pub peer_fetch: PeerFetch,
    /// Minimum number of prompt tokens of a peer fetch.
    #[serde(default = "peer_fetch::min_tokens")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub peer_fetch_min_tokens: u32,
    /// Maximum number of concurrent peer fetches from, and to, a worker.
    #[serde(default = "peer_fetch::max_per_worker")]
    #[schemars(range(min = 1, max = 1024))]
    pub peer_fetch_max_per_worker: u32,
    /// The `kv_load_failure_policy` of the prefill engines. `peer_fetch: one_shot` needs `fail`,
    /// vLLM's default.
    #[serde(default)]
    pub kv_load_failure_policy: Option<KvLoadFailurePolicy>,
    /// Whether a new or restarted prefill worker takes over hot prefixes
    /// ([prewarming](hand-offs.md#prewarming)).
    #[serde(default)]
    pub prewarm: PrewarmConfig,
    /// Prompts of up to this many tokens are never prefilled remotely.
    #[serde(default)]
    pub local_prefill_max_tokens: u32,
    /// What happens if no prefill worker can serve the leg.
    #[serde(default)]
    pub on_no_prefill: OnNoPrefill,
    /// How long a prefill engine keeps the blocks of a hand-off. It must be fetched within nine
    /// tenths of this.
    #[serde(default = "flow::lease")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub lease: Duration,
    /// Whether prefill workers [read back](hand-offs.md#read-back) what decode workers have
    /// generated, where that is predicted to be faster. Needs NIXL with `bidirectional_kv_xfer` and
    /// `kv_load_failure_policy: fail`, and a secret `hash_seed`.
    #[serde(default)]
    pub read_back: bool,
    /// vLLM's `decoder_kv_blocks_ttl`: how long a decode engine keeps pins. A tenth, and at least
    /// six seconds, is kept as a margin.
    #[serde(default = "flow::read_back_pin")]
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10s"))]
    pub read_back_pin: Duration,
    /// Maximum share of a decode worker's KV blocks that may be pinned, in percent. Beyond it, the
    /// oldest pins are released.
    #[serde(default = "flow::read_back_pinned_percent_max")]
    #[schemars(range(min = 1, max = 90))]
    pub read_back_pinned_percent_max: u32,
    /// Whether a stream that loses its decode worker [continues](http.md#failures-and-retries) on
    /// another.
    #[serde(default)]
    pub migrate: bool,
    /// What clients get without an engine's `cached_tokens`.
    #[serde(default)]
    pub cached_tokens_fallback: CachedTokensFallback,
    /// The policy that chooses workers.
    #[serde(default)]
    pub policy: Policy,
    /// Requests wait in the [router's queue](policies.md#the-queue); `none`: in the engines'.
    /// Default: on with `predicted_ttft` and a tokenizer.
    #[serde(default, with = "or_none")]
    #[schemars(with = "or_none::OrNone<QueueConfig>", transform = scalar::derived)]
    pub queue: Option<QueueConfig>,
    /// A worker beyond one of these gets requests only if all workers are. Default: never.
    #[serde(default)]
    pub saturation: SaturationConfig,
    /// [Where cache hits are lost](policies.md#where-hits-were-lost). About 10 bytes per block of
    /// long prompts, at most 20 for each of `blocks_max`; the first 4096 blocks of a request count.
    /// Default: on with a tokenizer; `none`: off.
    #[serde(default, with = "or_none")]
    #[schemars(with = "or_none::OrNone<CacheLossTrackingConfig>", transform = scalar::derived)]
    pub cache_loss_tracking: Option<CacheLossTrackingConfig>,
    /// The cost model before costs have been learned.
    #[serde(default)]
    pub costs: CostsConfig,
    /// The [speculative index](configuration.md#the-speculative-index).
    #[serde(default)]
    pub speculative_index: SpeculativeIndexConfig,
    /// The [canary](parity.md#the-canary).
    #[serde(default)]
    pub canary: CanaryConfig,
    /// What happens on [drift](parity.md#drift).
    #[serde(default)]
    pub drift: DriftConfig,
    /// [Fields](fields.md) that are forwarded although they control an engine or are unknown. Not
    /// those that only the router may set.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub pass_unknown: Vec<String>,
    /// Retries before the first byte of the reply.
    #[serde(default)]
    pub retries: Retries,
    /// Stop requests to a worker after consecutive failures.
    #[serde(default)]
    pub breaker: BreakerConfig,
    /// How the health of workers is observed.
    #[serde(default)]
    pub health: HealthConfig,
    /// Timeouts of the steps of a request.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// What tokens count towards the limits of tenants.
    #[serde(default)]
    pub token_weights: TokenWeights,
    /// The bearer token for the engines.
    #[serde(default)]
    pub engine_api_key: Option<Secret>,
    /// TLS to engines with an `https` URL. Without it, the system's authorities are trusted, and
    /// the router has no certificate.
    #[serde(default)]
    pub engine_tls: Option<EngineTls>,
    /// The URLs of prefill workers, with the ids `p0`, `p1`, and so on.
    #[serde(default, skip_serializing)]
    #[schemars(transform = scalar::without_default)]
    pub prefill: Vec<String>,
    /// The URLs of decode workers, likewise.
    #[serde(default, skip_serializing)]
    #[schemars(transform = scalar::without_default)]
    pub decode: Vec<String>,
    /// The listed workers. A text is the URL of an engine that does both parts
    /// (`worker-10.0.0.1:8000`). Optional with `prefill` and `decode`, or `discovery`.
    #[serde(default)]
    #[schemars(with = "Vec<worker::WorkerEntry>")]
    pub workers: Vec<WorkerConfig>,
    /// Further sources of workers.
    #[serde(default)]
    pub discovery: Vec<Discovery>,
}

impl Model {
    /// The engine of the workers.
    pub fn engine(&self) -> EngineKind {
        self.engine.map(EngineKind::from).or(self.connector.engine()).unwrap_or_default()
    }

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

/// What happens if no prefill worker can serve the leg.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OnNoPrefill {
    /// The decode worker computes the prompt.
    #[default]
    Local,
    /// The request fails with status 503.
    Fail,
}

/// What clients get without an engine's `cached_tokens`.
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
    /// Requests from which a worker is saturated. Default: not counted.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub requests: Option<u32>,
    /// Prompt tokens to compute from which it is saturated. Default: not counted.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub prefill_tokens: Option<u64>,
    /// Used KV blocks, in percent as the worker reports, from which it is saturated. Default: not
    /// counted.
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
    /// Maximum number of remembered blocks. At least the latest half is kept, or fewer if prompts
    /// add fewer than 8 blocks each on average.
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
    /// Timeout of opening a connection to an engine, with the TLS handshake.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub connect: Duration,
    /// Timeout of the whole prefill leg.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub prefill: Duration,
    /// Timeout of a whole peer fetch; then the worker computes the prompt.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub peer_fetch: Duration,
    /// Timeout from sending the last leg of a stream to its first event.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub first_token: Duration,
    /// Timeout of a whole reply that is not streamed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub reply: Duration,
    /// Maximum time between two events of a stream. Comments alone keep it open for ten times as
    /// long.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "1ms"))]
    pub stream_idle: Duration,
}

impl Model {
    /// Whether workers may fetch prefixes from each other, as far as the configuration says.
    pub fn fetches_prefixes(&self) -> bool {
        match self.peer_fetch {
            PeerFetch::Off => false,
            PeerFetch::TwoStep | PeerFetch::OneShot => true,
            PeerFetch::Auto => {
                self.connector.is_pulled()
                    && self.tokenizer != TokenizerConfig::None {}
                    && matches!(self.policy, Policy::PredictedTtft { .. })
            }
        }
    }
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
