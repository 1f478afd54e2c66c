//! Bounds on clients, and on what the router holds for them.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use splitrail_settings::size;

use crate::scalar;

/// Limits. Each refusal names the key of its limit.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum client connections per listener. Further ones are closed.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// Maximum connections per client address (IPv6: /64) and listener. Further ones are closed. 0:
    /// no limit, except that an address holds at most eight times as many as are free (a single one
    /// 8/9 of `connections_max`).
    #[schemars(range(min = 0, max = 1_000_000))]
    pub connections_per_address_max: usize,
    /// Maximum time for the head of a request, or from the opening of a connection. Then the
    /// connection is closed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub header_timeout: Duration,
    /// Maximum time of a connection without a request. Load balancers in front should close theirs
    /// earlier.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub idle_timeout: Duration,
    /// Maximum time for which a client may read nothing. Then its connection or HTTP/2 stream is
    /// closed, and its requests are cancelled.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub write_stall: Duration,
    /// Time for which a client may read more slowly than `reply_rate_min`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub reply_grace: Duration,
    /// Minimum rate at which a client reads pending bytes, on average after `reply_grace`;
    /// otherwise as for `write_stall`. The waiting streams of one HTTP/2 connection share it. 0:
    /// only `write_stall` applies.
    #[serde(rename = "reply_rate_min")]
    #[serde(deserialize_with = "size::rate", serialize_with = "size::rate_text")]
    #[schemars(with = "size::RateText", range(min = 0, max = 1_073_741_824_u64))]
    pub reply_min_bytes_per_s: u64,
    /// Maximum size of long replies (over 256 KiB) held for one HTTP/2 connection; a longer one is
    /// held alone. Further ones wait, and are shed with 429 and `Retry-After` if the client does
    /// not read.
    #[serde(rename = "unread_replies_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub unread_replies_max_bytes: usize,
    /// Maximum size of a request head (otherwise 431).
    #[serde(rename = "header_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 4096, max = 1_048_576))]
    pub header_max_bytes: usize,
    /// Maximum header fields of a request (otherwise 431).
    #[schemars(range(min = 16, max = 1024))]
    pub headers_max: usize,
    /// Maximum concurrent requests on one HTTP/2 connection.
    #[schemars(range(min = 1, max = 100_000))]
    pub http2_streams_max: u32,
    /// Maximum open health watches and reflection calls over gRPC (otherwise `RESOURCE_EXHAUSTED`).
    /// A client address (IPv6: /64) holds at most eight times as many as are free.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub grpc_watches_max: usize,
    /// Maximum size of a request body (otherwise 413).
    #[serde(rename = "body_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024, max = 1_073_741_824_u64))]
    pub body_max_bytes: usize,
    /// Maximum time for the arrival of a body (otherwise 408).
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText", extend("x-minimum" = "10ms"))]
    pub body_timeout: Duration,
    /// Time for which a body may be slower than `body_rate_min`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub body_grace: Duration,
    /// Minimum rate of an arriving body, on average after `body_grace` (otherwise 408). 0: only
    /// `body_timeout` applies.
    #[serde(rename = "body_rate_min")]
    #[serde(deserialize_with = "size::rate", serialize_with = "size::rate_text")]
    #[schemars(with = "size::RateText", range(min = 0, max = 1_073_741_824_u64))]
    pub body_min_bytes_per_s: u64,
    /// Maximum memory of all requests: bodies and what is built from them (otherwise 503 and
    /// `Retry-After`).
    #[serde(rename = "request_memory_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub request_memory_max_bytes: usize,
    /// Maximum members of each object in a body (otherwise 400). `sampling_params` has at most
    /// 4096.
    #[schemars(range(min = 64, max = 262_144))]
    pub object_members_max: usize,
    /// Maximum messages of a chat, or items of a response's `input` (otherwise 400).
    #[schemars(range(min = 1, max = 1_000_000))]
    pub messages_max: usize,
    /// Maximum size of a prompt that is tokenised, as JSON with all that its template reads; longer
    /// ones are placed by load. Tokenising takes up to 200 bytes of memory per byte, on one prompt
    /// per core (from 256 KiB on half of the cores).
    #[serde(rename = "tokenize_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024, max = 1_073_741_824_u64))]
    pub tokenize_max_bytes: usize,
    /// Maximum processor time of a chat template; beyond it, the prompt is placed by load.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub template_timeout: Duration,
    /// Maximum requests in flight for all models (otherwise 503 and `Retry-After`). Each prompt of
    /// a batch, and each sample sent separately, counts.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub in_flight_max: usize,
    /// How the router identifies clients, which share `in_flight_max` when it is scarce. Requests beyond a
    /// fair share get 429 and `Retry-After`.
    pub fair_by: FairBy,
    /// Maximum prompts in one batch.
    #[schemars(range(min = 1, max = 1024))]
    pub batch_prompts_max: usize,
    /// Maximum entries in the `input` of embeddings, `/classify` and `/pooling`, and in each list of
    /// texts to score or rerank.
    #[schemars(range(min = 1, max = 65_536))]
    pub embedding_inputs_max: usize,
    /// Maximum value of `n` and `best_of`.
    #[schemars(range(min = 1, max = 1024))]
    pub n_max: u32,
    /// Maximum value of `max_tokens` and equivalent fields.
    #[schemars(range(min = 1))]
    pub output_tokens_max: u32,
    /// Maximum entries in a `stop` list.
    #[schemars(range(min = 0, max = 1024))]
    pub stop_max: usize,
    /// Maximum size of one schema, grammar or list of tokens (`tools`, `response_format`, guided
    /// decoding, `logit_bias`).
    #[serde(rename = "schema_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024))]
    pub schema_max_bytes: usize,
    /// Maximum size of an engine's whole reply, or one event of a stream.
    #[serde(rename = "engine_reply_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 65_536, max = 1_073_741_824_u64))]
    pub engine_reply_max_bytes: usize,
    /// Maximum KV blocks of one worker in the index.
    #[schemars(range(min = 1))]
    pub index_blocks_per_worker_max: usize,
    /// Decision records kept for `/admin/decisions`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub decisions_kept: usize,
    /// How long a stopping router is "not ready" and still accepts connections.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub drain_delay: Duration,
    /// Maximum time for requests in flight after `drain_delay`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub drain_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 8192,
            connections_per_address_max: 0,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(90),
            write_stall: Duration::from_secs(30),
            reply_grace: Duration::from_secs(30),
            reply_min_bytes_per_s: 4096,
            unread_replies_max_bytes: 32 << 20,
            header_max_bytes: 16 << 10,
            headers_max: 100,
            http2_streams_max: 200,
            grpc_watches_max: 1024,
            body_max_bytes: 32 << 20,
            body_timeout: Duration::from_secs(60),
            body_grace: Duration::from_secs(5),
            body_min_bytes_per_s: 1024,
            request_memory_max_bytes: 1 << 30,
            object_members_max: 4096,
            messages_max: 4096,
            tokenize_max_bytes: 4 << 20,
            template_timeout: Duration::from_secs(1),
            in_flight_max: 4096,
            fair_by: FairBy::None {},
            batch_prompts_max: 64,
            embedding_inputs_max: 2048,
            n_max: 128,
            output_tokens_max: 1 << 20,
            stop_max: 64,
            schema_max_bytes: 1 << 20,
            engine_reply_max_bytes: 64 << 20,
            index_blocks_per_worker_max: 4 << 20,
            decisions_kept: 1024,
            drain_delay: Duration::from_secs(3),
            drain_grace: Duration::from_secs(30),
        }
    }
}

/// How clients are told apart for fair shares.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FairBy {
    /// Not at all: in the order of arrival.
    None {},
    /// By address (IPv6: /64). Not useful behind a load balancer.
    Address {},
    /// By the [session](limits.md#fair-shares) that agents name, without one by address.
    Session {},
    /// By the value of a header, such as the API key. All clients without it count as one.
    Header {
        /// The name of the header.
        #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9-]+$"))]
        name: String,
    },
}

impl Default for FairBy {
    fn default() -> Self {
        Self::None {}
    }
}
