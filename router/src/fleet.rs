//! Beside the way of a request: the workers, what they hold and how busy they are.

pub mod assumed;
pub mod booking;
pub mod bootstrap;
pub mod breaker;
pub mod budget;
mod canary;
pub mod claims;
pub mod drift;
mod follow;
pub mod hosts;
pub mod intake;
pub mod keeper;
pub mod pace;
pub mod parity;
pub mod poll;
pub mod pool;
pub mod probe;
pub mod resync;
pub mod roster;
pub mod witness;
pub mod worker;

pub use booking::{Booked, Booking};
pub use bootstrap::Bootstrap;
pub use claims::Source;
pub use hosts::Hosts;
pub use keeper::Fleet;
pub use pool::Pool;
pub use roster::Roster;
pub use worker::Worker;
