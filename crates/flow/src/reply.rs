//! From an engine's answer to the client's: streams are relayed, and usage is
//! decided in one place.

pub(crate) mod alike;
pub mod choices;
pub mod detail;
pub mod dialect;
pub mod merge;
pub mod relay;
pub mod sse;
pub mod usage;
