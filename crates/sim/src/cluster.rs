//! A P/D cluster in virtual time: a discrete-event simulation, deterministic to the
//! nanosecond, of prefill workers with prefix caches, KV transfers and decode workers
//! with continuous batching.
//!
//! Nothing here sleeps, draws random numbers or reads a clock. A [`Router`] decides where each
//! request goes and sees the cluster through read-only methods of [`Cluster`]; it is the only part
//! that differs between policies. `docs/replay.md` describes the model.
//!
//! All times are unsigned nanoseconds; values in seconds are converted in one place, [`cost::ns`].

pub mod cost;
pub mod workload;

mod cache;
mod clairvoyant;
mod config;
mod decode;
mod events;
mod links;
mod lru;
mod outcome;
mod prefill;
mod router;
mod run;
mod state;

pub use cache::Cache;
pub use config::{ClusterConfig, InsertAt, Pool};
pub use cost::CostModel;
pub use lru::Lru;
pub use outcome::{RequestResult, SimulationResult};
pub use router::{Decision, Peer, Placement, Router};
pub use run::run;
pub use state::Cluster;
pub use workload::{TraceRequest, Workload};
