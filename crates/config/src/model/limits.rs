//! Bounds on what clients may do and on what the router holds.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scalar;

/// Bounds. Each refusal names the key that was hit.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Open connections of clients, for each listener; more are closed at once.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections_max: usize,
    /// Open connections from one client address (IPv6: its first 64 bits), for each listener; more
    /// are closed at once. 0 sets no such bound. Without one, an address may still hold no more
    /// than eight times as many as are free: one alone, such as a balancer, gets 8/9 of
    /// `connections_max`, and others always find room.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub connections_per_address_max: usize,
    /// How long a request's head may take from its first byte, and a new connection's first
    /// head from the connection's beginning; then the connection is closed.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub header_timeout: Duration,
    /// How long a connection may be open without a request; balancers in front should give up
    /// idle connections earlier than that.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub idle_timeout: Duration,
    /// How long a client may take nothing of what is sent to it; then its connection, or its
    /// HTTP/2 stream, is closed and its requests are cancelled.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub write_stall: Duration,
    /// How long an answer may be read more slowly than `answer_min_bytes_per_s`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub answer_grace: Duration,
    /// The pace at which a client must read what waits for it, on average after `answer_grace`;
    /// else its connection, or its HTTP/2 stream, is closed and its requests are cancelled. Only
    /// the time counts in which bytes wait for the client, so an engine may be slow. The waiting
    /// streams of one HTTP/2 connection share the pace. 0 leaves it at `write_stall`.
    #[schemars(range(min = 0, max = 1_073_741_824_u64))]
    pub answer_min_bytes_per_s: u64,
    /// Bytes of long answers (over 256 KiB) that are held for one HTTP/2 connection, whose client
    /// may ask for many at a time and read none: an engine's further replies are not read before
    /// there is room. If the client does not read in the meantime, these requests are shed with
    /// 429 and `Retry-After`. A longer answer goes alone.
    #[schemars(range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub unread_answers_max_bytes: usize,
    /// Bytes of a request's head; more is a 431.
    #[schemars(range(min = 4096, max = 1_048_576))]
    pub header_max_bytes: usize,
    /// Fields of a request's head; more is a 431.
    #[schemars(range(min = 16, max = 1024))]
    pub headers_max: usize,
    /// Requests at a time on one HTTP/2 connection.
    #[schemars(range(min = 1, max = 100_000))]
    pub http2_streams_max: u32,
    /// Open health watches and reflection calls of gRPC clients; more are refused with
    /// `RESOURCE_EXHAUSTED`. A watch may stay open for as long as its connection. One client address
    /// (IPv6: its first 64 bits) may hold no more than eight times as many as are free.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub grpc_watches_max: usize,
    /// Largest request body, in bytes; more is a 413.
    #[schemars(range(min = 1024, max = 1_073_741_824_u64))]
    pub body_max_bytes: usize,
    /// How long a request's body may take to arrive; then it is a 408.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub body_timeout: Duration,
    /// How long a body may arrive more slowly than `body_min_bytes_per_s`.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub body_grace: Duration,
    /// The pace at which a body must arrive, on average after `body_grace`; else it is a 408.
    /// 0 leaves it at `body_timeout`.
    #[schemars(range(min = 0, max = 1_073_741_824_u64))]
    pub body_min_bytes_per_s: u64,
    /// Bytes of memory that all requests may make the router hold: bodies that are arriving or
    /// belong to requests in flight, and what is built from them; past it, requests are shed with
    /// 503 and `Retry-After`.
    #[schemars(range(min = 1_048_576, max = 1_099_511_627_776_u64))]
    pub request_memory_max_bytes: usize,
    /// Members of any one object in a request's body, at every depth; more is a 400.
    #[schemars(range(min = 64, max = 262_144))]
    pub object_members_max: usize,
    /// Messages of one chat, or items of one response's `input`; more is a 400.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub messages_max: usize,
    /// Longest prompt that is tokenised, in bytes of JSON, with all that its chat template reads;
    /// longer ones are placed by load alone. Tokenising takes up to 200 bytes of memory per byte,
    /// on at most one prompt per core, and on long ones (from 256 KiB) on half of the cores.
    #[schemars(range(min = 1024, max = 1_073_741_824_u64))]
    pub tokenize_max_bytes: usize,
    /// Processor time that a chat template may take for one prompt; then the request is placed by
    /// load alone.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub template_timeout: Duration,
    /// Requests in flight over all models, each prompt of a batch counted, and each sample that
    /// is sent apart; more are shed with 503 and `Retry-After`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub in_flight_max: usize,
    /// Who shares the room in flight fairly with whom when it gets scarce; who has more than a
    /// fair share is shed with 429 and `Retry-After`.
    pub fair_by: FairBy,
    /// Prompts in one batched completions request.
    #[schemars(range(min = 1, max = 1024))]
    pub batch_prompts_max: usize,
    /// Entries in the `input` of one embeddings request.
    #[schemars(range(min = 1, max = 65_536))]
    pub embedding_inputs_max: usize,
    /// Largest `n` and `best_of`.
    #[schemars(range(min = 1, max = 1024))]
    pub n_max: u32,
    /// Largest `max_tokens` and its relatives.
    #[schemars(range(min = 1))]
    pub output_tokens_max: u32,
    /// Entries in a `stop` list.
    #[schemars(range(min = 0, max = 1024))]
    pub stop_max: usize,
    /// Bytes of one schema or grammar (`tools`, `response_format`, guided decoding).
    #[schemars(range(min = 1024))]
    pub schema_max_bytes: usize,
    /// Bytes of an engine's non-streamed reply, or of one event of a stream.
    #[schemars(range(min = 65_536, max = 1_073_741_824_u64))]
    pub engine_reply_max_bytes: usize,
    /// KV blocks that one worker can make the index hold.
    #[schemars(range(min = 1))]
    pub index_blocks_per_worker_max: usize,
    /// Decision records kept for `/admin/decisions`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub decisions_kept: usize,
    /// How long a stopping router says "not ready" while it still accepts.
    #[serde(deserialize_with = "scalar::duration", serialize_with = "scalar::duration_text")]
    #[schemars(with = "scalar::DurationText")]
    pub drain_delay: Duration,
    /// How long requests in flight may go on once it stops accepting.
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
            answer_grace: Duration::from_secs(30),
            answer_min_bytes_per_s: 4096,
            unread_answers_max_bytes: 64 << 20,
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

/// Who shares the room in flight fairly with whom.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FairBy {
    /// Nobody: who comes first is served.
    None {},
    /// Clients by their address (IPv6: its first 64 bits). Not of use behind a balancer.
    Address {},
    /// Clients by the value of a header, say their API key; those without it are as one.
    Header {
        /// The header's name.
        #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9-]+$"))]
        name: String,
    },
}

impl Default for FairBy {
    fn default() -> Self {
        Self::None {}
    }
}
