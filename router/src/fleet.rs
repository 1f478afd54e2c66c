//! Beside the way of a request: the workers, what they hold and how busy they are.

pub mod assumed;
pub mod booking;
pub mod bootstrap;
pub mod breaker;
pub mod budget;
pub mod discovery;
pub mod hosts;
pub mod intake;
pub mod pace;
pub mod poll;
pub mod pool;
pub mod probe;
pub mod worker;

pub use booking::{Booked, Booking};
pub use bootstrap::Bootstrap;
pub use hosts::Hosts;
pub use pool::Pool;
pub use worker::Worker;
