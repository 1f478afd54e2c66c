//! The event plane over NATS, shared by routers and shims: the names of subjects and stores, the
//! connection to the broker, and the format of a stored snapshot. The messages are defined in
//! `splitrail/v1/plane.proto`; the programs decide when to send each of them.

#[cfg(feature = "nats")]
pub mod broker;
pub mod config;
pub mod names;
pub mod snapshot;

#[cfg(feature = "nats")]
pub use async_nats;
#[cfg(feature = "nats")]
pub use broker::Broker;
