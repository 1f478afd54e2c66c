//! Settings of a simulated engine.

use std::net::{IpAddr, Ipv4Addr};

use serde::Deserialize;

use crate::cache::GroupKind;
use crate::faults::Fault;
use crate::storage::SharedStorage;

/// Which legs of a disaggregated request the engine takes. Requests without
/// hand-off fields are served by every role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Only `do_remote_decode`.
    Prefill,
    /// Only `do_remote_prefill`.
    Decode,
    /// Both legs.
    #[default]
    Both,
}

/// The form of `usage.prompt_tokens_details`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UsageReport {
    /// As with `--enable-prompt-tokens-details`.
    #[default]
    Details,
    /// As without that flag: `null` in complete replies, no key in streams.
    Null,
    /// The key is always missing.
    Absent,
}

/// The value of `cached_tokens` in the decode leg's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecodeUsage {
    /// The prefill leg's figure, carried by the hand-off (vLLM 0.32).
    #[default]
    RemotePrefill,
    /// The whole prompt, whatever was cached; hand-offs made by such an engine
    /// carry no figure (vLLM 0.22.1).
    WholePrompt,
}

/// How the engine transfers KV, which determines the hand-off fields that it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvConnector {
    /// vLLM's NIXL: the decode engine pulls the blocks that the prefill reply names.
    #[default]
    Nixl,
    /// vLLM's NIXL in push mode: the decode engine registers with the prefill engine, which matches
    /// both legs by their request ids and pushes the blocks.
    NixlPush,
    /// A storage that engines share; requests have no hand-off fields.
    SharedStorage,
    /// vLLM's Mooncake: both legs carry a transfer id, and wait for each other.
    Mooncake,
    /// SGLang: both legs carry a room, and wait for each other.
    Sglang,
    /// No connector: hand-off fields are ignored, as vLLM ignores them.
    None,
}

impl KvConnector {
    /// Whether the legs are sent at once and wait for each other.
    #[must_use]
    pub fn is_concurrent(self) -> bool {
        matches!(self, Self::NixlPush | Self::Mooncake | Self::Sglang)
    }
}

/// What the engine does if it cannot read KV from another engine (`kv_load_failure_policy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadFailure {
    /// The engine fails the request.
    #[default]
    Fail,
    /// The engine computes what it cannot read if it is a decode engine. A prefill leg of the real
    /// engine that is to read would then wait without end, so none is accepted.
    Recompute,
}

/// How KV events are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EventForm {
    /// Maps tagged `type` (vLLM 0.32).
    #[default]
    Map,
    /// Arrays that begin with the event's name (up to vLLM 0.23).
    Array,
}

/// The form of block hashes in KV events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HashForm {
    /// Unsigned 64-bit integers.
    #[default]
    U64,
    /// 32 bytes.
    Bytes32,
}

/// How a request below its `cache_hit_threshold` is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThresholdReply {
    /// By `finish_reason: "cache_threshold"`, in the only chunk of a stream.
    #[default]
    Finish,
    /// Like [`Finish`](Self::Finish), but in a stream after a chunk without output.
    AfterOpening,
    /// By status 412.
    Status412,
}

/// Deviations of prompts from the shipped tokenizer files: an engine that was started with another
/// model, template or flag than the router knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptDialect {
    /// As in the files.
    #[default]
    Shipped,
    /// Every prompt begins with one more special token.
    Bos,
    /// Another chat template is used.
    OtherTemplate,
    /// Another token stands for every byte.
    OtherVocabulary,
}

