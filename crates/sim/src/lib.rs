//! Simulated P/D engines, stricter than real ones.
//!
//! [`SimEngine`] is a vLLM-like server within the process: OpenAI's HTTP API, a paged KV cache with
//! prefix caching, KV events over ZMQ, NIXL-like hand-offs between prefill and decode, metrics, and
//! faults on request. Each generated token depends on all tokens before it, so any mix-up of KV is
//! visible in the text; a hand-off that does not match is an error instead of wrong text.
//!
//! The crate shares no code with the router: that both agree is therefore a test of both.

pub mod cache;
pub mod cluster;
pub mod tokenizer;

mod adapters;
mod config;
mod engine;
mod error;
mod events;
mod faults;
mod http;
mod record;
mod server;
mod storage;

pub use config::{
    DecodeUsage, EventForm, HashForm, KvConnector, LoadFailure, PromptDialect, Role, SimConfig,
    ThresholdReply, UsageReport,
};
pub use engine::Counters;
pub use faults::{Fault, FaultKind, OddEvent};
pub use record::{RecordedRequest, SimState};
pub use server::SimEngine;
pub use storage::SharedStorage;
pub use tokenizer::{TOKENIZER_CONFIG_JSON, write_tokenizer};
