//! The event plane: one connection to a broker instead of a stream to each router.
//!
//! First, the shim asks the routers how they hash blocks. Then it publishes changes to the
//! model's stream. Each message is acknowledged before the next one is sent, so that no message
//! can be missing between two others. A snapshot is stored in the model's object store
//! periodically, when many changes have been published since the last one, when changes were
//! lost before they were published, and when a router asks for one. The shim also publishes
//! regular reports with the engine's load.

mod config;
#[cfg(feature = "nats")]
mod hash_terms;
#[cfg(feature = "nats")]
mod publish;
#[cfg(feature = "nats")]
mod publisher;
#[cfg(feature = "nats")]
mod report;
#[cfg(feature = "nats")]
mod requests;
#[cfg(feature = "nats")]
mod session;
#[cfg(feature = "nats")]
mod snapshots;
mod status;

pub use self::config::PlaneConfig;
#[cfg(feature = "nats")]
pub use self::publisher::run;
pub use self::status::{PlaneStatus, SharedPlaneStatus};