/// Settings of one engine. Ports may be 0 for any free port.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Address of all listeners.
    pub host: IpAddr,
    /// HTTP API.
    pub http_port: u16,
    /// Side channel, or bootstrap server: where decode engines fetch hand-offs.
    pub side_port: u16,
    /// KV events (ZMQ PUB); `None` publishes none.
    pub kv_events_port: Option<u16>,
    /// Replay of KV events (ZMQ ROUTER); `None` offers none.
    pub kv_replay_port: Option<u16>,
    /// Number of batches of KV events that can be replayed; older ones are dropped (vLLM's
    /// `buffer_steps`).
    pub replay_batches: usize,
    /// Name of the served model; influences the generated tokens.
    pub model: String,
    /// LoRA adapter names that requests may give as `model`.
    pub adapters: Vec<String>,
    /// Legs that the engine takes.
    pub role: Role,
    /// The connector.
    pub connector: KvConnector,
    /// The storage of [`KvConnector::SharedStorage`], common to all engines that share it.
    pub storage: SharedStorage,
    /// Maximum time for which one leg waits for the other, in milliseconds, if both are sent at
    /// once. With [`KvConnector::NixlPush`], a decode leg waits for ever.
    pub rendezvous_timeout_ms: u64,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Physical KV blocks, of which one cannot be used (vLLM's null block).
    pub kv_blocks: u32,
    /// Number of evicted blocks that are kept in host memory and announced with medium `CPU`. Prompts
    /// that need them load them; hand-offs and reads from other engines do not.
    pub host_blocks: usize,
    /// The cache groups besides full attention, as in hybrid models. They keep blocks at a prompt's
    /// resume points alone.
    pub cache_groups: Vec<GroupKind>,
    /// Whether the last block of each hit is computed again, as vLLM does with EAGLE and MTP. Engines
    /// without cache groups only.
    pub drops_last_block: bool,
    /// Time to load one block from host memory, in microseconds.
    pub host_load_us_per_block: u64,
    /// The data type of the KV, as metrics report it. Engines exchange KV of one type only, as vLLM's
    /// handshake has it.
    pub kv_dtype: String,
    /// Seed of block hashes; engines with equal seeds announce equal hashes.
    pub hash_seed: u64,
    /// Maximum number of running requests.
    pub max_num_seqs: usize,
    /// Maximum number of waiting requests; further ones are refused with 503.
    pub max_waiting: usize,
    /// Maximum tokens of prompt and reply together. Reduced to what the cache can hold.
    pub max_model_len: usize,
    /// Length of the reply of chats that do not set one.
    pub default_max_tokens: usize,
    /// On average, one token in this number ends the reply (unless `ignore_eos`); 0 = never.
    pub eos_one_in: u64,
    /// Time to compute one uncached prompt token, in microseconds.
    pub prefill_us_per_token: u64,
    /// Time of one engine step, in microseconds.
    pub decode_us_per_step: u64,
    /// Time to transfer one KV block, in microseconds.
    pub transfer_us_per_block: u64,
    /// Whether the engine takes part in peer fetches, as any vLLM engine with NIXL does: it takes a
    /// hand-off, or hands over, for a request of one token whatever its role is.
    pub peer_fetch: bool,
    /// How long a hand-off's blocks stay pinned for the decode engine, in milliseconds.
    pub lease_ms: u64,
    /// How long the blocks of a finished decode leg stay pinned for a prefill leg to read, in
    /// milliseconds (NIXL with `bidirectional_kv_xfer`, `decoder_kv_blocks_ttl`); `None` without the
    /// flag.
    pub bidirectional_ttl_ms: Option<u64>,
    /// Remainders of fewer tokens than this are computed and not read (`kv_recompute_threshold`).
    pub recompute_threshold_tokens: usize,
    /// What happens if KV cannot be read.
    pub load_failure: LoadFailure,
    /// Whether `cache_hit_threshold` gates requests or is ignored as an unknown field.
    pub honour_threshold: bool,
    /// How requests below it are refused.
    pub threshold_reply: ThresholdReply,
    /// Whether the header `x-splitrail-gate` gates requests, like that of a shim: by its third
    /// part, the number of leading blocks.
    pub honour_gate_header: bool,
    /// Number of data-parallel ranks: each has its own cache, queue and events, on consecutive
    /// ports.
    pub data_parallel: u16,
    /// Whether `X-data-parallel-rank` pins a request to a rank. Otherwise, or without the header,
    /// each request goes to the next rank, so that a repeated prompt never finds its own blocks.
    pub honour_rank_header: bool,
    /// Report of cached tokens.
    pub usage_report: UsageReport,
    /// Report of cached tokens on the decode leg.
    pub decode_usage: DecodeUsage,
    /// Encoding of KV events.
    pub event_form: EventForm,
    /// Encoding of block hashes in KV events.
    pub hash_form: HashForm,
    /// Streams get their headers immediately, and errors inside the stream, as with the real
    /// engine. Otherwise the first output determines the status.
    pub early_stream_headers: bool,
    /// How texts become prompts.
    pub dialect: PromptDialect,
    /// Whether responses and messages support `kv_transfer_params`; older releases do not.
    pub names_hand_offs: bool,
    /// Whether `/tokenize`, `/detokenize` and `/v1/messages/count_tokens` exist.
    pub offers_tokenize: bool,
    /// Whether it serves embeddings, scores, classes and pools (`/v1/embeddings`, `/score`, `/rerank`,
    /// `/classify`, `/pooling`), and generates nothing.
    pub embeds: bool,
    /// Whether it serves `/v1/audio/transcriptions` and `/v1/audio/translations`.
    pub transcribes: bool,
    /// Faults that are active from the start.
    pub faults: Vec<Fault>,
    /// The reply of `/version`.
    pub version: String,
    /// The key that requests under `/v1` must present as a bearer token (vLLM's `--api-key`).
    pub api_key: Option<String>,
    /// How far the engine's clock is ahead of the true time, in seconds: in the field `date` of its
    /// replies and in its KV events.
    pub clock_ahead_s: i64,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            http_port: 0,
            side_port: 0,
            kv_events_port: Some(0),
            kv_replay_port: Some(0),
            replay_batches: 10_000,
            model: "sim".to_owned(),
            adapters: Vec::new(),
            role: Role::Both,
            connector: KvConnector::Nixl,
            storage: SharedStorage::default(),
            rendezvous_timeout_ms: 300_000,
            block_size: 16,
            kv_blocks: 4096,
            host_blocks: 0,
            cache_groups: Vec::new(),
            drops_last_block: false,
            host_load_us_per_block: 0,
            kv_dtype: "auto".to_owned(),
            hash_seed: 0,
            max_num_seqs: 64,
            max_waiting: 4096,
            max_model_len: 32_768,
            default_max_tokens: 128,
            eos_one_in: 0,
            prefill_us_per_token: 0,
            decode_us_per_step: 0,
            transfer_us_per_block: 0,
            peer_fetch: true,
            lease_ms: 30_000,
            bidirectional_ttl_ms: None,
            recompute_threshold_tokens: 64,
            load_failure: LoadFailure::Fail,
            honour_threshold: true,
            threshold_reply: ThresholdReply::Finish,
            honour_gate_header: false,
            data_parallel: 1,
            honour_rank_header: true,
            usage_report: UsageReport::Details,
            decode_usage: DecodeUsage::RemotePrefill,
            event_form: EventForm::Map,
            hash_form: HashForm::U64,
            early_stream_headers: false,
            dialect: PromptDialect::Shipped,
            names_hand_offs: true,
            offers_tokenize: true,
            embeds: false,
            transcribes: false,
            faults: Vec::new(),
            version: "0.32.0".to_owned(),
            api_key: None,
            clock_ahead_s: 0,
        }
    }
}

impl SimConfig {
    /// Maximum length of a sequence that the engine accepts, in tokens.
    #[must_use]
    pub fn sequence_limit_tokens(&self) -> usize {
        let cache_tokens = (self.kv_blocks as usize).saturating_sub(1) * self.block_size;
        self.max_model_len.min(cache_tokens)
    }
}
