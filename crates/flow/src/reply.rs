//! Makes the client's answer from the engine's: relays streams, and decides usage in one place.

pub(crate) mod alike;
pub mod choices;
pub mod detail;
pub mod dialect;
pub mod merge;
pub mod relay;
pub mod sse;
pub mod usage;
