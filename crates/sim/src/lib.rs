//! Simulated P/D engines, stricter than real ones.
//!
//! [`SimEngine`] is a vLLM-like server inside the process: OpenAI's HTTP API, a
//! paged KV cache with prefix caching, KV events over ZMQ, NIXL-shaped
//! hand-offs between prefill and decode, metrics, and faults on demand. Each
//! token that it generates depends on all tokens before it, so any mix-up of
//! KV shows in the text; a hand-off that does not fit is an error instead of
//! wrong text.
//!
//! The crate knows nothing of the router's own code: agreement between the two
//! is therefore a test of both.

pub mod cache;
pub mod cluster;
pub mod tokenizer;

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
    DecodeUsage, EventForm, HashForm, KvConnector, PromptDialect, Role, SimConfig, ThresholdReply,
    UsageReport,
};
pub use engine::Counters;
pub use faults::{Fault, FaultKind};
pub use record::{RecordedRequest, SimState};
pub use server::SimEngine;
pub use storage::SharedStorage;
pub use tokenizer::{TOKENIZER_CONFIG_JSON, write_tokenizer};
