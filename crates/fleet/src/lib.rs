//! The workers: which exist, what they hold, how busy and how healthy they are. Requests read snapshots of this.

pub mod assumed;
pub mod attach;
pub mod audit;
pub mod booking;
pub mod bootstrap;
pub mod breaker;
pub mod calibration;
mod canary;
pub mod claims;
pub mod cluster;
pub mod costs;
mod deeds;
pub mod discovery;
pub mod drift;
pub mod ejection;
pub mod exclusion;
mod follow;
pub mod hand_overs;
mod health;
pub mod hosts;
mod indexing;
pub mod intake;
pub mod keeper;
pub mod life;
pub mod losses;
pub mod models;
pub mod offers;
pub mod pace;
pub mod parity;
mod picture;
pub mod poll;
pub mod pool;
pub mod probe;
pub mod ranks;
pub mod releases;
pub mod reply_audit;
pub mod resync;
pub mod roster;
pub mod served;
pub mod state;
pub mod told;
pub mod waiting;
pub mod witness;
pub mod worker;

use splitrail_config::Parts;

/// The parts that this build has.
pub const PARTS: Parts =
    Parts { kubernetes: cfg!(feature = "kubernetes"), nats: cfg!(feature = "nats") };

pub use booking::{Booked, Booking};
pub use bootstrap::Bootstrap;
pub use claims::Source;
pub use cluster::Cluster;
pub use exclusion::{Exclusion, excluded, veto_by_health};
pub use hosts::Hosts;
pub use keeper::Fleet;
pub use pool::Pool;
pub use ranks::Ranks;
pub use roster::Roster;
pub use served::{Named, Served, Serving, Tokenizing};
pub use worker::Worker;
