//! The event plane over NATS: what routers and shims have in common there. Names of
//! subjects and stores, the connection to the broker, and the form of a stored snapshot.
//! What is said stands in `splitrail/v1/plane.proto`; when and why is the programs' own.

#[cfg(feature = "nats")]
pub mod broker;
pub mod config;
pub mod names;
pub mod snapshot;

#[cfg(feature = "nats")]
pub use async_nats;
#[cfg(feature = "nats")]
pub use broker::Broker;
