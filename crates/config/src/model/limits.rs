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
    /// Maximum number of client connections per listener. Further ones are closed at once.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// Maximum number of connections from one client address (IPv6: its first 64 bits) per listener.
    /// Further ones are closed at once. 0 sets no limit. In any case, an address can hold at most
    /// eight times as many connections as are free: a single one, such as a load balancer, gets 8/9
    /// of `connections_max`, and others always find room.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub connections_per_address_max: usize,
    /// Maximum time for the head of a request, from its first byte, or from the opening of a new
    /// connection. Afterwards the connection is closed. At least 10 ms.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub header_timeout: Duration,
    /// Maximum time for which a connection stays open without a request. Load balancers in front
    /// should close idle connections earlier. At least 10 ms.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub idle_timeout: Duration,
    /// Maximum time for which a client may read nothing of what is sent to it. Afterwards its
    /// connection, or its HTTP/2 stream, is closed and its requests are cancelled. At least 10 ms.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub write_stall: Duration,
    /// Time for which a client may read a reply more slowly than `reply_rate_min`. At least 10 ms.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub reply_grace: Duration,
    /// The minimum rate at which a client must read pending bytes, on average after `reply_grace`.
    /// Otherwise its connection, or its HTTP/2 stream, is closed and its requests are cancelled.
    /// Only time in which bytes are pending counts, so an engine may be slow. The waiting streams of
    /// one HTTP/2 connection share the rate. With 0, only `write_stall` applies.
    #[serde(rename = "reply_rate_min")]
    #[serde(deserialize_with = "size::rate", serialize_with = "size::rate_text")]
    #[schemars(with = "size::RateText", range(min = 0, max = 1_073_741_824_u64))]
    pub reply_min_bytes_per_s: u64,
    /// Maximum size of long replies (over 256 KiB) that are held for one HTTP/2 connection.
    /// Further replies of engines are not read before there is room. If the client does not read in
    /// the meantime, these requests are shed with 429 and `Retry-After`. A reply that is longer than
    /// this value is held alone.
    #[serde(rename = "unread_replies_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub unread_replies_max_bytes: usize,
    /// Maximum size of a request head. A larger one gets status 431.
    #[serde(rename = "header_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 4096, max = 1_048_576))]
    pub header_max_bytes: usize,
    /// Maximum number of header fields of a request. More get status 431.
    #[schemars(range(min = 16, max = 1024))]
    pub headers_max: usize,
    /// Maximum number of concurrent requests on one HTTP/2 connection.
    #[schemars(range(min = 1, max = 100_000))]
    pub http2_streams_max: u32,
    /// Maximum number of open health watches and reflection calls of gRPC clients. Further ones are
    /// refused with `RESOURCE_EXHAUSTED`. A watch may stay open for as long as its connection. One
    /// client address (IPv6: its first 64 bits) may hold no more than eight times as many as are
    /// free.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub grpc_watches_max: usize,
    /// Maximum size of a request body. A larger one gets status 413.
    #[serde(rename = "body_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024, max = 1_073_741_824_u64))]
    pub body_max_bytes: usize,
    /// Maximum time for the arrival of a request body. Afterwards the request gets status 408. At
    /// least 10 ms.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub body_timeout: Duration,
    /// Time for which a body may arrive more slowly than `body_rate_min`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub body_grace: Duration,
    /// The minimum rate at which a body must arrive, on average after `body_grace`. Otherwise the
    /// request gets status 408. With 0, only `body_timeout` applies.
    #[serde(rename = "body_rate_min")]
    #[serde(deserialize_with = "size::rate", serialize_with = "size::rate_text")]
    #[schemars(with = "size::RateText", range(min = 0, max = 1_073_741_824_u64))]
    pub body_min_bytes_per_s: u64,
    /// Maximum memory for all requests: bodies that are arriving or belong to requests in
    /// flight, and what is built from them. Beyond it, requests are shed with 503 and
    /// `Retry-After`.
    #[serde(rename = "request_memory_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub request_memory_max_bytes: usize,
    /// Maximum number of members of each object in a request body, at every depth. More get status
    /// 400. `sampling_params` has at most 4096 in any case.
    #[schemars(range(min = 64, max = 262_144))]
    pub object_members_max: usize,
    /// Maximum number of messages of a chat, or items of a response's `input`. More get status 400.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub messages_max: usize,
    /// Maximum size of a prompt that is tokenised, as JSON, with all members that its chat
    /// template reads. Longer prompts are placed by load alone. Tokenising takes up to 200 bytes of
    /// memory per byte, on at most one prompt per core, and on at most half of the cores for long
    /// prompts (from 256 KiB).
    #[serde(rename = "tokenize_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024, max = 1_073_741_824_u64))]
    pub tokenize_max_bytes: usize,
    /// Maximum processor time of a chat template for one prompt. Beyond it, the request is placed by
    /// load alone.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub template_timeout: Duration,
    /// Maximum number of requests in flight for all models. Each prompt of a batch, and each sample
    /// that is sent separately, counts. Further ones are shed with 503 and `Retry-After`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub in_flight_max: usize,
    /// How clients are distinguished to share `in_flight_max` fairly when it gets scarce. Requests
    /// of a client beyond its fair share are shed with 429 and `Retry-After`.
    pub fair_by: FairBy,
    /// Maximum number of prompts in one batched completions request.
    #[schemars(range(min = 1, max = 1024))]
    pub batch_prompts_max: usize,
    /// Maximum number of entries in the `input` of one embeddings request.
    #[schemars(range(min = 1, max = 65_536))]
    pub embedding_inputs_max: usize,
    /// Maximum value of `n` and `best_of`.
    #[schemars(range(min = 1, max = 1024))]
    pub n_max: u32,
    /// Maximum value of `max_tokens` and equivalent fields.
    #[schemars(range(min = 1))]
    pub output_tokens_max: u32,
    /// Maximum number of entries in a `stop` list.
    #[schemars(range(min = 0, max = 1024))]
    pub stop_max: usize,
    /// Maximum size of one schema, grammar or list of tokens (`tools`, `response_format`, guided
    /// decoding, `logit_bias`).
    #[serde(rename = "schema_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 1024))]
    pub schema_max_bytes: usize,
    /// Maximum size of an engine's reply that is not streamed, or of one event of a stream.
    #[serde(rename = "engine_reply_size_max")]
    #[serde(deserialize_with = "size::size", serialize_with = "size::size_text")]
    #[schemars(with = "size::SizeText", range(min = 65_536, max = 1_073_741_824_u64))]
    pub engine_reply_max_bytes: usize,
    /// Maximum number of KV blocks of one worker in the index.
    #[schemars(range(min = 1))]
    pub index_blocks_per_worker_max: usize,
    /// Number of decision records that are kept for `/admin/decisions`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub decisions_kept: usize,
    /// How long a stopping router reports "not ready" while it still accepts connections.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub drain_delay: Duration,
    /// Maximum time for requests in flight once the router accepts no more connections.
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
    /// Clients are not distinguished. Requests are served in the order of arrival.
    None {},
    /// By their address (IPv6: its first 64 bits). Not useful behind a load balancer.
    Address {},
    /// By the value of a header, for example their API key. All clients without the header count as
    /// one.
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
