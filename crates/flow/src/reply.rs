//! Makes the client's answer from the engine's: relays streams, and is the only place that decides
//! the usage that clients see.

pub(crate) mod alike;
pub mod choices;
pub mod detail;
pub mod dialect;
pub mod merge;
pub mod relay;
pub mod sse;
pub mod usage;
