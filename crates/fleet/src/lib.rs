//! The workers of a router: which exist, which KV blocks they hold, and how busy and healthy they
//! are. Requests read snapshots of this state.

pub mod attach;
pub mod audit;
pub mod bootstrap;
mod canary;
mod candidates;
pub mod claims;
pub mod cluster;
pub mod drift;
pub mod engine_facts;
pub mod event_stats;
pub mod exclusion;
mod follow;
mod health;
mod indexing;
pub mod intake;
mod learn;
pub mod life;
pub mod losses;
pub mod membership;
pub mod missing_hand_offs;
pub mod models;
mod outcomes;
pub mod parity;
pub mod peer_fetch;
pub mod poll;
pub mod pool;
pub mod presence;
pub mod prewarm;
pub mod probe;
pub mod push;
pub mod quarantine;
pub mod ranks;
pub mod read_back;
pub mod releases;
pub mod reply_audit;
pub mod resync;
pub mod roster;
pub mod served;
pub mod shim_report;
pub mod speculative_index;
pub mod state;
pub mod waiting;
pub mod worker;

use splitrail_config::Parts;

/// The optional parts (cargo features) of the fleet that this build includes; those of the whole
/// router are `splitrail_router::PARTS`.
pub const PARTS: Parts =
    Parts { kubernetes: cfg!(feature = "kubernetes"), nats: cfg!(feature = "nats"), otlp: false };

pub use bootstrap::Bootstrap;
pub use claims::WorkerSource;
pub use cluster::Cluster;
pub use exclusion::{Exclusion, excluded, veto_by_health};
pub use membership::Fleet;
pub use pool::{CandidateQuery, Pool};
pub use ranks::Ranks;
pub use roster::Roster;
pub use served::{Named, Served, Serving, Tokenizing};
pub use splitrail_engine_client::hosts::Hosts;
pub use splitrail_workload::{
    Booked, Booking, booking, breaker, calibration, costs, endpoint_support, pace,
};
pub use worker::Worker;
