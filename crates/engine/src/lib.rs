//! Everything that knows an engine's dialect: KV event decoding and subscription, load metrics,
//! hand-offs and usage. Nothing here makes decisions; the crate turns an engine's bytes into typed
//! facts, or says precisely why that is not possible.
//!
//! What engines send is untrusted: every length is checked before memory is reserved for it, every
//! buffer has a bound, and no error or log line carries token ids or payload contents.

pub mod connectors;
pub mod dialect;
pub mod fields;
pub mod identity;
pub mod json;
mod kind;
pub mod kv_events;
pub mod load;
mod sglang;
pub mod sse;
pub mod template_kwargs;
pub mod threshold_reply;
pub mod tokenize;
pub mod usage;
mod vllm;
pub mod zmtp;

pub use kind::{EngineKind, ReportPaths};
