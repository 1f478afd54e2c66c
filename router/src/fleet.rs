//! Beside the way of a request: the workers, what they hold and how busy they are.

pub mod assumed;
pub mod attach;
pub mod booking;
pub mod bootstrap;
pub mod breaker;
pub mod budget;
pub mod claims;
mod deeds;
pub mod discovery;
pub mod ejection;
mod follow;
mod health;
pub mod hosts;
mod indexing;
pub mod intake;
pub mod keeper;
pub mod life;
pub mod networks;
pub mod pace;
pub mod poll;
pub mod pool;
pub mod probe;
pub mod roster;
pub mod state;
pub mod told;
pub mod worker;

pub use booking::{Booked, Booking};
pub use bootstrap::Bootstrap;
pub use claims::Source;
pub use hosts::Hosts;
pub use keeper::Fleet;
pub use networks::Networks;
pub use pool::Pool;
pub use roster::Roster;
pub use worker::Worker;
